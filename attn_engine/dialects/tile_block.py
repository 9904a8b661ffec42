"""The value level of the ``tile`` dialect in whole blocks: through descriptors, bounded by the tensor, and set aside in private."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import TensorType, i32
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, result_def, traits_def, var_operand_def
from xdsl.traits import MemoryReadEffect, MemoryWriteEffect
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile_base import GlobalType, element_of, shape_of, tile_type
from attn_engine.dialects.tile_types import DescriptorType

EARLY_COPIES = "early_copies"
"""The attribute of a loop whose copies for its next iteration shall go out as soon as their place is free."""


def block_tile(descriptor: Attribute) -> Attribute:
    """The tile that a block of a descriptor is: without the ones in front of its last two sizes."""
    assert isinstance(descriptor, DescriptorType)
    return tile_type(descriptor.get_shape()[-2:], descriptor.element_type)


def _check(descriptor: SSAValue, coordinates: Sequence[SSAValue], tile: Attribute) -> None:
    assert isinstance(descriptor.type, DescriptorType)
    shape = descriptor.type.get_shape()
    if len(coordinates) != len(shape):
        raise VerifyException(f"{descriptor.type} needs {len(shape)} coordinates, got {len(coordinates)}")
    if len(shape) < 2 or any(size != 1 for size in shape[:-2]):
        raise VerifyException(f"{descriptor.type} must have ones in front of its last two sizes")
    if shape_of(tile) != tuple(shape[-2:]) or element_of(tile) != descriptor.type.element_type:
        raise VerifyException(f"a block of {descriptor.type} is no {tile}")


@irdl_op_definition
class LoadBlockOp(IRDLOperation):
    """Reads the block at `coordinates`; elements outside of the tensor are 0.

    ```
    %k = tile.load_block %kd[%b, %h, %t0, %c0] : !tile.descriptor<1x1x64x128xbf16> -> tensor<64x128xbf16>
    ```
    """

    name = "tile.load_block"
    source = operand_def(DescriptorType)
    coordinates = var_operand_def(i32)
    result = result_def(TensorType)
    traits = traits_def(MemoryReadEffect())
    assembly_format = "$source `[` $coordinates `]` attr-dict `:` type($source) `->` type($result)"

    def __init__(self, source: SSAValue, coordinates: Sequence[SSAValue | Operation]):
        super().__init__(operands=[source, list(coordinates)], result_types=[block_tile(source.type)])

    def verify_(self) -> None:
        _check(self.source, self.coordinates, self.result.type)


@irdl_op_definition
class StoreBlockOp(IRDLOperation):
    """Writes the block at `coordinates`; elements outside of the tensor are not written.

    ```
    tile.store_block %o, %od[%b, %h, %t0, %c0] : tensor<64x64xbf16>, !tile.descriptor<1x1x64x64xbf16>
    ```
    """

    name = "tile.store_block"
    value = operand_def(TensorType)
    target = operand_def(DescriptorType)
    coordinates = var_operand_def(i32)
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "$value `,` $target `[` $coordinates `]` attr-dict `:` type($value) `,` type($target)"

    def __init__(self, value: SSAValue | Operation, target: SSAValue, coordinates: Sequence[SSAValue | Operation]):
        super().__init__(operands=[value, target, list(coordinates)])

    def verify_(self) -> None:
        _check(self.target, self.coordinates, self.value.type)


def _check_place(memory: SSAValue, indices: Sequence[SSAValue], tile: Attribute) -> None:
    assert isinstance(memory.type, GlobalType)
    if len(indices) != memory.type.rank.data:
        raise VerifyException(f"{memory.type} needs {memory.type.rank.data} indices, got {len(indices)}")
    if len(shape_of(tile)) != 2 or element_of(tile) != memory.type.element_type:
        raise VerifyException(f"{tile} is no matrix of what {memory.type} holds")


@irdl_op_definition
class SetAsideOp(IRDLOperation):
    """Writes all numbers of a tile one after the other, from a place of the memory's last axis on, in an order of the backend's.

    A tile of the same shape takes them back with `tile.take_back`. Nothing else can know what is where: so each thread may
    write what it holds.

    ```
    tile.set_aside %s, %kept[%b, %h, %slot, %first] : tensor<128x64xbf16>, !tile.global<4 x bf16>
    ```
    """

    name = "tile.set_aside"
    value = operand_def(TensorType)
    target = operand_def(GlobalType)
    indices = var_operand_def(i32)
    traits = traits_def(MemoryWriteEffect())
    assembly_format = "$value `,` $target `[` $indices `]` attr-dict `:` type($value) `,` type($target)"

    def __init__(self, value: SSAValue | Operation, target: SSAValue, indices: Sequence[SSAValue | Operation]):
        super().__init__(operands=[value, target, list(indices)])

    def verify_(self) -> None:
        _check_place(self.target, self.indices, self.value.type)


@irdl_op_definition
class TakeBackOp(IRDLOperation):
    """Reads a tile that `tile.set_aside` has written there, in the same shape.

    ```
    %s = tile.take_back %kept[%b, %h, %slot, %first] : !tile.global<4 x bf16> -> tensor<128x64xbf16>
    ```
    """

    name = "tile.take_back"
    source = operand_def(GlobalType)
    indices = var_operand_def(i32)
    result = result_def(TensorType)
    traits = traits_def(MemoryReadEffect())
    assembly_format = "$source `[` $indices `]` attr-dict `:` type($source) `->` type($result)"

    def __init__(self, source: SSAValue, indices: Sequence[SSAValue | Operation], result: Attribute):
        super().__init__(operands=[source, list(indices)], result_types=[result])

    def verify_(self) -> None:
        _check_place(self.source, self.indices, self.result.type)


BLOCK_OPS: list[type[Operation]] = [LoadBlockOp, StoreBlockOp, SetAsideOp, TakeBackOp]
