"""`tile-fix-sums`: what programs add to memory is added in fixed point, so that no order of theirs changes a bit."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from xdsl.context import Context
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, TensorType, f32, i64
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.passes import ModulePass

from attn_engine.dialects import tile
from attn_engine.dialects.tile_block import SetAsideOp, StoreBlockOp
from attn_engine.errors import PassError
from attn_engine.passes.lowering.scope import Scope
from attn_engine.passes.meeting_programs import Add, meetings

NAME = "tile-fix-sums"
BITS = 61.0
"""Of a sum: one less than a signed integer of 64 bits has, for what logarithms are off by."""
LARGEST_STEP = 100.0
"""Steps from 2^-100 to 2^100 are normal numbers, and so are their reciprocals."""
SMALLEST_PEAK = 1e-30
LARGEST = 3.4028234e38
"""What exceeds it is infinite or no number."""
MOST_CHANNELS = 256
BLOCK = 128
_OLE = 5


@dataclass
class FixedSum:
    """One gradient that one kernel adds to: its adds, and in the plan the sums, the largest contribution, the count."""

    target: SSAValue
    """The argument of the kernel."""
    memory: SSAValue
    """What the plan passes for it."""
    adds: list[Add]
    count: SSAValue = field(init=False)
    peak: SSAValue = field(init=False)
    sums: SSAValue = field(init=False)

    @property
    def rank(self) -> int:
        return rank_of(self.memory)


def rank_of(memory: SSAValue) -> int:
    assert isinstance(memory.type, tile.GlobalType)
    return memory.type.rank.data


class Plan:
    """The host side around one launch."""

    def __init__(self, plan: tile.PlanOp, launch: tile.LaunchOp):
        self.plan, self.launch = plan, launch
        self.before, self.after = Scope(Block()), Scope(Block())
        self.named = {a.name_hint: a for a in plan.body.block.args}

    def prepare(self, found: FixedSum) -> None:
        scope = self.before
        found.count = folded(scope, arith.AddfOp, [self._times(add) for add in found.adds])
        found.peak = scope.add(tile.AllocOp([scope.value(1)], tile.GlobalType(1, f32)), "peak").result
        scope.add(tile.FillOp(found.peak, scope.real(0.0)))
        sizes = self.sizes(scope, found)
        found.sums = scope.add(tile.AllocOp(sizes, tile.GlobalType(found.rank, i64)), "sums").result
        scope.add(tile.FillOp(found.sums, scope.widen(0, "zero")))

    def _times(self, add: Add) -> SSAValue:
        """At most so many contributions of an add meet in one place."""
        axes = meetings(add)
        sizes = [self.launch.grid[axis] for axis in axes] if axes is not None else self._all()
        scope = self.before
        factors = [scope.add(arith.SIToFPOp(size, f32), "n").result for size in sizes]
        return folded(scope, arith.MulfOp, [scope.real(1.0), *factors])

    def _all(self) -> list[SSAValue]:
        """Of the scores, and of the elements of every operand, there are no more than the product of these."""
        q, k, scope = self.named["q"], self.named["k"], self.before
        b, h, sq = (scope.add(tile.DimOp(q, axis), "n").result for axis in range(3))
        skv = scope.add(tile.DimOp(k, 2), "n").result
        return [b, h, *(scope.value(scope.plus(n, MOST_CHANNELS)) for n in (sq, skv))]

    def sizes(self, scope: Scope, found: FixedSum) -> list[SSAValue]:
        return [scope.add(tile.DimOp(found.memory, axis), "n").result for axis in range(found.rank)]

    def finish(self) -> None:
        """The launch between what comes before and after it."""
        block = self.plan.body.block
        block.insert_ops_before(_detached(self.before.block), self.launch)
        block.insert_ops_after(_detached(self.after.block), self.launch)


def _detached(block: Block) -> list[Operation]:
    ops = list(block.ops)
    for op in ops:
        op.detach()
    return ops


def _argument(kernel: tile.KernelOp, like: SSAValue, hint: str) -> SSAValue:
    block = kernel.body.block
    arg = block.insert_arg(like.type, len(block.args))
    arg.name_hint = hint
    return arg


def exponent(scope: Scope, peak: SSAValue, count: SSAValue) -> SSAValue:
    """Of two in the number of steps in 1: `count` contributions as large as the peak stay below 2^61 steps."""
    found = scope.add(tile.LoadOp(peak, [scope.value(0)], [], f32), "peak").result
    found = scope.add(arith.MaximumfOp(found, scope.real(SMALLEST_PEAK))).result
    size = folded(scope, arith.AddfOp, [scope.add(math.Log2Op(x)).result for x in (found, count)])
    whole = scope.add(math.FloorOp(scope.add(arith.SubfOp(scope.real(BITS), size)).result)).result
    below = scope.add(arith.MinimumfOp(whole, scope.real(LARGEST_STEP))).result
    return scope.add(arith.MaximumfOp(below, scope.real(-LARGEST_STEP)), "exponent").result


def folded(scope: Scope, kind: type[Operation], values: Sequence[SSAValue]) -> SSAValue:
    """The sum or product of scalars."""
    found = values[0]
    for value in values[1:]:
        found = scope.add(kind(found, value), "n").results[0]  # type: ignore[call-arg]
    return found


def power(scope: Scope, value: SSAValue) -> SSAValue:
    return scope.add(math.Exp2Op(value), "steps").result


def to_steps(scope: Scope, value: SSAValue, steps: SSAValue) -> SSAValue:
    """A scalar in steps, as an integer; 0 for what is not finite, which the peak tells of."""
    scaled = scope.add(math.RoundEvenOp(scope.add(arith.MulfOp(value, steps)).result)).result
    kept = scope.add(arith.SelectOp(is_finite(scope, value), scaled, scope.real(0.0))).result
    return scope.add(arith.FPToSIOp(kept, i64), "d").result


def is_finite(scope: Scope, value: SSAValue) -> SSAValue:
    size = scope.add(math.AbsFOp(value)).result
    return scope.add(arith.CmpfOp(size, scope.real(LARGEST), _OLE)).result


def magnitude(scope: Scope, value: SSAValue) -> SSAValue:
    """|x|, infinite for what is no number."""
    endless = scope.real(float("inf"))
    return scope.add(
        arith.SelectOp(is_finite(scope, value), scope.add(math.AbsFOp(value)).result, endless), "size"
    ).result


def over(
    scope: Scope, inputs: Sequence[SSAValue], axes: Sequence[Sequence[int]], inner: Scope, result: SSAValue
) -> SSAValue:
    """The map whose region is `inner`, for a tile of the shape of the first input."""
    inner.block.add_op(tile.MapYieldOp(result))
    type_ = TensorType(result.type, tile.shape_of(inputs[0]))
    return scope.add(tile.MapOp(inputs, axes, [type_], inner.block), result.name_hint or "d").outputs[0]


class Kernels:
    """The kernel, rewritten, and those beside it."""

    def __init__(self, kernel: tile.KernelOp, launch: tile.LaunchOp, sums: list[FixedSum], plan: Plan):
        self.kernel, self.launch, self.sums, self.plan = kernel, launch, sums, plan
        self.name = kernel.sym_name.data

    def run(self) -> list[tile.KernelOp]:
        """New kernels, launched by the plan."""
        peaks = self._peaks()
        self._fix()
        return [peaks, *(self._result(n, found) for n, found in enumerate(self.sums))]

    def _peaks(self) -> tile.KernelOp:
        """The same kernel, but that it finds the largest contributions and stores nothing else."""
        kernel = self.kernel.clone()
        copies = dict(zip(self.kernel.walk(), kernel.walk(), strict=True))
        kernel.sym_name = kernel.sym_name.__class__(f"{self.name}_peaks")
        for found in self.sums:
            peak = _argument(kernel, found.peak, "peak")
            for add in found.adds:
                _raise_peak(copies[add.op], peak)
        writes = (tile.StoreOp, StoreBlockOp, SetAsideOp, tile.AtomicAddOp, tile.ScatterAddOp)
        for op in [o for o in kernel.walk() if isinstance(o, writes)]:
            op.detach()
            op.erase()
        arguments = [*self.launch.arguments, *(found.peak for found in self.sums)]
        self.plan.before.add(tile.LaunchOp(f"{self.name}_peaks", list(self.launch.grid), arguments))
        return kernel

    def _fix(self) -> None:
        """Adds integers in place of floats."""
        block = self.kernel.body.block
        first = block.first_op
        assert first is not None
        arguments = list(self.launch.arguments)
        for found in self.sums:
            own = Scope(Block())
            peak, count = _argument(self.kernel, found.peak, "peak"), _argument(self.kernel, found.count, "count")
            sums = _argument(self.kernel, found.sums, "sums")
            arguments += [found.peak, found.count, found.sums]
            steps = power(own, exponent(own, peak, count))
            block.insert_ops_before(_detached(own.block), first)
            for add in found.adds:
                _add_steps(add.op, steps, sums)
        launch = tile.LaunchOp(self.name, list(self.launch.grid), arguments)
        parent = self.launch.parent
        assert parent is not None
        parent.insert_op_before(launch, self.launch)
        self.launch.detach()
        self.launch.erase()
        self.plan.launch = launch

    def _result(self, number: int, found: FixedSum) -> tile.KernelOp:
        """Adds the sums, as floats again, to the gradient: one program for each run of its last axis."""
        name, plan = f"{self.name}_sum{number}", self.plan.after
        sizes = self.plan.sizes(plan, found)
        arguments = [found.memory, found.sums, found.peak, found.count, *sizes]
        kernel = Scope(Block(arg_types=[a.type for a in arguments]))
        for arg, hint in zip(kernel.block.args, ("d", "sums", "peak", "count", *["n"] * len(sizes)), strict=True):
            arg.name_hint = hint
        memory, sums, peak, count, *lengths = kernel.block.args
        power_of_two = exponent(kernel, peak, count)
        step = power(kernel, kernel.add(arith.NegfOp(power_of_two)).result)
        largest = kernel.add(tile.LoadOp(peak, [kernel.value(0)], [], f32)).result
        nothing = kernel.real(float("nan"))
        step = kernel.add(arith.SelectOp(is_finite(kernel, largest), step, nothing), "step").result
        _add_result(kernel, memory, sums, step, lengths)
        kernel.add(tile.EndOp())
        plan.add(tile.LaunchOp(name, _grid(plan, sizes), arguments))
        attributes: dict[str, Attribute] = {"num_warps": IntegerAttr(4, i64), "num_stages": IntegerAttr(1, i64)}
        return tile.KernelOp(name, kernel.block, attributes)


def _grid(scope: Scope, sizes: Sequence[SSAValue]) -> list[SSAValue]:
    """Of all axes but the last, then of blocks of the last."""
    if not sizes:
        return [scope.value(1)]
    rows = folded(scope, arith.MuliOp, [scope.value(1), *sizes[:-1]])
    return [rows, scope.add(arith.CeilDivSIOp(sizes[-1], scope.value(BLOCK)), "blocks").result]


def _add_result(scope: Scope, memory: SSAValue, sums: SSAValue, step: SSAValue, sizes: Sequence[SSAValue]) -> None:
    row, place = scope.add(tile.ProgramIdOp(0), "row").result, list[SSAValue]()
    for size in reversed(sizes[:-1]):
        place.insert(0, scope.add(arith.RemSIOp(row, size), "i").result)
        row = scope.add(arith.DivSIOp(row, size), "row").result
    types: list[Attribute] = [f32, i64]
    dims, limits = list[int](), dict[int, SSAValue]()
    if sizes:
        start = scope.add(arith.MuliOp(scope.add(tile.ProgramIdOp(1), "i").result, scope.value(BLOCK)), "start").result
        place, dims, limits = [*place, start], [len(sizes) - 1], {0: sizes[-1]}
        types = [TensorType(type_, [BLOCK]) for type_ in types]
    old, found = (
        scope.add(tile.LoadOp(source, place, dims, type_, limits), hint).result
        for source, type_, hint in ((memory, types[0], "d"), (sums, types[1], "sum"))
    )
    inputs = [old, found, step]
    inner = Scope(Block(arg_types=[f32, i64, f32])) if sizes else scope
    before, total, factor = inner.block.args if sizes else inputs
    change = inner.add(arith.MulfOp(inner.add(arith.SIToFPOp(total, f32)).result, factor)).result
    new = inner.add(arith.AddfOp(before, change), "d").result
    if sizes:
        new = over(scope, inputs, [[0], [0], []], inner, new)
    scope.add(tile.StoreOp(new, memory, place, dims, limits))


def _add_steps(op: tile.AtomicAddOp | tile.ScatterAddOp, steps: SSAValue, sums: SSAValue) -> None:
    scope, rank = Scope(Block()), len(tile.shape_of(op.value))
    if rank:
        inner = Scope(Block(arg_types=[f32, f32]))
        inputs, axes = [op.value, steps], [list(range(rank)), []]
        value = over(scope, inputs, axes, inner, to_steps(inner, *inner.block.args))
    else:
        value = to_steps(scope, op.value, steps)
    if isinstance(op, tile.ScatterAddOp):
        scope.add(tile.ScatterAddOp(value, sums, list(op.indices), op.guard, tile.axes_of(op.axes)))
    else:
        scope.add(tile.AtomicAddOp(value, sums, list(op.indices), []))
    _replace(op, scope)


def _raise_peak(op: Operation, peak: SSAValue) -> None:
    assert isinstance(op, tile.AtomicAddOp | tile.ScatterAddOp)
    scope, rank = Scope(Block()), len(tile.shape_of(op.value))
    guard = op.guard if isinstance(op, tile.ScatterAddOp) else None
    inputs = [op.value, *([guard] if guard is not None else [])]
    inner = Scope(Block(arg_types=[tile.element_of(i) for i in inputs])) if rank else scope
    value, *guards = inner.block.args if rank else inputs
    size = magnitude(inner, value)
    for inside in guards:
        size = inner.add(arith.SelectOp(inside, size, inner.real(0.0)), "size").result
    if rank:
        axes = [list(range(rank))]
        if guard is not None and isinstance(op, tile.ScatterAddOp):
            axes.append(list(tile.axes_of(op.axes)[-1]))
        size = over(scope, inputs, axes, inner, size)
    for axis in reversed(range(rank)):
        size = scope.add(tile.ReduceOp(tile.Reduction.MAX, size, axis), "size").result
    scope.add(tile.AtomicMaxOp(size, peak, [scope.value(0)], []))
    _replace(op, scope)


def _replace(op: Operation, scope: Scope) -> None:
    block = op.parent
    assert block is not None
    block.insert_ops_before(_detached(scope.block), op)
    op.detach()
    op.erase()


def sums_of(kernel: tile.KernelOp, launch: tile.LaunchOp, used: Container[SSAValue] = ()) -> list[FixedSum]:
    """What a kernel adds to in an order that may change its bits; `used` is what earlier launches may have added to."""
    found: dict[SSAValue, list[Add]] = {}
    for op in kernel.walk():
        if isinstance(op, tile.AddDiagonalsOp):
            raise PassError(NAME, f"@{kernel.sym_name.data} adds along diagonals: convert without `diagonals`")
        if isinstance(op, tile.AtomicAddOp | tile.ScatterAddOp) and tile.element_of(op.value) == f32:
            if isinstance(op, tile.AtomicAddOp) and tile.ints_of(op.dims):
                raise PassError(NAME, f"@{kernel.sym_name.data} adds whole tiles: convert with `single`")
            found.setdefault(op.target, []).append(Add(op, kernel))
    arguments: dict[SSAValue, SSAValue] = dict(zip(kernel.body.block.args, launch.arguments, strict=True))
    sums = [FixedSum(target, arguments[target], adds) for target, adds in found.items()]
    return [s for s in sums if not _commute(s.adds, 1 if s.memory in used else 2)]


def _commute(adds: Sequence[Add], most: int) -> bool:
    """Whether at most two numbers are added to 0 in each place, or one to any number: a sum of two has no order."""
    return len(adds) <= most and all(meetings(add) == () for add in adds)


@dataclass(frozen=True)
class TileFixSumsPass(ModulePass):
    """Makes what programs add to memory the same, bit for bit, in whatever order they come.

    A copy of the kernel finds the largest contribution first. From it and from how many can meet in one place follows
    a step, a power of two, in which contributions are whole numbers; sums of integers have no order. A last kernel adds
    them to the gradient, as floats again. Where no more than two contributions meet, those of earlier launches counted
    as one, floats are added as before. A contribution that is not finite makes all of its gradient NaN.

    ```
    tile.launch @backward_dq grid(...) args(..., %d_table)
    ```
    becomes
    ```
    tile.launch @backward_dq_peaks grid(...) args(..., %d_table, %peak)
    tile.launch @backward_dq grid(...) args(..., %d_table, %peak, %count, %sums)
    tile.launch @backward_dq_sum0 grid(...) args(%d_table, %sums, %peak, %count, ...)
    ```
    """

    name = NAME

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        kernels = {o.sym_name.data: o for o in op.body.block.ops if isinstance(o, tile.KernelOp)}
        for plan in [o for o in op.body.block.ops if isinstance(o, tile.PlanOp)]:
            used = set[SSAValue]()
            for launch in [o for o in plan.body.block.ops if isinstance(o, tile.LaunchOp)]:
                arguments = set(launch.arguments)
                _fix_launch(plan, launch, kernels[launch.kernel.root_reference.data], used)
                used |= arguments


def _fix_launch(plan: tile.PlanOp, launch: tile.LaunchOp, kernel: tile.KernelOp, used: Container[SSAValue]) -> None:
    sums, host = sums_of(kernel, launch, used), Plan(plan, launch)
    if not sums:
        return
    for found in sums:
        host.prepare(found)
    made = Kernels(kernel, launch, sums, host).run()
    host.finish()
    parent = plan.parent
    assert parent is not None
    parent.insert_ops_before(made, plan)
