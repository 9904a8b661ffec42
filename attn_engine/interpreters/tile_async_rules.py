"""What each op of the async level does, but for those that may block: see `tile_async`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from xdsl.dialects.builtin import f32
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects import tile_async_copy as copies
from attn_engine.dialects import tile_async_fragments as fragments
from attn_engine.dialects import tile_async_memory as memory
from attn_engine.dialects import tile_async_product as products
from attn_engine.dialects import tile_async_view as views
from attn_engine.dialects.tile_flag import PassTurnOp
from attn_engine.dialects.tile_types import BarriersType, BufferType
from attn_engine.interpreters import tile_async_state as state
from attn_engine.interpreters.tile import Machine
from attn_engine.interpreters.tile_async_order import AsyncProtocolError, Clock, Thread, merge
from attn_engine.interpreters.tile_async_state import Barrier, Product, Scheduler, Slot
from attn_engine.interpreters.tile_memory import poison

Result = Sequence[Any]


def int32(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


class Role(Machine):
    """One instance of a role, or the part of a program before its roles."""

    def __init__(self, host: Machine, scheduler: Scheduler, thread: Thread):
        super().__init__(host.module, host.dtype_of)
        self.scheduler = scheduler
        self.thread = thread
        self.rings: list[state.Storage] = []
        self.products = scheduler.queue()
        self.stores = scheduler.queue()
        self.unwaited_products: deque[Clock] = deque()
        self.unwaited_stores: deque[Clock] = deque()

    def at(self, program: tuple[int, ...], number: int, owners: Any) -> Role:
        self.program, self.program_number, self.owners = program, number, owners
        return self

    def work(self) -> Thread:
        """A piece of work that starts now."""
        return self.thread.start(self.scheduler.thread())

    def finish(self, unwaited: deque[Clock], count: int) -> None:
        """Has seen the end of all but the last `count` pieces of work."""
        while len(unwaited) > count:
            merge(self.thread.clock, unwaited.popleft())

    def any(self, value: SSAValue) -> Any:
        return self.values[value]

    def barrier(self, op: Any) -> Barrier:
        return self.any(op.barriers)[int(self.values[op.index])]


# --- memory ------------------------------------------------------------------------------------


def _ring(role: Role, op: views.RingOp) -> Result:
    type_ = op.result.type
    assert isinstance(type_, BufferType)
    role.rings.append(state.storage(type_.get_shape(), role.dtype_of(type_.element_type)))
    return [Slot(role.rings[-1], -1, role.rings[-1].data)]


def _slot(role: Role, op: views.SlotOp) -> Result:
    ring, stage = role.any(op.ring), int(role.values[op.index])
    if not 0 <= stage < len(ring.data):
        raise AsyncProtocolError(f"stage {stage} of a ring of {len(ring.data)}: {op}")
    return [Slot(ring.storage, stage, ring.data[stage])]


def _transposed_slot(role: Role, op: views.TransposedSlotOp) -> Result:
    slot = role.any(op.source)
    return [slot.view(slot.data.T)]


def _part(role: Role, op: views.PartOp) -> Result:
    assert isinstance(op.result.type, BufferType)
    slot, axis = role.any(op.source), op.axis.value.data
    size = op.result.type.get_shape()[axis]
    return [slot.view(slot.data.narrow(axis, int(role.values[op.index]) * size, size))]


def _alias_slot(role: Role, op: views.AliasSlotOp) -> Result:
    type_, slot = op.result.type, role.any(op.source)
    assert isinstance(type_, BufferType)
    dtype, shape = role.dtype_of(type_.element_type), type_.get_shape()
    if slot.data.dtype.itemsize == dtype.itemsize and slot.data.numel() != prod(shape):
        return [slot.alias(poison(shape, dtype))]  # in exact mode all elements have one size: no alias
    return [slot.alias(slot.data.view(dtype).view(shape))]


def _read(role: Role, op: memory.ReadOp) -> Result:
    return [role.any(op.source).read(role.thread, op)]


def _write(role: Role, op: memory.WriteOp) -> Result:
    role.any(op.target).write(role.thread, op, role.values[op.value])
    return []


def _cell_read(role: Role, op: memory.CellReadOp) -> Result:
    return [role.any(op.cells).cell(role.thread, op, int(role.values[op.index]), writes=False).clone()]


def _cell_write(role: Role, op: memory.CellWriteOp) -> Result:
    cell = role.any(op.cells).cell(role.thread, op, int(role.values[op.index]), writes=True)
    cell.copy_(role.values[op.value])
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
    role.barrier(op).arrive(role.thread.release(), op.bytes.value.data)
    return []


def _barrier_arrive(role: Role, op: copies.BarrierArriveOp) -> Result:
    if op.condition is None or bool(role.values[op.condition]):
        role.barrier(op).arrive(role.thread.release())
    return []


def _async_load(role: Role, op: copies.AsyncLoadOp) -> Result:
    """The slot is poison from the start of the copy to its end."""
    slot, barrier, descriptor = role.any(op.target), role.barrier(op), role.any(op.descriptor)
    window = descriptor.window(role.ints(op.coordinates))
    work = role.work()
    slot.access(work, op, writes=True)
    slot.data.fill_(float("nan") if slot.data.is_floating_point() else -77)

    def land() -> None:
        block = slot.data.new_zeros(descriptor.block)
        block[window.tile] = window.of(descriptor.tensor).to(block.dtype)
        slot.data.copy_(block.reshape(slot.data.shape))
        barrier.land(work.clock, op.byte_size)

    role.scheduler.copies.append(land)
    return []


def _from_slot(role: Role, op: copies.AsyncStoreOp | copies.AsyncReduceAddOp) -> Result:
    slot, descriptor = role.any(op.source), role.any(op.descriptor)
    window = descriptor.window(role.ints(op.coordinates))
    work = role.work()
    slot.access(work, op, writes=False)

    def land() -> None:
        part = slot.data.reshape(descriptor.block)[window.tile]
        target = window.of(descriptor.tensor)
        if isinstance(op, copies.AsyncReduceAddOp):
            target += part
        else:
            role.owners.claim(op, descriptor.tensor, window, role.program_number)
            target.copy_(part)

    role.stores.append(land)
    role.unwaited_stores.append(work.clock)
    return []


def _async_store_wait(role: Role, op: copies.AsyncStoreWaitOp) -> Result:
    while len(role.stores) > op.pending.value.data:
        role.stores.popleft()()
    role.finish(role.unwaited_stores, op.pending.value.data)
    return []


def _pass_turn(role: Role, op: PassTurnOp) -> Result:
    while role.stores:
        role.stores.popleft()()
    role.finish(role.unwaited_stores, 0)
    role.values[op.flags][tuple(role.ints(op.indices))] += 1
    return []


def _proxy_fence(role: Role, op: copies.ProxyFenceOp) -> Result:
    for ring in role.rings:
        ring.fence(role.thread.number)
    return []


# --- products ----------------------------------------------------------------------------------


def _async_dot(role: Role, op: products.AsyncDotOp) -> Result:
    """Registers are read now, slots and a pending accumulator at the end."""
    a, b = role.any(op.a), role.any(op.b)
    acc = role.any(op.acc) if op.acc is not None else None
    work = role.work()
    for operand in (a, b):
        if isinstance(operand, Slot):
            operand.access(work, op, writes=False)
    role.unwaited_products.append(work.clock)
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
    role.finish(role.unwaited_products, op.count.value.data)
    return [role.any(pending).value for pending in op.pending]


def _identity(role: Role, op: products.DotOperandOp | products.HoldBackOp | products.PinOp) -> Result:
    return [role.values[op.value]]


def _split_columns(role: Role, op: products.SplitColumnsOp) -> Result:
    return list(role.values[op.value].chunk(2, 1))


def _join_columns(role: Role, op: products.JoinColumnsOp) -> Result:
    return [torch.cat([role.values[op.low], role.values[op.high]], 1)]


def _opaque_zero(role: Role, op: products.OpaqueZeroOp) -> Result:
    return [int32(0)]


def _reduce_partial(role: Role, op: products.ReducePartialOp) -> Result:
    value, groups, width = role.values[op.value], op.groups.value.data, op.width.value.data
    parts = value.reshape(value.shape[0], -1, groups, width)
    reduce = _REDUCE[op.kind.data]
    return [reduce(reduce(parts, 3), 1)]


def _to_fragments(role: Role, op: fragments.ToFragmentsOp) -> Result:
    """Axes: warp, half, row; eight columns, lane, neighbour."""
    rounds = tile.shape_of(op.value)[1] // fragments.COLUMNS
    held = role.values[op.value].reshape(4, 2, 8, rounds, 4, 2).permute(0, 2, 4, 3, 1, 5)
    return [held.reshape(fragments.THREADS, -1)]


def _from_fragments(role: Role, op: fragments.FromFragmentsOp) -> Result:
    rows, columns = tile.shape_of(op.result)
    parts = op.parts.value.data
    held = role.values[op.value].reshape(rows // fragments.ROWS, parts, 4, 8, 4, -1, 2, 2)
    return [held.permute(0, 2, 6, 3, 1, 5, 4, 7).reshape(rows, columns)]


_REDUCE: dict[tile.Reduction, Callable[[Tensor, int], Tensor]] = {
    tile.Reduction.SUM: torch.sum,
    tile.Reduction.MAX: torch.amax,
    tile.Reduction.MIN: torch.amin,
}
RULES: dict[type[Operation], Callable[..., Result]] = {
    views.RingOp: _ring,
    views.SlotOp: _slot,
    views.TransposedSlotOp: _transposed_slot,
    views.PartOp: _part,
    views.AliasSlotOp: _alias_slot,
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
    PassTurnOp: _pass_turn,
    products.AsyncDotOp: _async_dot,
    products.WaitOp: _wait,
    products.DotOperandOp: _identity,
    products.PinOp: _identity,
    products.HoldBackOp: _identity,
    products.SplitColumnsOp: _split_columns,
    products.JoinColumnsOp: _join_columns,
    products.OpaqueZeroOp: _opaque_zero,
    products.ReducePartialOp: _reduce_partial,
    fragments.ToFragmentsOp: _to_fragments,
    fragments.FromFragmentsOp: _from_fragments,
}
