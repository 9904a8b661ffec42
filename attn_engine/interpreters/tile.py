"""Executable meaning of the tile dialect at the value level: plans and kernels on CPU torch tensors.

`run_plan` runs every program of every launch, one after the other. It is the oracle for passes and
backends: slow, and strict about memory (see `tile_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor
from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, FloatAttr, IntegerAttr, ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_memory import DescribeOp
from attn_engine.dialects.tile_block import LoadBlockOp, SetAsideOp, StoreBlockOp, TakeBackOp
from attn_engine.dialects.tile_flag import AwaitOp, SignalOp
from attn_engine.errors import UnsupportedOpError
from attn_engine.interpreters import tile_block, tile_memory
from attn_engine.interpreters.scalar import SCALAR_OPS, DtypeOf, exact_dtype, oracle_dtypes
from attn_engine.interpreters.tile_memory import Owners, TileAccessError

Argument = Tensor | int | float
Callable_ = TypeVar("Callable_", tile.KernelOp, tile.PlanOp)


def run_plan(module: ModuleOp, name: str, arguments: Sequence[Argument], *, exact: bool = False) -> None:
    """Runs the `tile.plan` @name; outputs are written in place.

    By default every op rounds as its types say. With `exact`, all float arithmetic is float64 and casts do
    not round (float tensors of any dtype are taken), so that what remains is no rounding error.
    """
    plan = find(module, name, tile.PlanOp)
    machine = Machine(module, oracle_dtypes() if exact else exact_dtype)
    machine.bind(
        plan.body.block, [machine.argument(a, b) for a, b in zip(arguments, plan.body.block.args, strict=True)]
    )
    machine.run(plan.body.block)


def find(module: ModuleOp, name: str, kind: type[Callable_]) -> Callable_:
    """The kernel or plan of that name."""
    for op in module.body.block.ops:
        if isinstance(op, kind) and op.sym_name.data == name:
            return op
    raise KeyError(f"no {kind.name} is named @{name}")


class Machine:
    """The state of one run: values, and in a kernel the program's position."""

    def __init__(self, module: ModuleOp, dtype_of: DtypeOf):
        self.module = module
        self.dtype_of = dtype_of
        self.values: dict[SSAValue, Tensor] = {}
        self.program: tuple[int, ...] = ()
        self.program_number = 0
        self.owners = Owners()

    def argument(self, value: Argument, target: SSAValue) -> Tensor:
        dtype = self.dtype_of(tile.element_of(target))
        if not isinstance(target.type, tile.GlobalType):
            return torch.as_tensor(value).to(dtype)
        if not isinstance(value, Tensor) or value.ndim != target.type.rank.data:
            raise TypeError(f"argument {target.name_hint} must be a tensor of rank {target.type.rank.data}")
        if value.dtype != dtype and not (dtype == torch.float64 and value.is_floating_point()):
            raise TypeError(f"argument {target.name_hint} has dtype {value.dtype}, the plan says {target.type}")
        return value

    def bind(self, block: Block, values: Sequence[Tensor]) -> None:
        self.values.update(zip(block.args, values, strict=True))

    def get(self, values: Sequence[SSAValue]) -> list[Tensor]:
        return [self.values[value] for value in values]

    def ints(self, values: Sequence[SSAValue]) -> list[int]:
        return [int(self.values[value]) for value in values]

    def run(self, block: Block) -> list[Tensor]:
        """Runs a block; the operands of its terminator."""
        for op in block.ops:
            if op is block.last_op:
                return self.get(op.operands)
            self.step(op)
        return []

    def step(self, op: Operation) -> None:
        rule = _RULES.get(type(op))
        if rule is not None:
            self.values.update(zip(op.results, rule(self, op), strict=True))
        elif type(op) in SCALAR_OPS:
            self.values[op.results[0]] = SCALAR_OPS[type(op)](op, self.get(op.operands), self.dtype_of)
        else:
            raise UnsupportedOpError(op.name, "tile interpreter")


# --- control and plans -------------------------------------------------------------------------


def _for(machine: Machine, op: scf.ForOp) -> Sequence[Tensor]:
    low, high, step = machine.ints([op.lb, op.ub, op.step])
    index_type = machine.values[op.lb].dtype
    carries = machine.get(op.iter_args)
    for i in range(low, high, step):
        machine.bind(op.body.block, [torch.tensor(i, dtype=index_type), *carries])
        carries = machine.run(op.body.block)
    return carries


def _if(machine: Machine, op: scf.IfOp) -> Sequence[Tensor]:
    region = op.true_region if bool(machine.values[op.cond]) else op.false_region
    return machine.run(region.block) if region.blocks else []


def _launch(machine: Machine, op: tile.LaunchOp) -> Sequence[Tensor]:
    kernel = find(machine.module, op.kernel.root_reference.data, tile.KernelOp)
    arguments = machine.get(op.arguments)
    inner = Machine(machine.module, machine.dtype_of)
    for number, program in enumerate(product(*map(range, machine.ints(op.grid)))):
        inner.values = {}
        inner.program, inner.program_number = program, number
        inner.bind(kernel.body.block, arguments)
        inner.run(kernel.body.block)
    return []


def _dim(machine: Machine, op: tile.DimOp) -> Sequence[Tensor]:
    return [torch.tensor(machine.values[op.source].shape[op.axis.value.data], dtype=torch.int32)]


def _alloc(machine: Machine, op: tile.AllocOp) -> Sequence[Tensor]:
    return [tile_memory.poison(machine.ints(op.sizes), machine.dtype_of(tile.element_of(op.result)))]


def _fill(machine: Machine, op: tile.FillOp) -> Sequence[Tensor]:
    machine.values[op.target].fill_(machine.values[op.value])
    return []


def _program_id(machine: Machine, op: tile.ProgramIdOp) -> Sequence[Tensor]:
    axis = op.axis.value.data
    return [torch.tensor(machine.program[axis] if axis < len(machine.program) else 0, dtype=torch.int32)]


# --- memory ------------------------------------------------------------------------------------


def _load(machine: Machine, op: tile.LoadOp) -> Sequence[Tensor]:
    memory, shape = machine.values[op.source], tile.shape_of(op.result)
    result = torch.zeros(shape, dtype=machine.dtype_of(tile.element_of(op.result)))
    access = tile_memory.window(op, memory, shape, machine.ints(op.indices), machine.ints(op.limits))
    if access is not None:
        result[access.tile] = access.of(memory).to(result.dtype)
    return [result]


def _store(machine: Machine, op: tile.StoreOp) -> Sequence[Tensor]:
    memory, value = machine.values[op.target], machine.values[op.value]
    access = tile_memory.window(op, memory, value.shape, machine.ints(op.indices), machine.ints(op.limits))
    if access is not None:
        machine.owners.claim(op, memory, access, machine.program_number)
        access.of(memory).copy_(value[access.tile])
    return []


def _atomic_add(machine: Machine, op: tile.AtomicAddOp) -> Sequence[Tensor]:
    memory, value = machine.values[op.target], machine.values[op.value]
    access = tile_memory.window(op, memory, value.shape, machine.ints(op.indices), machine.ints(op.limits))
    if access is not None:
        access.of(memory).add_(value[access.tile])
    return []


def _load_diagonals(machine: Machine, op: tile.LoadDiagonalsOp) -> Sequence[Tensor]:
    memory, shape = machine.values[op.source], tile.shape_of(op.result)
    *lead, origin = machine.ints(op.indices)
    starts = machine.ints([op.rows, op.columns])
    rows, columns = (torch.arange(size) + start for size, start in zip(shape, starts, strict=True))
    apart = columns[None, :] - rows[:, None]
    place = origin + (-apart if op.turned is not None else apart)
    placed = [*(torch.full_like(place, index) for index in lead), place]
    tile_memory.check_gather(op.name, memory, placed, torch.ones(shape, dtype=torch.bool))
    return [memory[tuple(placed)]]


def _add_diagonals(machine: Machine, op: tile.AddDiagonalsOp) -> Sequence[Tensor]:
    memory, value = machine.values[op.target], machine.values[op.value]
    *lead, start = machine.ints(op.indices)
    rows, columns = (torch.arange(size) for size in value.shape)
    apart = columns[None, :] - rows[:, None]
    place = start + (-apart if op.turned is not None else apart)
    placed = [*(torch.full_like(place, index) for index in lead), place]
    tile_memory.check_gather(op.name, memory, placed, torch.ones(value.shape, dtype=torch.bool))
    memory.index_put_(tuple(placed), value.to(memory.dtype), accumulate=True)
    return []


def _atomic_max(machine: Machine, op: tile.AtomicMaxOp) -> Sequence[Tensor]:
    memory, value = machine.values[op.target], machine.values[op.value]
    access = tile_memory.window(op, memory, value.shape, machine.ints(op.indices), machine.ints(op.limits))
    assert access is not None
    element = access.of(memory)
    element.copy_(torch.maximum(element, value.to(element.dtype)))
    return []


def _signal(machine: Machine, op: SignalOp) -> Sequence[Tensor]:
    machine.values[op.flags][tuple(machine.ints(op.indices))] = 1
    return []


def _await(machine: Machine, op: AwaitOp) -> Sequence[Tensor]:
    """Programs run one after the other: who has not signalled yet never will."""
    if not bool(machine.values[op.flags][tuple(machine.ints(op.indices))]):
        raise TileAccessError(f"a program waits for one that comes later: {op}")
    return []


def _constant(machine: Machine, op: arith.ConstantOp) -> Sequence[Tensor]:
    if not isinstance(op.value, DenseIntOrFPElementsAttr):
        return [SCALAR_OPS[arith.ConstantOp](op, [], machine.dtype_of)]
    shape, dtype = op.value.get_shape(), machine.dtype_of(tile.element_of(op.result))
    number = tile.splat_of(op.value)
    if isinstance(number, IntegerAttr | FloatAttr):
        return [torch.full(shape, number.value.data, dtype=dtype)]
    return [torch.tensor(op.value.get_values(), dtype=dtype).reshape(shape)]


def _truncf(machine: Machine, op: arith.TruncFOp) -> Sequence[Tensor]:
    """In exact mode nothing is rounded, but what exceeds the range of the type is infinite as ever."""
    value = machine.values[op.input]
    dtype = machine.dtype_of(op.result.type)
    limit = torch.finfo(exact_dtype(op.result.type)).max
    overflows = value.abs() > limit
    return (
        [torch.where(overflows, value.sign() * torch.inf, value).to(dtype)]
        if dtype == value.dtype
        else [value.to(dtype)]
    )


def _gather(machine: Machine, op: tile.GatherOp) -> Sequence[Tensor]:
    memory = machine.values[op.source]
    guard = machine.values[op.guard] if op.guard is not None else torch.tensor(True)
    given = machine.get(op.indices)
    for index in given:
        guard = guard & torch.ones_like(index, dtype=torch.bool)
    indices = [index.expand(guard.shape) for index in given]
    tile_memory.check_gather(op.name, memory, indices, guard)
    safe = [torch.where(guard, index, 0).to(torch.int64) for index in indices]
    dtype = machine.dtype_of(tile.element_of(op.source))
    if not bool(guard.any()):
        return [torch.zeros(guard.shape, dtype=dtype)]
    return [torch.where(guard, memory[tuple(safe)].to(dtype), torch.zeros((), dtype=dtype))]


def _scatter_add(machine: Machine, op: tile.ScatterAddOp) -> Sequence[Tensor]:
    memory, value = machine.values[op.target], machine.values[op.value]
    operands = [*op.indices, *([op.guard] if op.guard is not None else [])]
    placed = [
        place(machine.values[operand], axes, value.ndim).expand(value.shape)
        for operand, axes in zip(operands, tile.axes_of(op.axes), strict=True)
    ]
    guard = placed.pop() if op.guard is not None else torch.ones(value.shape, dtype=torch.bool)
    tile_memory.check_gather(op.name, memory, placed, guard)
    memory.index_put_(tuple(i[guard].long() for i in placed), value[guard].to(memory.dtype), accumulate=True)
    return []


# --- tensors -----------------------------------------------------------------------------------


def place(value: Tensor, axes: Sequence[int], rank: int) -> Tensor:
    """A tile with the named axes, reshaped so that it broadcasts against `rank` axes."""
    shape = [1] * rank
    for axis, size in zip(axes, value.shape, strict=True):
        shape[axis] = size
    return value.reshape(shape)


def _map(machine: Machine, op: tile.MapOp) -> Sequence[Tensor]:
    shape = tile.shape_of(op.outputs[0])
    arguments = [
        value if isinstance(operand.type, tile.GlobalType) else place(value, axes, len(shape))
        for operand, value, axes in zip(op.inputs, machine.get(op.inputs), tile.axes_of(op.axes), strict=True)
    ]
    machine.bind(op.body.block, arguments)
    return [value.expand(shape) for value in machine.run(op.body.block)]


def _range(machine: Machine, op: tile.RangeOp) -> Sequence[Tensor]:
    return [machine.values[op.start] + torch.arange(tile.shape_of(op.result)[0], dtype=torch.int32)]


def _dot(machine: Machine, op: tile.DotOp) -> Sequence[Tensor]:
    a, b, acc = machine.get([op.a, op.b, op.acc])
    return [acc + matmul(a.to(acc.dtype), b.to(acc.dtype))]


MOST_PRODUCTS = 2**15
"""Of numbers in a small product: it holds all of them at once."""


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Small ones are sums in one order, as on devices: the same bits whatever the size of the block around."""
    if a.shape[0] * a.shape[1] * b.shape[1] > MOST_PRODUCTS:
        return a @ b
    # Contiguous: what one element is summed of lies the same way in every block, and so is summed in the same order.
    return (a[:, None, :] * b.mT[None]).contiguous().sum(-1)


REDUCE: dict[tile.Reduction, Callable[[Tensor, int], Tensor]] = {
    tile.Reduction.SUM: lambda value, axis: value.sum(axis, dtype=value.dtype),
    tile.Reduction.MAX: torch.amax,
    tile.Reduction.MIN: torch.amin,
}
_SCAN: dict[tile.Reduction, Callable[[Tensor, int], Tensor]] = {
    tile.Reduction.SUM: lambda value, axis: value.cumsum(axis, dtype=value.dtype),
    tile.Reduction.MAX: lambda value, axis: value.cummax(axis).values,
    tile.Reduction.MIN: lambda value, axis: value.cummin(axis).values,
}


def _reduce(machine: Machine, op: tile.ReduceOp) -> Sequence[Tensor]:
    return [REDUCE[op.kind.data](machine.values[op.value], op.axis.value.data)]


def scan(kind: tile.Reduction, value: Tensor, axis: int, reverse: bool) -> Tensor:
    """Running sums, maxima or minima along an axis; `reverse` from its end."""
    return _SCAN[kind](value.flip(axis), axis).flip(axis) if reverse else _SCAN[kind](value, axis)


def _scan(machine: Machine, op: tile.ScanOp) -> Sequence[Tensor]:
    return [scan(op.kind.data, machine.values[op.value], op.axis.value.data, op.reverse is not None)]


def _slice(machine: Machine, op: tile.SliceOp) -> Sequence[Tensor]:
    axis = op.axis.value.data
    return [machine.values[op.value].narrow(axis, op.start.value.data, tile.shape_of(op.result)[axis])]


def _transpose(machine: Machine, op: tile.TransposeOp) -> Sequence[Tensor]:
    return [machine.values[op.value].T]


def _concat(machine: Machine, op: tile.ConcatOp) -> Sequence[Tensor]:
    return [torch.cat(machine.get(op.values), op.axis.value.data)]


_RULES: dict[type[Operation], Callable[..., Sequence[Tensor]]] = {
    scf.ForOp: _for,
    scf.IfOp: _if,
    arith.ConstantOp: _constant,
    arith.TruncFOp: _truncf,
    tile.LaunchOp: _launch,
    tile.DimOp: _dim,
    tile.AllocOp: _alloc,
    tile.FillOp: _fill,
    tile.ProgramIdOp: _program_id,
    tile.LoadOp: _load,
    tile.StoreOp: _store,
    DescribeOp: tile_block.describe,
    SignalOp: _signal,
    AwaitOp: _await,
    LoadBlockOp: tile_block.load_block,
    StoreBlockOp: tile_block.store_block,
    SetAsideOp: tile_block.set_aside,
    TakeBackOp: tile_block.take_back,
    tile.AtomicAddOp: _atomic_add,
    tile.AddDiagonalsOp: _add_diagonals,
    tile.LoadDiagonalsOp: _load_diagonals,
    tile.AtomicMaxOp: _atomic_max,
    tile.GatherOp: _gather,
    tile.ScatterAddOp: _scatter_add,
    tile.MapOp: _map,
    tile.RangeOp: _range,
    tile.DotOp: _dot,
    tile.ReduceOp: _reduce,
    tile.ScanOp: _scan,
    tile.TransposeOp: _transpose,
    tile.SliceOp: _slice,
    tile.ConcatOp: _concat,
}
