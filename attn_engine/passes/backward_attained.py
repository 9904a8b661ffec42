"""Who attains an extremum of a row, found by one loop and told by key.

A score that another kernel computes again may be rounded in another way: then nobody, or somebody else, equals the
extremum. So no other code compares values with an extremum of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import IntegerAttr, f32, i1
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.ir.autodiff.graph import IDENTITY, Graph, Needs
from attn_engine.passes.simplify_rule import predicate_of

TIE = 2.0**-20
EXTREMA = (attn.ReduceKind.MAX, attn.ReduceKind.MIN)
_SWAPPED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge", "eq": "eq", "ne": "ne"}


@dataclass(frozen=True)
class Attained:
    """Conditions on the key of an element, `kv`."""

    graph: Graph
    kv: SSAValue

    def first(self, kind: attn.ReduceKind, value: SSAValue) -> SSAValue:
        """Whether the element is the first one that attains the extremum."""
        return self.graph.compare(self._position(), self._of_these(kind, value, attn.ReduceKind.MIN), "oeq")

    def ties(self, kind: attn.ReduceKind, value: SSAValue) -> SSAValue:
        """How many elements attain it."""
        graph = self.graph
        return graph.reduce_where(attn.ReduceKind.SUM, self._equal(kind, value), graph.constant(1.0))

    def any(self, kind: attn.ReduceKind, value: SSAValue) -> SSAValue:
        """Whether the element is one of those that attain it.

        Of three ties or more those in the middle are known by their value, up to how it may be rounded.
        """
        graph, best = self.graph, self.graph.reduce(kind, value)
        last = graph.compare(self._position(), self._of_these(kind, value, attn.ReduceKind.MAX), "oeq")
        distance = graph.emit(math.AbsFOp(graph.sub(value, best)))
        size = graph.emit(math.AbsFOp(best))
        near = graph.compare(distance, graph.mul(size, graph.constant(TIE)), "ole")
        several = graph.compare(self.ties(kind, value), graph.constant(2.5), "ogt")
        either = graph.emit(arith.OrIOp(self.first(kind, value), last))
        return graph.emit(arith.OrIOp(either, graph.emit(arith.AndIOp(several, near))))

    def _position(self) -> SSAValue:
        return self.graph.emit(arith.SIToFPOp(self.kv, f32))

    def _equal(self, kind: attn.ReduceKind, value: SSAValue) -> SSAValue:
        return self.graph.compare(value, self.graph.reduce(kind, value), "oeq")

    def _of_these(self, kind: attn.ReduceKind, value: SSAValue, which: attn.ReduceKind) -> SSAValue:
        return self.graph.reduce_where(which, self._equal(kind, value), self._position())

    # --- comparisons of the user's ---------------------------------------------------------------

    def replace_comparisons(self) -> None:
        """Comparisons of an element with an extremum of such elements ask who attains it."""
        for op in [op for op in self.graph.block.ops if isinstance(op, arith.CmpfOp)]:
            relation, (lhs, rhs) = predicate_of(op)[1:], self._sides(op)
            if relation not in _SWAPPED:
                continue
            found = self._compared(op, lhs, rhs, relation) or self._compared(op, rhs, lhs, _SWAPPED[relation])
            if found is not None:
                value, kept = found
                op.result.replace_uses_with_if(value, lambda use, kept=kept: use.operation is not kept)

    def _sides(self, op: arith.CmpfOp) -> tuple[SSAValue, SSAValue]:
        """What is compared, be it by its difference to 0 or an exponential of that to 1."""
        lhs, rhs = op.lhs, op.rhs
        if isinstance(lhs.owner, math.ExpOp) and self.graph.number(rhs) == 1:
            lhs, rhs = lhs.owner.operand, self.graph.constant(0.0)
        if isinstance(lhs.owner, arith.SubfOp) and self.graph.number(rhs) == 0:
            return lhs.owner.lhs, lhs.owner.rhs
        return lhs, rhs

    def _compared(
        self, op: arith.CmpfOp, value: SSAValue, row: SSAValue, relation: str
    ) -> tuple[SSAValue, Operation | Block | None] | None:
        """value <relation> row, where the row's value is the extremum of such values or of some of them.

        With the operation that still compares: of elements that the extremum is not of.
        """
        graph, best = self.graph, row.owner
        if not isinstance(best, attn.RowReduceOp) or best.kind.data not in EXTREMA:
            return None
        if not graph.is_element(value) or graph.needs[row] & Needs.BACKWARD:
            return None
        if best.value is value:
            return self._among(best.kind.data, value, relation), None
        inside = self._reduced(value, best)
        if inside is None:
            return None
        attains = self._among(best.kind.data, best.value, relation)
        outside = graph.emit(arith.AndIOp(self._opposite(inside), op.result))
        return graph.emit(arith.OrIOp(graph.emit(arith.AndIOp(inside, attains)), outside)), outside.owner

    def _reduced(self, value: SSAValue, best: attn.RowReduceOp) -> SSAValue | None:
        """Where the extremum is of such values, others being out of it."""
        chosen = best.value.owner
        if not isinstance(chosen, arith.SelectOp) or value not in (chosen.lhs, chosen.rhs):
            return None
        other = chosen.rhs if chosen.lhs is value else chosen.lhs
        if self.graph.number(other) != IDENTITY[best.kind.data]:
            return None
        return chosen.cond if chosen.lhs is value else self._opposite(chosen.cond)

    def _among(self, kind: attn.ReduceKind, value: SSAValue, relation: str) -> SSAValue:
        """What a comparison with the extremum gives for an element that it is of."""
        if relation == ("gt" if kind == attn.ReduceKind.MAX else "lt"):
            return self._constant(False)
        if relation == ("le" if kind == attn.ReduceKind.MAX else "ge"):
            return self._constant(True)
        attains = self.any(kind, value)
        return attains if relation in ("eq", "ge", "le") else self._opposite(attains)

    def _constant(self, yes: bool) -> SSAValue:
        return self.graph.emit(arith.ConstantOp(IntegerAttr(int(yes), i1)))

    def _opposite(self, condition: SSAValue) -> SSAValue:
        return self.graph.emit(arith.XOrIOp(condition, self._constant(True)))
