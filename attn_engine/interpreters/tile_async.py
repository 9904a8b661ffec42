"""Executable meaning of the tile dialect at the async level, with asynchronous semantics and random schedules.

`run_plan` runs the programs of a launch at the same time, and the roles of each program as coroutines. Copies and
products take effect at a random moment between their start and the wait for them. One seed is one schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from xdsl.dialects import scf
from xdsl.dialects.builtin import ModuleOp, f32
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects import tile_async_copy as copies
from attn_engine.dialects import tile_async_memory as memory
from attn_engine.dialects import tile_async_product as products
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_types import BarriersType, BufferType, DescriptorType
from attn_engine.interpreters import tile_async_state as state
from attn_engine.interpreters.scalar import exact_dtype, oracle_dtypes
from attn_engine.interpreters.tile import Argument, Machine, find
from attn_engine.interpreters.tile_async_state import Barrier, Condition, Descriptor, Product, Scheduler, Slot, Steps

Result = Sequence[Any]


def int32(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


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


class Role(Machine):
    """One instance of a role, or the part of a program before its roles."""

    def __init__(self, host: Machine, scheduler: Scheduler, number: int):
        super().__init__(host.module, host.dtype_of)
        self.scheduler = scheduler
        self.number = number
        self.rings: list[state.Storage] = []
        self.products = scheduler.queue()
        self.stores = scheduler.queue()

    def at(self, program: tuple[int, ...], number: int, owners: Any) -> Role:
        self.program, self.program_number, self.owners = program, number, owners
        return self

    def any(self, value: SSAValue) -> Any:
        return self.values[value]

    def barrier(self, op: Any) -> Barrier:
        return self.any(op.barriers)[int(self.values[op.index])]

    def steps(self, block: Block) -> Generator[Callable[[], bool] | None, None, list[Any]]:
        """Runs a block as a coroutine; the operands of its terminator."""
        for op in block.ops:
            if op is block.last_op:
                return self.get(op.operands)
            control, rule = _CONTROL.get(type(op)), _RULES.get(type(op))
            if control is not None or rule is not None:
                yield None  # whatever other roles see of this op, they may act before it
            if control is not None:
                self.values.update(zip(op.results, (yield from control(self, op)), strict=True))
            elif rule is not None:
                self.values.update(zip(op.results, rule(self, op), strict=True))
            else:
                self.step(op)
        return []


# --- host --------------------------------------------------------------------------------------


def _launch(host: Host, op: tile.LaunchOp) -> Result:
    kernel = find(host.module, op.kernel.root_reference.data, tile.KernelOp)
    arguments = host.get(op.arguments)
    scheduler = Scheduler(host.seed)
    host.seed += 1
    for number, program in enumerate(product(*map(range, host.ints(op.grid)))):
        role = Role(host, scheduler, len(scheduler.queues)).at(program, number, host.owners)
        role.bind(kernel.body.block, arguments)
        scheduler.add(f"program {number}", role.steps(kernel.body.block))
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
        carries = yield from role.steps(op.body.block)
    return carries


def _while(role: Role, op: scf.WhileOp) -> Steps:
    carries = role.get(op.arguments)
    while True:
        role.bind(op.before_region.block, carries)
        go_on, *passed = yield from role.steps(op.before_region.block)
        if not bool(go_on):
            return passed
        role.bind(op.after_region.block, passed)
        carries = yield from role.steps(op.after_region.block)


def _if(role: Role, op: scf.IfOp) -> Steps:
    region = op.true_region if bool(role.values[op.cond]) else op.false_region
    return (yield from role.steps(region.block)) if region.blocks else []


def _roles(role: Role, op: RolesOp) -> Steps:
    captures = role.get(op.captures)
    for region, count, _, _ in op.roles:
        for instance in range(count):
            scheduler = role.scheduler
            inner = Role(role, scheduler, len(scheduler.queues)).at(role.program, role.program_number, role.owners)
            inner.rings = role.rings
            inner.bind(region.block, [int32(instance), *captures])
            name = f"program {role.program_number} role {len(scheduler.queues) // 2}"
            scheduler.add(name, inner.steps(region.block))
    yield None
    return []


def _barrier_wait(role: Role, op: copies.BarrierWaitOp) -> Steps:
    barrier, parity = role.barrier(op), int(role.values[op.parity])
    place = (
        f"tile.barrier_wait %{op.barriers.name_hint}[{int(role.values[op.index])}], {parity} (phase {barrier.phase})"
    )
    yield Condition(lambda: barrier.has_ended(parity), place)
    return []


# --- memory ------------------------------------------------------------------------------------


def _ring(role: Role, op: memory.RingOp) -> Result:
    type_ = op.result.type
    assert isinstance(type_, BufferType)
    role.rings.append(state.storage(type_.get_shape(), role.dtype_of(type_.element_type)))
    return [Slot(role.rings[-1], -1)]


def _slot(role: Role, op: memory.SlotOp) -> Result:
    ring, stage = role.any(op.ring), int(role.values[op.index])
    if not 0 <= stage < len(ring.data):
        raise state.AsyncProtocolError(f"stage {stage} of a ring of {len(ring.data)}: {op}")
    return [Slot(ring.storage, stage)]


def _transposed_slot(role: Role, op: memory.TransposedSlotOp) -> Result:
    slot = role.any(op.source)
    return [Slot(slot.storage, slot.stage, not slot.transposed)]


def _read(role: Role, op: memory.ReadOp) -> Result:
    slot = role.any(op.source)
    slot.touch(role.number)
    return [slot.data.clone()]


def _write(role: Role, op: memory.WriteOp) -> Result:
    slot = role.any(op.target)
    slot.touch(role.number)
    slot.data.copy_(role.values[op.value])
    return []


def _cell_read(role: Role, op: memory.CellReadOp) -> Result:
    return [role.any(op.cells).data[int(role.values[op.index])].clone()]


def _cell_write(role: Role, op: memory.CellWriteOp) -> Result:
    role.any(op.cells).data[int(role.values[op.index])] = role.values[op.value]
    return []


def _fetch_add(role: Role, op: memory.FetchAddOp) -> Result:
    element = role.values[op.target][int(role.values[op.index])]
    old = element.clone()
    element += role.values[op.value]
    return [old]


# --- barriers and copies -----------------------------------------------------------------------


def _make_barriers(role: Role, op: copies.MakeBarriersOp) -> Result:
    assert isinstance(op.result.type, BarriersType)
    return [[Barrier(op.count.value.data) for _ in range(op.result.type.size.data)]]


def _barrier_expect(role: Role, op: copies.BarrierExpectOp) -> Result:
    role.barrier(op).arrive(op.bytes.value.data)
    return []


def _barrier_arrive(role: Role, op: copies.BarrierArriveOp) -> Result:
    if op.condition is None or bool(role.values[op.condition]):
        role.barrier(op).arrive()
    return []


def _async_load(role: Role, op: copies.AsyncLoadOp) -> Result:
    """The slot is poison from the start of the copy to its end."""
    slot, barrier, descriptor = role.any(op.target), role.barrier(op), role.any(op.descriptor)
    window = descriptor.window(role.ints(op.coordinates))
    slot.check(op)
    slot.data.fill_(float("nan") if slot.data.is_floating_point() else -77)

    def land() -> None:
        block = slot.data.new_zeros(descriptor.block)
        block[window.tile] = window.of(descriptor.tensor).to(block.dtype)
        slot.data.copy_(block.reshape(slot.data.shape))
        barrier.land(op.byte_size)

    role.scheduler.copies.append(land)
    return []


def _from_slot(role: Role, op: copies.AsyncStoreOp | copies.AsyncReduceAddOp) -> Result:
    slot, descriptor = role.any(op.source), role.any(op.descriptor)
    window = descriptor.window(role.ints(op.coordinates))
    slot.check(op)

    def land() -> None:
        part = slot.data.reshape(descriptor.block)[window.tile]
        target = window.of(descriptor.tensor)
        if isinstance(op, copies.AsyncReduceAddOp):
            target += part
        else:
            role.owners.claim(op, descriptor.tensor, window, role.program_number)
            target.copy_(part)

    role.stores.append(land)
    return []


def _async_store_wait(role: Role, op: copies.AsyncStoreWaitOp) -> Result:
    while len(role.stores) > op.pending.value.data:
        role.stores.popleft()()
    return []


def _proxy_fence(role: Role, op: copies.ProxyFenceOp) -> Result:
    for ring in role.rings:
        for roles in ring.unfenced.values():
            roles.discard(role.number)
    return []


# --- products ----------------------------------------------------------------------------------


def _async_dot(role: Role, op: products.AsyncDotOp) -> Result:
    """Registers are read now, slots and a pending accumulator at the end."""
    a, b = role.any(op.a), role.any(op.b)
    acc = role.any(op.acc) if op.acc is not None else None
    for operand in (a, b):
        if isinstance(operand, Slot):
            operand.check(op)
    dtype = role.dtype_of(f32)

    def compute() -> Tensor:
        left = a.data if isinstance(a, Slot) else a
        result = left.to(dtype) @ b.data.to(dtype)
        start = acc.value if isinstance(acc, Product) else acc
        return result if start is None else start + result

    pending = Product(compute)
    role.products.append(pending.complete)
    return [pending]


def _wait(role: Role, op: products.WaitOp) -> Result:
    while len(role.products) > op.count.value.data:
        role.products.popleft()()
    return [role.any(pending).value for pending in op.pending]


def _identity(role: Role, op: products.DotOperandOp | products.PinOp) -> Result:
    return [role.values[op.value]]


def _opaque_zero(role: Role, op: products.OpaqueZeroOp) -> Result:
    return [int32(0)]


def _reduce_partial(role: Role, op: products.ReducePartialOp) -> Result:
    value, groups, width = role.values[op.value], op.groups.value.data, op.width.value.data
    parts = value.reshape(value.shape[0], -1, groups, width)
    reduce = _REDUCE[op.kind.data]
    return [reduce(reduce(parts, 3), 1)]


_REDUCE: dict[tile.Reduction, Callable[[Tensor, int], Tensor]] = {
    tile.Reduction.SUM: torch.sum,
    tile.Reduction.MAX: torch.amax,
    tile.Reduction.MIN: torch.amin,
}
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
}
_RULES: dict[type[Operation], Callable[..., Result]] = {
    memory.RingOp: _ring,
    memory.SlotOp: _slot,
    memory.TransposedSlotOp: _transposed_slot,
    memory.ReadOp: _read,
    memory.WriteOp: _write,
    memory.CellReadOp: _cell_read,
    memory.CellWriteOp: _cell_write,
    memory.FetchAddOp: _fetch_add,
    copies.MakeBarriersOp: _make_barriers,
    copies.BarrierExpectOp: _barrier_expect,
    copies.BarrierArriveOp: _barrier_arrive,
    copies.AsyncLoadOp: _async_load,
    copies.AsyncStoreOp: _from_slot,
    copies.AsyncReduceAddOp: _from_slot,
    copies.AsyncStoreWaitOp: _async_store_wait,
    copies.ProxyFenceOp: _proxy_fence,
    products.AsyncDotOp: _async_dot,
    products.WaitOp: _wait,
    products.DotOperandOp: _identity,
    products.PinOp: _identity,
    products.OpaqueZeroOp: _opaque_zero,
    products.ReducePartialOp: _reduce_partial,
}
