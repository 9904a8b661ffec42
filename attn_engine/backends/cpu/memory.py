"""Accesses to global memory for a batch of programs: strided views where indices allow, else gathers.

Indices are numbers or tensors [z, y]. An access is *regular* when each tile axis starts at one number
for the whole batch, at most one fixed index varies along z and at most one along y. Then it is one view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from attn_engine.backends.cpu.support import Programs, Scalar, at, broadcast, number, tensor


@dataclass
class View:
    """A regular access: the part of the memory inside the limits as [z, y, ...tile], and where it is in the tile."""

    memory: Tensor
    tile: tuple[slice, ...]
    partial: bool
    copied: bool
    empty: bool = False


def _steps(values: list[int]) -> slice | None:
    """A slice that picks the same elements, if there is one."""
    step = values[1] - values[0]
    if step <= 0 or values != list(range(values[0], values[-1] + 1, step)):
        return None
    return slice(values[0], values[-1] + 1, step)


def _range(start: int, size: int, limit: int | None, bound: int) -> tuple[int, int]:
    """The part of [start, start + size) that is read; without a limit it must be in the tensor."""
    low, high = (start, start + size) if limit is None else (max(start, 0), min(start + size, limit))
    if low < high and (low < 0 or high > bound):
        raise IndexError(f"a tile reads [{low}, {high}) of an axis of size {bound}")
    return low, max(low, high)


def _view(
    memory: Tensor, shape: Sequence[int], indices: Sequence[Scalar], dims: Sequence[int], limits: dict[int, Scalar]
) -> View | None:
    """The access as a view, or None where it is not regular."""
    picks: list[int | slice] = []
    selects: list[tuple[int, Tensor]] = []
    axis_of: dict[str | int, int] = {}
    inside: dict[int, slice] = {}
    partial = False
    for dim, index in enumerate(indices):
        index = number(index)
        position = sum(isinstance(p, slice) for p in picks)
        if dim in dims:
            t = dims.index(dim)
            limit = number(limits[t]) if t in limits else None
            if isinstance(index, Tensor) or isinstance(limit, Tensor):
                return None
            start = int(index)
            low, high = _range(start, shape[t], None if limit is None else int(limit), memory.shape[dim])
            picks.append(slice(low, high))
            inside[t] = slice(low - start, high - start)
            partial |= high - low < shape[t]
            axis_of[t] = position
        elif isinstance(index, Tensor):
            along = "z" if index.shape[1] == 1 else "y" if index.shape[0] == 1 else ""
            if not along or along in axis_of:
                return None
            axis_of[along] = position
            values = cast(list[int], index.flatten().tolist())
            if min(values) < 0 or max(values) >= memory.shape[dim]:
                return None
            pick = _steps(values)
            picks.append(slice(None) if pick is None else pick)
            if pick is None:
                selects.append((position, index.flatten()))
        else:
            picks.append(int(index))
    if any(s.start == s.stop for s in inside.values()):
        return View(memory, (), True, True, True)
    view = memory[tuple(picks)]
    for position, index in selects:
        view = view.index_select(position, index)
    order = [axis_of[key] for key in ("z", "y", *range(len(dims))) if key in axis_of]
    view = view.permute(order)
    if "y" not in axis_of:
        view = view.unsqueeze(1 if "z" in axis_of else 0)
    if "z" not in axis_of:
        view = view.unsqueeze(0)
    return View(view, tuple(inside[t] for t in range(len(dims))), partial, bool(selects))


def _quick(
    programs: Programs,
    memory: Tensor,
    shape: Sequence[int],
    indices: Sequence[Scalar],
    dims: Sequence[int],
    limits: dict[int, Scalar],
) -> View | None:
    """The access as a view, if its tile starts at numbers: what the other indices pick is found once for a batch."""
    key = (id(memory), *[0 if d in dims else id(i) for d, i in enumerate(indices)])
    found = programs.views.get(key)
    if found is None:
        whole = [0 if d in dims else index for d, index in enumerate(indices)]
        view = _view(memory, [memory.shape[d] for d in dims], whole, dims, {})
        if view is None or view.empty or view.copied:
            return None
        # The indices are kept, so that no other object gets their ids.
        found = programs.views[key] = (view.memory, (memory, indices))
    result = found[0]
    inside: list[slice] = []
    partial = False
    for t, dim in enumerate(dims):
        start, size, bound = indices[dim], shape[t], memory.shape[dim]
        limit = limits.get(t)
        if isinstance(start, Tensor) or isinstance(limit, Tensor):
            return None
        low, high = _range(int(start), size, None if limit is None else int(limit), bound)
        if low == high:
            return View(memory, (), True, True, True)
        if high - low != bound:
            result = result.narrow(t + 2, low, high - low)
        inside.append(slice(low - int(start), high - int(start)))
        partial |= high - low < size
    return View(result, tuple(inside), partial, False)


def _places(
    memory: Tensor,
    shape: Sequence[int],
    indices: Sequence[Scalar],
    dims: Sequence[int],
    limits: dict[int, Scalar],
    active: Tensor | None,
) -> tuple[list[Tensor], Tensor]:
    """Any access: index tensors that broadcast to [z, y, ...tile], and which elements are accessed."""
    rank = len(shape)
    valid = torch.ones(1, 1, *[1] * rank, dtype=torch.bool)
    if active is not None:
        valid = valid & active.reshape(*active.shape, *[1] * rank)
    places: list[Tensor] = []
    for dim, index in enumerate(indices):
        place = tensor(at(index, rank), torch.int64).to(torch.int64)
        if dim in dims:
            t = dims.index(dim)
            place = place + torch.arange(shape[t]).reshape([-1 if a == t else 1 for a in range(rank)])
            if t in limits:
                valid = valid & (place >= 0) & (place < at(limits[t], rank))
        places.append(place)
    return [torch.where(valid, place, 0) for place in places], valid


def load(
    programs: Programs,
    memory: Tensor,
    shape: Sequence[int],
    indices: Sequence[Scalar],
    dims: Sequence[int],
    limits: dict[int, Scalar],
    fresh: bool = False,
) -> Tensor:
    """A tile, or with no `dims` a scalar [z, y]; elements outside the limits are 0.

    `fresh` asks for a copy, for memory that the kernel also writes.
    """
    view = _quick(programs, memory, shape, indices, dims, limits) or _view(memory, shape, indices, dims, limits)
    if view is None:
        places, valid = _places(memory, shape, indices, dims, limits, programs.active)
        return read_places(memory, places, valid)
    if not view.partial:
        return view.memory.clone() if fresh else view.memory
    if view.empty:
        return memory.new_zeros(()).expand(1, 1, *shape)
    result = memory.new_zeros(*view.memory.shape[:2], *shape)
    result[(..., *view.tile)] = view.memory
    return result


def read_places(memory: Tensor, places: Sequence[Tensor], valid: Tensor) -> Tensor:
    """One element per place, 0 where it is not valid."""
    if memory.numel() == 0:
        return memory.new_zeros(broadcast(valid.shape, *(p.shape for p in places)))
    return torch.where(valid, memory[tuple(places)], memory.new_zeros(()))


def store(
    programs: Programs,
    value: Scalar,
    memory: Tensor,
    shape: Sequence[int],
    indices: Sequence[Scalar],
    dims: Sequence[int],
    limits: dict[int, Scalar],
) -> None:
    """Writes a tile or scalar where it is inside the limits and its program is active."""
    value = _element(value, memory.dtype)
    view = None
    if programs.active is None:
        view = _quick(programs, memory, shape, indices, dims, limits) or _view(memory, shape, indices, dims, limits)
    if view is not None and view.empty:
        return
    if view is None or view.copied or not _fits(value, view.memory):
        places, valid = _places(memory, shape, indices, dims, limits, programs.active)
        _write(memory, places, valid, value, accumulate=False)
        return
    view.memory.copy_(value[(..., *view.tile)])


def atomic_add(
    programs: Programs,
    value: Scalar,
    memory: Tensor,
    shape: Sequence[int],
    indices: Sequence[Scalar],
    dims: Sequence[int],
    limits: dict[int, Scalar],
) -> None:
    """Adds each active program's tile; programs that meet in an element all count."""
    value = _element(value, memory.dtype)
    view = _view(memory, shape, indices, dims, limits) if programs.active is None else None
    if view is not None and view.empty:
        return
    if view is not None and not view.copied and view.memory.shape[:2] == programs.shape:
        view.memory.add_(value[(..., *view.tile)])
        return
    places, valid = _places(memory, shape, indices, dims, limits, programs.active)
    _write(memory, places, valid.expand(*programs.shape, *valid.shape[2:]), value, accumulate=True)


def atomic_max(
    programs: Programs,
    value: Scalar,
    memory: Tensor,
    shape: Sequence[int],
    indices: Sequence[Scalar],
    dims: Sequence[int],
    limits: dict[int, Scalar],
) -> None:
    """Raises one element to the largest number of the active programs."""
    places, valid = _places(memory, shape, indices, dims, limits, programs.active)
    index, values = _accessed(places, valid, _element(value, memory.dtype))
    steps = zip(index, memory.stride(), strict=True)
    flat = sum((i * stride for i, stride in steps), torch.zeros(values.shape, dtype=torch.int64))
    memory.view(-1).scatter_reduce_(0, flat, values.to(memory.dtype), "amax")


def _element(value: Scalar, dtype: torch.dtype) -> Tensor:
    return value if isinstance(value, Tensor) and value.ndim >= 2 else tensor(value, dtype).reshape(1, 1)


def _fits(value: Tensor, view: Tensor) -> bool:
    """Whether no two programs of the batch write to one element of the view."""
    return all(v in (1, m) for v, m in zip(value.shape[:2], view.shape[:2], strict=True))


def _write(memory: Tensor, places: Sequence[Tensor], valid: Tensor, value: Tensor, accumulate: bool) -> None:
    index, values = _accessed(places, valid, value)
    if not places and accumulate:
        # A tensor without axes: index_put_ has no index to sum over.
        memory.add_(values.sum().to(memory.dtype))
        return
    memory.index_put_(index, values.to(memory.dtype), accumulate=accumulate)


def _accessed(places: Sequence[Tensor], valid: Tensor, value: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """One row for each valid element: its indices, and what goes there."""
    full = broadcast(valid.shape, value.shape, *(p.shape for p in places))
    mask = valid.expand(full)
    return tuple(p.expand(full)[mask] for p in places), value.expand(full)[mask]
