"""Divides the queries of a persistent kernel among consumers: every tile along the queries becomes a part of it."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, TensorType
from xdsl.ir import Block, Operation, SSAValue
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import (
    AsyncLoadOp,
    AsyncStoreOp,
    BarrierExpectOp,
    BarrierWaitOp,
    MakeBarriersOp,
)
from attn_engine.dialects.tile_async_memory import DescribeOp, ReadOp, WriteOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp
from attn_engine.dialects.tile_async_view import PartOp, RingOp, SlotOp
from attn_engine.dialects.tile_types import BufferType, MmaLayoutAttr, PendingType
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.hopper.edit import After, Before, OpT, Signature
from attn_engine.passes.hopper.rows import own_constants, row_axes, walk

_WARPS = 4


@dataclass
class SplitRows:
    """One kernel; `part` stands for the number of the consumer."""

    signature: Signature
    block: Block
    parts: int

    def run(self) -> SSAValue:
        """Changes the kernel in place and returns `part`."""
        own_constants(self.block)
        first = self.block.first_op
        assert first is not None
        self.part = Before(first).add(arith.ConstantOp.from_int_and_width(0, 32), "part").result
        slot, store = self._query_slot(), self._only(AsyncStoreOp)
        q0 = store.coordinates[2]
        ranges = [o.result for o in walk(self.block) if isinstance(o, tile.RangeOp) and o.start is q0]
        reads = [o.result for o in walk(self.block) if isinstance(o, ReadOp)]
        axes = row_axes(self.block, dict.fromkeys([slot.result, *reads, *ranges], 0))
        del axes[slot.result]
        assert isinstance(slot.result.type, BufferType)
        self.rows = slot.result.type.get_shape()[0] // self.parts
        row0 = self._first_row(q0)
        self._move(q0, row0, axes)
        retype(axes, self.parts)
        self._split_query(slot, q0)
        for read in [o for o in walk(self.block) if isinstance(o, ReadOp)]:
            self._split_table(read)
        self._split_output(store, row0)
        for op in walk(self.block):
            if isinstance(op, AsyncDotOp | DotOperandOp):
                op.properties["layout"] = MmaLayoutAttr(_WARPS, 1, op.layout.n)
        return self.part

    def _only(self, kind: type[OpT]) -> OpT:
        found = [o for o in walk(self.block) if isinstance(o, kind)]
        if len(found) != 1:
            raise AsyncUnsupportedError(f"its kernel has {len(found)} '{kind.name}' instead of one")
        return found[0]

    def _query_slot(self) -> SlotOp:
        """Where queries are copied to: read from there in front of all steps, or the first operand of products."""
        found = {o.a for o in walk(self.block) if isinstance(o, AsyncDotOp) and isinstance(o.a.type, BufferType)}
        found = found or {next(o.source for o in self.block.ops if isinstance(o, ReadOp))}
        if len(found) != 1 or not isinstance(slot := found.pop().owner, SlotOp):
            raise AsyncUnsupportedError("its queries are in more than one place")
        return slot

    def _first_row(self, q0: SSAValue) -> SSAValue:
        """The first query of this consumer."""
        owner = q0.owner
        assert isinstance(owner, Operation)
        scope = After(owner)
        offset = scope.value(scope.times(self.part, self.rows, "part_rows"))
        return scope.add(arith.AddiOp(q0, offset), "row0").result

    def _move(self, q0: SSAValue, row0: SSAValue, axes: dict[SSAValue, int]) -> None:
        """Tiles of queries start at the consumer's first one."""
        for op in walk(self.block):
            if isinstance(op, tile.RangeOp) and op.result in axes:
                op.operands[0] = row0
            elif isinstance(op, tile.StoreOp) and op.value in axes:
                self._move_access(op, q0, row0, tile.ints_of(op.dims)[axes[op.value]] + 2)
            elif isinstance(op, tile.LoadDiagonalsOp) and op.result in axes:
                self._move_access(op, q0, row0, axes[op.result] + 1)
            elif isinstance(op, tile.LoadOp) and op.result in axes:
                self._move_access(op, q0, row0, tile.ints_of(op.dims)[axes[op.result]] + 1)

    def _move_access(self, op: Operation, q0: SSAValue, row0: SSAValue, place: int) -> None:
        if op.operands[place] is not q0:
            raise AsyncUnsupportedError(f"'{op.name}' of queries does not start at the block's first query")
        op.operands[place] = row0

    def _describe(self, argument: SSAValue) -> tuple[SSAValue, tuple[int, ...]]:
        """The descriptor's argument with blocks of one part."""
        described = self.signature.passed(argument).owner
        assert isinstance(described, DescribeOp)
        *lead, _, columns = described.result.type.get_shape()
        new = Before(self.signature.launch).add(DescribeOp(described.source, [*lead, self.rows, columns]), "copies")
        argument = self.signature.replace(argument, new.result)
        if not described.result.uses:
            Rewriter.erase_op(described)
        return argument, (self.rows, columns)

    def _ring(self, old: RingOp, shape: tuple[int, ...]) -> SSAValue:
        type_ = old.result.type
        assert isinstance(type_, BufferType)
        new = RingOp(BufferType([self.parts, *shape], type_.element_type))
        return Before(old).add(new, old.result.name_hint or "ring").result

    def _split_query(self, slot: SlotOp, q0: SSAValue) -> None:
        """One slot, barrier and copy for each part; the consumer reads its own."""
        assert isinstance(slot.ring.owner, RingOp)
        load = next(o for o in walk(self.block) if isinstance(o, AsyncLoadOp) and o.target is slot.result)
        expect, wait = load.prev_op, load.next_op
        assert isinstance(expect, BarrierExpectOp) and isinstance(wait, BarrierWaitOp)
        old_ring, old_full = slot.ring.owner, load.barriers.owner
        descriptor, shape = self._describe(load.descriptor)
        ring = self._ring(old_ring, shape)
        assert isinstance(old_full, MakeBarriersOp)
        full = Before(old_full).add(MakeBarriersOp(self.parts, 1), old_full.result.name_hint or "full").result
        scope = Before(expect)
        b, h, _, c = load.coordinates
        for part in range(self.parts):
            index = scope.value(part)
            row = scope.value(scope.plus(q0, part * self.rows, "row"))
            target = scope.add(SlotOp(ring, index), "q").result
            copy = AsyncLoadOp(descriptor, [b, h, row, c], target, full, index)
            scope.add(BarrierExpectOp(full, index, copy.byte_size))
            scope.add(copy)
        own = scope.add(SlotOp(ring, self.part), "q").result
        scope.add(BarrierWaitOp(full, self.part, wait.parity))
        for op in (load, expect, wait):
            Rewriter.erase_op(op)
        slot.result.replace_all_uses_with(own)
        for op in (slot, old_ring, old_full):
            Rewriter.erase_op(op)

    def _split_table(self, read: ReadOp) -> None:
        """A consumer reads its rows of a block that is copied for all."""
        assert isinstance(read.source.type, BufferType)
        if read.source.type.get_shape()[0] != self.rows:
            read.operands[0] = Before(read).add(PartOp(read.source, 0, self.part, self.rows), "own_rows").result

    def _split_output(self, store: AsyncStoreOp, row0: SSAValue) -> None:
        slot = store.source.owner
        descriptor, shape = self._describe(store.descriptor)
        b, h, _, c = store.coordinates
        source, left = store.source, list[Operation]()
        if isinstance(slot, PartOp):  # of the consumer's own slot of queries
            left = [slot]
            source = Before(slot).add(PartOp(slot.source, 1, slot.index, shape[1]), "o_slot").result
        elif isinstance(slot, SlotOp) and slot.index is not self.part:  # else it is that slot
            assert isinstance(slot.ring.owner, RingOp)
            left = [slot, slot.ring.owner]
            source = Before(slot).add(SlotOp(self._ring(slot.ring.owner, shape), self.part), "o_slot").result
        if left:
            write = next(o for o in walk(self.block) if isinstance(o, WriteOp) and o.target is store.source)
            write.operands[1] = source
        Before(store).add(AsyncStoreOp(source, descriptor, [b, h, row0, c]))
        for op in (store, *left):
            Rewriter.erase_op(op)


def splat_like(op: arith.ConstantOp, type_: TensorType) -> arith.ConstantOp:
    """The same number in another shape."""
    assert isinstance(op.value, DenseIntOrFPElementsAttr)
    splat = tile.splat_of(op.value)
    if splat is None:
        raise AsyncUnsupportedError("it holds a constant tile of different elements")
    return arith.ConstantOp(DenseIntOrFPElementsAttr.from_list(type_, [splat.value.data]), type_)  # type: ignore[attr-defined]


def retype(axes: dict[SSAValue, int], parts: int) -> None:
    """Tiles become a part of themselves along an axis each."""
    for value, axis in axes.items():
        type_ = value.type.value if isinstance(value.type, PendingType) else value.type
        shape = list(tile.shape_of(type_))
        shape[axis] //= parts
        new = TensorType(tile.element_of(type_), shape)
        if isinstance(value.owner, arith.ConstantOp):
            Rewriter.replace_op(value.owner, splat_like(value.owner, new))
        else:
            pending = isinstance(value.type, PendingType)
            Rewriter.replace_value_with_new_type(value, PendingType(new) if pending else new)
