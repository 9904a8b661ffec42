"""The buffered level of the ``tile`` dialect, computing side: products and reductions; maps are in `tile_buffer_map`."""

from __future__ import annotations

from xdsl.dialects.builtin import I64, IntegerAttr, UnitAttr, f32, i64
from xdsl.dialects.utils import EnumAttribute
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect
from xdsl.utils.exceptions import VerifyException
from xdsl.utils.str_enum import StrEnum

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_layout import MfmaAttr, Part, SliceLayoutAttr, ownership
from attn_engine.dialects.tile_buffer_map import BufferMapOp, BufferScatterAddOp, IndexOp, KeepOp
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

    With `clear`, acc = a @ b.

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
    clear = opt_prop_def(UnitAttr)
    precision = prop_def(tile.PrecisionAttr)
    split = opt_prop_def(SplitAttr)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = (
        "$a `,` $b `,` $acc (`transpose_a` $transpose_a^)? (`transpose_b` $transpose_b^)? (`clear` $clear^)?"
        " $precision (`split` $split^)? attr-dict `:` type($a) `,` type($b) `,` type($acc)"
    )

    def __init__(
        self,
        a: SSAValue,
        b: SSAValue,
        acc: SSAValue,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        clear: bool = False,
        precision: tile.Precision = tile.Precision.IEEE,
        split: Split | None = None,
    ):
        super().__init__(
            operands=[a, b, acc],
            properties={
                "transpose_a": UnitAttr() if transpose_a else None,
                "transpose_b": UnitAttr() if transpose_b else None,
                "clear": UnitAttr() if clear else None,
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


@irdl_op_definition
class BufferTotalOp(IRDLOperation):
    """Reduces a fragment of rank 1 to a number, which every thread gets.

    ```
    %t = tile.buffer_total sum %d : !tile.buffer<64xf32, register> -> f32
    ```
    """

    name = "tile.buffer_total"
    kind = prop_def(tile.ReductionAttr)
    source = operand_def(BufferType)
    result = result_def()
    traits = traits_def(MemoryReadEffect())
    assembly_format = "$kind $source attr-dict `:` type($source) `->` type($result)"

    def __init__(self, kind: tile.Reduction, source: SSAValue):
        super().__init__(
            operands=[source],
            properties={"kind": tile.ReductionAttr(kind)},
            result_types=[buffer_type(source).element_type],
        )

    def verify_(self) -> None:
        source = buffer_type(self.source)
        if len(source.get_shape()) != 1 or not is_fragment(self.source):
            raise VerifyException(f"a total is of a fragment of rank 1, got {source}")
        if self.result.type != source.element_type:
            raise VerifyException(f"a total of {source} is no {self.result.type}")


@irdl_op_definition
class BufferScanOp(IRDLOperation):
    """Running sums (or maxima, minima) of a fragment along one axis, each element's own included; `reverse` from the end.

    The target may be the source.

    ```
    tile.buffer_scan sum %g, 0 into %s : !tile.buffer<64x8xf32, register>, !tile.buffer<64x8xf32, register>
    tile.buffer_scan sum %g, 0 reverse into %s : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
    ```
    """

    name = "tile.buffer_scan"
    kind = prop_def(tile.ReductionAttr)
    axis = prop_def(IntegerAttr[I64])
    reverse = opt_prop_def(UnitAttr)
    source = operand_def(BufferType)
    target = operand_def(BufferType)
    traits = traits_def(MemoryReadEffect(), MemoryWriteEffect())
    assembly_format = (
        "$kind $source `,` $axis (`reverse` $reverse^)? `into` $target attr-dict `:` type($source) `,` type($target)"
    )

    def __init__(self, kind: tile.Reduction, source: SSAValue, axis: int, target: SSAValue, reverse: bool = False):
        super().__init__(
            operands=[source, target],
            properties={
                "kind": tile.ReductionAttr(kind),
                "axis": IntegerAttr(axis, i64),
                "reverse": UnitAttr() if reverse else None,
            },
        )

    def verify_(self) -> None:
        source, axis = buffer_type(self.source), self.axis.value.data
        if not 0 <= axis < len(source.get_shape()) or len(source.get_shape()) > 2:
            raise VerifyException(f"axis {axis} of {source}; a scan takes a fragment of rank 1 or 2")
        if self.target.type != source or not is_fragment(self.source):
            raise VerifyException(f"a scan is of a fragment into one like it, got {source} and {self.target.type}")
        check_held_alike(self.source, self.target)


BUFFER_COMPUTE_OPS: list[type[Operation]] = [
    BufferMapOp,
    BufferReduceOp,
    BufferScanOp,
    BufferScatterAddOp,
    BufferTotalOp,
    GemmOp,
    IndexOp,
    KeepOp,
]
BUFFER_COMPUTE_ATTRIBUTES: list[type[Attribute]] = [SplitAttr]
