"""States kept every so many tokens, and what they come to with their gradients: where sums of gradients start anew."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith, scf
from xdsl.ir import Block, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_block import SetAsideOp, TakeBackOp
from attn_engine.errors import RecurrenceFormError
from attn_engine.passes.lowering.recurrence.chunks import slot_of
from attn_engine.passes.lowering.recurrence.setting import State, View, rank_of
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.scope import Scope

ASIDE = 4
"""The rank of states that are set aside."""


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
    """Values of the plan: `states`, written forward and read backwards, and then `ends`.

    `states` are [B, H, slots, K, V], or [B, H, slots, numbers] of tiles that are set aside.

    `ends` are [splits, B, H, slots], or with a log decay per channel [1, B, H, slots, V].
    """

    segment: int
    states: SSAValue
    ends: SSAValue | None
    crossings: SSAValue | None = None
    """[splits, B, H, T]: what each token and those of later chunks give each other, as a sweep backwards sees it."""

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
        if rank_of(self.states) == ASIDE:
            scope.add(SetAsideOp(rounded, target, [*index, self._first(visitor, scope)]))
            return
        visitor.state.store(scope, rounded, target, index, visitor.v0)

    def _first(self, visitor: Visitor, scope: Scope) -> SSAValue:
        """Where the numbers of a program's part of a state are."""
        rows, columns = visitor.state.shape
        return scope.value(scope.times(visitor.split, rows * columns, "first"))

    def _meet(self, visitor: Visitor, scope: Scope, view: View, index: list[SSAValue], state: SSAValue) -> None:
        assert self.ends is not None
        source = view.kernel.take(self.states)
        if rank_of(self.states) == ASIDE:
            type_ = tile.tile_type(list(visitor.state.shape), tile.element_of(source))
            kept = scope.add(TakeBackOp(source, [*index, self._first(visitor, scope)], type_), "kept").result
        else:
            kept = visitor.state.load(scope, source, index, visitor.v0, "kept")
        terms = Terms(scope, tile.shape_of(state))
        product = terms.result(terms.mul(terms.take(state, 0, 1), terms.take(kept, 0, 1)))
        target = view.kernel.take(self.ends)
        if rank_of(self.ends) == 5:
            keys = 1 if visitor.state.turned else 0
            sums = self._scaled(
                visitor, scope, scope.add(tile.ReduceOp(tile.Reduction.SUM, product, keys), "sums").result
            )
            scope.add(tile.StoreOp(sums, target, [scope.value(0), *index, visitor.v0], [4]))
            return
        # Along the rows first: most of that stays within a thread, whichever way the state is turned.
        sums = scope.add(tile.ReduceOp(tile.Reduction.SUM, product, 1), "sums").result
        sums = self._scaled(visitor, scope, sums)
        total = scope.add(tile.ReduceOp(tile.Reduction.SUM, sums, 0), "total").result
        scope.add(tile.StoreOp(total, target, [visitor.split, *index], []))

    def _scaled(self, visitor: Visitor, scope: Scope, sums: SSAValue) -> SSAValue:
        if visitor.scale is None:
            return sums
        terms = Terms(scope, tile.shape_of(sums))
        return terms.result(terms.mul(terms.take(sums, 0), terms.take(visitor.scale)))
