"""States kept every so many tokens, and what they come to with their gradients: where sums of gradients start anew."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith, scf
from xdsl.ir import Block, SSAValue

from attn_engine.dialects import tile
from attn_engine.errors import RecurrenceFormError
from attn_engine.passes.lowering.recurrence.chunks import slot_of
from attn_engine.passes.lowering.recurrence.setting import State, View, rank_of
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.scope import Scope


@dataclass(frozen=True)
class Visitor:
    """A program of a sweep: tokens per chunk, its part of the state, and what its state still lacks."""

    chunk: int
    reverse: bool
    state: State
    split: SSAValue
    v0: SSAValue
    scale: SSAValue | None


@dataclass(frozen=True)
class Anchors:
    """Values of the plan: `states` [B, H, slots, K, V], written forward and read backwards, and then `ends`.

    `ends` are [splits, B, H, slots], or with a log decay per channel [1, B, H, slots, V].
    """

    segment: int
    states: SSAValue
    ends: SSAValue | None
    crossings: SSAValue | None = None
    """[splits, B, H, chunks]: what the tokens of a chunk and later ones give each other, as a sweep backwards sees it."""

    def every(self, chunk: int) -> int:
        """Chunks of a segment."""
        if self.segment % chunk:
            raise RecurrenceFormError(
                f"segments of {self.segment} tokens", f"chunk={chunk}", "take a chunk that divides them"
            )
        return self.segment // chunk

    def visit(self, visitor: Visitor, scope: Scope, view: View, at: SSAValue, own: SSAValue, state: SSAValue) -> None:
        """Before a chunk of a sweep, `own` of which its sequence has: keeps the state, or meets the one kept."""
        every, reverse = scope.value(self.every(visitor.chunk)), visitor.reverse
        first = scope.value(scope.plus(at, 1, "first")) if reverse else at
        start = scope.add(arith.CmpiOp(scope.add(arith.RemSIOp(first, every)).result, scope.value(0), "eq")).result
        inside = scope.add(arith.CmpiOp(first, own if reverse else scope.value(0), "slt" if reverse else "sgt")).result
        where = Scope(Block())
        begins = where.value(where.plus(view.begin, where.times(first, visitor.chunk, "begins"), "begins"))
        index = [view.b, view.h, slot_of(view, where, begins, self.segment)]
        (self._meet if reverse else self._keep)(visitor, where, view, index, state)
        where.add(scf.YieldOp())
        scope.add(scf.IfOp(scope.add(arith.AndIOp(start, inside), "anchored").result, [], [where.block]))

    def _keep(self, visitor: Visitor, scope: Scope, view: View, index: list[SSAValue], state: SSAValue) -> None:
        target = view.kernel.take(self.states)
        terms = Terms(scope, tile.shape_of(state))
        rounded = terms.result(terms.take(state, 0, 1), tile.element_of(target))
        visitor.state.store(scope, rounded, target, index, visitor.v0)

    def _meet(self, visitor: Visitor, scope: Scope, view: View, index: list[SSAValue], state: SSAValue) -> None:
        assert self.ends is not None
        kept = visitor.state.load(scope, view.kernel.take(self.states), index, visitor.v0, "kept")
        terms = Terms(scope, tile.shape_of(state))
        product = terms.mul(terms.take(state, 0, 1), terms.take(kept, 0, 1))
        if visitor.scale is not None:
            product = terms.mul(product, terms.take(visitor.scale))
        keys = 1 if visitor.state.turned else 0
        sums = scope.add(tile.ReduceOp(tile.Reduction.SUM, terms.result(product), keys), "sums").result
        target = view.kernel.take(self.ends)
        if rank_of(self.ends) == 5:
            scope.add(tile.StoreOp(sums, target, [scope.value(0), *index, visitor.v0], [4]))
            return
        total = scope.add(tile.ReduceOp(tile.Reduction.SUM, sums, 0), "total").result
        scope.add(tile.StoreOp(total, target, [visitor.split, *index], []))
