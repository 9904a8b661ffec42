"""`tile-order-programs`: which block of which head each program of a kernel of gradients takes."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_memory import ProcessorCountOp
from attn_engine.passes.hopper.edit import Before, Signature
from attn_engine.passes.hopper.head_groups import HeadGroups, alike
from attn_engine.passes.hopper.steps import signatures

_GRID = 3


def _groups(signature: Signature) -> tuple[HeadGroups, SSAValue]:
    """Counts in the plan; the kernel gets the numbers as arguments. Also the plan's number of all heads."""
    scope = Before(signature.launch)
    rows, heads, batch = signature.launch.grid
    all_heads = scope.add(arith.MuliOp(batch, heads), "all_heads").result
    processors = scope.add(ProcessorCountOp(), "processors").result
    side = scope.add(arith.DivSIOp(processors, scope.value(scope.larger(rows, 1, "rows"))), "side_by_side").result
    most = scope.value(scope.larger(scope.smaller(side, all_heads), 1, "most"))
    values = (rows, heads, all_heads, alike(scope, all_heads, most, scope.value(1)))
    names = ("row_tiles", "heads", "all_heads", "heads_in_flight")
    return HeadGroups(*(signature.add(v, n) for v, n in zip(values, names, strict=True))), all_heads


def order(signature: Signature) -> None:
    """Changes one kernel, whose programs are blocks of rows, heads and batch."""
    groups, all_heads = _groups(signature)
    block = signature.kernel.body.block
    first = block.first_op
    assert first is not None
    scope = Before(first)
    program = scope.add(tile.ProgramIdOp(0), "program").result
    place = groups.place(scope, program)
    for op in [o for o in block.ops if isinstance(o, tile.ProgramIdOp) and o.result is not program]:
        _replace(op, place[op.axis.value.data])
    before = Before(signature.launch)
    signature.grid([before.add(arith.MuliOp(signature.launch.grid[0], all_heads), "programs").result])


def _replace(op: tile.ProgramIdOp, value: SSAValue) -> None:
    op.result.replace_all_uses_with(value)
    Rewriter.erase_op(op)


@dataclass(frozen=True)
class TileOrderProgramsPass(ModulePass):
    """Puts the same blocks of neighbouring heads beside each other in the order in which programs start.

    Programs start in the order of the grid: block by block of one head, then of the next. Where a mask makes the first blocks
    of a head the longest, those of the last heads would start when little is left to run beside them. As many heads
    go together as run at the same time anyway: what they read and write has the room in L2 that it had before.

    ```
    tile.kernel @k(...) { %i = tile.program_id 0; %h = tile.program_id 1; %b = tile.program_id 2; body }
    ```
    becomes
    ```
    tile.kernel @k(..., %row_tiles, %heads, %all_heads, %heads_in_flight) {
      %program = tile.program_id 0
      %i, %h, %b from %program; body
    }
    ```
    """

    name = "tile-order-programs"

    plan: str = "backward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for signature in signatures(op, self.plan):
            if len(signature.launch.grid) == _GRID:
                order(signature)
