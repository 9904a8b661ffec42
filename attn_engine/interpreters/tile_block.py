"""Blocks through descriptors in the interpreter of the value level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_memory import DescribeOp
from attn_engine.dialects.tile_block import LoadBlockOp, SetAsideOp, StoreBlockOp, TakeBackOp
from attn_engine.dialects.tile_types import DescriptorType
from attn_engine.interpreters.tile_memory import Window

if TYPE_CHECKING:
    from attn_engine.interpreters.tile import Machine


@dataclass(frozen=True)
class Blocks:
    """What a descriptor is worth: the tensor, and the sizes of a block."""

    tensor: Tensor
    block: tuple[int, ...]

    def window(self, coordinates: Sequence[int]) -> Window | None:
        """The part of a block that is inside of the tensor; None if that is nothing."""
        memory, inside = list[int | slice](), list[slice]()
        axes = len(self.block) - 2
        for axis, (start, size, end) in enumerate(zip(coordinates, self.block, self.tensor.shape, strict=True)):
            low, high = max(start, 0), min(start + size, end)
            if low >= high:
                return None
            memory.append(low if axis < axes else slice(low, high))
            if axis >= axes:
                inside.append(slice(low - start, high - start))
        return Window(tuple(memory), tuple(inside), (0, 1))


def describe(machine: Machine, op: DescribeOp) -> Sequence[Any]:
    assert isinstance(op.result.type, DescriptorType)
    return [Blocks(machine.values[op.source], tuple(op.result.type.get_shape()))]


def load_block(machine: Machine, op: LoadBlockOp) -> Sequence[Tensor]:
    blocks: Blocks = machine.values[op.source]  # type: ignore[assignment]
    result = torch.zeros(tile.shape_of(op.result), dtype=machine.dtype_of(tile.element_of(op.result)))
    access = blocks.window(machine.ints(op.coordinates))
    if access is not None:
        result[access.tile] = access.of(blocks.tensor).to(result.dtype)
    return [result]


def store_block(machine: Machine, op: StoreBlockOp) -> Sequence[Tensor]:
    blocks: Blocks = machine.values[op.target]  # type: ignore[assignment]
    access = blocks.window(machine.ints(op.coordinates))
    if access is not None:
        machine.owners.claim(op, blocks.tensor, access, machine.program_number)
        access.of(blocks.tensor).copy_(machine.values[op.value][access.tile])
    return []


def _aside(machine: Machine, memory: Tensor, indices: Sequence[int], shape: Sequence[int]) -> Window:
    count = shape[0] * shape[1]
    return Window((*indices[:-1], slice(indices[-1], indices[-1] + count)), (slice(0, count),), (0,))


def set_aside(machine: Machine, op: SetAsideOp) -> Sequence[Tensor]:
    memory, value = machine.values[op.target], machine.values[op.value]
    access = _aside(machine, memory, machine.ints(op.indices), value.shape)
    machine.owners.claim(op, memory, access, machine.program_number)
    access.of(memory).copy_(value.flatten())
    return []


def take_back(machine: Machine, op: TakeBackOp) -> Sequence[Tensor]:
    memory, shape = machine.values[op.source], tile.shape_of(op.result)
    return [_aside(machine, memory, machine.ints(op.indices), shape).of(memory).reshape(shape).clone()]
