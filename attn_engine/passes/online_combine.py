"""Two partial results of one loop as one: the `combine` regions of `attn.online`.

States are merged in the scale of the merged stabilisers, which is what a step does with a block of keys. What
belongs to the row once (constants, sinks, the row factor) is in the stabilisers and the epilogue, never in a part.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.builder import Builder
from xdsl.dialects.builtin import f32, i64
from xdsl.ir import Attribute, Block, Region, SSAValue
from xdsl.rewriter import InsertPoint

from attn_engine.dialects.attn import CombineYieldOp
from attn_engine.ir.expression import Atom
from attn_engine.ir.separation import Stabiliser
from attn_engine.passes.online_plan import OnlinePlan, State
from attn_engine.passes.online_regions import Rescaling, merged, named, state_name
from attn_engine.passes.online_scalars import Scalars


class CombineBuilder:
    """The region of one loop."""

    def __init__(self, plan: OnlinePlan, level: int, row: Block):
        self.plan = plan
        self.level = level
        self.states = [s for s in plan.states if s.level == level]
        self.finals = [s for s in plan.states if s.level < level]
        captures, count = row.args[5:], len(self.states)
        floats: list[Attribute] = [f32] * (2 * count + len(self.finals))
        self.block = Block(arg_types=[*[i64] * 3, *floats, *(c.type for c in captures)])
        args = self.block.args
        names = [state_name(s) for s in (*self.states, *self.states, *self.finals)]
        named(args, [*(a.name_hint for a in row.args[1:4]), *names, *(c.name_hint for c in captures)])
        end = 3 + len(floats)
        kept = [*row.args[1:4], *captures]
        self.leaves: dict[SSAValue | Atom, SSAValue] = dict(zip(kept, [*args[:3], *args[end:]], strict=True))
        self.builder = Builder(InsertPoint.at_end(self.block))
        self.safe: dict[Atom, SSAValue] = {}
        self.now = self._scalars(self.finals, args[3 + 2 * count : end], safe=True)
        self.parts = [self._part(args[3 + n * count : 3 + (n + 1) * count], args[3 + 2 * count : end]) for n in (0, 1)]

    def _scalars(self, states: Sequence[State], values: Sequence[SSAValue], safe: bool) -> Scalars:
        scalars = Scalars(self.builder, self.plan.forms, self.leaves)
        for state, value in zip(states, values, strict=True):
            if safe and state.detects_dead_rows:
                value = scalars.safe(value, state.kind)
            scalars.define(state.atom, value)
        return scalars

    def _part(self, values: Sequence[SSAValue], finals: Sequence[SSAValue]) -> Rescaling:
        states = [*self.states, *self.finals]
        before = self._scalars(states, [*values, *finals], safe=False)
        old = {s.atom: v for s, v in zip(self.states, values, strict=True)}
        return Rescaling(self.now, before, old, self.safe)

    def build(self) -> Region:
        new = [self._merge(state) for state in self.states]
        factors: list[SSAValue] = []
        if self.level == self.plan.levels - 1:
            stabilisers = self.plan.weight.stabilisers
            self._settle(stabilisers)
            factors = [p.alpha(stabilisers) if stabilisers else self.now.constant(1.0) for p in self.parts]
        self.block.add_op(CombineYieldOp(new, factors))
        return Region(self.block)

    def _merge(self, state: State) -> SSAValue:
        self._settle(state.separation.stabilisers)
        a, b = (part.state(state) for part in self.parts)
        value = merged(self.now, state.kind, a, b)
        value.name_hint = state_name(state)
        self.now.define(state.atom, value)
        return value

    def _settle(self, stabilisers: Sequence[Stabiliser]) -> None:
        for s in stabilisers:
            if s.atom not in self.safe:
                self.safe[s.atom] = self.now.safe(self.now.atom(s.atom), s.kind)
