"""`tile-order-sums`: programs add to the same sums one after the other, in the order of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import i32
from xdsl.ir import Block, BlockArgument, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import (
    AsyncReduceAddOp,
    AsyncStoreOp,
    AsyncStoreWaitOp,
    BarrierArriveOp,
    BarrierWaitOp,
    MakeBarriersOp,
)
from attn_engine.dialects.tile_async_memory import DescribeOp
from attn_engine.dialects.tile_flag import AwaitTurnOp, PassTurnOp
from attn_engine.dialects.tile_types import DescriptorType
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import AsyncSchedule
from attn_engine.passes.hopper.edit import After, Before, Signature
from attn_engine.passes.hopper.role_steps import count_of
from attn_engine.passes.hopper.slicing import Slice, depends_on
from attn_engine.passes.hopper.steps import kernels_at_async_level, launched
from attn_engine.passes.lowering.scope import Scope
from attn_engine.passes.simplify_constants import constant_of

_IN_NO_ORDER = (tile.AtomicAddOp, tile.ScatterAddOp, tile.AddDiagonalsOp)


@dataclass
class _Turns:
    """One kernel: its consumers write sums to slots, a role of their own adds them when their turn has come."""

    signature: Signature
    roles: RolesOp
    registers: int
    taken: dict[AsyncReduceAddOp, list[Operation]] = field(default_factory=dict[AsyncReduceAddOp, list[Operation]])
    """What the role that adds does besides each addition."""

    def run(self) -> None:
        consumer = self.roles.bodies[0].block
        adds = [op for op in consumer.walk() if isinstance(op, AsyncReduceAddOp)]
        number = _number(consumer)
        _check(consumer, adds, number)
        self._captures(adds[0])
        body = self._adder(consumer, adds, number)
        for add in adds:
            self._hand_over(add)
        self._insert(body)

    # --- what roles share

    def _captures(self, add: AsyncReduceAddOp) -> None:
        """Barriers of the slots that sums leave through, and whose turn it is at each block of sums."""
        instances, top = self.roles.roles[0][1], Before(self.roles)
        self.full, self.free = (
            self._capture(top.add(MakeBarriersOp(instances, 1), name).result) for name in ("sums_full", "sums_free")
        )
        assert isinstance(add.descriptor, BlockArgument)
        outer = self.roles.captures[add.descriptor.index - 1]
        describe = self.signature.passed(outer).owner
        assert isinstance(describe, DescribeOp) and isinstance(describe.source.owner, tile.AllocOp)
        assert isinstance(describe.result.type, DescriptorType)
        (batch, heads, rows, _), plan = describe.source.owner.sizes, Before(self.signature.launch)
        self.high = describe.result.type.get_shape()[2]
        places = plan.add(arith.CeilDivSIOp(rows, plan.value(self.high)), "places").result
        # Copies leave out what is beyond the tensor, of which the last step may have a block for each consumer; turns do not.
        places = plan.value(plan.plus(places, instances, "places"))
        turns = plan.add(tile.AllocOp([batch, heads, places], tile.GlobalType(3, i32)), "turns").result
        plan.add(tile.FillOp(turns, plan.value(0)))
        self.turns = self._capture(self.signature.add(turns, "turns"))

    def _capture(self, value: SSAValue) -> int:
        """One more, in every role; its number among their arguments."""
        self.roles.operands = [*self.roles.captures, value]
        for region in self.roles.bodies:
            region.block.insert_arg(value.type, len(region.block.args)).name_hint = value.name_hint
        return len(self.roles.captures)

    # --- roles

    def _adder(self, consumer: Block, adds: Sequence[AsyncReduceAddOp], number: SSAValue) -> Block:
        """Each instance adds what the consumer of its number has written."""
        for add in adds:
            self._take_turns(add, number)
        role = Block(arg_types=[argument.type for argument in consumer.args])
        mapping: dict[SSAValue, SSAValue] = {}
        for old, new in zip(consumer.args, role.args, strict=True):
            new.name_hint, mapping[old] = old.name_hint, new
        taken = [op for add in adds for op in self.taken[add]]
        needed = Slice(consumer, lambda value: value in consumer.args)
        needed.need([*taken, *adds])
        scope = Scope(role)
        needed.copy(scope, mapping)
        scope.add(tile.EndOp())
        for op in reversed(taken):
            Rewriter.erase_op(op)
        return role

    def _take_turns(self, add: AsyncReduceAddOp, number: SSAValue) -> None:
        """Around an addition of the consumer, for a copy of it: what its role does besides."""
        assert add.parent is not None
        consumer, part = self.roles.bodies[0].block, self.roles.bodies[0].block.args[0]
        scope, (batch, head, row, _) = Before(add), add.coordinates
        place = [batch, head, scope.add(arith.DivSIOp(row, scope.value(self.high)), "place").result]
        full, free, turns = (consumer.args[n] for n in (self.full, self.free, self.turns))
        before = [
            scope.add(AwaitTurnOp(turns, place, number)),
            scope.add(BarrierWaitOp(full, part, self._parity(scope, add))),
        ]
        behind = After(add)
        after = [
            behind.add(AsyncStoreWaitOp(0)),
            behind.add(BarrierArriveOp(free, part)),
            behind.add(PassTurnOp(turns, place)),
        ]
        self.taken[add] = [*before, *after]

    def _parity(self, scope: Before, add: AsyncReduceAddOp) -> SSAValue:
        body = add.parent
        assert body is not None
        count = count_of(next(op for op in body.ops if isinstance(op, BarrierWaitOp)))
        return scope.add(arith.AndIOp(count, scope.value(1)), "turn").result

    def _hand_over(self, add: AsyncReduceAddOp) -> None:
        """The consumer waits until its slot is free, and says when it is full."""
        consumer = self.roles.bodies[0].block
        full, free, part = consumer.args[self.full], consumer.args[self.free], consumer.args[0]
        wait = add.prev_op
        while not isinstance(wait, AsyncStoreWaitOp):
            assert wait is not None, "a slot is written once what was in it has left"
            wait = wait.prev_op
        scope = Before(wait)
        parity = scope.add(arith.XOrIOp(self._parity(scope, add), scope.value(1)), "free_parity").result
        scope.add(BarrierWaitOp(free, part, parity))
        Rewriter.erase_op(wait)
        Before(add).add(BarrierArriveOp(full, part))
        Rewriter.erase_op(add)

    def _insert(self, body: Block) -> None:
        old = self.roles
        (_, *others), (first, *more) = old.roles, old.bodies
        counts = [old.roles[0][1], old.roles[0][1], *(r[1] for r in others)]
        warps = [old.roles[0][2], 1, *(r[2] for r in others)]
        registers = [old.roles[0][3], self.registers, *(r[3] for r in others)]
        regions = [old.detach_region(region) for region in (first, *more)]
        new = RolesOp(list(old.captures), counts, warps, registers, [regions[0], Region(body), *regions[1:]])
        Rewriter.insert_op(new, InsertPoint.before(old))
        Rewriter.erase_op(old)


def _number(consumer: Block) -> SSAValue:
    """Which block of rows a program owns, from where its results are stored."""
    store = next((op for op in consumer.ops if isinstance(op, AsyncStoreOp)), None)
    if store is not None:
        work = [store.coordinates[2]]
        while work:
            owner = work.pop().owner
            if isinstance(owner, arith.MuliOp) and isinstance(constant_of(owner.rhs), int) and owner.lhs.type == i32:
                if not isinstance(owner.lhs, BlockArgument):
                    return owner.lhs
            elif isinstance(owner, arith.AddiOp):
                work += owner.operands
    raise AsyncUnsupportedError("its programs do not say which block they own")


def _check(consumer: Block, adds: Sequence[AsyncReduceAddOp], number: SSAValue) -> None:
    """Every program adds to every block, and nothing is added in another way."""
    if not adds:
        raise AsyncUnsupportedError("it adds nothing to memory in the order of its steps")
    own = depends_on(consumer, number)
    if any(bound in own for bound in _ends(consumer)) or any(
        isinstance(op, scf.IfOp | scf.WhileOp) for op in consumer.walk()
    ):
        raise AsyncUnsupportedError("its programs do not go through all blocks")
    for add in adds:
        loop = add.parent_op()
        if not isinstance(loop, scf.ForOp) or add.coordinates[2] in loop.body.block.args[1:]:
            raise AsyncUnsupportedError("it adds in another step than its own")


def _ends(consumer: Block) -> list[SSAValue]:
    """Where the loops of a role begin and end; one that begins where another one ends is one with it."""
    loops = [op for op in consumer.walk() if isinstance(op, scf.ForOp)]
    starts, stops = [op.lb for op in loops], [op.ub for op in loops]
    for value in list(stops):
        if value in starts:
            starts.remove(value)
            stops.remove(value)
    return [*starts, *stops]


@dataclass(frozen=True)
class TileOrderSumsPass(ModulePass):
    """Lets programs add to sums in memory in the order of the blocks that they own: results are the same in every run.

    What consumers have written to their slots is added by a role of its own, which waits for its turn: until the programs
    of all blocks before have added to the same sums. These programs come earlier in the grid, so nobody waits in vain; a
    program is behind that of the block before it by about a step, and waits for nobody from then on. For kernels whose
    programs go through all blocks.

    ```
    role { ...; write %dq, %slot; async_reduce_add %slot, %sums[%b, %h, %row] }
    ```
    becomes
    ```
    role { ...; barrier_wait free; write %dq, %slot; barrier_arrive full }
    role { await_turn %turns[%b, %h, %place], %i; barrier_wait full; async_reduce_add %slot, ...; barrier_arrive free; pass_turn }
    ```
    """

    name = "tile-order-sums"

    plan: str = "backward"
    """The plan whose kernels are changed."""
    registers: int = AsyncSchedule.producer_registers
    """Registers of a thread of the role that adds."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        if any(isinstance(o, _IN_NO_ORDER) for s in launched(op, self.plan) for o in s.kernel.walk()):
            raise AsyncUnsupportedError("it adds to memory in no order")
        for signature in kernels_at_async_level(op, self.plan):
            for roles in [o for o in signature.kernel.body.block.ops if isinstance(o, RolesOp)]:
                _Turns(signature, roles, self.registers).run()
