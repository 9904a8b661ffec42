"""`tile-persist-roles`: programs of roles that go on to further tiles, which they take off a counter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import i32
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import (
    AsyncStoreWaitOp,
    BarrierArriveOp,
    BarrierExpectOp,
    BarrierWaitOp,
    MakeBarriersOp,
)
from attn_engine.dialects.tile_async_memory import CellReadOp, CellWriteOp, FetchAddOp
from attn_engine.dialects.tile_async_product import WaitOp
from attn_engine.dialects.tile_async_view import RingOp
from attn_engine.dialects.tile_flag import AwaitTurnOp
from attn_engine.dialects.tile_types import BufferType
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.hopper.counted_tiles import CELLS, cell_of, programs_and_counter
from attn_engine.passes.hopper.edit import After, Before, Signature
from attn_engine.passes.hopper.persist import Steps, arrive_again, in_steps, once_a_tile
from attn_engine.passes.hopper.stage_results import Staging, filled_by
from attn_engine.passes.hopper.steps import kernels_at_async_level
from attn_engine.passes.lowering.scope import Scope

_PARITY = 2
"""The operand of a wait."""


@dataclass
class _Shared:
    """What the roles of a kernel have in common for the sake of tiles, by their arguments for it."""

    tiles: SSAValue
    programs: SSAValue
    counter: SSAValue
    tile_full: SSAValue
    next_tile: SSAValue
    owned_free: SSAValue
    """The slots of the blocks that a tile owns are free."""
    staged_free: SSAValue | None = None
    """The results of a tile have left the slots of all consumers; only where a consumer writes those of others."""


def _plan(signature: Signature) -> list[SSAValue]:
    """Counts programs in the plan, makes the counter, and launches the programs; the kernel's arguments for them."""
    scope = Before(signature.launch)
    (tiles,) = signature.launch.grid
    programs, counter = programs_and_counter(scope, tiles)
    signature.grid([programs])
    names = ("tiles", "programs", "counter")
    return [signature.add(v, n) for v, n in zip((tiles, programs, counter), names, strict=True)]


def _share(signature: Signature, roles: RolesOp, meets: bool) -> list[_Shared]:
    """More captures for all roles."""
    first = signature.kernel.body.block.first_op
    assert first is not None
    top, consumers = Before(first), roles.roles[0][1]
    values = [
        *_plan(signature),
        top.add(MakeBarriersOp(CELLS, 1), "tile_full").result,
        top.add(RingOp(BufferType([CELLS], i32)), "next_tile").result,
        top.add(MakeBarriersOp(1, consumers), "owned_free").result,
    ]
    if meets:
        values.append(top.add(MakeBarriersOp(1, consumers), "staged_free").result)
    counts, warps, registers = zip(*(numbers for _, *numbers in roles.roles), strict=True)
    regions = [roles.detach_region(region) for region in list(roles.regions)]
    shared: list[_Shared] = []
    for region in regions:
        arguments: list[SSAValue] = []
        for value in values:
            argument = region.block.insert_arg(value.type, len(region.block.args))
            argument.name_hint = value.name_hint
            arguments.append(argument)
        shared.append(_Shared(*arguments))
    new = RolesOp([*roles.captures, *values], counts, warps, registers, regions)
    Rewriter.insert_op(new, InsertPoint.before(roles))
    Rewriter.erase_op(roles)
    return shared


def _into(block: Block, role: Block) -> None:
    """Moves the code of a role into a loop."""
    for op in list(role.ops):
        if not isinstance(op, tile.EndOp):
            op.detach()
            block.add_op(op)


class _Role:
    """One role, whose code becomes the body of a loop over tiles."""

    def __init__(self, role: Block, shared: _Shared, carries: int):
        self.role, self.shared = role, shared
        self.steps = Steps.of(role)
        self.test, self.body = (Block(arg_types=[i32] * carries) for _ in range(2))
        for block in (self.test, self.body):
            for argument, hint in zip(block.args, ("count", "tiles_done", "tile"), strict=False):
                argument.name_hint = hint
        self.count, self.done = self.body.args[:2]
        self.head = Scope(self.body)
        self.parity = self.head.add(arith.AndIOp(self.done, self.head.value(1)), "tile_parity").result

    def number(self, tile_: SSAValue) -> None:
        """Tiles and steps are numbered on; what ends one phase a tile has a parity."""
        for op in [o for o in self.role.walk() if isinstance(o, tile.ProgramIdOp)]:
            op.result.replace_all_uses_with(tile_)
            Rewriter.erase_op(op)
        for wait in once_a_tile(self.role):
            wait.operands[_PARITY] = self.parity
        self.steps.go_on_from(self.count)

    def next(self, scope: Scope, spare: bool) -> tuple[SSAValue, SSAValue]:
        """Counts for the next tile; one step more where the producer has copied for a step that there was not."""
        one = scope.value(1)
        count = scope.value(scope.plus(self.steps.end, one, "next_count")) if spare else self.steps.end
        return count, scope.value(scope.plus(self.done, one, "tiles_done"))


def _last_product(role: Block) -> Operation:
    """Behind it nothing reads the blocks that a tile owns."""
    return [op for op in role.ops if isinstance(op, WaitOp | scf.ForOp)][-1]


def _consume(role: Block, shared: _Shared, staging: Staging, spare: bool) -> None:
    """Waits for a tile, computes it, and goes on until there is none."""
    own = _Role(role, shared, 2)
    cell, _ = cell_of(own.head, own.done)
    tile_ = own.head.add(CellReadOp(shared.next_tile, cell), "tile").result
    staging.run()
    behind = After(_last_product(role))
    if spare:
        for arrive in in_steps(role, BarrierArriveOp):
            arrive_again(behind, arrive, own.steps.end)
    behind.add(BarrierArriveOp(shared.owned_free, behind.value(0)))
    own.number(tile_)
    _await_stores(role, own)
    _into(own.body, role)
    scope = Scope(own.body)
    scope.add(scf.YieldOp(*own.next(scope, spare)))
    test = Scope(own.test)
    cell, parity = cell_of(test, own.test.args[1])
    test.add(BarrierWaitOp(shared.tile_full, cell, parity))
    number = test.add(CellReadOp(shared.next_tile, cell), "tile").result
    more = test.add(arith.CmpiOp(number, shared.tiles, "slt"), "more").result
    test.add(scf.ConditionOp(more, *own.test.args))
    end = role.last_op
    assert end is not None
    outer = Before(end)
    zero = outer.value(0)
    outer.add(scf.WhileOp([zero, zero], [i32, i32], [own.test], [own.body]))
    outer.add(AsyncStoreWaitOp(0))


def _await_stores(role: Block, own: _Role) -> None:
    """Results of the tile before have left their slots before a step of this one writes there, not where they start to."""
    last = role.last_op and role.last_op.prev_op
    if isinstance(last, AsyncStoreWaitOp):
        Rewriter.erase_op(last)
    scope = Before(next(op for op in role.ops if isinstance(op, scf.ForOp)))
    scope.add(AsyncStoreWaitOp(0))
    free = own.shared.staged_free
    if free is not None:
        zero = scope.value(0)
        scope.add(BarrierArriveOp(free, zero))
        scope.add(BarrierWaitOp(free, zero, own.parity))


def _produce(role: Block, shared: _Shared) -> bool:
    """Takes tiles off the counter, tells the consumers, and copies. Whether it copies for one step more than there are."""
    own = _Role(role, shared, 3)
    tile_ = own.body.args[2]
    spares = [op for op in role.ops if isinstance(op, BarrierExpectOp) and own.steps.end in _operands(op)]
    for op in in_steps(role, BarrierExpectOp):
        if spares and op.barriers not in [spare.barriers for spare in spares]:
            arrive_again(After(spares[-1]), op, own.steps.end)
    scope = Before(_owned(role))
    free = scope.add(arith.XOrIOp(own.parity, scope.value(1)), "free").result
    scope.add(BarrierWaitOp(shared.owned_free, scope.value(0), free))
    own.number(tile_)
    _publish(own.head, own.done, shared, tile_)
    _into(own.body, role)
    scope = Scope(own.body)
    taken = scope.add(FetchAddOp(shared.counter, scope.value(0), scope.value(1)), "taken").result
    following = scope.value(scope.plus(taken, shared.programs, "next_tile"))
    scope.add(scf.YieldOp(*own.next(scope, bool(spares)), following))
    test = Scope(own.test)
    more = test.add(arith.CmpiOp(own.test.args[2], shared.tiles, "slt"), "more").result
    test.add(scf.ConditionOp(more, *own.test.args))
    end = role.last_op
    assert end is not None
    outer = Before(end)
    start = outer.add(tile.ProgramIdOp(0), "first_tile").result
    zero = outer.value(0)
    loop = outer.add(scf.WhileOp([zero, zero, start], [i32] * 3, [own.test], [own.body]), "count", "tiles_done", "end")
    _publish(outer, loop.res[1], shared, loop.res[2])
    return bool(spares)


def _owned(role: Block) -> BarrierExpectOp:
    """Where the copies of the blocks that a tile owns begin."""
    for op in role.ops:
        if isinstance(op, scf.ForOp):
            break
        if isinstance(op, BarrierExpectOp):
            return op
    raise AsyncUnsupportedError("its programs own no blocks")


def _operands(op: BarrierExpectOp) -> Sequence[SSAValue]:
    return op.index.owner.operands if isinstance(op.index.owner, arith.RemSIOp) else ()


def _publish(scope: Scope, done: SSAValue, shared: _Shared, number: SSAValue) -> None:
    """Tells the consumers of a tile, or that there is none: they have read the cell, or its blocks would not have been free."""
    cell, _ = cell_of(scope, done)
    scope.add(CellWriteOp(number, shared.next_tile, cell))
    scope.add(BarrierArriveOp(shared.tile_full, cell))


def persist(signature: Signature) -> None:
    """Changes one kernel. Raises AsyncUnsupportedError, before anything has changed, where its roles have another form."""
    roles = next((op for op in signature.kernel.body.block.ops if isinstance(op, RolesOp)), None)
    if roles is None or len(roles.roles) != 2 or len(signature.launch.grid) != 1:
        raise AsyncUnsupportedError("it has no two roles that number their programs along one axis")
    if any(isinstance(op, AwaitTurnOp) for op in roles.walk()):
        raise AsyncUnsupportedError("its programs wait for each other's turns")
    for region in roles.regions:
        Steps.of(region.block)
        once_a_tile(region.block)
    (consumer, consumers, *_), (producer, *_) = roles.roles
    _owned(producer.block)
    staging = Staging(consumer.block, consumers, filled_by(producer.block)).plan()
    shared = _share(signature, roles, staging.meets)
    spare = _produce(producer.block, shared[1])
    _consume(consumer.block, shared[0], staging, spare)


@dataclass(frozen=True)
class TilePersistRolesPass(ModulePass):
    """Makes programs of roles persistent: as many as there are multiprocessors, which take the tiles of others off a counter.

    The producer copies the blocks of the next tile while the results of this one leave; for that, they wait in slots
    in which consumers pass on what a step computes. Slots that go round are numbered on from tile to tile, barriers that end
    one phase a program end one a tile. Kernels stay as they are where a result finds no such slot, where programs wait for each
    other's turns, and where what a step does depends on its number.

    ```
    tile.roles (...) {
      role count 2 ... { %i = tile.program_id 0; barrier_wait %k_full; scf.for ... {...}; write %dk, %ks; async_store %ks }
      role count 1 ... { %i = tile.program_id 0; async_load %ks, %k_full; scf.for ... { async_load %qs } }
    }
    ```
    becomes
    ```
    tile.roles (..., %counter, %tile_full, %next_tile, %owned_free, %staged_free) {
      role count 2 ... {
        scf.while (%count, %tiles_done) { barrier_wait %tile_full; cell_read %next_tile } do {
          barrier_wait %k_full; async_store_wait; scf.for ... {...}; barrier_arrive %owned_free
          write %dk, %staged; async_store %staged
        }
        async_store_wait
      }
      role count 1 ... {
        scf.while (%count, %tiles_done, %tile) {...} do {
          cell_write %next_tile; barrier_arrive %tile_full
          barrier_wait %owned_free; async_load %ks, %k_full; scf.for ... { async_load %qs }; fetch_add %counter
        }
      }
    }
    ```
    """

    name = "tile-persist-roles"

    plan: str = "backward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for signature in kernels_at_async_level(op, self.plan):
            try:
                persist(signature)
            except AsyncUnsupportedError:
                continue
