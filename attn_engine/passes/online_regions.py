"""The regions of `attn.online` from a plan: one per loop, and the epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from xdsl.builder import Builder
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32, i64
from xdsl.ir import Attribute, Block, Region, SSAValue
from xdsl.rewriter import InsertPoint

from attn_engine.dialects.attn import EpilogueYieldOp, ReduceKind, RowReduceOp, StepYieldOp
from attn_engine.ir.autodiff.graph import IDENTITY
from attn_engine.ir.expression import Atom, atoms_of
from attn_engine.ir.separation import Stabiliser
from attn_engine.ir.value_range import atom_range
from attn_engine.passes.online_plan import OnlinePlan, State
from attn_engine.passes.online_scalars import DEAD, Scalars


def named(args: Sequence[SSAValue], names: Sequence[str | None]) -> None:
    for argument, name in zip(args, names, strict=True):
        argument.name_hint = name


@dataclass
class Rescaling:
    """Brings states from the scale of old stabilisers (`before`) to that of the new ones (`now`, made `safe`)."""

    now: Scalars
    before: Scalars
    old: Mapping[Atom, SSAValue]
    safe: Mapping[Atom, SSAValue]
    alphas: dict[tuple[Stabiliser, ...], SSAValue] = field(default_factory=dict[tuple[Stabiliser, ...], SSAValue])

    def state(self, state: State) -> SSAValue:
        """The old value of a state in the new scale."""
        old = self.old[state.atom]
        if not state.separation.stabilisers:
            return old
        scaled = self.now.mul(old, self.alpha(state.separation.stabilisers))
        identity = IDENTITY[state.kind]
        return self.now.unless(old, identity, scaled, old) if identity else scaled

    def alpha(self, stabilisers: tuple[Stabiliser, ...]) -> SSAValue:
        """exp(sum c * (old - new)): from the scale of the old stabilisers to that of the new ones."""
        if stabilisers not in self.alphas:
            exponents = [self._exponent(s) for s in stabilisers]
            alpha = self.now.exp(reduce(self.now.add, exponents))
            for s in stabilisers:
                if not s.monotone:
                    alpha = self.now.unless(self.before.atom(s.atom), DEAD[s.kind], alpha, self.now.constant(0.0))
            alpha.name_hint = "alpha"
            self.alphas[stabilisers] = alpha
        return self.alphas[stabilisers]

    def _exponent(self, s: Stabiliser) -> SSAValue:
        return self.now.times(s.coefficient, self.now.sub(self.before.atom(s.atom), self.safe[s.atom]))


def merged(scalars: Scalars, kind: ReduceKind, a: SSAValue, b: SSAValue) -> SSAValue:
    """One reduction of two."""
    match kind:
        case ReduceKind.MAX:
            return scalars.insert(arith.MaximumfOp(a, b))
        case ReduceKind.MIN:
            return scalars.insert(arith.MinimumfOp(a, b))
        case _:
            return scalars.add(a, b)


class StepBuilder:
    """One loop: the new value of every state of its level, and in the last loop the weight."""

    def __init__(self, plan: OnlinePlan, level: int, row: Block):
        self.plan = plan
        self.level = level
        self.score = row.args[0]
        self.states = [s for s in plan.states if s.level == level]
        self.finals = [s for s in plan.states if s.level < level]
        captures = row.args[5:]
        floats: list[Attribute] = [f32] * (len(self.states) + len(self.finals))
        self.block = Block(arg_types=[f32, *[i64] * 4, *floats, *(c.type for c in captures)])
        args = self.block.args
        first, last = 5 + len(self.states), 5 + len(floats)
        self.old = {s.atom: a for s, a in zip(self.states, args[5:first], strict=True)}
        names = [*(a.name_hint for a in row.args[:5]), *(state_name(s) for s in (*self.states, *self.finals))]
        named(args, [*names, *(c.name_hint for c in captures)])
        leaves: dict[SSAValue | Atom, SSAValue] = dict(zip(row.args, [*args[:5], *args[last:]], strict=True))
        builder = Builder(InsertPoint.at_end(self.block))
        self.before = Scalars(builder, plan.forms, {**leaves, **self.old})
        self.now = Scalars(builder, plan.forms, leaves)
        for scalars in (self.before, self.now):
            self._define_finals(scalars, args[first:last])
        self.safe: dict[Atom, SSAValue] = {}
        self.rescaling = Rescaling(self.now, self.before, self.old, self.safe)

    def _define_finals(self, scalars: Scalars, values: Sequence[SSAValue]) -> None:
        for state, value in zip(self.finals, values, strict=True):
            if scalars is self.now and state.detects_dead_rows:
                value = scalars.safe(value, state.kind)
            scalars.define(state.atom, value)

    def build(self) -> Region:
        new = [self._update(state) for state in self.states]
        if self.level == self.plan.levels - 1:
            separation = self.plan.weight
            self._settle(separation.stabilisers)
            weight = self._guarded(self.now.weight(separation, self.safe))
            rescale = self.rescaling.alpha(separation.stabilisers) if separation.stabilisers else None
            self.block.add_op(StepYieldOp(new, rescale, weight))
        else:
            self.block.add_op(StepYieldOp(new))
        return Region(self.block)

    def _update(self, state: State) -> SSAValue:
        separation, scalars = state.separation, self.now
        self._settle(separation.stabilisers)
        element = scalars.weight(separation, self.safe)
        if state.kind is ReduceKind.COUNT:
            element = self.block.args[0]
        block = scalars.insert(RowReduceOp(state.kind, element))
        value = merged(scalars, state.kind, self.rescaling.state(state), block)
        value.name_hint = state_name(state)
        scalars.define(state.atom, value)
        return value

    def _settle(self, stabilisers: Sequence[Stabiliser]) -> None:
        """The stabilisers of this block, made safe to subtract."""
        for s in stabilisers:
            if s.atom not in self.safe:
                self.safe[s.atom] = self.now.safe(self.now.atom(s.atom), s.kind)

    def _guarded(self, weight: SSAValue) -> SSAValue:
        """The weight, 0 in a row that is dead so far, where the formula may give more than that."""
        if self._always_finite():
            return weight
        for state in self.plan.states:
            if not state.detects_dead_rows:
                continue
            dead = DEAD[state.kind]
            zero = self.now.constant(0.0)
            if state.level < self.level or self._stabilised_by(state):
                value = self.before.atom(state.atom) if state.level < self.level else self.now.atom(state.atom)
                weight = self.now.unless(value, dead, weight, zero)
            else:
                weight = self._finite_while_dead(weight, self.now.atom(state.atom), dead)
        return weight

    def _stabilised_by(self, state: State) -> bool:
        return any(s.atom == state.atom for s in self.plan.weight.stabilisers)

    def _always_finite(self) -> bool:
        """Whether every weight is finite: a stabilised exponential times factors that no score makes infinite."""
        weight = self.plan.weight
        if not weight.stabilisers or not weight.tight or not all(s.monotone for s in weight.stabilisers):
            return False
        factors = [f for p, _ in weight.element.terms for f in p.factors if f[0].on_kv]
        return all((_magnitude(a) < 1e30 and p > 0) or not self._reads_score(a) for a, p in factors)

    def _reads_score(self, atom: Atom) -> bool:
        if atom.value is not None:
            return atom.value == self.score
        return any(self._reads_score(a) for arg in atom.args for a in atoms_of(arg))

    def _finite_while_dead(self, weight: SSAValue, value: SSAValue, dead: float) -> SSAValue:
        """Drops infinite weights while only infinite elements were seen.

        In a row that stays dead they must not reach the accumulator. In a row that comes to life the formula
        gives an infinite or undefined result: the one case in which this gives a finite one instead.
        """
        size = self.now.insert(math.AbsFOp(weight))
        infinite = self.now.insert(arith.CmpfOp(size, self.now.constant(float("inf")), "ult"))
        kept = self.now.select(infinite, weight, self.now.constant(0.0))
        return self.now.unless(value, dead, weight, kept)


def _magnitude(atom: Atom) -> float:
    """The largest absolute value of an atom."""
    bounds = atom_range(atom)
    return max(abs(bounds.low), abs(bounds.high))


def state_name(state: State) -> str | None:
    operation = state.atom.operation
    return operation.results[0].name_hint if operation is not None else None


def build_epilogue(plan: OnlinePlan, row: Block, outputs: int) -> Region:
    """The row factor, and the row results, from the final states."""
    captures = row.args[5:]
    block = Block(arg_types=[*[i64] * 3, *[f32] * len(plan.states), *(c.type for c in captures)])
    args, count = block.args, 3 + len(plan.states)
    named(
        args, [*(a.name_hint for a in row.args[1:4]), *map(state_name, plan.states), *(c.name_hint for c in captures)]
    )
    kept = [*row.args[1:4], *captures]
    leaves: dict[SSAValue | Atom, SSAValue] = dict(zip(kept, [*args[:3], *args[count:]], strict=True))
    leaves |= {s.atom: a for s, a in zip(plan.states, args[3:count], strict=True)}
    scalars = Scalars(Builder(InsertPoint.at_end(block)), plan.forms, leaves)
    scale, values = scalars.sum(plan.weight.row), [scalars.written(o) for o in plan.outputs]
    for state in plan.dead_row_states:
        dead = scalars.equals(leaves[state.atom], IDENTITY[state.kind])
        scale = scalars.select(dead, scalars.constant(0.0), scale)
        values = [scalars.select(dead, scalars.constant(float("-inf")), v) for v in values]
    block.add_op(EpilogueYieldOp(scale, values[:outputs], values[outputs:]))
    return Region(block)
