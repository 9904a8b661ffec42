"""Rings of blocks under `tile-pipeline-steps`, and what is left to erase once their loads and products are converted."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import FixedBitwidthType
from xdsl.ir import Operation, SSAValue
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import AsyncLoadOp
from attn_engine.dialects.tile_async_view import SlotOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.hopper.edit import Before
from attn_engine.passes.hopper.steps import Write

_ALIGNED_BITS = 128
"""To which copies align rows."""


@dataclass
class Ring:
    """Stages of blocks of one tensor, and the descriptor that they are copied through."""

    ring: SSAValue
    descriptor: SSAValue

    def copy(self, scope: Before, load: tile.LoadOp, full: SSAValue, stage: SSAValue) -> tuple[SlotOp, AsyncLoadOp]:
        slot = scope.add(SlotOp(self.ring, stage), load.result.name_hint or "slot")
        return slot, AsyncLoadOp(self.descriptor, list(load.indices), slot, full, stage)


def check_behind(vector: tile.LoadOp, scope: Before) -> None:
    for use in vector.result.uses:
        user = use.operation
        if user.parent is scope.block and user.is_before_in_block(scope.anchor):
            raise AsyncUnsupportedError("it computes with vectors before its first product")


def align(alloc: tile.AllocOp) -> None:
    """Rows of a temporary start at multiples of 16 bytes."""
    *outer, last = alloc.sizes
    if isinstance(last.owner, arith.MuliOp) and last.name_hint == "aligned":
        return
    scope = Before(alloc)
    element = tile.element_of(alloc.result)
    assert isinstance(element, FixedBitwidthType)
    units = scope.value(scope.round_up(last, _ALIGNED_BITS // element.bitwidth, "aligned"))
    alloc.operands = [*outer, units]


def erase_turned(op: tile.DotOp | Write, user: Operation | None = None) -> None:
    """An op behind its user, and what turns its first operand if nothing else needs that."""
    turn = op.operands[0].owner
    for one in (user, op):
        if one is not None:
            Rewriter.erase_op(one)
    if isinstance(turn, tile.TransposeOp) and not turn.result.uses:
        Rewriter.erase_op(turn)


def erase_load(load: tile.LoadOp) -> None:
    for use in list(load.result.uses):
        if isinstance(use.operation, tile.TransposeOp) and not use.operation.result.uses:
            Rewriter.erase_op(use.operation)
    Rewriter.erase_op(load)
