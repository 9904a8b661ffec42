"""Divides the rows that a program owns among consumers: every tile along them becomes a part of it."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import AsyncLoadOp, AsyncStoreOp
from attn_engine.dialects.tile_async_memory import DescribeOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp
from attn_engine.dialects.tile_async_view import RingOp, SlotOp
from attn_engine.dialects.tile_types import BufferType, DescriptorType, MmaLayoutAttr
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.hopper.edit import Before, Signature
from attn_engine.passes.hopper.rows import own_constants, row_axes, walk
from attn_engine.passes.hopper.split_rows import retype
from attn_engine.passes.hopper.steps import adds_up

_WARPS = 4


@dataclass
class SplitParts:
    """One kernel; products whose first operand is in shared memory say which rows are owned."""

    signature: Signature
    parts: int

    def run(self) -> SSAValue:
        """Changes the kernel in place and returns the number of the part, 0 until roles replace it."""
        self.block = self.signature.kernel.body.block
        own_constants(self.block)
        first = self.block.first_op
        assert first is not None
        scope = Before(first)
        self.part = scope.add(arith.ConstantOp.from_int_and_width(0, 32), "part").result
        owned = [op for op in walk(self.block) if isinstance(op, AsyncDotOp) and isinstance(op.a.type, BufferType)]
        if not owned:
            raise AsyncUnsupportedError("no product of its kernel starts from a block that the program owns")
        rows = {tile.shape_of(op.result.type.value)[0] for op in owned}  # type: ignore[attr-defined]
        if len(rows) != 1:
            raise AsyncUnsupportedError("its products have different numbers of rows")
        self.rows = rows.pop() // self.parts
        self.offset = scope.value(scope.times(self.part, self.rows, "part_rows"))
        axes = row_axes(self.block, {op.result: 0 for op in owned})
        for op in list(walk(self.block)):
            self._move(op, axes)
        retype(axes, self.parts)
        for ring in dict.fromkeys(_ring_of(op.a) for op in owned):
            self._divide(ring)
        for op in walk(self.block):
            if isinstance(op, AsyncDotOp | DotOperandOp):
                op.properties["layout"] = MmaLayoutAttr(_WARPS, 1, op.layout.n)
        return self.part

    def _move(self, op: Operation, axes: dict[SSAValue, int]) -> None:
        """Tiles along the owned rows start at the consumer's first one."""
        if isinstance(op, tile.RangeOp) and op.result in axes:
            self._add_offset(op, 0)
        elif isinstance(op, tile.StoreOp | tile.AtomicAddOp) and op.value in axes:
            self._add_offset(op, tile.ints_of(op.dims)[axes[op.value]] + 2)
        elif isinstance(op, tile.AddDiagonalsOp) and op.value in axes:
            self._take_offset(op, len(op.operands) - 1)
        elif isinstance(op, tile.LoadOp) and op.result in axes:
            self._add_offset(op, tile.ints_of(op.dims)[axes[op.result]] + 1)
        elif isinstance(op, tile.ReduceOp) and axes.get(op.value) == op.axis.value.data and not adds_up(op):
            raise AsyncUnsupportedError("it reduces over the rows that consumers share")

    # --- owned blocks

    def _divide(self, ring: RingOp) -> None:
        """A slot for each part of an owned block; every consumer uses its own."""
        _, rows, *rest = ring.result.type.get_shape()
        assert rows == self.rows * self.parts
        type_ = BufferType([self.parts, self.rows, *rest], ring.result.type.element_type)
        new = Before(ring).add(RingOp(type_), ring.result.name_hint or "ring").result
        for slot in [use.operation for use in list(ring.result.uses)]:
            assert isinstance(slot, SlotOp)
            for user in [use.operation for use in list(slot.result.uses)]:
                if isinstance(user, AsyncLoadOp):
                    self._load(user, new)
                elif isinstance(user, AsyncStoreOp):
                    self._store(user, new)
            if slot.result.uses:
                scope = Before(slot)
                own = scope.add(arith.AddiOp(slot.index, self.part), "own").result
                slot.result.replace_all_uses_with(scope.add(SlotOp(new, own), slot.result.name_hint or "own").result)
            Rewriter.erase_op(slot)
        Rewriter.erase_op(ring)

    def _load(self, load: AsyncLoadOp, ring: SSAValue) -> None:
        """One copy for each part, onto the same barrier."""
        scope, descriptor = Before(load), self._describe(load.descriptor)
        for part in range(self.parts):
            place = list(load.coordinates)
            place[-2] = scope.value(scope.plus(place[-2], part * self.rows, "row"))
            slot = scope.add(SlotOp(ring, scope.value(part)), "part").result
            scope.add(AsyncLoadOp(descriptor, place, slot, load.barriers, load.index))
        Rewriter.erase_op(load)

    def _store(self, store: AsyncStoreOp, ring: SSAValue) -> None:
        scope, descriptor, place = Before(store), self._describe(store.descriptor), list(store.coordinates)
        place[-2] = scope.add(arith.AddiOp(place[-2], self.offset), "row0").result
        slot = scope.add(SlotOp(ring, self.part), "part").result
        Rewriter.replace_op(store, AsyncStoreOp(slot, descriptor, place))

    def _describe(self, argument: SSAValue) -> SSAValue:
        """The descriptor's argument with blocks of one part."""
        described = self.signature.passed(argument).owner
        assert isinstance(described, DescribeOp) and isinstance(described.result.type, DescriptorType)
        *lead, _, columns = described.result.type.get_shape()
        new = Before(self.signature.launch).add(DescribeOp(described.source, [*lead, self.rows, columns]))
        argument = self.signature.replace(argument, new.result)
        if not described.result.uses:
            Rewriter.erase_op(described)
        return argument

    # --- tiles

    def _add_offset(self, op: Operation, place: int) -> None:
        start = op.operands[place]
        op.operands[place] = Before(op).add(arith.AddiOp(start, self.offset), start.name_hint or "row0").result

    def _take_offset(self, op: Operation, place: int) -> None:
        """The diagonals of a tile whose rows start later start earlier."""
        start = op.operands[place]
        op.operands[place] = Before(op).add(arith.SubiOp(start, self.offset), start.name_hint or "start").result


def _ring_of(value: SSAValue) -> RingOp:
    slot = value.owner
    assert isinstance(slot, SlotOp) and isinstance(slot.ring.owner, RingOp)
    return slot.ring.owner
