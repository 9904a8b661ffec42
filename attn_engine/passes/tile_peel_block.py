"""`tile-peel-block`: one block of keys in front of the last loop over the others."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import i1
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.hopper.edit import Before, yields
from attn_engine.passes.hopper.form import Forward, is_zero, read_forward, step_of


def _slice_ops(loop: scf.ForOp, wanted: list[SSAValue], known: set[SSAValue]) -> list[Operation]:
    """The ops of a loop's body behind `wanted`, in order; values in `known` need none."""
    body, needed, work = loop.body.block, set[Operation](), list(wanted)
    while work:
        value = work.pop()
        owner = value.owner
        if value in known or not isinstance(owner, Operation) or owner.parent is not body or owner in needed:
            continue
        needed.add(owner)
        work.extend(owner.operands)
        work.extend(o for inner in owner.walk() for o in inner.operands)
    return [op for op in body.ops if op in needed]


def _start_at(scope: Before, loop: scf.ForOp, position: SSAValue) -> SSAValue:
    """The first key of the block at a position of a loop."""
    start = step_of(loop.body.block).start
    mapping: dict[SSAValue, SSAValue] = {loop.body.block.args[0]: position}
    for op in _slice_ops(loop, [start], set()):
        scope.add(op.clone(value_mapper=mapping))
    return mapping.get(start, start)


def _skip_first(scope: Before, loops: tuple[scf.ForOp, ...]) -> SSAValue:
    """Moves the first block out of the ranges of the loops; returns its first key (0 if there is no block)."""
    none = scope.add(arith.ConstantOp.from_int_and_width(0, 1), "none").result
    taken: SSAValue = none
    found: list[tuple[SSAValue, SSAValue]] = []
    for loop in loops:
        some = scope.add(arith.CmpiOp(loop.lb, loop.ub, "slt"), "some").result
        found.append((some, _start_at(scope, loop, loop.lb)))
        second = scope.add(arith.AddiOp(loop.lb, loop.step), "second").result
        low = second if taken is none else scope.add(arith.SelectOp(taken, loop.lb, second), "low").result
        taken = some if taken is none else scope.add(arith.OrIOp(taken, some, i1), "taken").result
        loop.operands[0] = low
    if not none.uses:
        Rewriter.erase_op(none.owner)
    start = scope.value(0)
    for some, at in reversed(found):
        start = scope.add(arith.SelectOp(some, at, start), "first").result
    return start


def peel(forward: Forward) -> None:
    """Puts the first block, with the body of the first loop, in front of the last loop."""
    loop, last = forward.loops[0], forward.loops[-1]
    step = step_of(loop.body.block)
    first = _skip_first(Before(loop), forward.loops)
    scope = Before(last)
    mapping: dict[SSAValue, SSAValue] = dict(zip(loop.body.block.args[1:], last.iter_args, strict=True))
    mapping[step.start] = first
    ends = yields(loop.body.block).operands
    for op in _slice_ops(loop, list(ends), {step.start}):
        zero = _zero_times(op, mapping)
        if zero is None:
            scope.add(op.clone(value_mapper=mapping))
        else:
            mapping[op.results[0]] = zero
    last.operands = [last.lb, last.ub, last.step, *(mapping.get(end, end) for end in ends)]


def _zero_times(op: Operation, mapping: dict[SSAValue, SSAValue]) -> SSAValue | None:
    """The zero accumulator, if an op is its product with something: it stays what it is."""
    if not isinstance(op, tile.MapOp) or len(op.outputs) != 1:
        return None
    kinds = [type(o) for o in op.body.block.ops]
    for value, argument in zip(op.inputs, op.body.block.args, strict=True):
        zero = mapping.get(value, value)
        factor = any(use.operation is op.body.block.first_op for use in argument.uses)
        if kinds == [arith.MulfOp, tile.MapYieldOp] and factor and zero.type == op.outputs[0].type and is_zero(zero):
            return zero
    return None


@dataclass(frozen=True)
class TilePeelBlockPass(ModulePass):
    """Takes the first block of keys, whichever loop it belongs to, out of the loops of a forward kernel.

    The block comes after all loops but the last, which usually have nothing left to do: a causal mask cuts one
    block. It runs the body of the first loop, which evaluates the mask and is right for any block; without
    a visible block it runs on masked keys. The last loop can then start the work of a block before the end of the one before.

    ```
    %m1, %acc1 = scf.for %n0 = %lo to %hi step %n iter_args(%m = %m0, %acc = %zero) { masked body }
    %m2, %acc2 = scf.for %n0 = %full_lo to %full_hi step %n iter_args(%m = %m1, %acc = %acc1) { body }
    ```
    becomes
    ```
    %first = arith.select %some, %lo, %full_lo
    %m1, %acc1 = scf.for %n0 = %second to %hi step %n iter_args(%m = %m0, %acc = %zero) { masked body }
    masked body with %n0 = %first, %m = %m1, %acc = %acc1
    %m2, %acc2 = scf.for %n0 = %full_lo to %full_hi step %n iter_args(...) { body }
    ```
    """

    name = "tile-peel-block"

    plan: str = "forward"
    """The plan whose kernel is changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        peel(read_forward(op, self.plan))
