"""`tile-persist-programs`: as many programs of a kernel of gradients as there are processors, each for several blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import i32
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import (
    AsyncLoadOp,
    BarrierArriveOp,
    BarrierExpectOp,
    BarrierWaitOp,
    MakeBarriersOp,
)
from attn_engine.dialects.tile_async_memory import ProcessorCountOp
from attn_engine.dialects.tile_async_view import SlotOp
from attn_engine.passes.hopper.edit import Before, Signature
from attn_engine.passes.hopper.role_steps import holds_steps
from attn_engine.passes.hopper.steps import kernels_at_async_level
from attn_engine.passes.lowering.scope import Scope

_GRID = 3
_ROLES = 2
"""Of a kernel that this pass takes: consumers, and one that copies."""


@dataclass
class _Numbers:
    """What a role needs to know to go through its blocks: arguments of it."""

    blocks: SSAValue
    programs: SSAValue
    rows: SSAValue
    heads: SSAValue
    left: SSAValue
    """The barrier at which consumers say that nothing reads the blocks that a program owns any more."""

    def place(self, scope: Scope, number: SSAValue) -> list[SSAValue]:
        """Of a block: what the ids of its program were."""
        x = scope.add(arith.RemSIOp(number, self.rows), "x").result
        column = scope.add(arith.DivSIOp(number, self.rows), "column").result
        y = scope.add(arith.RemSIOp(column, self.heads), "y").result
        return [x, y, scope.add(arith.DivSIOp(column, self.heads), "z").result]


def takes(roles: RolesOp) -> bool:
    """Whether all slots of a program's steps are free again at its end: none is released a step later."""
    arrives = [op for op in roles.bodies[0].block.walk() if isinstance(op, BarrierArriveOp)]
    return len(roles.bodies) == _ROLES and not any(op.condition is not None for op in arrives)


def persist(signature: Signature, roles: RolesOp) -> None:
    """Changes one kernel, whose programs are blocks of rows, heads and batch."""
    scope, (rows, heads, batch) = Before(signature.launch), signature.launch.grid
    columns = scope.add(arith.MuliOp(heads, batch), "columns").result
    blocks = scope.add(arith.MuliOp(columns, rows), "blocks").result
    processors = scope.add(ProcessorCountOp(), "processors").result
    programs = scope.value(scope.smaller(processors, blocks, "programs"))
    signature.grid([programs])
    values = {"blocks": blocks, "programs": programs, "rows": rows, "heads": heads}
    added = [signature.add(value, name) for name, value in values.items()]
    counts, warps, registers = (tile.ints_of(numbers) for numbers in (roles.counts, roles.warps, roles.registers))
    left = Before(roles).add(MakeBarriersOp(1, counts[0]), "left").result
    bodies = [roles.detach_region(region) for region in list(roles.bodies)]
    bodies.append(bodies[1].clone())
    _without(bodies[2].block, _rest(bodies[2].block))
    _without(bodies[1].block, _owned(bodies[1].block))
    arguments = [_more(region.block, [*added, left]) for region in bodies]
    _consume(bodies[0].block, _Numbers(*arguments[0]))
    _produce(bodies[1].block, _Numbers(*arguments[1]))
    _bring(bodies[2].block, _Numbers(*arguments[2]))
    new = RolesOp([*roles.captures, *added, left], [*counts, 1], [*warps, 1], [*registers, registers[1]], bodies)
    Rewriter.insert_op(new, InsertPoint.before(roles))
    Rewriter.erase_op(roles)


def _more(block: Block, captures: Sequence[SSAValue]) -> list[SSAValue]:
    """Arguments of a role for more captures."""
    found: list[SSAValue] = []
    for capture in captures:
        found.append(block.insert_arg(capture.type, len(block.args)))
        found[-1].name_hint = capture.name_hint
    return found


# --- who copies what ---------------------------------------------------------------------------


def _is_dead(op: Operation) -> bool:
    """Whether nothing needs what an op computes or reads."""
    free = isinstance(op, tile.LoadOp | SlotOp | tile.DimOp | tile.ProgramIdOp) or op.name.startswith("arith.")
    return free and not any(result.uses for result in op.results)


def _without(block: Block, erased: Collection[Operation]) -> None:
    """Erases ops, and what nothing needs then."""
    for op in reversed(list(block.ops)):
        if op in erased or _is_dead(op):
            Rewriter.erase_op(op)


def _owned(block: Block) -> list[Operation]:
    """The copies in front of all steps, which bring the blocks that a program owns, and what expects them."""
    loop = next(op for op in block.ops if isinstance(op, scf.ForOp))
    copies = [op for op in block.ops if isinstance(op, AsyncLoadOp | BarrierExpectOp)]
    return [op for op in copies if op.is_before_in_block(loop)]


def _rest(block: Block) -> list[Operation]:
    """The other ops that wait, copy or hold such."""
    owned = _owned(block)
    acts = (scf.ForOp, AsyncLoadOp, BarrierExpectOp, BarrierWaitOp)
    return [op for op in block.ops if isinstance(op, acts) and op not in owned]


# --- loops over blocks -------------------------------------------------------------------------


def _loop(block: Block, ops: Sequence[Operation], numbers: _Numbers, count: SSAValue | None) -> tuple[Block, SSAValue]:
    """Moves ops of a role into a loop over its blocks; the loop's body, and the parity of the block's number.

    `count` is what the number of a step starts from: steps are counted on from block to block.
    """
    anchor = ops[-1].next_op
    assert anchor is not None
    scope = Before(anchor)
    body = Block(arg_types=[i32] * (2 + (count is not None)))
    for argument, name in zip(body.args, ("block", "turn", "steps"), strict=False):
        argument.name_hint = name
    start = scope.add(tile.ProgramIdOp(0), "first_block")
    inits = [scope.value(0) for _ in body.args[1:]]
    loop = scf.ForOp(start, numbers.blocks, numbers.programs, inits, Region(body))
    inside = Scope(body)
    place = numbers.place(inside, body.args[0])
    phase = inside.add(arith.AndIOp(body.args[1], inside.value(1)), "phase").result
    for op in ops:
        op.detach()
        body.add_op(op)
    for op in [op for op in ops if isinstance(op, tile.ProgramIdOp)]:
        op.result.replace_all_uses_with(place[op.axis.value.data])
        Rewriter.erase_op(op)
    following = inside.add(arith.AddiOp(body.args[1], inside.value(1)), "turn").result
    after: list[SSAValue] = []
    if count is not None:
        after = [_steps_of([op for op in body.ops if isinstance(op, scf.ForOp)][-1])]
        count.replace_all_uses_with(body.args[2])
    inside.add(scf.YieldOp(following, *after))
    scope.add(loop)
    return body, phase


def _steps_of(loop: scf.ForOp) -> SSAValue:
    """How many steps there have been behind a loop."""
    return next(result for result in loop.results if result.type == i32)


def _start(block: Block) -> SSAValue:
    """What the number of a step starts from."""
    loop = next(op for op in block.ops if isinstance(op, scf.ForOp))
    return next(value for value in loop.iter_args if value.type == i32)


def _consume(block: Block, numbers: _Numbers) -> None:
    """A consumer waits for its blocks once a turn, and leaves them when its results have left through them."""
    assert any(holds_steps(op) for op in block.ops)
    body, phase = _loop(block, [op for op in block.ops if not isinstance(op, tile.EndOp)], numbers, _start(block))
    for wait in [op for op in body.ops if isinstance(op, BarrierWaitOp)]:
        if isinstance(wait.parity.owner, arith.ConstantOp):
            wait.operands[2] = phase
    end = body.last_op
    assert end is not None
    scope = Before(end)
    scope.add(BarrierArriveOp(numbers.left, scope.value(0)))


def _produce(block: Block, numbers: _Numbers) -> None:
    """Blocks of steps are copied without regard to whose steps they are; the one that nothing needs comes last of all."""
    last = [op for op in block.ops if isinstance(op, scf.ForOp)][-1]
    ops, count = list(block.ops), _steps_of(last)
    inside, behind = ops[: ops.index(last) + 1], ops[ops.index(last) + 1 :]
    _loop(block, inside, numbers, _start(block))
    outer = next(op for op in block.ops if isinstance(op, scf.ForOp))
    count.replace_uses_with_if(outer.results[1], lambda use: use.operation in behind)


def _bring(block: Block, numbers: _Numbers) -> None:
    """The blocks that a program owns come as soon as those of the turn before are left."""
    body, phase = _loop(block, [op for op in block.ops if not isinstance(op, tile.EndOp)], numbers, None)
    first = next(op for op in body.ops if isinstance(op, BarrierExpectOp))
    scope = Before(first)
    free = scope.add(arith.XOrIOp(phase, scope.value(1)), "free").result
    scope.add(BarrierWaitOp(numbers.left, scope.value(0), free))


@dataclass(frozen=True)
class TilePersistProgramsPass(ModulePass):
    """Gives a program every so-manieth block of rows, where it had one: the copies of the next one start under the last steps.

    For kernels whose slots are all free at the end of a program. Steps are counted on from block to block, so that the
    copies of steps go on without a stop. A role of its own brings the blocks that are owned, as soon as the
    results of the last ones have left through them.

    ```
    role (consumers) { barrier_wait %k_full, 0; for steps { ... }; store through %ks }
    role { async_load %ks; for steps { async_load %qs } }
    ```
    becomes
    ```
    role (consumers) { for blocks { barrier_wait %k_full, turn; for steps { ... }; store through %ks; barrier_arrive %left } }
    role { for blocks { for steps { async_load %qs } } }
    role { for blocks { barrier_wait %left; async_load %ks } }
    ```
    """

    name = "tile-persist-programs"

    plan: str = "backward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for signature in kernels_at_async_level(op, self.plan):
            for roles in [o for o in signature.kernel.body.block.ops if isinstance(o, RolesOp)]:
                if len(signature.launch.grid) == _GRID and takes(roles):
                    persist(signature, roles)
