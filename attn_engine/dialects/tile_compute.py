"""Work on tiles: elementwise maps, products, reductions, scans, and changes of shape."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import (
    I64,
    ArrayAttr,
    IntegerAttr,
    TensorType,
    f32,
    i32,
    i64,
)
from xdsl.ir import (
    Attribute,
    Block,
    Operation,
    Region,
    SSAValue,
)
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import (
    IsolatedFromAbove,
    IsTerminator,
    MemoryReadEffect,
    Pure,
)
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile_base import (
    GlobalType,
    Precision,
    PrecisionAttr,
    Reduction,
    ReductionAttr,
    axes_attr,
    axes_of,
    check_axes,
    element_of,
    shape_of,
    tile_type,
)


@irdl_op_definition
class MapYieldOp(IRDLOperation):
    """Ends the region of a `tile.map` with the elements of its results."""

    name = "tile.yield"
    values = var_operand_def()
    traits = traits_def(IsTerminator(), Pure())
    assembly_format = "$values attr-dict `:` type($values)"

    def __init__(self, *values: SSAValue | Operation):
        super().__init__(operands=[list(values)])


@irdl_op_definition
class MapOp(IRDLOperation):
    """Elementwise work: a scalar region applied at every index of the result shape.

    `axes` gives, per operand, the axes of the result shape that it has: [0, 1] a whole tile, [0] one value
    per row, [1] one per column, [] a scalar or a `!tile.global` (read by `tile.gather`). The region is
    arith/math/select/casts and `tile.gather`, on element types, and is isolated from above.

    ```
    %p = tile.map (%s, %m) axes [[0, 1], [0]] : (tensor<64x32xf32>, tensor<64xf32>) -> tensor<64x32xf32> {
    ^bb0(%x: f32, %y: f32):
      %d = arith.subf %x, %y : f32
      %e = math.exp2 %d : f32
      tile.yield %e : f32
    }
    ```
    """

    name = "tile.map"
    inputs = var_operand_def()
    axes = prop_def(ArrayAttr)
    body = region_def("single_block")
    outputs = var_result_def(TensorType)
    traits = traits_def(IsolatedFromAbove(), MemoryReadEffect())

    def __init__(
        self,
        inputs: Sequence[SSAValue | Operation],
        axes: Sequence[Sequence[int]],
        result_types: Sequence[Attribute],
        body: Region | Block,
    ):
        super().__init__(
            operands=[list(inputs)],
            properties={"axes": axes_attr(axes)},
            result_types=[list(result_types)],
            regions=[body if isinstance(body, Region) else Region(body)],
        )

    @classmethod
    def parse(cls, parser: Parser):
        unresolved = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_unresolved_operand)
        parser.parse_keyword("axes")
        axes = parser.parse_comma_separated_list(
            parser.Delimiter.SQUARE,
            lambda: parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_integer),
        )
        parser.parse_punctuation(":")
        types = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        inputs = parser.resolve_operands(unresolved, types, parser.pos)
        parser.parse_punctuation("->")
        results = parser.parse_optional_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        return cls(inputs, axes, results if results is not None else [parser.parse_type()], parser.parse_region())

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        with printer.in_parens():
            printer.print_list(self.inputs, printer.print_operand)
        printer.print_string(f" axes {[list(a) for a in axes_of(self.axes)]} : ")
        with printer.in_parens():
            printer.print_list([i.type for i in self.inputs], printer.print_attribute)
        printer.print_string(" -> ")
        types = [o.type for o in self.outputs]
        if len(types) == 1:
            printer.print_attribute(types[0])
        else:
            with printer.in_parens():
                printer.print_list(types, printer.print_attribute)
        printer.print_string(" ")
        printer.print_region(self.body)

    def verify_(self) -> None:
        if not self.outputs:
            raise VerifyException("a map has at least one result")
        shape = shape_of(self.outputs[0])
        if any(shape_of(o) != shape for o in self.outputs):
            raise VerifyException("all results of a map have the same shape")
        check_axes(shape, list(self.inputs), axes_of(self.axes))
        args = [a.type for a in self.body.block.args]
        want = [i.type if isinstance(i.type, GlobalType) else element_of(i) for i in self.inputs]
        if args != want:
            raise VerifyException(f"block arguments are {args}, operands give {want}")
        last = self.body.block.last_op
        if not isinstance(last, MapYieldOp) or [v.type for v in last.values] != [element_of(o) for o in self.outputs]:
            raise VerifyException("the region must end in tile.yield of the results' element types")


@irdl_op_definition
class RangeOp(IRDLOperation):
    """start, start + 1, ... as a tile of i32.

    ```
    %cols = tile.range %n0 : tensor<64xi32>
    ```
    """

    name = "tile.range"
    start = operand_def(i32)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$start attr-dict `:` type($result)"

    def __init__(self, start: SSAValue | Operation, size: int):
        super().__init__(operands=[start], result_types=[TensorType(i32, [size])])

    def verify_(self) -> None:
        if len(shape_of(self.result)) != 1 or element_of(self.result) != i32:
            raise VerifyException(f"a range is a rank 1 tile of i32, got {self.result.type}")


@irdl_op_definition
class DotOp(IRDLOperation):
    """acc + a @ b, accumulated in f32.

    ```
    %s = tile.dot %q, %kt, %zero ieee : tensor<64x128xbf16>, tensor<128x32xbf16> -> tensor<64x32xf32>
    ```
    """

    name = "tile.dot"
    a = operand_def(TensorType)
    b = operand_def(TensorType)
    acc = operand_def(TensorType)
    precision = prop_def(PrecisionAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = (
        "$a `,` $b `,` $acc $precision attr-dict `:` type($a) `,` type($b) `,` type($acc) `->` type($result)"
    )

    def __init__(
        self,
        a: SSAValue | Operation,
        b: SSAValue | Operation,
        acc: SSAValue | Operation,
        precision: Precision = Precision.IEEE,
    ):
        super().__init__(
            operands=[a, b, acc],
            properties={"precision": PrecisionAttr(precision)},
            result_types=[SSAValue.get(acc).type],
        )

    def verify_(self) -> None:
        a, b, acc = shape_of(self.a), shape_of(self.b), shape_of(self.acc)
        if len(a) != 2 or len(b) != 2 or a[1] != b[0] or acc != (a[0], b[1]):
            raise VerifyException(f"shapes {a} @ {b} + {acc} do not fit")
        if element_of(self.a) != element_of(self.b):
            raise VerifyException(f"operands differ in type: {self.a.type} and {self.b.type}")
        if self.result.type != self.acc.type or element_of(self.acc) != f32:
            raise VerifyException(f"accumulator and result must be the same f32 tile, got {self.acc.type}")


@irdl_op_definition
class ReduceOp(IRDLOperation):
    """Reduces a tile along one axis (which disappears); rank 1 gives a scalar. A NaN anywhere gives NaN.

    ```
    %m = tile.reduce max %s, 1 : tensor<64x32xf32> -> tensor<64xf32>
    ```
    """

    name = "tile.reduce"
    kind = prop_def(ReductionAttr)
    axis = prop_def(IntegerAttr[I64])
    value = operand_def(TensorType)
    result = result_def()
    traits = traits_def(Pure())
    assembly_format = "$kind $value `,` $axis attr-dict `:` type($value) `->` type($result)"

    def __init__(self, kind: Reduction, value: SSAValue | Operation, axis: int):
        operand = SSAValue.get(value)
        shape = list(shape_of(operand))
        del shape[axis]
        super().__init__(
            operands=[value],
            properties={"kind": ReductionAttr(kind), "axis": IntegerAttr(axis, i64)},
            result_types=[tile_type(shape, element_of(operand))],
        )

    def verify_(self) -> None:
        shape, axis = list(shape_of(self.value)), self.axis.value.data
        if not 0 <= axis < len(shape):
            raise VerifyException(f"axis {axis} of {self.value.type}")
        del shape[axis]
        if self.result.type != tile_type(shape, element_of(self.value)):
            raise VerifyException(f"reducing axis {axis} of {self.value.type} does not give {self.result.type}")


@irdl_op_definition
class ScanOp(IRDLOperation):
    """Inclusive running reduction along one axis (`reverse` from the end).

    ```
    %g = tile.scan sum %log_decay, 0 : tensor<64xf32>
    ```
    """

    name = "tile.scan"
    kind = prop_def(ReductionAttr)
    axis = prop_def(IntegerAttr[I64])
    reverse = opt_prop_def(IntegerAttr[I64])
    value = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$kind $value `,` $axis (`reverse` $reverse^)? attr-dict `:` type($value) `->` type($result)"

    def __init__(self, kind: Reduction, value: SSAValue | Operation, axis: int, reverse: bool = False):
        operand = SSAValue.get(value)
        super().__init__(
            operands=[value],
            properties={
                "kind": ReductionAttr(kind),
                "axis": IntegerAttr(axis, i64),
                "reverse": IntegerAttr(1, i64) if reverse else None,
            },
            result_types=[operand.type],
        )

    def verify_(self) -> None:
        if self.value.type != self.result.type:
            raise VerifyException(f"a scan keeps its type: {self.value.type} and {self.result.type}")
        if not 0 <= self.axis.value.data < len(shape_of(self.value)):
            raise VerifyException(f"axis {self.axis.value.data} of {self.value.type}")


@irdl_op_definition
class TransposeOp(IRDLOperation):
    """The transpose of a rank 2 tile."""

    name = "tile.transpose"
    value = operand_def(TensorType)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$value attr-dict `:` type($value) `->` type($result)"

    def __init__(self, value: SSAValue | Operation):
        operand = SSAValue.get(value)
        super().__init__(operands=[value], result_types=[TensorType(element_of(operand), shape_of(operand)[::-1])])

    def verify_(self) -> None:
        shape = shape_of(self.value)
        if len(shape) != 2 or self.result.type != TensorType(element_of(self.value), shape[::-1]):
            raise VerifyException(f"{self.result.type} is not the transpose of {self.value.type}")


@irdl_op_definition
class SliceOp(IRDLOperation):
    """A static part of a tile along one axis: [start, start + size of the result).

    ```
    %left = tile.slice %x, 1, 0 : tensor<64x192xbf16> -> tensor<64x128xbf16>
    ```
    """

    name = "tile.slice"
    value = operand_def(TensorType)
    axis = prop_def(IntegerAttr[I64])
    start = prop_def(IntegerAttr[I64])
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$value `,` $axis `,` $start attr-dict `:` type($value) `->` type($result)"

    def __init__(self, value: SSAValue | Operation, axis: int, start: int, size: int):
        operand = SSAValue.get(value)
        shape = list(shape_of(operand))
        shape[axis] = size
        super().__init__(
            operands=[value],
            properties={"axis": IntegerAttr(axis, i64), "start": IntegerAttr(start, i64)},
            result_types=[TensorType(element_of(operand), shape)],
        )

    def verify_(self) -> None:
        source, result = list(shape_of(self.value)), list(shape_of(self.result))
        axis, start = self.axis.value.data, self.start.value.data
        if not 0 <= axis < len(source) or len(result) != len(source):
            raise VerifyException(f"axis {axis} of {self.value.type}")
        if start < 0 or start + result[axis] > source[axis]:
            raise VerifyException(f"[{start}, {start + result[axis]}) is outside axis {axis} of {self.value.type}")
        source[axis] = result[axis]
        if source != result or element_of(self.value) != element_of(self.result):
            raise VerifyException(f"{self.result.type} is not a slice of {self.value.type} along axis {axis}")


@irdl_op_definition
class ConcatOp(IRDLOperation):
    """Tiles joined along one axis.

    ```
    %x = tile.concat %left, %right, 1 : tensor<64x128xbf16>, tensor<64x64xbf16> -> tensor<64x192xbf16>
    ```
    """

    name = "tile.concat"
    values = var_operand_def(TensorType)
    axis = prop_def(IntegerAttr[I64])
    result = result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$values `axis` $axis attr-dict `:` type($values) `->` type($result)"

    def __init__(self, values: Sequence[SSAValue | Operation], axis: int):
        operands = [SSAValue.get(v) for v in values]
        shape = list(shape_of(operands[0]))
        shape[axis] = sum(shape_of(v)[axis] for v in operands)
        super().__init__(
            operands=[operands],
            properties={"axis": IntegerAttr(axis, i64)},
            result_types=[TensorType(element_of(operands[0]), shape)],
        )

    def verify_(self) -> None:
        axis, result = self.axis.value.data, list(shape_of(self.result))
        total = 0
        for value in self.values:
            shape = list(shape_of(value))
            if len(shape) != len(result) or not 0 <= axis < len(result):
                raise VerifyException(f"{value.type} cannot be joined along axis {axis} to {self.result.type}")
            total += shape[axis]
            shape[axis] = result[axis]
            if shape != result or element_of(value) != element_of(self.result):
                raise VerifyException(f"{value.type} cannot be joined along axis {axis} to {self.result.type}")
        if total != result[axis]:
            raise VerifyException(f"parts have {total} along axis {axis}, the result {result[axis]}")
