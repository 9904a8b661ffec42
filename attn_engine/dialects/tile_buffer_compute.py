"""The buffered level of the ``tile`` dialect, computing side: products, maps and reductions, all in place."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import I64, ArrayAttr, IntegerAttr, UnitAttr, f32, i32, i64
from xdsl.dialects.utils import EnumAttribute
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.irdl import (
    AttrSizedOperandSegments,
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.traits import IsolatedFromAbove, MemoryReadEffect, MemoryWriteEffect, Pure
from xdsl.utils.exceptions import VerifyException
from xdsl.utils.str_enum import StrEnum

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_layout import MfmaAttr, Part, SliceLayoutAttr, ownership
from attn_engine.dialects.tile_buffer_memory import buffer_type, check_held_alike, fragment_layout, is_fragment, root
from attn_engine.dialects.tile_types import BufferType, MemorySpace


class Split(StrEnum):
    """How warps share an accumulator: its rows, its columns, or both."""

    ROWS = "rows"
    COLUMNS = "columns"
    BOTH = "both"


@irdl_attr_definition
class SplitAttr(EnumAttribute[Split]):
    name = "tile.split"


@irdl_op_definition
class GemmOp(IRDLOperation):
    """acc += a @ b, in place, in f32; `transpose_a` and `transpose_b` read an operand as its transpose.

    The accumulator is a fragment, the operands are in shared memory or fragments. `split` says how warps share the
    accumulator where its layout does not.

    ```
    tile.gemm %qs, %ks, %s transpose_b ieee split rows
      : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
    ```
    """

    name = "tile.gemm"
    a = operand_def(BufferType)
    b = operand_def(BufferType)
    acc = operand_def(BufferType)
    transpose_a = opt_prop_def(UnitAttr)
    transpose_b = opt_prop_def(UnitAttr)
    precision = prop_def(tile.PrecisionAttr)
    split = opt_prop_def(SplitAttr)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = (
        "$a `,` $b `,` $acc (`transpose_a` $transpose_a^)? (`transpose_b` $transpose_b^)? $precision (`split` $split^)?"
        " attr-dict `:` type($a) `,` type($b) `,` type($acc)"
    )

    def __init__(
        self,
        a: SSAValue,
        b: SSAValue,
        acc: SSAValue,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        precision: tile.Precision = tile.Precision.IEEE,
        split: Split | None = None,
    ):
        super().__init__(
            operands=[a, b, acc],
            properties={
                "transpose_a": UnitAttr() if transpose_a else None,
                "transpose_b": UnitAttr() if transpose_b else None,
                "precision": tile.PrecisionAttr(precision),
                "split": SplitAttr(split) if split is not None else None,
            },
        )

    def verify_(self) -> None:
        a, b, acc = (buffer_type(value) for value in (self.a, self.b, self.acc))
        if not is_fragment(self.acc):
            raise VerifyException(f"the accumulator of a product is a fragment, got {acc}")
        if acc.element_type != f32:
            raise VerifyException(f"products accumulate in f32, got {acc}")
        if root(self.acc) in (root(self.a), root(self.b)):
            raise VerifyException("the accumulator of a product is also its operand")
        if a.element_type != b.element_type:
            raise VerifyException(f"operands differ in type: {a} and {b}")
        for operand in (a, b):
            if operand.memory_space not in (MemorySpace.SHARED, MemorySpace.REGISTER):
                raise VerifyException(f"operands are in shared memory or fragments, got {operand}")
        left = a.get_shape()[::-1] if self.transpose_a is not None else a.get_shape()
        right = b.get_shape()[::-1] if self.transpose_b is not None else b.get_shape()
        if len(left) != 2 or len(right) != 2 or left[1] != right[0] or acc.get_shape() != (left[0], right[1]):
            raise VerifyException(f"shapes {left} @ {right} + {acc.get_shape()} do not fit")
        self._verify_layouts()

    def _verify_layouts(self) -> None:
        layout = fragment_layout(self.acc)
        if layout is None:
            if any(is_fragment(v) and fragment_layout(v) is not None for v in (self.a, self.b)):
                raise VerifyException("an operand has a layout, the accumulator has none")
            return
        if not isinstance(layout, MfmaAttr) or layout.part.data != Part.ACC:
            raise VerifyException(f"the accumulator is held as {layout}")
        if self.split is not None:
            raise VerifyException("the accumulator's layout already says how warps share it")
        for operand, part, flag in ((self.a, Part.A, self.transpose_a), (self.b, Part.B, self.transpose_b)):
            if not is_fragment(operand):
                continue
            if flag is not None:
                raise VerifyException(f"operand {part} is a fragment with a layout and cannot be read as its transpose")
            held = fragment_layout(operand)
            if held is None or ownership(held) != ownership(layout.with_part(part)):
                raise VerifyException(f"operand {part} is held as {held}, not as {layout.with_part(part)}")


@irdl_op_definition
class IndexOp(IRDLOperation):
    """The position along one axis of the element at hand, inside a `tile.buffer_map`.

    ```
    %col = tile.index 1
    ```
    """

    name = "tile.index"
    axis = prop_def(IntegerAttr[I64])
    result = result_def(i32)
    traits = traits_def(Pure())
    assembly_format = "$axis attr-dict"

    def __init__(self, axis: int):
        super().__init__(properties={"axis": IntegerAttr(axis, i64)}, result_types=[i32])

    def verify_(self) -> None:
        parent = self.parent_op()
        if not isinstance(parent, BufferMapOp):
            raise VerifyException("tile.index stands in the region of a tile.buffer_map")
        if not 0 <= self.axis.value.data < len(parent.shape):
            raise VerifyException(f"axis {self.axis.value.data} of a map of shape {parent.shape}")


@irdl_op_definition
class BufferMapOp(IRDLOperation):
    """Elementwise work in place: a scalar region at every index of the outputs' shape.

    `axes` says of each input which axes of that shape it has, as in `tile.map`; inputs are fragments, shared buffers,
    scalars and globals (read by `tile.gather`), outputs are fragments. An input may be an output: each element is read
    before it is written. `tile.index` gives the place.

    ```
    tile.buffer_map (%s, %m) axes [[0, 1], [0]] into (%s)
      : (!tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64x64xf32, register>) {
    ^bb0(%x: f32, %y: f32):
      %d = arith.subf %x, %y : f32
      %e = math.exp2 %d : f32
      tile.yield %e : f32
    }
    ```
    """

    name = "tile.buffer_map"
    inputs = var_operand_def()
    outputs = var_operand_def(BufferType)
    axes = prop_def(ArrayAttr)
    body = region_def("single_block")
    irdl_options = (AttrSizedOperandSegments(as_property=True),)
    traits = traits_def(IsolatedFromAbove(), MemoryReadEffect(), MemoryWriteEffect())

    def __init__(
        self,
        inputs: Sequence[SSAValue | Operation],
        axes: Sequence[Sequence[int]],
        outputs: Sequence[SSAValue],
        body: Region | Block,
    ):
        super().__init__(
            operands=[list(inputs), list(outputs)],
            properties={"axes": tile.axes_attr(axes)},
            regions=[body if isinstance(body, Region) else Region(body)],
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape over which the region runs."""
        return buffer_type(self.outputs[0]).get_shape()

    @classmethod
    def parse(cls, parser: Parser):
        inputs = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_unresolved_operand)
        parser.parse_keyword("axes")
        axes = parser.parse_comma_separated_list(
            parser.Delimiter.SQUARE,
            lambda: parser.parse_comma_separated_list(parser.Delimiter.SQUARE, parser.parse_integer),
        )
        parser.parse_keyword("into")
        outputs = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_unresolved_operand)
        parser.parse_punctuation(":")
        read = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        parser.parse_keyword("into")
        written = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
        return cls(
            parser.resolve_operands(inputs, read, parser.pos),
            axes,
            parser.resolve_operands(outputs, written, parser.pos),
            parser.parse_region(),
        )

    def print(self, printer: Printer) -> None:
        printer.print_string(" ")
        with printer.in_parens():
            printer.print_list(self.inputs, printer.print_operand)
        printer.print_string(f" axes {[list(a) for a in tile.axes_of(self.axes)]} into ")
        with printer.in_parens():
            printer.print_list(self.outputs, printer.print_operand)
        for word, values in ((" : ", self.inputs), (" into ", self.outputs)):
            printer.print_string(word)
            with printer.in_parens():
                printer.print_list([v.type for v in values], printer.print_attribute)
        printer.print_string(" ")
        printer.print_region(self.body)

    def verify_(self) -> None:
        if not self.outputs:
            raise VerifyException("a map writes at least one buffer")
        if any(buffer_type(o).get_shape() != self.shape for o in self.outputs):
            raise VerifyException("all outputs of a map have the same shape")
        if len({root(o) for o in self.outputs}) != len(self.outputs):
            raise VerifyException("a map writes the same buffer twice")
        for output in self.outputs:
            if not is_fragment(output):
                raise VerifyException(f"a map writes fragments, got {output.type}")
            check_held_alike(output, self.outputs[0])
        axes = tile.axes_of(self.axes)
        if len(axes) != len(self.inputs):
            raise VerifyException(f"axes has {len(axes)} entries for {len(self.inputs)} operands")
        for number, (value, named) in enumerate(zip(self.inputs, axes, strict=True)):
            self._verify_input(number, value, named)
        self._verify_body()

    def _verify_input(self, number: int, value: SSAValue, axes: tuple[int, ...]) -> None:
        shape = self.shape
        if any(not 0 <= a < len(shape) for a in axes) or list(axes) != sorted(set(axes)):
            raise VerifyException(f"operand {number}: axes {list(axes)} are not ascending axes of {shape}")
        have = value.type.get_shape() if isinstance(value.type, BufferType) else ()
        if have != tuple(shape[a] for a in axes):
            raise VerifyException(f"operand {number}: {value.type} does not match axes {list(axes)} of shape {shape}")
        if have != shape and root(value) in map(root, self.outputs):
            raise VerifyException(f"operand {number} is written while other elements of it are still read")
        if isinstance(value.type, BufferType) and is_fragment(value):
            self._verify_layout(number, value, axes)

    def _verify_layout(self, number: int, value: SSAValue, axes: tuple[int, ...]) -> None:
        if len(axes) == len(self.shape):
            check_held_alike(value, self.outputs[0])
            return
        mine, held = fragment_layout(self.outputs[0]), fragment_layout(value)
        if mine is None or held is None:
            if mine is not held:
                raise VerifyException("a fragment without a layout meets one that has a layout")
            return
        assert isinstance(mine, MfmaAttr)
        want = SliceLayoutAttr(1 - axes[0], mine)
        if ownership(held) != ownership(want):
            raise VerifyException(f"operand {number} is held as {held}, the map wants it as {want}")

    def _verify_body(self) -> None:
        args = [a.type for a in self.body.block.args]
        want = [v.type.element_type if isinstance(v.type, BufferType) else v.type for v in self.inputs]
        if args != want:
            raise VerifyException(f"block arguments are {args}, operands give {want}")
        last = self.body.block.last_op
        results = [buffer_type(o).element_type for o in self.outputs]
        if not isinstance(last, tile.MapYieldOp) or [v.type for v in last.values] != results:
            raise VerifyException("the region must end in tile.yield of the outputs' element types")


@irdl_op_definition
class BufferReduceOp(IRDLOperation):
    """Reduces a rank 2 fragment along one axis into a fragment without it. A NaN anywhere gives NaN.

    ```
    tile.buffer_reduce max %s, 1 into %m : !tile.buffer<64x32xf32, register>, !tile.buffer<64xf32, register>
    ```
    """

    name = "tile.buffer_reduce"
    kind = prop_def(tile.ReductionAttr)
    axis = prop_def(IntegerAttr[I64])
    source = operand_def(BufferType)
    target = operand_def(BufferType)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = "$kind $source `,` $axis `into` $target attr-dict `:` type($source) `,` type($target)"

    def __init__(self, kind: tile.Reduction, source: SSAValue, axis: int, target: SSAValue):
        super().__init__(
            operands=[source, target],
            properties={"kind": tile.ReductionAttr(kind), "axis": IntegerAttr(axis, i64)},
        )

    def verify_(self) -> None:
        source, axis = buffer_type(self.source), self.axis.value.data
        shape = list(source.get_shape())
        if len(shape) != 2 or axis not in (0, 1):
            raise VerifyException(f"axis {axis} of {source}; a reduction takes a fragment of rank 2")
        del shape[axis]
        if self.target.type != BufferType(shape, source.element_type, MemorySpace.REGISTER):
            raise VerifyException(f"reducing axis {axis} of {source} does not give {self.target.type}")
        if not is_fragment(self.source):
            raise VerifyException(f"a reduction takes a fragment, got {source}")
        self._verify_layouts(axis)

    def _verify_layouts(self, axis: int) -> None:
        source, target = fragment_layout(self.source), fragment_layout(self.target)
        if source is None or target is None:
            if source is not target:
                raise VerifyException("a fragment without a layout meets one that has a layout")
            return
        assert isinstance(source, MfmaAttr)
        if ownership(target) != ownership(SliceLayoutAttr(axis, source)):
            raise VerifyException(f"the target is held as {target}, not as {SliceLayoutAttr(axis, source)}")


BUFFER_COMPUTE_OPS: list[type[Operation]] = [BufferMapOp, BufferReduceOp, GemmOp, IndexOp]
BUFFER_COMPUTE_ATTRIBUTES: list[type[Attribute]] = [SplitAttr]
