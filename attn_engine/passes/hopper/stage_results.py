"""Where the results of a tile wait for their stores, so that the blocks of the next tile may be copied meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.dialects import scf
from xdsl.ir import Block, BlockArgument, SSAValue
from xdsl.rewriter import Rewriter

from attn_engine.dialects.tile_async_copy import (
    AsyncLoadOp,
    AsyncReduceAddOp,
    AsyncStoreOp,
    AsyncStoreWaitOp,
    BarrierArriveOp,
    BarrierWaitOp,
)
from attn_engine.dialects.tile_async_memory import WriteOp
from attn_engine.dialects.tile_async_view import AliasSlotOp, PartOp, SlotOp
from attn_engine.dialects.tile_types import BufferType, MemorySpace
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.hopper.edit import Before
from attn_engine.passes.hopper.role_steps import slot_of
from attn_engine.passes.hopper.rows import walk


@dataclass(frozen=True)
class _Result:
    """A result in a slot that the producer fills, and the store that takes it from there."""

    write: WriteOp
    store: AsyncStoreOp


@dataclass
class Staging:
    """Moves results from slots that the producer fills to those in which consumers pass on what a step computes.

    A result of a consumer takes the slot of its number, if that has the size: it is idle between two tiles.
    """

    role: Block
    consumers: int
    filled: frozenset[int]
    """Numbers of the arguments of a role that the producer copies into."""
    places: list[tuple[_Result, SSAValue]] = field(default_factory=list[tuple[_Result, SSAValue]])
    """Results, and the rings to which they go."""

    def plan(self) -> Staging:
        """Finds places. Raises AsyncUnsupportedError if a result has none."""
        for result in self._results():
            ring = self._place(result)
            if ring is None:
                raise AsyncUnsupportedError("a result has no slot but that of a block which the next tile needs")
            self.places.append((result, ring))
        return self

    @property
    def meets(self) -> bool:
        """Whether a slot is taken that other consumers write in their steps."""
        return any(self._is_shared(ring) for _, ring in self.places)

    def run(self) -> None:
        for result, ring in self.places:
            self._move(result, ring)

    def _results(self) -> list[_Result]:
        found: list[_Result] = []
        for ring in [a for a in self.role.args if a.index in self.filled]:
            stores = [op for op in self.role.ops if isinstance(op, AsyncStoreOp) and _ring(op.source) is ring]
            writes = [op for op in self.role.ops if isinstance(op, WriteOp) and _ring(op.target) is ring]
            if len(stores) == len(writes) == 1:
                found.append(_Result(writes[0], stores[0]))
            elif stores:
                raise AsyncUnsupportedError("a result leaves in parts")
        return found

    def _place(self, result: _Result) -> SSAValue | None:
        """A ring in which the result has room, first of those from which no sums leave just before."""
        taken = [ring for _, ring in self.places]
        rings = [a for a in self.role.args if isinstance(a.type, BufferType) and a.index not in self.filled]
        for ring in sorted(rings, key=self._is_shared, reverse=True):
            reached = not self._is_shared(ring) or self._have_met(result.write)
            if ring not in taken and reached and self._fits(result, ring):
                return ring
        return None

    def _fits(self, result: _Result, ring: SSAValue) -> bool:
        type_, want = ring.type, result.store.source.type
        assert isinstance(type_, BufferType) and isinstance(want, BufferType)
        shape = type_.get_shape()
        if type_.memory_space is not MemorySpace.SHARED or len(shape) != _RING_RANK or shape[0] < self.consumers:
            return False
        return BufferType(shape[1:], type_.element_type, type_.space).byte_size == want.byte_size

    def _is_shared(self, ring: SSAValue) -> bool:
        """Whether a consumer writes slots that others read or write, not only that of its number."""
        slots = [slot_of(op.target) for op in walk(self.role) if isinstance(op, WriteOp)]
        return any(s is not None and s.ring is ring and s.index is not self.role.args[0] for s in slots)

    def _have_met(self, write: WriteOp) -> bool:
        """Whether the consumers wait for each other between their last step and a result."""
        arrived = set[SSAValue]()
        behind = False
        for op in self.role.ops:
            if op is write:
                return False
            behind = behind or isinstance(op, scf.ForOp)
            if behind and isinstance(op, BarrierArriveOp):
                arrived.add(op.barriers)
            if behind and isinstance(op, BarrierWaitOp) and op.barriers in arrived:
                return True
        return False

    def _move(self, result: _Result, ring: SSAValue) -> None:
        scope = Before(result.write)
        want = result.store.source.type
        assert isinstance(want, BufferType)
        if any(isinstance(op, AsyncReduceAddOp) and _ring(op.source) is ring for op in walk(self.role)):
            scope.add(AsyncStoreWaitOp(_started_behind_sums(self.role, result.write)))
        slot = scope.add(SlotOp(ring, self.role.args[0]), "staging").result
        alias = scope.add(AliasSlotOp(slot, want), "staged").result
        for op, view in ((result.write, result.write.target), (result.store, result.store.source)):
            op.operands[list(op.operands).index(view)] = alias
            _erase_views(view)


def _started_behind_sums(role: Block, write: WriteOp) -> int:
    """How many stores start between the last sums that leave and a write."""
    started = 0
    for op in role.ops:
        if op is write:
            break
        if any(isinstance(o, AsyncReduceAddOp) for o in op.walk()):
            started = 0
        started += isinstance(op, AsyncStoreOp)
    return started


def _erase_views(view: SSAValue) -> None:
    """Views that nothing looks through any more."""
    while isinstance(view.owner, PartOp | SlotOp) and not view.uses:
        op = view.owner
        view = op.source if isinstance(op, PartOp) else op.ring
        Rewriter.erase_op(op)


_RING_RANK = 3


def _ring(view: SSAValue) -> BlockArgument | None:
    slot = slot_of(view)
    return slot.ring if slot is not None and isinstance(slot.ring, BlockArgument) else None


def filled_by(producer: Block) -> frozenset[int]:
    """The numbers of the arguments that a role copies into."""
    rings = [_ring(op.target) for op in walk(producer) if isinstance(op, AsyncLoadOp)]
    return frozenset(ring.index for ring in rings if ring is not None)
