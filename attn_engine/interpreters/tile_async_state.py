"""What asynchronous kernels share while they run: slots, barriers, work in flight, and a scheduler that picks at random.

Work in flight takes effect at one moment between its start and the wait for it, and the scheduler picks that moment.
A missing wait, barrier or fence is an error in every schedule (see `tile_async_order`); a wrong one may also show as
poison, as a wrong result or as a deadlock in some.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from xdsl.ir import Operation

from attn_engine.errors import AttnEngineError
from attn_engine.interpreters.tile_async_order import AsyncProtocolError, Box, Clock, History, Thread, merge, overlap
from attn_engine.interpreters.tile_memory import Window, poison

_MATRIX = 2

Steps = Generator["Callable[[], bool] | None", None, Any]
"""A role as a coroutine: it yields what it waits for, or None where another may run."""


class DeadlockError(AttnEngineError):
    """Roles wait for barriers whose phases nothing will end."""


@dataclass
class Storage:
    """The memory of one ring, and what parts of which slots roles read or wrote since their last proxy fence."""

    data: Tensor
    reads: dict[int, set[tuple[int, Box]]] = field(default_factory=dict[int, set[tuple[int, Box]]])
    writes: dict[int, set[tuple[int, Box]]] = field(default_factory=dict[int, set[tuple[int, Box]]])
    histories: dict[int, History] = field(default_factory=lambda: defaultdict(History))

    def fence(self, role: int) -> None:
        for parts in (*self.reads.values(), *self.writes.values()):
            parts.difference_update([part for part in parts if part[0] == role])


@dataclass(frozen=True)
class Slot:
    """A view of one stage of a ring (or of all of it, stage -1), or of a part of that."""

    storage: Storage
    stage: int
    data: Tensor
    is_alias: bool = False
    """Whether it has the bytes of the stage in another form."""

    def view(self, data: Tensor) -> Slot:
        return Slot(self.storage, self.stage, data, self.is_alias)

    def alias(self, data: Tensor) -> Slot:
        return Slot(self.storage, self.stage, data, is_alias=True)

    def read(self, thread: Thread, op: Operation) -> Tensor:
        """A generic read."""
        self._record(thread, op, writes=False)
        self.storage.reads.setdefault(self.stage, set()).add((thread.number, self._box()))
        return self.data.clone()

    def write(self, thread: Thread, op: Operation, value: Tensor) -> None:
        """A generic write."""
        self._record(thread, op, writes=True)
        self.storage.writes.setdefault(self.stage, set()).add((thread.number, self._box()))
        self.data.copy_(value)

    def cell(self, thread: Thread, op: Operation, index: int, *, writes: bool) -> Tensor:
        """One element of a ring of cells."""
        self.storage.histories[index].record(thread, ((0, 1),), op, writes=writes)
        return self.data[index]

    def access(self, work: Thread, op: Operation, *, writes: bool) -> None:
        """An asynchronous access by work in flight; generic ones before it need a fence too."""
        self.check(op, writes=writes)
        self._record(work, op, writes=writes)

    def _record(self, thread: Thread, op: Operation, *, writes: bool) -> None:
        self.storage.histories[self.stage].record(thread, self._box(), op, writes=writes)

    def _box(self) -> Box:
        """Rows and columns of the stage that this view covers; all of them where it has another form."""
        whole = self.storage.data[self.stage]
        columns = int(whole.shape[-1])
        start = int(self.data.storage_offset()) - int(whole.storage_offset())
        if self.is_alias or not 0 <= start < whole.numel() or whole.ndim > _MATRIX:
            return (0, whole.numel() // columns), (0, columns)
        sizes = {int(step): int(size) for step, size in zip(self.data.stride(), self.data.shape, strict=True)}
        row, column = start // columns, start % columns
        return (row, row + sizes.get(columns, 1)), (column, column + sizes.get(1, columns))

    def check(self, op: Operation, *, writes: bool) -> None:
        """Before an asynchronous access: reads must come after writes, and writes after all accesses."""
        before = [*self.storage.writes.get(self.stage, ()), *(self.storage.reads.get(self.stage, ()) if writes else ())]
        if any(overlap(box, self._box()) for _, box in before):
            raise AsyncProtocolError(
                f"{op.name} follows a generic access of the same slot; put a tile.proxy_fence in between: {op}"
            )


@dataclass
class Barrier:
    """One barrier: the phase that runs, what it still waits for, and what those who wait will have seen."""

    count: int
    phase: int = 0
    arrivals: int = 0
    missing_bytes: int = 0
    _arriving: Clock = field(default_factory=dict[int, int])
    _ended: dict[int, Clock] = field(default_factory=dict[int, Clock])

    def arrive(self, clock: Clock, expected_bytes: int = 0) -> None:
        self.arrivals += 1
        self.missing_bytes += expected_bytes
        self._end_phase(clock)

    def land(self, clock: Clock, size: int) -> None:
        self.missing_bytes -= size
        self._end_phase(clock)

    def _end_phase(self, clock: Clock) -> None:
        merge(self._arriving, clock)
        if self.arrivals == self.count and self.missing_bytes == 0:
            self._ended[self.phase & 1] = self._arriving
            self._arriving = {}
            self.phase += 1
            self.arrivals = 0

    def seen(self, parity: int) -> Clock:
        """What a wait for that parity makes sure of."""
        return self._ended.get(parity, {})

    def has_ended(self, parity: int) -> bool:
        """Whether the last phase that ended has that parity; before the first, phase -1 has."""
        return self.phase & 1 != parity


@dataclass(frozen=True)
class Descriptor:
    """A global tensor, for copies of blocks of one shape."""

    tensor: Tensor
    block: tuple[int, ...]

    def window(self, coordinates: list[int]) -> Window:
        """What part of the tensor and of the block a copy moves; the rest is outside."""
        memory: list[slice] = []
        inside: list[slice] = []
        for start, size, limit in zip(coordinates, self.block, self.tensor.shape, strict=True):
            low, high = max(start, 0), max(min(start + size, limit), 0)
            high = max(low, high)
            memory.append(slice(low, high))
            inside.append(slice(low - start, high - start))
        return Window(tuple(memory), tuple(inside), tuple(range(len(self.block))))


@dataclass
class Product:
    """A product in flight: reads its slots when it completes."""

    compute: Callable[[], Tensor]
    value: Tensor | None = None

    def complete(self) -> None:
        self.value = self.compute()


class Scheduler:
    """Runs roles and completes work in flight in a random order, until nothing is left."""

    def __init__(self, seed: int):
        self.random = Random(seed)
        # some schedules complete work early, some late
        self.eagerness = self.random.choice((0.02, 0.2, 1.0, 5.0))
        self.copies: list[Callable[[], None]] = []
        self.queues: list[deque[Callable[[], None]]] = []
        self._roles: list[_Running] = []
        self._threads = 0

    def thread(self) -> int:
        """A number for a new thread."""
        self._threads += 1
        return self._threads

    def queue(self) -> deque[Callable[[], None]]:
        """Work that completes in the order in which it started."""
        self.queues.append(deque())
        return self.queues[-1]

    def add(self, name: str, steps: Steps) -> None:
        self._roles.append(_Running(name, steps))

    def run(self) -> None:
        while True:
            ready = [role for role in self._roles if role.waits_for is None or role.waits_for()]
            late = len(self.copies) + sum(map(bool, self.queues))
            if not ready and not late:
                break
            weight = late * self.eagerness
            if not ready or self.random.random() * (weight + len(ready)) < weight:
                self._complete()
            else:
                self._advance(self.random.choice(ready))
        if self._roles:
            raise DeadlockError("no role can go on: " + "; ".join(f"{r.name} in {r.place()}" for r in self._roles))

    def _complete(self) -> None:
        choice = self.random.randrange(len(self.copies) + sum(map(bool, self.queues)))
        if choice < len(self.copies):
            self.copies.pop(choice)()
        else:
            [q for q in self.queues if q][choice - len(self.copies)].popleft()()

    def _advance(self, role: _Running) -> None:
        try:
            role.waits_for = next(role.steps)
        except StopIteration:
            self._roles.remove(role)


@dataclass(eq=False)
class _Running:
    name: str
    steps: Steps
    waits_for: Callable[[], bool] | None = None

    def place(self) -> str:
        return getattr(self.waits_for, "place", "a loop")


class Condition:
    """What a role waits for, with a text for reports."""

    def __init__(self, test: Callable[[], bool], place: str):
        self._test = test
        self.place = place

    def __call__(self) -> bool:
        return self._test()


def storage(shape: tuple[int, ...], dtype: torch.dtype) -> Storage:
    """Fresh memory holds poison."""
    return Storage(poison(shape, dtype))
