"""The async level of the ``tile`` dialect: rings in shared memory, and views of their slots."""

from __future__ import annotations

from xdsl.dialects import arith
from xdsl.dialects.builtin import I64, IntegerAttr, i32, i64
from xdsl.ir import BlockArgument, Operation, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, prop_def, result_def, traits_def
from xdsl.traits import MemoryWriteEffect, Pure
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile_types import BufferType, MemorySpace


@irdl_op_definition
class RingOp(IRDLOperation):
    """A buffer whose leading axis counts stages; uninitialised; lives as long as the program.

    ```
    %ks = tile.ring : !tile.buffer<2x128x128xf16, shared>
    ```
    """

    name = "tile.ring"
    result = result_def(BufferType)
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "attr-dict `:` type($result)"

    def __init__(self, result: BufferType):
        super().__init__(result_types=[result])

    def verify_(self) -> None:
        assert isinstance(self.result.type, BufferType)
        if self.result.type.memory_space is not MemorySpace.SHARED:
            raise VerifyException(f"a ring is in shared memory, got {self.result.type}")


@irdl_op_definition
class SlotOp(IRDLOperation):
    """One stage of a ring, as a view. The index is in [0, stages).

    ```
    %k = tile.slot %ks[%i] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
    ```
    """

    name = "tile.slot"
    ring = operand_def(BufferType)
    index = operand_def(i32)
    result = result_def(BufferType)
    traits = traits_def(Pure())
    assembly_format = "$ring `[` $index `]` attr-dict `:` type($ring) `->` type($result)"

    def __init__(self, ring: SSAValue, index: SSAValue | Operation):
        type_ = ring.type
        assert isinstance(type_, BufferType)
        super().__init__(
            operands=[ring, index],
            result_types=[BufferType(type_.get_shape()[1:], type_.element_type, type_.memory_space)],
        )

    def verify_(self) -> None:
        assert isinstance(self.ring.type, BufferType)
        ring = self.ring.type
        if len(ring.get_shape()) < 2:
            raise VerifyException(f"a ring has a leading axis of stages, got {ring}")
        if self.result.type != BufferType(ring.get_shape()[1:], ring.element_type, ring.space):
            raise VerifyException(f"{self.result.type} is not a stage of {ring}")


@irdl_op_definition
class TransposedSlotOp(IRDLOperation):
    """A rank 2 buffer read as its transpose: a view, nothing moves.

    ```
    %kt = tile.transposed_slot %k : !tile.buffer<128x64xf16, shared> -> !tile.buffer<64x128xf16, shared>
    ```
    """

    name = "tile.transposed_slot"
    source = operand_def(BufferType)
    result = result_def(BufferType)
    traits = traits_def(Pure())
    assembly_format = "$source attr-dict `:` type($source) `->` type($result)"

    def __init__(self, source: SSAValue | Operation):
        type_ = SSAValue.get(source).type
        assert isinstance(type_, BufferType)
        super().__init__(
            operands=[source],
            result_types=[BufferType(type_.get_shape()[::-1], type_.element_type, type_.space)],
        )

    def verify_(self) -> None:
        source = self.source.type
        assert isinstance(source, BufferType)
        shape = source.get_shape()[::-1]
        if len(shape) != 2 or self.result.type != BufferType(shape, source.element_type, source.space):
            raise VerifyException(f"{self.result.type} is not the transpose of {source}")


@irdl_op_definition
class PartOp(IRDLOperation):
    """A part of a buffer along one axis, as a view: number `index` of those that have the size of the result.

    The index is a constant, or the number of the role's instance: views are placed at compile time. Parts cover the
    axis but for what is left behind the last one.

    ```
    %half = tile.part %k axis 1 [%wg] : !tile.buffer<128x128xf16, shared> -> !tile.buffer<128x64xf16, shared>
    ```
    """

    name = "tile.part"
    source = operand_def(BufferType)
    axis = prop_def(IntegerAttr[I64])
    index = operand_def(i32)
    result = result_def(BufferType)
    traits = traits_def(Pure())
    assembly_format = "$source `axis` $axis `[` $index `]` attr-dict `:` type($source) `->` type($result)"

    def __init__(self, source: SSAValue | Operation, axis: int, index: SSAValue | Operation, size: int):
        type_ = SSAValue.get(source).type
        assert isinstance(type_, BufferType)
        shape = list(type_.get_shape())
        shape[axis] = size
        super().__init__(
            operands=[source, index],
            properties={"axis": IntegerAttr(axis, i64)},
            result_types=[BufferType(shape, type_.element_type, type_.space)],
        )

    def verify_(self) -> None:
        source, result, axis = self.source.type, self.result.type, self.axis.value.data
        assert isinstance(source, BufferType) and isinstance(result, BufferType)
        whole, part = list(source.get_shape()), list(result.get_shape())
        fits = len(part) == len(whole) and 0 <= axis < len(whole) and part[axis] <= whole[axis]
        if fits and isinstance(self.index.owner, arith.ConstantOp):
            number = self.index.owner.value
            fits = isinstance(number, IntegerAttr) and 0 <= number.value.data < whole[axis] // part[axis]
        if fits:
            whole[axis] = part[axis]
        if not fits or result != BufferType(whole, source.element_type, source.space):
            raise VerifyException(f"{result} is not a part of {source} along axis {axis}")
        if not is_static(self.index):
            raise VerifyException("the index of a part is a constant or the number of the role's instance")


def is_static(value: SSAValue) -> bool:
    """Whether an emitter knows a scalar: a constant, or the number of a role's instance."""
    if isinstance(value, BlockArgument):
        parent = value.owner.parent_op()
        return value.index == 0 and parent is not None and parent.name == "tile.roles"
    return isinstance(value.owner, arith.ConstantOp)


@irdl_op_definition
class AliasSlotOp(IRDLOperation):
    """The same bytes as a buffer of another shape and element type; holds nothing defined until it is written.

    ```
    %o = tile.alias_slot %staging : !tile.buffer<64x64xf32, shared> -> !tile.buffer<64x128xf16, shared>
    ```
    """

    name = "tile.alias_slot"
    source = operand_def(BufferType)
    result = result_def(BufferType)
    traits = traits_def(Pure())
    assembly_format = "$source attr-dict `:` type($source) `->` type($result)"

    def __init__(self, source: SSAValue | Operation, result: BufferType):
        super().__init__(operands=[source], result_types=[result])

    def verify_(self) -> None:
        source, result = self.source.type, self.result.type
        assert isinstance(source, BufferType) and isinstance(result, BufferType)
        if source.byte_size != result.byte_size or source.space != result.space:
            raise VerifyException(f"{source} and {result} are not the same bytes")


VIEW_OPS: list[type[Operation]] = [AliasSlotOp, PartOp, RingOp, SlotOp, TransposedSlotOp]
