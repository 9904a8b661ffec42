"""`tile-reduce-in-trees`: what a row's threads hold is reduced by each of them first, in short chains."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.dialects.builtin import f32
from xdsl.ir import Block
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_product import ReducePartialOp
from attn_engine.passes.hopper.edit import Before
from attn_engine.passes.hopper.pin import GROUPS, WIDTH
from attn_engine.passes.hopper.steps import roles_of

_MATRIX_RANK = 2
_TREE = 4
"""Numbers that one step of a tree reduces."""


def _is_extreme(op: tile.ReduceOp) -> bool:
    """Whether it finds the greatest or the least element of each row of scores."""
    shape = tile.shape_of(op.value)
    of_rows = len(shape) == _MATRIX_RANK and op.axis.value.data == 1 and shape[1] % (GROUPS * WIDTH) == 0
    return of_rows and op.kind.data is not tile.Reduction.SUM and tile.element_of(op.value) == f32


def _split(role: Block) -> None:
    for op in [op for op in role.walk() if isinstance(op, tile.ReduceOp) and _is_extreme(op)]:
        scope = Before(op)
        rounds = tile.shape_of(op.value)[1] // (GROUPS * WIDTH)
        tree = _TREE if rounds > _TREE and rounds % _TREE == 0 else None
        parts = scope.add(ReducePartialOp(op.kind, op.value, GROUPS, WIDTH, tree), "parts")
        new = scope.add(tile.ReduceOp(op.kind.data, parts, 1), op.result.name_hint or "r").result
        op.result.replace_all_uses_with(new)
        Rewriter.erase_op(op)


@dataclass(frozen=True)
class TileReduceInTreesPass(ModulePass):
    """Finds the greatest or least score of a row in two stages: of what a thread holds, then of its four threads.

    All scores are there at once, so that a thread need not go through its own one after the other: in a tree, the
    comparisons do not wait for each other.

    ```
    %m = tile.reduce max %x axis 1 : 64x128
    ```
    becomes
    ```
    %m4 = tile.reduce_partial max %x groups 4 width 2 tree 4 : 64x128 -> 64x4
    %m = tile.reduce max %m4 axis 1
    ```
    """

    name = "tile-reduce-in-trees"

    plan: str = "forward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for roles in roles_of(op, self.plan):
            for role in roles.bodies:
                _split(role.block)
