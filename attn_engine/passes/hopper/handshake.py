"""Barriers by which the consumers of a ring tell its producer that slots are free, and who owns which op."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import (
    AsyncLoadOp,
    AsyncReduceAddOp,
    AsyncStoreOp,
    AsyncStoreWaitOp,
    BarrierArriveOp,
    BarrierExpectOp,
    BarrierWaitOp,
    MakeBarriersOp,
    ProxyFenceOp,
)
from attn_engine.dialects.tile_async_memory import FetchAddOp, ReadOp, WriteOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, WaitOp
from attn_engine.dialects.tile_async_view import PartOp, SlotOp, TransposedSlotOp
from attn_engine.dialects.tile_types import BarriersType, BufferType
from attn_engine.passes.hopper.edit import After, Before
from attn_engine.passes.hopper.rows import walk

COPIES = (BarrierExpectOp, AsyncLoadOp, FetchAddOp)
COMPUTES = (
    *(BarrierWaitOp, ReadOp, ProxyFenceOp, AsyncDotOp, WaitOp, tile.StoreOp),
    *(AsyncStoreWaitOp, WriteOp, AsyncStoreOp, AsyncReduceAddOp, tile.AtomicAddOp, tile.ScatterAddOp),
    tile.AddDiagonalsOp,
)


@dataclass
class Handshake:
    """Barriers by which consumers tell the producer that slots are free; which ops belong to which side."""

    block: Block
    top: Before
    consumers: int
    part: SSAValue
    threads: int = 1
    """Of a consumer, which arrive each for itself where products alone read a slot; 1 to arrive together."""

    def run(self) -> tuple[list[Operation], list[Operation]]:
        """Adds the missing half of every handshake; the ops of the producer and of the consumers."""
        self.produce: list[Operation] = [o for o in walk(self.block) if isinstance(o, COPIES)]
        self.consume: list[Operation] = [o for o in walk(self.block) if isinstance(o, COMPUTES)]
        waits = [o for o in walk(self.block) if isinstance(o, BarrierWaitOp)]
        self.empty: dict[SSAValue, SSAValue] = {}
        reads = (_slot(op.source) for op in self.consume if isinstance(op, ReadOp))
        self.read = {self._full(slot) for slot in reads if slot is not None}
        """The full barriers of slots that threads read themselves."""
        for expect in [o for o in self.produce if isinstance(o, BarrierExpectOp)]:
            own = [w for w in waits if w.barriers is expect.barriers]
            same = [w for w in own if w.index is expect.index] or own
            self._wait_until_free(expect, same[0])
        for op in list(self.consume):
            self._release(op)
        self._release_queries()
        return self.produce, self.consume

    def _barriers(self, full: SSAValue) -> SSAValue:
        if full not in self.empty:
            name = (full.name_hint or "slot").removesuffix("_full")
            own = any(isinstance(u.operation, BarrierWaitOp) and u.operation.index is self.part for u in full.uses)
            assert isinstance(full.type, BarriersType)
            size, threads = full.type.size.data, 1 if own or full in self.read else self.threads
            barriers = MakeBarriersOp(size, 1 if own else self.consumers, threads)
            self.empty[full] = self.top.add(barriers, f"{name}_empty").result
        return self.empty[full]

    def _wait_until_free(self, expect: BarrierExpectOp, wait: BarrierWaitOp) -> None:
        """The slot is free one phase after the consumers' last wait for it."""
        scope = Before(expect)
        free = scope.add(arith.XOrIOp(wait.parity, scope.value(1)), "free").result
        self.produce.append(scope.add(BarrierWaitOp(self._barriers(expect.barriers), expect.index, free)))

    def _release(self, op: Operation) -> None:
        """A slot is free after the fence behind a read of it, and after the wait for a product that reads it."""
        slots: list[SSAValue] = []
        if isinstance(op, ReadOp):
            slots, op = [op.source], _fence_behind(op)
        elif isinstance(op, WaitOp):
            slots = [d.b for d in (p.owner for p in op.pending) if isinstance(d, AsyncDotOp)]
        scope = After(op) if slots else None
        for slot in slots:
            found = _slot(slot)
            full = self._full(found) if found is not None else None
            if scope is not None and found is not None and full is not None:
                self.consume.append(scope.add(BarrierArriveOp(self._barriers(full), found.index)))

    def _release_queries(self) -> None:
        """Queries that products read from their slot are free behind the last wait for such a product.

        If the output leaves through the same slot, it is free behind the wait for that copy.
        """
        found = [(op, slot) for op in self.block.ops for slot in _queries_of(op)]
        if not found:
            return
        last, slot = found[-1]
        stores = [op for op in self.block.ops if isinstance(op, AsyncStoreOp) and _slot(op.source) is slot]
        if stores:
            last = next(
                op for op in self.block.ops if isinstance(op, AsyncStoreWaitOp) and stores[0].is_before_in_block(op)
            )
        full = self._full(slot)
        assert full is not None
        self.consume.append(After(last).add(BarrierArriveOp(self._barriers(full), slot.index)))

    def _full(self, slot: SlotOp) -> SSAValue | None:
        """The barriers on which the copies into a slot's ring land."""
        for op in self.produce:
            if isinstance(op, AsyncLoadOp):
                target = _slot(op.target)
                if target is not None and target.ring is slot.ring:
                    return op.barriers
        return None


def _slot(value: SSAValue) -> SlotOp | None:
    owner = value.owner
    while isinstance(owner, TransposedSlotOp | PartOp):
        owner = owner.source.owner
    return owner if isinstance(owner, SlotOp) else None


def _queries_of(op: Operation) -> Iterator[SlotOp]:
    """The slots that the first operands of the products come from for which an op of the tile, or a loop, waits."""
    for wait in [o for o in op.walk() if isinstance(o, WaitOp)]:
        for pending in wait.pending:
            dot = pending.owner
            if isinstance(dot, AsyncDotOp) and isinstance(dot.a.type, BufferType):
                slot = _slot(dot.a)
                assert slot is not None
                yield slot


def _fence_behind(op: Operation) -> Operation:
    following = op.next_op
    assert isinstance(following, ProxyFenceOp), "a read of a slot that is filled again is fenced"
    return following
