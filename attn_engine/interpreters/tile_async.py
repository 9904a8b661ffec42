"""Executable meaning of the tile dialect at the async level, with asynchronous semantics and random schedules.

`run_plan` runs the programs of a launch at the same time, and the roles of each program as coroutines. Copies and
products take effect at a random moment between their start and the wait for them. One seed is one schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import product
from typing import Any

from xdsl.dialects import scf
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation

from attn_engine.dialects import tile
from attn_engine.dialects import tile_async_copy as copies
from attn_engine.dialects import tile_async_memory as memory
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_flag import AwaitTurnOp
from attn_engine.dialects.tile_types import DescriptorType
from attn_engine.interpreters.scalar import exact_dtype, oracle_dtypes
from attn_engine.interpreters.tile import Argument, Machine, find
from attn_engine.interpreters.tile_async_order import AsyncProtocolError, Thread, merge
from attn_engine.interpreters.tile_async_rules import RULES, Result, Role, int32
from attn_engine.interpreters.tile_async_state import Condition, Descriptor, Scheduler, Steps
from attn_engine.interpreters.tile_memory import Owners


def run_plan(
    module: ModuleOp,
    name: str,
    arguments: Sequence[Argument],
    *,
    seed: int = 0,
    processors: int = 2,
    exact: bool = False,
) -> None:
    """Runs the `tile.plan` @name under the schedule of that seed; outputs are written in place."""
    plan = find(module, name, tile.PlanOp)
    host = Host(module, seed, processors, exact)
    host.bind(plan.body.block, [host.argument(a, b) for a, b in zip(arguments, plan.body.block.args, strict=True)])
    host.run(plan.body.block)


class Host(Machine):
    """Runs a plan."""

    def __init__(self, module: ModuleOp, seed: int, processors: int, exact: bool):
        super().__init__(module, oracle_dtypes() if exact else exact_dtype)
        self.seed = seed
        self.processors = processors

    def step(self, op: Operation) -> None:
        rule = _HOST_RULES.get(type(op))
        if rule is None:
            super().step(op)
        else:
            self.values.update(zip(op.results, rule(self, op), strict=True))


def steps(role: Role, block: Block) -> Generator[Callable[[], bool] | None, None, list[Any]]:
    """Runs a block as a coroutine; the operands of its terminator."""
    for op in block.ops:
        if op is block.last_op:
            if isinstance(op, tile.EndOp) and role.unwaited_stores:
                raise AsyncProtocolError("a role ends while its stores may still read shared memory")
            return role.get(op.operands)
        control, rule = _CONTROL.get(type(op)), RULES.get(type(op))
        if control is not None or rule is not None:
            yield None  # whatever other roles see of this op, they may act before it
        if control is not None:
            role.values.update(zip(op.results, (yield from control(role, op)), strict=True))
        elif rule is not None:
            role.values.update(zip(op.results, rule(role, op), strict=True))
        else:
            role.step(op)
    return []


# --- host --------------------------------------------------------------------------------------


def _launch(host: Host, op: tile.LaunchOp) -> Result:
    kernel = find(host.module, op.kernel.root_reference.data, tile.KernelOp)
    arguments = host.get(op.arguments)
    scheduler = Scheduler(host.seed)
    host.seed += 1
    owners = Owners()
    for number, program in enumerate(product(*map(range, host.ints(op.grid)))):
        role = Role(host, scheduler, Thread(scheduler.thread())).at(program, number, owners)
        role.bind(kernel.body.block, arguments)
        scheduler.add(f"program {number}", steps(role, kernel.body.block))
    scheduler.run()
    return []


def _describe(host: Host, op: memory.DescribeOp) -> Result:
    assert isinstance(op.result.type, DescriptorType)
    return [Descriptor(host.values[op.source], op.result.type.get_shape())]


def _processor_count(host: Host, op: memory.ProcessorCountOp) -> Result:
    return [int32(host.processors)]


# --- control -----------------------------------------------------------------------------------


def _for(role: Role, op: scf.ForOp) -> Steps:
    low, high, step = role.ints([op.lb, op.ub, op.step])
    carries = role.get(op.iter_args)
    for i in range(low, high, step):
        role.bind(op.body.block, [int32(i).to(role.values[op.lb].dtype), *carries])
        carries = yield from steps(role, op.body.block)
    return carries


def _while(role: Role, op: scf.WhileOp) -> Steps:
    carries = role.get(op.arguments)
    while True:
        role.bind(op.before_region.block, carries)
        go_on, *passed = yield from steps(role, op.before_region.block)
        if not bool(go_on):
            return passed
        role.bind(op.after_region.block, passed)
        carries = yield from steps(role, op.after_region.block)


def _if(role: Role, op: scf.IfOp) -> Steps:
    region = op.true_region if bool(role.values[op.cond]) else op.false_region
    return (yield from steps(role, region.block)) if region.blocks else []


def _roles(role: Role, op: RolesOp) -> Steps:
    captures = role.get(op.captures)
    for region, count, _, _ in op.roles:
        for instance in range(count):
            scheduler = role.scheduler
            inner = Role(role, scheduler, role.work()).at(role.program, role.program_number, role.owners)
            inner.rings = role.rings
            inner.bind(region.block, [int32(instance), *captures])
            name = f"program {role.program_number} role {len(scheduler.queues) // 2}"
            scheduler.add(name, steps(inner, region.block))
    yield None
    return []


def _barrier_wait(role: Role, op: copies.BarrierWaitOp) -> Steps:
    barrier, parity = role.barrier(op), int(role.values[op.parity])
    place = (
        f"tile.barrier_wait %{op.barriers.name_hint}[{int(role.values[op.index])}], {parity} (phase {barrier.phase})"
    )
    yield Condition(lambda: barrier.has_ended(parity), place)
    merge(role.thread.clock, barrier.seen(parity))
    return []


def _await_turn(role: Role, op: AwaitTurnOp) -> Steps:
    turns, place, number = role.values[op.flags], tuple(role.ints(op.indices)), int(role.values[op.number])
    yield Condition(
        lambda: int(turns[place]) >= number, f"tile.await_turn {place}, {number} ({int(turns[place])} so far)"
    )
    return []


_HOST_RULES: dict[type[Operation], Callable[..., Result]] = {
    tile.LaunchOp: _launch,
    memory.DescribeOp: _describe,
    memory.ProcessorCountOp: _processor_count,
}
_CONTROL: dict[type[Operation], Callable[..., Steps]] = {
    scf.ForOp: _for,
    scf.WhileOp: _while,
    scf.IfOp: _if,
    RolesOp: _roles,
    copies.BarrierWaitOp: _barrier_wait,
    AwaitTurnOp: _await_turn,
}
