"""`tile-skip-scales`: accumulators are scaled where a factor is not 1."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin
from xdsl.ir import Block, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_product import AsyncDotOp, ScaleRowsOp, WaitOp
from attn_engine.passes.hopper.edit import Before
from attn_engine.passes.hopper.role_steps import role_steps
from attn_engine.passes.hopper.steps import roles_of

_ACCUMULATOR = 2
"""Which operand of a product it is."""


def _factor(op: tile.MapOp) -> tuple[SSAValue, SSAValue] | None:
    """A tile and the vector of its rows by which a map multiplies it, if it does nothing else."""
    if [type(o) for o in op.body.block.ops] != [arith.MulfOp, tile.MapYieldOp] or len(op.inputs) != 2:
        return None
    by_rank = dict(zip(tile.axes_of(op.axes), op.inputs, strict=True))
    return (by_rank[0, 1], by_rank[(0,)]) if by_rank.keys() == {(0, 1), (0,)} else None


def _is_accumulator(wide: SSAValue, scaled: SSAValue) -> bool:
    """Whether products are added up in a tile: one has ended in it, or the next one is added to it."""
    added = any(isinstance(u.operation, AsyncDotOp) and u.index == _ACCUMULATOR for u in scaled.uses)
    return added or isinstance(wide.owner, WaitOp)


def _skip(body: Block) -> None:
    for op in [op for op in body.ops if isinstance(op, tile.MapOp)]:
        found = _factor(op)
        if found is not None and _is_accumulator(found[0], op.outputs[0]):
            new = Before(op).add(ScaleRowsOp(*found), op.outputs[0].name_hint or "acc").result
            op.outputs[0].replace_all_uses_with(new)
            Rewriter.erase_op(op)


@dataclass(frozen=True)
class TileSkipScalesPass(ModulePass):
    """Scales the accumulators of a step only where a factor is not 1, warp by warp.

    The factors of softmax are 1 for rows whose greatest score a block of keys leaves as it is: most of them, after a few
    blocks. A multiplication stands between the end of one step's products and the start of the next step's.

    ```
    %acc1 = tile.map(%acc, %alpha) { acc * alpha }
    ```
    becomes
    ```
    %acc1 = tile.scale_rows %acc, %alpha
    ```
    """

    name = "tile-skip-scales"

    plan: str = "forward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for roles in roles_of(op, self.plan):
            for body in [body for role in roles.bodies for body in role_steps(role.block)]:
                _skip(body)
