"""`tile-schedule-grid`: one persistent program per multiprocessor, which takes tiles off a counter."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import FixedBitwidthType, i32
from xdsl.ir import Block, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_memory import FetchAddOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import AsyncSchedule
from attn_engine.passes.hopper.counted_tiles import programs_and_counter
from attn_engine.passes.hopper.edit import Before, Signature
from attn_engine.passes.hopper.form import signature_of, step_of, tables_of
from attn_engine.passes.hopper.head_groups import HeadGroups, alike
from attn_engine.passes.hopper.slicing import depends_on
from attn_engine.passes.lowering.scope import Scope

_GRID, _BATCH = 3, 2


@dataclass
class _Tiles:
    """What the kernel needs to know to take tiles off the counter."""

    tiles: SSAValue
    programs: SSAValue
    counter: SSAValue
    groups: HeadGroups


def _plan_tiles(signature: Signature, position_bytes: int, k: SSAValue, l2_bytes: int, across: bool) -> _Tiles:
    """Counts tiles and programs in the plan, makes the counter, and launches the programs."""
    scope = Before(signature.launch)
    row_tiles, heads, batch = signature.launch.grid
    all_heads = scope.add(arith.MuliOp(batch, heads), "all_heads").result
    tiles = scope.add(arith.MuliOp(row_tiles, all_heads), "tiles").result
    in_flight = _heads_in_flight(scope, heads, all_heads, k, max(1, l2_bytes // position_bytes))
    programs, counter = programs_and_counter(scope, tiles)
    signature.grid([programs])
    values = (tiles, programs, counter, row_tiles, heads, all_heads, in_flight)
    names = ("tiles", "programs", "counter", "row_tiles", "heads", "all_heads", "heads_in_flight")
    added = [signature.add(v, n) for v, n in zip(values, names, strict=True)]
    groups = HeadGroups(*added[3:], batch=signature.add(batch, "batch") if across else None)
    return _Tiles(*added[:3], groups=groups)


def _heads_in_flight(scope: Before, heads: SSAValue, all_heads: SSAValue, k: SSAValue, room: int) -> SSAValue:
    """How many query heads run at the same time, so that their keys and values, of `room` positions, stay in L2."""
    kv_heads = scope.add(tile.DimOp(k, 1), "kv_heads").result
    group = scope.add(arith.DivSIOp(heads, scope.value(scope.larger(kv_heads, 1))), "group").result
    positions = scope.larger(scope.add(tile.DimOp(k, 2), "skv").result, 1, "positions")
    fit = scope.add(arith.DivSIOp(scope.value(room), scope.value(positions)), "fit").result
    wanted = scope.add(arith.MuliOp(scope.value(scope.larger(fit, 1)), group), "wanted").result
    # `room` is below 2^24 positions, so the product of fit and group stays in 32 bits for up to 128 heads a group.
    most = scope.value(scope.larger(scope.smaller(wanted, all_heads), 1, "most"))
    return alike(scope, all_heads, most, scope.value(scope.larger(group, 1, "group")))


def _loop(kernel: tile.KernelOp, tiles: _Tiles) -> None:
    """Wraps the whole kernel in the loop over tiles."""
    block = kernel.body.block
    body, test = Block(arg_types=[i32]), Block(arg_types=[i32])
    body.args[0].name_hint = test.args[0].name_hint = "tile"
    inside = Scope(body)
    place = tiles.groups.place(inside, body.args[0])
    for op in list(block.ops):
        if isinstance(op, tile.EndOp):
            continue
        if isinstance(op, tile.ProgramIdOp):
            op.result.replace_all_uses_with(place[op.axis.value.data])
            Rewriter.erase_op(op)
            continue
        op.detach()
        body.add_op(op)
    taken = inside.add(FetchAddOp(tiles.counter, inside.value(0), inside.value(1)), "taken").result
    inside.add(scf.YieldOp(inside.value(inside.plus(taken, tiles.programs, "next_tile"))))
    tests = Scope(test)
    more = tests.add(arith.CmpiOp(test.args[0], tiles.tiles, "slt"), "more").result
    tests.add(scf.ConditionOp(more, test.args[0]))
    end = block.last_op
    assert end is not None
    first = tile.ProgramIdOp(0)
    first.result.name_hint = "first_tile"
    Rewriter.insert_op([first, scf.WhileOp([first], [i32], [test], [body])], InsertPoint.before(end))


def _position_bytes(kernel: tile.KernelOp) -> tuple[int, SSAValue]:
    """Bytes of a key and its value, and the keys."""
    loop = next((o for o in kernel.body.block.ops if isinstance(o, scf.ForOp)), None)
    if loop is None:
        raise AsyncUnsupportedError("its kernel has no loop over keys")
    step = step_of(loop.body.block)
    size = 0
    for load in (step.k, step.v):
        element = tile.element_of(load.result)
        assert isinstance(element, FixedBitwidthType)
        size += tile.shape_of(load.result)[1] * element.bitwidth // 8
    return size, step.k.source


def _shares_tables(kernel: tile.KernelOp) -> bool:
    """Whether the steps load a table of scores, and all of them the same one for the whole batch."""
    loops = [o for o in kernel.body.block.ops if isinstance(o, scf.ForOp)]
    tables = [load for loop in loops for load in tables_of(loop.body.block, step_of(loop.body.block))]
    batch = [o.result for o in kernel.body.block.ops if isinstance(o, tile.ProgramIdOp) and o.axis.value.data == _BATCH]
    bound = depends_on(kernel.body.block, batch[0]) if batch else set[SSAValue]()
    return bool(tables) and not any(index in bound for load in tables for index in load.indices)


@dataclass(frozen=True)
class TileScheduleGridPass(ModulePass):
    """Makes the programs of a forward kernel persistent: as many as there are multiprocessors, tiles by a counter.

    Tiles of the same group of heads run at the same time, so that at most `l2_bytes` of keys and values are
    in use; heads that share keys count once. Groups are about alike, so that the last one is no tail of a few long tiles.
    Heads of the same number are neighbours across a batch that shares a
    table of scores. Inside of a group the order of the blocks of queries is that of the grid.

    ```
    tile.kernel @k(...) { %i = tile.program_id 0; %h = tile.program_id 1; %b = tile.program_id 2; body; tile.end }
    ```
    becomes
    ```
    tile.kernel @k(..., %tiles, %programs, %counter, ...) {
      %first = tile.program_id 0
      scf.while (%t = %first) { %more = arith.cmpi slt, %t, %tiles; scf.condition(%more) %t }
      do { %i, %h, %b from %t; body; %taken = tile.fetch_add %counter[0], 1; scf.yield %taken + %programs }
      tile.end
    }
    ```
    """

    name = "tile-schedule-grid"

    plan: str = "forward"
    """The plan whose kernel is changed."""
    l2_bytes: int = AsyncSchedule.l2_bytes
    """Bytes of keys and values that the heads in flight may have."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        signature = signature_of(op, self.plan)
        if len(signature.launch.grid) != _GRID:
            raise AsyncUnsupportedError("its grid is not blocks of queries, heads and batch")
        size, k = _position_bytes(signature.kernel)
        across = _shares_tables(signature.kernel)
        tiles = _plan_tiles(signature, size, signature.passed(k), self.l2_bytes, across)
        _loop(signature.kernel, tiles)
