"""Global memory of the tile interpreter: bounded accesses on torch tensors, with every mistake found.

An access outside its tensor raises, whatever a real machine would do; so does a second program of the
same launch that stores to an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_engine.dialects import tile
from attn_engine.errors import AttnEngineError


class TileAccessError(AttnEngineError):
    """A kernel touches memory outside a tensor, or two programs of a launch store to the same element."""


@dataclass
class Window:
    """The part of a tile access that is inside its limits: `memory` slices the tensor, `tile` the tile."""

    memory: tuple[int | slice, ...]
    tile: tuple[slice, ...]
    permutation: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """That part of the tensor, with the axes of the tile."""
        return tensor[self.memory].permute(self.permutation)


def window(
    op: tile.Access,
    tensor: Tensor,
    shape: Sequence[int],
    indices: Sequence[int],
    limits: Sequence[int],
) -> Window | None:
    """What an access touches; None if that is nothing. Raises if it leaves the tensor."""
    dims = tile.ints_of(op.dims)
    memory: list[int | slice] = list(indices)
    inside: list[slice] = []
    limit_of = dict(zip(tile.ints_of(op.bounded), limits, strict=True))
    for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        start = indices[dim]
        low, high = start, start + size
        if axis in limit_of:
            low, high = max(low, 0), min(high, limit_of[axis])
        if low >= high:
            return None
        memory[dim] = slice(low, high)
        inside.append(slice(low - start, high - start))
    for dim, (index, size) in enumerate(zip(memory, tensor.shape, strict=True)):
        low, high = (index.start, index.stop) if isinstance(index, slice) else (index, index + 1)
        if low < 0 or high > size:
            raise TileAccessError(f"[{low}, {high}) is outside axis {dim} of size {size}: {op}")
    order = sorted(dims)
    return Window(tuple(memory), tuple(inside), tuple(order.index(dim) for dim in dims))


def check_gather(name: str, tensor: Tensor, indices: Sequence[Tensor], guard: Tensor) -> None:
    """Raises if a guarded index leaves the tensor."""
    for dim, (index, size) in enumerate(zip(indices, tensor.shape, strict=True)):
        bad = guard & ((index < 0) | (index >= size))
        if bool(bad.any()):
            example = int(index.expand(bad.shape)[bad].flatten()[0])
            raise TileAccessError(f"{name}: index {example} is outside axis {dim} of size {size}")


def poison(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised temporary: NaN, or an absurd integer."""
    if dtype.is_floating_point:
        return torch.full(sizes, torch.nan, dtype=dtype)
    if dtype == torch.bool:
        return torch.ones(sizes, dtype=dtype)
    return torch.full(sizes, torch.iinfo(dtype).min + 77, dtype=dtype)


class Owners:
    """Which program of the current launch stored to each element."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def claim(self, op: object, tensor: Tensor, access: Window, program: int) -> None:
        owner = self._of.get(id(tensor))
        if owner is None:
            owner = self._of[id(tensor)] = torch.full(tensor.shape, -1, dtype=torch.int32)
        part = access.of(owner)
        if bool(((part != -1) & (part != program)).any()):
            raise TileAccessError(f"two programs of a launch store to the same element: {op}")
        part.fill_(program)
