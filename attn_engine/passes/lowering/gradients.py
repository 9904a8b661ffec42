"""Gradients of captures: who owns a contribution, and how it leaves a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, i64
from xdsl.ir import Block, BlockArgument, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.ir.walks import behind
from attn_engine.passes.lowering.frame import Frame, spread
from attn_engine.passes.lowering.partition import Partition
from attn_engine.passes.lowering.program import Bound, Contribution, Program
from attn_engine.passes.lowering.scope import Scope

ELEMENT_INDICES = ("b", "h", "q", "kv")


def _axes(values: Sequence[SSAValue]) -> frozenset[str]:
    """Which of b, h, q and kv indices of the element region depend on."""
    arguments = [v for v in behind(values) if isinstance(v, BlockArgument)]
    return frozenset[str]().union(*map(_axes_of_argument, arguments))


def _axes_of_argument(value: BlockArgument) -> frozenset[str]:
    if value.type == i64:
        return frozenset({ELEMENT_INDICES[value.index - 2]})
    return frozenset() if isinstance(value.type, TensorType) else frozenset(ELEMENT_INDICES)


def capture_axes(op: attn.BackwardOp) -> list[frozenset[str]]:
    """For each contribution of the element region, in order, the axes that its index depends on."""
    block = op.element.block
    adds = [o for o in block.ops if isinstance(o, attn.AccumulateGradOp)]
    return [_axes(add.indices) for add in adds]


def summed(program: Program, contribution: Contribution) -> SSAValue:
    """A contribution summed over the axis that the program's reductions run over."""
    return program.add(attn.RowReduceOp(attn.ReduceKind.SUM, contribution.value), "d")


def counted(frame: Frame, program: Program, value: SSAValue, index: SSAValue, limit: SSAValue) -> SSAValue:
    """The value where an index is in range, else 0: the rows of a tile's tail contribute nothing."""
    if frame.operands.whole:
        return value
    return program.add(arith.SelectOp(program.below(index, Bound(limit)), value, program.real(0.0)), "d")


def in_range(frame: Frame, scope: Scope, value: Bound, index: Bound, limit: SSAValue) -> SSAValue:
    """A vector of sums with those of rows beyond the end set to 0."""
    program = Program()
    result = counted(frame, program, program.argument(value, "d"), program.index(index, "i"), limit)
    return frame.run(program, scope, [result])[0].value


@dataclass(frozen=True)
class Target:
    """Where a contribution goes: the gradient and the bound places in it."""

    name: str
    places: Sequence[Bound]
    inside: Bound | None


def flush(frame: Frame, scope: Scope, target: Target, value: Bound, shape: Sequence[int]) -> None:
    """Adds `value` to a gradient, atomically, summed over the tile axes that its place does not depend on."""
    kept = tuple(sorted({a for p in target.places for a in p.axes}))
    axes = tuple(sorted({*value.axes, *kept}))
    tensor = spread(scope, value, shape, axes) if axes else value.value
    for axis in sorted(set(axes) - set(kept), reverse=True):
        tensor = scope.add(tile.ReduceOp(tile.Reduction.SUM, tensor, axes.index(axis)), "d").result
        axes = tuple(a for a in axes if a != axis)
    places, memory = [p.value for p in target.places], frame.take(target.name)
    if axes:
        operands = [*target.places, *([target.inside] if target.inside is not None else [])]
        relative = [[axes.index(a) for a in o.axes] for o in operands]
        guard = target.inside.value if target.inside is not None else None
        scope.add(tile.ScatterAddOp(tensor, memory, places, guard, relative))
        return
    if target.inside is not None:
        tensor, places = _guarded(scope, target.inside, tensor, places)
    scope.add(tile.AtomicAddOp(tensor, memory, places, []))


def _guarded(scope: Scope, inside: Bound, value: SSAValue, places: list[SSAValue]) -> tuple[SSAValue, list[SSAValue]]:
    """For a single element: outside, nothing is added, at place 0."""
    program = Program()
    guard, element = program.argument(inside, "inside"), program.argument(Bound(value), "d")
    zero = program.add(arith.ConstantOp.from_int_and_width(0, 64), "zero")
    wanted = [program.add(arith.SelectOp(guard, element, program.real(0.0)), "d")]
    wanted += [program.add(arith.SelectOp(guard, program.argument(Bound(p), "at"), zero), "at") for p in places]
    found = Partition(program, scope, (), -1).run(wanted)
    return found[0].value, [f.value for f in found[1:]]


def places_of(
    frame: Frame, scope: Scope, region: Block, program: Program, arguments: Sequence[SSAValue], number: int
) -> Target:
    """The target of contribution `number` of a region, evaluated outside the loop that computes its value."""
    program.inline(region, arguments)
    contribution = program.contributions[number]
    return target_of(frame, scope, program, contribution)


def target_of(frame: Frame, scope: Scope, program: Program, contribution: Contribution) -> Target:
    wanted = [*contribution.places, *([contribution.inside] if contribution.inside is not None else [])]
    found = frame.run(program, scope, wanted)
    inside = found[-1] if contribution.inside is not None else None
    name = f"d_{frame.operands.capture_names[contribution.capture]}"
    return Target(name, found[: len(contribution.places)], inside)
