"""How much is left between two tokens of a chunk, from its start to a token, and from a token to its end.

Sums of log decays leave out those that forget everything; these are counted instead. Between two tokens all is forgotten
if their counts differ, and otherwise the sums differ by the log decay, however many tokens forget: no infinity is added
or taken off. What counts change is done where a chunk has any: mostly none does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xdsl.dialects import arith, scf
from xdsl.ir import Block, SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.recurrence.decay import Rows
from attn_engine.passes.lowering.recurrence.setting import View
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.scope import Scope

NOTHING = float("-inf")


def where_some(
    scope: Scope, count: SSAValue, values: Sequence[SSAValue], code: Callable[[Scope], Sequence[SSAValue]]
) -> list[SSAValue]:
    """`values`, or if the count is not 0 those that `code` makes."""
    some = scope.add(arith.CmpfOp(count, scope.real(0.0), "ogt"), "some").result
    other, same = Scope(Block()), Scope(Block())
    other.add(scf.YieldOp(*code(other)))
    same.add(scf.YieldOp(*values))
    op = scope.add(scf.IfOp(some, [x.type for x in values], [other.block], [same.block]))
    for result, value in zip(op.results, values, strict=True):
        result.name_hint = value.name_hint
    return list(op.results)


@dataclass(frozen=True)
class Fade:
    """Of one chunk: the sums of its tokens, what is left of the state before it at each, and of each at its end, [C]."""

    view: View
    t0: SSAValue
    sums: SSAValue
    resets: SSAValue
    """All counts, a value of the plan."""
    last: SSAValue
    """The count of the last token."""
    start: SSAValue
    end: SSAValue
    total: SSAValue
    """The log decay of the whole chunk, -inf if it forgets."""

    @staticmethod
    def load(view: View, scope: Scope, rows: Rows, t0: SSAValue, chunk: int) -> Fade | None:
        """None where nothing decays."""
        if rows.sums is None or rows.resets is None:
            return None
        sums, resets = (view.kernel.take(x) for x in (rows.sums, rows.resets))
        gc, at = view.own_vector(scope, rows.sums, t0, chunk, "gc"), view.last_of(scope, t0, chunk)
        total, last = view.number(scope, sums, at, "total"), view.number(scope, resets, at, "count")
        terms = Terms(scope, [chunk])
        left = terms.result(terms.exp2(terms.take(gc, 0)))
        terms = Terms(scope, [chunk])
        kept = terms.result(terms.exp2(terms.at_most_zero(terms.sub(terms.take(total), terms.take(gc, 0)))))
        plain = Fade(view, t0, gc, rows.resets, last, left, kept, total)
        found = plain.amended(scope, [left, kept, total], plain._cut)
        return Fade(view, t0, gc, rows.resets, last, *found)

    def _cut(self, scope: Scope, counts: SSAValue) -> list[SSAValue]:
        """The state ends at the first token that forgets, and what tokens before the last one write ends there."""
        chunk = tile.shape_of(counts)
        first = Terms(scope, chunk)
        left = first.where(first.equal(first.take(counts, 0), first.real(0.0)), first.take(self.start, 0))
        second = Terms(scope, chunk)
        kept = second.where(second.equal(second.take(counts, 0), second.take(self.last)), second.take(self.end, 0))
        return [first.result(left), second.result(kept), scope.real(NOTHING)]

    def amended(
        self, scope: Scope, values: Sequence[SSAValue], code: Callable[[Scope, SSAValue], Sequence[SSAValue]]
    ) -> list[SSAValue]:
        """`values`, or what `code` makes of them from the counts of tokens if the chunk has any that forgets."""
        (chunk,) = tile.shape_of(self.sums)

        def cut(inner: Scope) -> Sequence[SSAValue]:
            return code(inner, self.view.own_vector(inner, self.resets, self.t0, chunk, "counts"))

        return where_some(scope, self.last, values, cut)

    def from_start(self, t: Terms, axis: int) -> SSAValue:
        return t.take(self.start, axis)

    def to_end(self, t: Terms, axis: int) -> SSAValue:
        return t.take(self.end, axis)

    def between(self, t: Terms, later: int, sooner: int) -> SSAValue:
        """Of the tokens of one axis at those of another, if nothing between them forgets all."""
        return t.exp2(t.at_most_zero(t.sub(t.take(self.sums, later), t.take(self.sums, sooner))))

    def parted(self, scope: Scope, products: SSAValue) -> SSAValue:
        """Products of tokens [C, C], 0 where something between them forgets all."""

        def code(inner: Scope, counts: SSAValue) -> list[SSAValue]:
            t = Terms(inner, tile.shape_of(products))
            alike = t.equal(t.take(counts, 0), t.take(counts, 1))
            return [t.result(t.where(alike, t.take(products, 0, 1)), tile.element_of(products))]

        return self.amended(scope, [products], code)[0]
