"""Which accesses of shared memory are ordered, by vector clocks: a race shows in every schedule, not only in an unlucky one.

Roles and pieces of work in flight (copies, products) are threads. A thread's clock says how far it has surely
seen each other thread: at the start of a thread it inherits its starter's clock; an arrival passes a clock on to
whoever waits for the phase, and a wait for a product or a store takes over that of the work.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.ir import Operation

from attn_engine.errors import AttnEngineError

Clock = dict[int, int]
Box = tuple[tuple[int, int], ...]
"""A part of a slot: start and end along each axis."""


class AsyncProtocolError(AttnEngineError):
    """Two accesses of a slot that nothing orders, or a slot, fence or wait used against its rules."""


def merge(into: Clock, other: Clock) -> None:
    for number, time in other.items():
        into[number] = max(time, into.get(number, 0))


@dataclass
class Thread:
    """A role, or a piece of work in flight."""

    number: int
    clock: Clock = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        self.clock[self.number] = 1

    def start(self, number: int) -> Thread:
        """A thread that has seen all that this one has."""
        return Thread(number, self.release())

    def release(self) -> Clock:
        """The clock to pass on; what this thread does later is not covered by it."""
        clock = dict(self.clock)
        self.clock[self.number] += 1
        return clock


@dataclass(frozen=True)
class _Access:
    box: Box
    writes: bool
    thread: int
    time: int
    op: Operation


def overlap(a: Box, b: Box) -> bool:
    return all(low < other_high and other_low < high for (low, high), (other_low, other_high) in zip(a, b, strict=True))


def _inside(a: Box, b: Box) -> bool:
    return all(
        other_low <= low and high <= other_high for (low, high), (other_low, other_high) in zip(a, b, strict=True)
    )


class History:
    """The accesses of one slot that a later one may race with."""

    def __init__(self) -> None:
        self._accesses: list[_Access] = []

    def record(self, thread: Thread, box: Box, op: Operation, *, writes: bool) -> None:
        """Raises unless every conflicting access of the same elements surely came before."""
        for old in self._accesses:
            conflict = (writes or old.writes) and overlap(old.box, box)
            if conflict and thread.clock.get(old.thread, 0) < old.time:
                raise AsyncProtocolError(f"a race: nothing orders {op} after {old.op}")
        self._accesses = [old for old in self._accesses if not self._is_superseded(old, thread, box, writes)]
        self._accesses.append(_Access(box, writes, thread.number, thread.clock[thread.number], op))

    def _is_superseded(self, old: _Access, thread: Thread, box: Box, writes: bool) -> bool:
        """Whatever comes after the new access comes after the old one too."""
        return _inside(old.box, box) and (writes or (not old.writes and old.thread == thread.number))
