"""Divides the rows that a program owns among consumers: every tile along them becomes a part of it."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, Operation, SSAValue
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp
from attn_engine.dialects.tile_async_view import PartOp
from attn_engine.dialects.tile_types import BufferType, MmaLayoutAttr, PendingType
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.hopper.edit import Before
from attn_engine.passes.hopper.rows import own_constants, row_axes, walk
from attn_engine.passes.hopper.split_rows import splat_like

_WARPS = 4


@dataclass
class SplitParts:
    """The block of one kernel; products whose first operand is in shared memory say which rows are owned."""

    block: Block
    parts: int

    def run(self) -> SSAValue:
        """Changes the block in place and returns the number of the part, 0 until roles replace it."""
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
        self._retype(axes)
        for op in owned:
            part = Before(op).add(PartOp(op.a, 0, self.part, self.rows), op.a.name_hint or "part")
            op.operands[0] = part.result
        for op in walk(self.block):
            if isinstance(op, AsyncDotOp | DotOperandOp):
                op.properties["layout"] = MmaLayoutAttr(_WARPS, 1, op.layout.n)
        return self.part

    def _move(self, op: Operation, axes: dict[SSAValue, int]) -> None:
        """Tiles along the owned rows start at the consumer's first one."""
        if isinstance(op, tile.RangeOp) and op.result in axes:
            self._add_offset(op, 0)
        elif isinstance(op, tile.StoreOp) and op.value in axes:
            self._add_offset(op, tile.ints_of(op.dims)[axes[op.value]] + 2)
        elif isinstance(op, tile.LoadOp) and op.result in axes:
            self._add_offset(op, tile.ints_of(op.dims)[axes[op.result]] + 1)
        elif isinstance(op, tile.ReduceOp) and axes.get(op.value) == op.axis.value.data:
            raise AsyncUnsupportedError("it reduces over the rows that consumers share")

    def _add_offset(self, op: Operation, place: int) -> None:
        start = op.operands[place]
        op.operands[place] = Before(op).add(arith.AddiOp(start, self.offset), start.name_hint or "row0").result

    def _retype(self, axes: dict[SSAValue, int]) -> None:
        for value, axis in axes.items():
            type_ = value.type.value if isinstance(value.type, PendingType) else value.type
            shape = list(tile.shape_of(type_))
            shape[axis] //= self.parts
            new = TensorType(tile.element_of(type_), shape)
            if isinstance(value.owner, arith.ConstantOp):
                Rewriter.replace_op(value.owner, splat_like(value.owner, new))
            else:
                pending = isinstance(value.type, PendingType)
                Rewriter.replace_value_with_new_type(value, PendingType(new) if pending else new)
