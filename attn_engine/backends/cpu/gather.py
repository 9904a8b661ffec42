"""Elements of global memory by index tensors: strided blocks where the indices step evenly, else one by one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from attn_engine.backends.cpu.memory import read_places
from attn_engine.backends.cpu.support import Programs, Scalar, number, select, tensor


def gather(memory: Tensor, indices: Sequence[Scalar], guard: Scalar) -> Tensor:
    """One element per element of the indices, 0 where the guard is false."""
    if isinstance(guard, Tensor) and bool(guard.all()):
        guard = True
    block = _block(memory, indices, padded=guard is not True)
    if block is not None:
        return block.read() if guard is True else _guarded(guard, block.read())
    if guard is True:
        return memory[tuple(tensor(i, torch.int64).to(torch.int64) for i in indices)]
    where = tensor(guard, torch.bool)
    return read_places(memory, [torch.where(where, i, 0).to(torch.int64) for i in indices], where)


def _guarded(guard: Scalar, block: Tensor) -> Tensor:
    zero = 0.0 if block.dtype == torch.float32 else block.new_zeros(())
    return cast(Tensor, select(tensor(guard, torch.bool), block, zero))


@dataclass
class Block:
    """A strided part of the memory that indices pick, and where it is among the elements of their shape."""

    view: Tensor
    shape: list[int]
    inside: list[slice]

    def read(self) -> Tensor:
        """All elements; those outside the memory are 0."""
        if list(self.view.shape) == self.shape:
            return self.view
        block = self.view.new_zeros(self.shape)
        block[tuple(self.inside)] = self.view
        return block

    def add(self, value: Tensor) -> None:
        """Adds elements, of which those of axes along which no index varies meet in one place."""
        met = [axis for axis, size in enumerate(self.shape) if size == 1 and value.shape[axis] > 1]
        total = value.sum(met, keepdim=True) if met else value
        self.view.add_(total[tuple(self.inside)])


def _block(memory: Tensor, indices: Sequence[Scalar], padded: bool) -> Block | None:
    """What indices pick as a block, if each is a number or steps evenly along an axis of its own.

    With `padded`, part of it may be outside the memory: no guard lets it through.
    """
    rank = max((i.ndim for i in indices if isinstance(i, Tensor)), default=0)
    picks: list[int | slice] = []
    axes: list[int] = []
    shape, inside = [1] * rank, [slice(None)] * rank
    for index, size in zip(map(number, indices), memory.shape, strict=True):
        if not isinstance(index, Tensor):
            if not 0 <= index < size:
                return None
            picks.append(int(index))
            continue
        long = [axis for axis, length in enumerate(index.shape) if length > 1]
        if index.ndim != rank or len(long) != 1 or long[0] in axes:
            return None
        values = cast(list[int], index.flatten().tolist())
        step = values[1] - values[0]
        # Behind a guard they may be any numbers: the last tells how many there would be before they are listed.
        if step <= 0 or values[-1] != values[0] + step * (len(values) - 1):
            return None
        if values != list(range(values[0], values[-1] + 1, step)):
            return None
        low, high = bisect_left(values, 0), bisect_left(values, size)
        if not padded and high - low < len(values):
            return None
        picks.append(slice(values[low], values[high - 1] + 1, step) if low < high else slice(0, 0))
        axes.append(long[0])
        shape[long[0]], inside[long[0]] = len(values), slice(low, max(low, high))
    view = memory[tuple(picks)].permute([axes.index(axis) for axis in sorted(axes)])
    for axis in range(rank):
        view = view if axis in axes else view.unsqueeze(axis)
    return Block(view, shape, inside)


def scatter_add(
    programs: Programs, value: Scalar, shape: Sequence[int], memory: Tensor, indices: Sequence[Scalar], guard: Scalar
) -> None:
    """Adds each element of each active program's tile at its own place."""
    rank = len(shape)
    valid = tensor(guard, torch.bool)
    if programs.active is not None:
        valid = valid & programs.active.reshape(*programs.active.shape, *[1] * rank)
    full = (*programs.shape, *shape)
    block = _block(memory, indices, padded=guard is not True)
    if block is not None and len(block.shape) == len(full):
        whole = tensor(value, memory.dtype).expand(full)
        block.add(whole if bool(valid.all()) else _guarded(valid, whole))
        return
    mask = valid.expand(full)
    places = tuple(tensor(i, torch.int64).to(torch.int64).expand(full)[mask] for i in indices)
    values = tensor(value, memory.dtype).expand(full)[mask]
    memory.index_put_(places, values.to(memory.dtype), accumulate=True)
