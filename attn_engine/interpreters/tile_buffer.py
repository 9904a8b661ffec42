"""Executable meaning of the tile dialect at the buffered level.

`run_plan` runs every program of every launch, one after the other. Buffers start as NaN. In a kernel with
`explicit_barriers`, an access to shared memory that another thread's access may overtake is an error: what one op
wrote, another may touch only after a `tile.barrier`, and what one op read, another may write only after one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_compute as compute
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_async_view import SlotOp
from attn_engine.dialects.tile_buffer_check import reads, writes
from attn_engine.dialects.tile_buffer_pending import WaitProductsOp
from attn_engine.dialects.tile_types import BufferType, MemorySpace
from attn_engine.errors import AttnEngineError
from attn_engine.interpreters import tile_memory
from attn_engine.interpreters.scalar import exact_dtype, oracle_dtypes
from attn_engine.interpreters.tile import REDUCE, Argument, Machine, find, matmul, place, scan


class MissingBarrierError(AttnEngineError):
    """Two ops touch the same shared memory, one of them writing, without a barrier between them."""


def run_plan(module: ModuleOp, name: str, arguments: Sequence[Argument], *, exact: bool = False) -> None:
    """Runs the `tile.plan` @name; outputs are written in place. `exact` as in `interpreters.tile`."""
    plan = find(module, name, tile.PlanOp)
    host = BufferMachine(module, oracle_dtypes() if exact else exact_dtype)
    host.bind(plan.body.block, [host.argument(a, b) for a, b in zip(arguments, plan.body.block.args, strict=True)])
    host.run(plan.body.block)


class SharedLog:
    """What has touched each part of shared memory since the last barrier."""

    def __init__(self) -> None:
        self._read: dict[int, Operation] = {}
        self._written: dict[int, Operation] = {}

    def barrier(self) -> None:
        self._read.clear()
        self._written.clear()

    def access(self, op: Operation, values: dict[SSAValue, Tensor]) -> None:
        """Notes what an op touches; raises if nothing keeps it from overtaking an earlier op, or being overtaken."""
        for value in filter(_is_shared, reads(op)):
            self._check(op, value, self._written.get(values[value].data_ptr()))
        for value in filter(_is_shared, writes(op)):
            where = values[value].data_ptr()
            self._check(op, value, self._written.get(where) or self._read.get(where))
        self._read |= {values[v].data_ptr(): op for v in filter(_is_shared, reads(op))}
        self._written |= {values[v].data_ptr(): op for v in filter(_is_shared, writes(op))}

    def _check(self, op: Operation, value: SSAValue, earlier: Operation | None) -> None:
        if earlier is not None:
            name = memory.root(value).name_hint
            raise MissingBarrierError(f"{op.name} touches %{name} with no tile.barrier after {earlier.name}: {op}")


def _is_shared(value: SSAValue) -> bool:
    return isinstance(value.type, BufferType) and value.type.memory_space is MemorySpace.SHARED


class BufferMachine(Machine):
    """The state of one run, with the shape of the map that is running and a log of shared memory."""

    map_shape: tuple[int, ...] = ()
    log: SharedLog | None = None

    def step(self, op: Operation) -> None:
        rule = _RULES.get(type(op))
        if rule is None:
            super().step(op)
            return
        if self.log is not None:
            self.log.access(op, self.values)
        self.values.update(zip(op.results, rule(self, op), strict=True))

    def run_scalars(self, block: Block, shape: tuple[int, ...]) -> list[Tensor]:
        """Runs the region of a map."""
        self.map_shape = shape
        return self.run(block)


Result = Sequence[Tensor]


def _launch(machine: BufferMachine, op: tile.LaunchOp) -> Result:
    kernel = find(machine.module, op.kernel.root_reference.data, tile.KernelOp)
    arguments = machine.get(op.arguments)
    inner = BufferMachine(machine.module, machine.dtype_of)
    for number, program in enumerate(product(*map(range, machine.ints(op.grid)))):
        inner.values = {}
        inner.program, inner.program_number = program, number
        inner.log = SharedLog() if "explicit_barriers" in kernel.attributes else None
        inner.bind(kernel.body.block, arguments)
        inner.run(kernel.body.block)
    return []


# --- memory ------------------------------------------------------------------------------------


def _alloc(machine: BufferMachine, op: memory.BufferAllocOp) -> Result:
    type_ = memory.buffer_type(op.result)
    fresh = tile_memory.poison(type_.get_shape(), machine.dtype_of(type_.element_type))
    return [fresh if op.host is None else _within(machine.values[op.host], fresh)]


def _within(host: Tensor, like: Tensor) -> Tensor:
    """A tensor in a host's memory; one of its own where elements are wider than the kernel's."""
    bytes_ = host.view(-1).view(torch.uint8)
    size = like.numel() * like.element_size()
    return bytes_[:size].view(like.dtype).view(like.shape) if size <= bytes_.numel() else like


def _slot(machine: BufferMachine, op: SlotOp) -> Result:
    return [machine.values[op.ring][int(machine.values[op.index])]]


def _fill(machine: BufferMachine, op: memory.BufferFillOp) -> Result:
    machine.values[op.target].fill_(machine.values[op.value])
    return []


def _copy_in(machine: BufferMachine, op: memory.CopyInOp) -> Result:
    source, target = machine.get([op.source, op.target])
    access = tile_memory.window(op, source, target.shape, machine.ints(op.indices), machine.ints(op.limits))
    target.zero_()
    if access is not None:
        target[access.tile] = access.of(source).to(target.dtype)
    return []


def _copy_out(machine: BufferMachine, op: memory.CopyOutOp) -> Result:
    target, value = machine.get([op.target, op.value])
    access = tile_memory.window(op, target, value.shape, machine.ints(op.indices), machine.ints(op.limits))
    if access is not None:
        machine.owners.claim(op, target, access, machine.program_number)
        access.of(target).copy_(value[access.tile])
    return []


def _atomic_add(machine: BufferMachine, op: memory.BufferAtomicAddOp) -> Result:
    target, value = machine.get([op.target, op.value])
    access = tile_memory.window(op, target, value.shape, machine.ints(op.indices), machine.ints(op.limits))
    if access is not None:
        access.of(target).add_(value[access.tile])
    return []


def _copy(machine: BufferMachine, op: memory.CopyOp) -> Result:
    machine.values[op.target].copy_(machine.values[op.source])
    return []


def _barrier(machine: BufferMachine, op: memory.BarrierOp) -> Result:
    if machine.log is not None:
        machine.log.barrier()
    return []


# --- computing ---------------------------------------------------------------------------------


def _gemm(machine: BufferMachine, op: compute.GemmOp) -> Result:
    a, b, acc = machine.get([op.a, op.b, op.acc])
    a = a.T if op.transpose_a is not None else a
    b = b.T if op.transpose_b is not None else b
    summed = matmul(a.to(acc.dtype), b.to(acc.dtype))
    acc.copy_(summed if op.clear is not None else acc + summed)
    return []


def _wait_products(machine: BufferMachine, op: WaitProductsOp) -> Result:
    return []


def _everywhere(machine: BufferMachine, op: compute.BufferMapOp | compute.BufferScatterAddOp) -> list[Tensor]:
    """What a region yields at every index of its shape."""
    shape = op.shape
    arguments = [
        value if isinstance(operand.type, tile.GlobalType) else _placed(value, axes, len(shape))
        for operand, value, axes in zip(op.inputs, machine.get(op.inputs), tile.axes_of(op.axes), strict=True)
    ]
    machine.bind(op.body.block, arguments)
    return [value.expand(shape).clone() for value in machine.run_scalars(op.body.block, shape)]


def _placed(value: Tensor, axes: Sequence[int], rank: int) -> Tensor:
    """As `place`; axes in another order are read turned."""
    order = sorted(range(len(axes)), key=lambda n: axes[n])
    return place(value.permute(order), sorted(axes), rank)


def _map(machine: BufferMachine, op: compute.BufferMapOp) -> Result:
    for output, value in zip(machine.get(op.outputs), _everywhere(machine, op), strict=True):
        output.copy_(value)
    return []


def _scatter_add(machine: BufferMachine, op: compute.BufferScatterAddOp) -> Result:
    target = machine.values[op.target]
    value, *places, guard = _everywhere(machine, op)
    tile_memory.check_gather(op.name, target, places, guard)
    target.index_put_(tuple(p[guard].long() for p in places), value[guard].to(target.dtype), accumulate=True)
    return []


def _index(machine: BufferMachine, op: compute.IndexOp) -> Result:
    axis, shape = op.axis.value.data, machine.map_shape
    return [place(torch.arange(shape[axis], dtype=torch.int32), (axis,), len(shape))]


def _keep(machine: BufferMachine, op: compute.KeepOp) -> Result:
    return [machine.values[op.value]]


def _reduce(machine: BufferMachine, op: compute.BufferReduceOp) -> Result:
    machine.values[op.target].copy_(REDUCE[op.kind.data](machine.values[op.source], op.axis.value.data))
    return []


def _scan(machine: BufferMachine, op: compute.BufferScanOp) -> Result:
    sums = scan(op.kind.data, machine.values[op.source], op.axis.value.data, op.reverse is not None)
    machine.values[op.target].copy_(sums)
    return []


def _total(machine: BufferMachine, op: compute.BufferTotalOp) -> Result:
    return [REDUCE[op.kind.data](machine.values[op.source], 0)]


_RULES: dict[type[Operation], Callable[..., Result]] = {
    tile.LaunchOp: _launch,
    memory.BufferAllocOp: _alloc,
    memory.BufferFillOp: _fill,
    memory.CopyInOp: _copy_in,
    memory.CopyOutOp: _copy_out,
    memory.BufferAtomicAddOp: _atomic_add,
    memory.CopyOp: _copy,
    memory.BarrierOp: _barrier,
    SlotOp: _slot,
    compute.GemmOp: _gemm,
    compute.BufferMapOp: _map,
    compute.IndexOp: _index,
    compute.KeepOp: _keep,
    compute.BufferReduceOp: _reduce,
    compute.BufferScanOp: _scan,
    compute.BufferScatterAddOp: _scatter_add,
    compute.BufferTotalOp: _total,
    WaitProductsOp: _wait_products,
}
