"""Divides the rows that a program owns among consumers: every tile along them becomes a part of it."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import AsyncLoadOp, AsyncReduceAddOp, AsyncStoreOp
from attn_engine.dialects.tile_async_memory import DescribeOp, ReadOp, WriteOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp
from attn_engine.dialects.tile_async_view import PartOp, RingOp, SlotOp, TransposedSlotOp
from attn_engine.dialects.tile_types import BufferType, DescriptorType, MmaLayoutAttr
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import WARPGROUP_ROWS
from attn_engine.passes.hopper.edit import Before, Signature
from attn_engine.passes.hopper.role_steps import slot_of
from attn_engine.passes.hopper.rows import own_constants, row_axes, walk
from attn_engine.passes.hopper.split_rows import retype
from attn_engine.passes.hopper.steps import adds_up

_WARPS = 4


@dataclass
class SplitParts:
    """One kernel; products whose first operand is in shared memory say which rows are owned.

    A product over these rows themselves reads all of them, and is divided along its own rows, if every part has as many as
    a product takes, or along its columns.
    """

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
        resident = [op for op in walk(self.block) if isinstance(op, AsyncDotOp) and isinstance(op.a.type, BufferType)]
        over = [op for op in resident if isinstance(op.a.owner, TransposedSlotOp)]
        owned = [op for op in resident if op not in over]
        if not owned:
            raise AsyncUnsupportedError("no product of its kernel starts from a block that the program owns")
        rows = {tile.shape_of(op.result.type.value)[0] for op in owned}
        if len(rows) != 1:
            raise AsyncUnsupportedError("its products have different numbers of rows")
        self.rows = rows.pop() // self.parts
        self.offset = scope.value(scope.times(self.part, self.rows, "part_rows"))
        seeds: dict[SSAValue, int] = {op.result: int(op in over and not self._is_high(op)) for op in resident}
        axes = row_axes(self.block, seeds)
        for op in list(walk(self.block)):
            self._move(op, axes)
        passed = list(dict.fromkeys(_ring_of(op.a) for op in over))
        leaving = self._leaving(axes, [*(_ring_of(op.a) for op in owned), *passed])
        for read in [o for o in walk(self.block) if isinstance(o, ReadOp) and o.result in axes]:
            self._view(read, 0, axes[read.result])
        retype(axes, self.parts)
        whole = [_ring_of(op.b) for op in over]
        for ring in dict.fromkeys(_ring_of(op.a) for op in owned):
            if ring in whole:
                self._share(ring)
            else:
                self._divide(ring)
        for ring in passed:
            self._pass(ring)
        for op in over:
            assert isinstance(op.a.owner, TransposedSlotOp)
            if self._is_high(op):
                self._turn_part(op, op.a.owner)
            else:
                self._view(op, 1, 1)
        sent = [o for o in walk(self.block) if isinstance(o, AsyncStoreOp | AsyncReduceAddOp)]
        beside = [o for o in sent if _ring_of(o.source) in passed or leaving.get(_ring_of(o.source))]
        for ring, axis in leaving.items():
            if axis == 0:
                self._divide(ring)
            else:
                self._divide_columns(ring)
        for op in beside:
            if _ring_of(op.source) in passed:
                self._view(op, 0, 1)
            self._move_columns(op)
        for op in walk(self.block):
            if isinstance(op, AsyncDotOp | DotOperandOp):
                op.properties["layout"] = MmaLayoutAttr(_WARPS, 1, op.layout.n)
        return self.part

    def _is_high(self, op: AsyncDotOp) -> bool:
        """Whether every part of a product's rows is a product of its own."""
        assert isinstance(op.a.type, BufferType)
        return op.a.type.get_shape()[0] == WARPGROUP_ROWS * self.parts

    def _turn_part(self, op: AsyncDotOp, turned: TransposedSlotOp) -> None:
        """A product over shared rows gets the consumer's rows of its own."""
        assert isinstance(turned.source.type, BufferType)
        scope, hint = Before(op), turned.result.name_hint or "turned"
        columns = turned.source.type.get_shape()[1] // self.parts
        part = scope.add(PartOp(turned.source, 1, self.part, columns), "shared_part")
        op.operands[0] = scope.add(TransposedSlotOp(part), hint).result
        if not turned.result.uses:
            Rewriter.erase_op(turned)

    def _move(self, op: Operation, axes: dict[SSAValue, int]) -> None:
        """Tiles along the owned rows start at the consumer's first one."""
        if isinstance(op, tile.RangeOp) and op.result in axes:
            self._add_offset(op, 0)
        elif isinstance(op, tile.StoreOp | tile.AtomicAddOp) and op.value in axes:
            self._add_offset(op, tile.ints_of(op.dims)[axes[op.value]] + 2)
        elif isinstance(op, tile.AddDiagonalsOp) and op.value in axes:
            (self._add_offset if op.turned is not None else self._take_offset)(op, len(op.operands) - 1)
        elif isinstance(op, tile.LoadDiagonalsOp) and op.result in axes:
            self._add_offset(op, 1 + axes[op.result])
        elif isinstance(op, tile.LoadOp) and op.result in axes:
            self._add_offset(op, tile.ints_of(op.dims)[axes[op.result]] + 1)
        elif isinstance(op, tile.ReduceOp) and axes.get(op.value) == op.axis.value.data and not adds_up(op):
            raise AsyncUnsupportedError("it reduces over the rows that consumers share")

    def _leaving(self, axes: dict[SSAValue, int], owned: list[RingOp]) -> dict[RingOp, int]:
        """The other rings through which results of steps leave, and along which axis of these the owned rows run."""
        leave = [o.source for o in walk(self.block) if isinstance(o, AsyncStoreOp | AsyncReduceAddOp)]
        rings = [ring for ring in map(_ring_of, leave) if ring not in owned]
        writes = [o for o in walk(self.block) if isinstance(o, WriteOp) and _ring_of(o.target) in rings]
        if any(o.value not in axes for o in writes):
            raise AsyncUnsupportedError("what leaves in its steps is the same for all rows of scores")
        return {_ring_of(o.target): axes[o.value] ^ isinstance(o.target.owner, TransposedSlotOp) for o in writes}

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
                elif isinstance(user, AsyncStoreOp | AsyncReduceAddOp):
                    self._store(user, new)
            if slot.result.uses:
                scope = Before(slot)
                own = scope.add(arith.AddiOp(slot.index, self.part), "own").result
                slot.result.replace_all_uses_with(scope.add(SlotOp(new, own), slot.result.name_hint or "own").result)
            Rewriter.erase_op(slot)
        Rewriter.erase_op(ring)

    def _view(self, op: Operation, place: int, axis: int) -> None:
        """An operand becomes the consumer's part of it."""
        slot = op.operands[place]
        assert isinstance(slot.type, BufferType)
        part = PartOp(slot, axis, self.part, slot.type.get_shape()[axis] // self.parts)
        op.operands[place] = Before(op).add(part, slot.name_hint or "part").result

    def _share(self, ring: RingOp) -> None:
        """An owned block that some products need whole stays one slot, of which every consumer uses its rows."""
        for slot in [use.operation for use in list(ring.result.uses)]:
            for use in list(slot.results[0].uses):
                user, place = use.operation, use.index
                if isinstance(user, WriteOp) or (isinstance(user, AsyncDotOp) and not place):
                    self._view(user, place, 0)
                elif isinstance(user, AsyncStoreOp):
                    self._view(user, 0, 0)
                    self._move_store(user, user.source)

    def _pass(self, ring: RingOp) -> None:
        """A result of the step that all consumers read: each writes its rows."""
        for op in [o for o in walk(self.block) if isinstance(o, WriteOp) and _ring_of(o.target) is ring]:
            self._view(op, 1, 0)

    def _divide_columns(self, ring: RingOp) -> None:
        """A slot for the columns of each part."""
        _, *rows, columns = ring.result.type.get_shape()
        type_ = BufferType([self.parts, *rows, columns // self.parts], ring.result.type.element_type)
        new = Before(ring).add(RingOp(type_), ring.result.name_hint or "ring").result
        for slot in [use.operation for use in list(ring.result.uses)]:
            own = Before(slot).add(SlotOp(new, self.part), slot.results[0].name_hint or "own").result
            for turned in [
                u.operation for u in list(slot.results[0].uses) if isinstance(u.operation, TransposedSlotOp)
            ]:
                turned.result.replace_all_uses_with(Before(turned).add(TransposedSlotOp(own), "turned").result)
                Rewriter.erase_op(turned)
            slot.results[0].replace_all_uses_with(own)
            Rewriter.erase_op(slot)
        Rewriter.erase_op(ring)

    def _move_columns(self, op: AsyncStoreOp | AsyncReduceAddOp) -> None:
        """Every consumer stores or adds its columns to memory."""
        assert isinstance(op.source.type, BufferType)
        columns = op.source.type.get_shape()[-1]
        place, scope = list(op.coordinates), Before(op)
        offset = scope.value(scope.times(self.part, columns, "part_columns"))
        place[-1] = scope.add(arith.AddiOp(place[-1], offset), "column").result
        Rewriter.replace_op(op, type(op)(op.source, self._describe(op.descriptor, columns), place))

    def _load(self, load: AsyncLoadOp, ring: SSAValue) -> None:
        """One copy for each part, onto the same barrier."""
        scope, descriptor = Before(load), self._describe(load.descriptor)
        for part in range(self.parts):
            place = list(load.coordinates)
            place[-2] = scope.value(scope.plus(place[-2], part * self.rows, "row"))
            slot = scope.add(SlotOp(ring, scope.value(part)), "part").result
            scope.add(AsyncLoadOp(descriptor, place, slot, load.barriers, load.index))
        Rewriter.erase_op(load)

    def _store(self, store: AsyncStoreOp | AsyncReduceAddOp, ring: SSAValue) -> None:
        self._move_store(store, Before(store).add(SlotOp(ring, self.part), "part").result)

    def _move_store(self, store: AsyncStoreOp | AsyncReduceAddOp, slot: SSAValue) -> None:
        scope, descriptor, place = Before(store), self._describe(store.descriptor), list(store.coordinates)
        place[-2] = scope.add(arith.AddiOp(place[-2], self.offset), "row0").result
        Rewriter.replace_op(store, type(store)(slot, descriptor, place))

    def _describe(self, argument: SSAValue, columns: int | None = None) -> SSAValue:
        """The descriptor's argument with blocks of the rows of one part, or of so many columns of the block."""
        described = self.signature.passed(argument).owner
        assert isinstance(described, DescribeOp) and isinstance(described.result.type, DescriptorType)
        *lead, rows, whole = described.result.type.get_shape()
        size = [rows, columns] if columns is not None else [self.rows, whole]
        if [rows, whole] == size:
            return argument
        new = Before(self.signature.launch).add(DescribeOp(described.source, [*lead, *size]))
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
    slot = slot_of(value)
    assert slot is not None and isinstance(slot.ring.owner, RingOp)
    return slot.ring.owner
