"""What generated CPU code calls: batches of programs, masked loops and branches, scalar helpers.

A kernel runs for a batch of programs at once: all of one position on grid axis 0, several on axes 2 (z)
and 1 (y). A tile is a tensor [z, y, ...tile], in which z and y may be 1 where its programs agree; a
scalar is a Python number, or a tensor [z, y] where programs may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from math import copysign

import torch
from torch import Tensor

from attn_engine.backends.cpu.parallel import LONG, batches_of, dismiss_threads, run, workers_for

Scalar = Tensor | int | float | bool

MOST_VIEWS = 64
"""Views of memory that a batch keeps; each costs little, but each position on axis 0 may bring new ones."""

LARGE = 1 << 14
"""Elements from which a choice on bit patterns pays."""


class Programs:
    """A batch of programs, and which of them are active in the current loop or branch (None: all)."""

    def __init__(self, first: int, ys: range, zs: range, buffers: dict[int, Tensor] | None = None):
        self.place = (ys, zs)
        self._ids: list[Scalar] = [
            first,
            torch.arange(ys.start, ys.stop, dtype=torch.int32)[None, :],
            torch.arange(zs.start, zs.stop, dtype=torch.int32)[:, None],
        ]
        self.shape = (len(zs), len(ys))
        self.active: Tensor | None = None
        self.views: dict[object, tuple[Tensor, object]] = {}
        """Memory as this batch sees it, by what picks it; see `memory`."""
        self._buffers = {} if buffers is None else buffers

    def move(self, first: int) -> None:
        """The same programs at another position on axis 0."""
        self._ids[0] = first
        self.active = None
        if len(self.views) > MOST_VIEWS:
            self.views.clear()

    def buffer(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """Memory that one op of the kernel writes again and again: fresh pages cost as much as a product."""
        found = self._buffers.get(number)
        if found is None or found.shape != shape:
            found = self._buffers[number] = torch.empty(shape, dtype=torch.float32)
        return found

    def spare(self, number: int, like: Tensor) -> Tensor | None:
        """A buffer of the size of a tile, if every program has its own part of the tile."""
        return self.buffer(number, like.shape) if like.shape[:2] == self.shape else None

    def own(self, value: Tensor) -> Tensor | None:
        """The memory of a tile that is read no more, if every program has its own part of it.

        A constant is an expanded number, hence not contiguous.
        """
        own = value.shape[:2] == self.shape and value.numel() > 1 and value.is_contiguous()
        return value if own else None

    def id(self, axis: int) -> Scalar:
        """The position of each program on a grid axis."""
        return self._ids[axis]

    def loop(self, low: Scalar, high: Scalar, step: Scalar) -> Generator[Scalar]:
        """The induction values of a loop whose bounds may differ between programs.

        Where they do, every program runs as many trips as the longest; `active` says who is in range, and
        `keep` leaves the carries of the others alone.
        """
        low, high, step = number(low), number(high), number(step)
        if not isinstance(low, Tensor) and not isinstance(high, Tensor) and not isinstance(step, Tensor):
            yield from range(int(low), int(high), int(step))
            return
        outer = self.active
        low, high = tensor(low, torch.int32), tensor(high, torch.int32)
        for value in _trips(low, high, step, self._reach(low, high)):
            inside = (low <= value) & (value < high)
            if self._enter(outer, inside):
                yield value
        self.active = outer

    def _reach(self, low: Tensor, high: Tensor) -> Tensor:
        """Which programs take part in a loop at all."""
        nonempty = low < high
        return nonempty if self.active is None else nonempty & self.active

    def _enter(self, outer: Tensor | None, inside: Tensor) -> bool:
        active = inside if outer is None else inside & outer
        self.active = None if bool(active.all()) else active
        return self.active is None or bool(active.any())

    def keep(self, new: Scalar, old: Scalar) -> Scalar:
        """The new value of a loop carry where programs are active, else the old."""
        return new if self.active is None else select(_against(self.active, new, old), new, old)

    def branch(self, condition: Scalar) -> Generator[bool]:
        """True, False or both: the sides of a branch that some active program takes; `active` is set meanwhile."""
        condition = number(condition)
        if not isinstance(condition, Tensor):
            yield bool(condition)
            return
        outer = self.active
        for side in (True, False):
            if self._enter(outer, condition == side):
                yield side
        self.active = outer

    def join(self, condition: Scalar, then: Scalar | None, otherwise: Scalar | None) -> Scalar:
        """The result of a branch; None stands for a side that no program took."""
        if then is None or otherwise is None:
            result = otherwise if then is None else then
            assert result is not None
            return result
        condition = number(condition)
        if not isinstance(condition, Tensor):
            return then if condition else otherwise
        return select(_against(condition, then, otherwise), then, otherwise)


def _trips(low: Tensor, high: Tensor, step: Scalar, reach: Tensor) -> Generator[Scalar]:
    """Induction values; plain numbers where all programs step on the same grid."""
    if not bool(reach.any()):
        return
    lows, highs = low.expand(reach.shape)[reach], high.expand(reach.shape)[reach]
    if not isinstance(step, Tensor) and bool(((lows - lows[0]) % step == 0).all()):
        yield from range(int(lows.min()), int(highs.max()), int(step))
        return
    value = low
    while bool((reach & (value < high)).any()):
        yield value
        value = value + step


def _against(mask: Tensor, *values: Scalar) -> Tensor:
    """A mask [z, y] with as many trailing axes as the values need."""
    rank = max((v.ndim for v in values if isinstance(v, Tensor)), default=2)
    return mask.reshape(*mask.shape, *[1] * (rank - 2))


def launch(
    kernel: Callable[..., None],
    grid: Sequence[int],
    arguments: Sequence[Tensor | int | float],
    in_order: bool = False,
) -> None:
    """Runs every program of a grid in batches, on several threads unless the order of the batches matters."""
    programs = grid[0] * grid[1] * grid[2]
    batches = batches_of(grid, 1 if in_order else workers_for(programs))
    workers = 1 if in_order else workers_for(len(batches))
    left = iter(batches)

    def work() -> None:
        buffers: dict[int, Tensor] = {}
        programs: Programs | None = None
        for block, ys, zs in left:
            if programs is None or programs.place != (ys, zs):
                programs = Programs(block, ys, zs, buffers)
            programs.move(block)
            kernel(programs, *arguments)

    if workers == 1:
        work()
        return
    if sum(x.numel() for x in arguments if isinstance(x, Tensor)) >= LONG:
        dismiss_threads()
    run(work, workers)


# --- values ------------------------------------------------------------------------------------


def number(value: Scalar) -> Scalar:
    """A Python number where all programs agree by construction (a tensor of one element)."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def tensor(value: Scalar, dtype: torch.dtype) -> Tensor:
    """A tensor, whatever it was."""
    return value if isinstance(value, Tensor) else _constant(value, copysign(1.0, value), dtype)


@lru_cache(maxsize=1024)
def _constant(value: float, sign: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor; zeros of both signs are two."""
    return torch.tensor(value, dtype=dtype)


def at(value: Scalar, rank: int) -> Scalar:
    """A scalar as an operand of a map over `rank` axes."""
    return value.reshape(*value.shape, *[1] * rank) if isinstance(value, Tensor) else value


def full(value: Scalar, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tile from something that broadcasts to it."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return tensor(value, dtype).expand(1, 1, *shape)
    return value.expand(*value.shape[:2], *shape)


def iota(start: Scalar, size: int) -> Tensor:
    """start, start + 1, ... of i32."""
    if isinstance(start, Tensor):
        return start[..., None] + torch.arange(size, dtype=torch.int32)
    return torch.arange(int(start), int(start) + size, dtype=torch.int32)[None, None]


def f32(value: Tensor) -> Tensor:
    """The same in f32."""
    return value if value.dtype is torch.float32 else value.to(torch.float32)


def dot(a: Tensor, b: Tensor, acc: Tensor | None, out: Tensor | None = None) -> Tensor:
    """acc + a @ b in f32, one product for the whole batch; `out` may be overwritten."""
    a, b = f32(a), f32(b)
    if acc is None:
        return torch.matmul(a, b)
    if a.shape[:2] != b.shape[:2] or a.shape[:2] != acc.shape[:2]:
        return acc + torch.matmul(a, b)
    into = None if out is None else out.flatten(0, 1)
    return torch.baddbmm(acc.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1), out=into).view(acc.shape)


def product(a: Tensor, b: Tensor, programs: Programs, number: int) -> Tensor:
    """a @ b in f32, in the buffer of that number."""
    if a.shape[:2] != b.shape[:2]:
        return dot(a, b, None)
    z, y, m, _ = a.shape
    into = programs.buffer(number, (z, y, m, b.shape[3]))
    torch.bmm(f32(a).flatten(0, 1), f32(b).flatten(0, 1), out=into.flatten(0, 1))
    return into


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that all of these broadcast to; torch's own function takes longer than an operation on a tile."""
    result = [1] * max(map(len, shapes))
    for shape in shapes:
        for axis, size in enumerate(shape, len(result) - len(shape)):
            result[axis] = size if result[axis] == 1 else result[axis]
    return tuple(result)


def concat(values: Sequence[Tensor], axis: int) -> Tensor:
    """Tiles joined along a (negative) axis."""
    batch = broadcast(*(v.shape[:2] for v in values))
    return torch.cat([v.expand(*batch, *v.shape[2:]) for v in values], axis)


def select(condition: Scalar, then: Scalar, otherwise: Scalar, out: Tensor | None = None) -> Scalar:
    """Elementwise choice; of two numbers where the condition is a plain bool. `out` may be overwritten."""
    if not isinstance(condition, Tensor):
        return then if condition else otherwise
    for side in (then, otherwise):
        if isinstance(side, Tensor) and side.dtype == torch.float32 and side.numel() >= LARGE:
            return _select_bits(condition, then, otherwise, out)
    return torch.where(condition, then, otherwise)


def _select_bits(condition: Tensor, then: Scalar, otherwise: Scalar, out: Tensor | None) -> Tensor:
    """The choice made on bit patterns: exact for every float, and several times as fast as `torch.where`."""
    mask = -condition.to(torch.int32)
    kept = torch.bitwise_and(_bits(then), mask, out=None if out is None else out.view(torch.int32))
    rest = (
        _bits(otherwise) & ~mask
        if isinstance(otherwise, Tensor) or otherwise != 0.0 or copysign(1.0, otherwise) < 0
        else None
    )
    if rest is None:
        return kept.view(torch.float32)
    into = kept if kept.shape == broadcast(kept.shape, rest.shape) else None
    return torch.bitwise_or(kept, rest, out=into).view(torch.float32)


def _bits(value: Scalar) -> Tensor:
    return tensor(value, torch.float32).view(torch.int32)


# --- scalars -----------------------------------------------------------------------------------


def wrap(value: Scalar, bits: int) -> Scalar:
    """A Python integer at a width; tensors wrap by themselves."""
    if isinstance(value, Tensor) or -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        return value
    return (int(value) + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def divsi(a: Scalar, b: Scalar) -> Scalar:
    """The quotient rounded toward zero; by zero it is 0 and does not trap."""
    return _divide(a, b, "trunc")


def floordivsi(a: Scalar, b: Scalar) -> Scalar:
    """The quotient rounded down; by zero it is 0."""
    return _divide(a, b, "floor")


def _divide(a: Scalar, b: Scalar, rounding: str) -> Scalar:
    if not isinstance(b, Tensor) and b == 1:
        return a
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if isinstance(b, Tensor):
            return torch.where(b == 0, 0, torch.div(a, torch.where(b == 0, 1, b), rounding_mode=rounding))
        return torch.div(a, b, rounding_mode=rounding) if b else a * 0
    if not b:
        return 0
    return int(a // b) if rounding == "floor" or (a < 0) == (b < 0) else -int(-a // b)


def remsi(a: Scalar, b: Scalar) -> Scalar:
    """The remainder of `divsi`: it has the sign of `a`."""
    return a - divsi(a, b) * b


def minsi(a: Scalar, b: Scalar) -> Scalar:
    return _pick(torch.minimum, min, a, b)


def maxsi(a: Scalar, b: Scalar) -> Scalar:
    return _pick(torch.maximum, max, a, b)


def _pick(on_tensors: Callable[..., Tensor], on_numbers: Callable[..., Scalar], a: Scalar, b: Scalar) -> Scalar:
    if isinstance(a, Tensor):
        return on_tensors(a, tensor(b, a.dtype))
    return on_tensors(tensor(a, b.dtype), b) if isinstance(b, Tensor) else on_numbers(a, b)


def unsigned(value: Scalar, bits: int) -> Scalar:
    """A value whose signed order is the unsigned order of the argument."""
    return value ^ -(1 << (bits - 1)) if bits > 1 else value  # type: ignore[operator]


def shrui(a: Scalar, b: Scalar, bits: int) -> Scalar:
    """A logical shift to the right: the bits that the sign fills in are cleared."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return wrap((int(a) & ((1 << bits) - 1)) >> int(b), bits)
    a, b = tensor(a, torch.int64), tensor(b, torch.int64)
    return torch.where(b == 0, a, (a >> b) & ~(-1 << (bits - b.clamp(min=1))))


def cast(value: Scalar, dtype: torch.dtype) -> Scalar:
    """To a float or integer type; a number stays one unless it must be rounded to a narrow float."""
    if isinstance(value, Tensor):
        return value.to(dtype)
    if not dtype.is_floating_point:
        return int(value)
    return float(value) if dtype in (torch.float32, torch.float64) else torch.tensor(value, dtype=dtype)


def extsi(value: Scalar, dtype: torch.dtype) -> Scalar:
    """A true i1 is -1."""
    if isinstance(value, Tensor):
        return -value.to(dtype) if value.dtype == torch.bool else value.to(dtype)
    return -int(value) if isinstance(value, bool) else value


def extui(value: Scalar, dtype: torch.dtype) -> Scalar:
    if not isinstance(value, Tensor) or value.dtype == torch.bool:
        return cast(value, dtype)
    return value.to(dtype) & ((1 << torch.iinfo(value.dtype).bits) - 1)


def trunci(value: Scalar, dtype: torch.dtype) -> Scalar:
    if dtype == torch.bool:
        return (value & 1) != 0  # type: ignore[operator]
    return value.to(dtype) if isinstance(value, Tensor) else wrap(value, torch.iinfo(dtype).bits)


def sitofp(value: Scalar, dtype: torch.dtype) -> Scalar:
    return cast(extsi(value, torch.int8) if _is_bool(value) else value, dtype)


def _is_bool(value: Scalar) -> bool:
    return value.dtype == torch.bool if isinstance(value, Tensor) else isinstance(value, bool)
