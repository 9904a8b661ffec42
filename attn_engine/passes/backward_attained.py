"""Who attains an extremum of a row, found by one loop and told by key.

A score that another kernel computes again may be rounded in another way: then nobody, or somebody else, equals the
extremum. So no other code compares values with an extremum of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import IntegerAttr, f32, i1
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.ir.autodiff.graph import IDENTITY, Graph, Needs
from attn_engine.ir.autodiff.terms import Term
from attn_engine.ir.walks import behind
from attn_engine.passes.simplify_rule import predicate_of

TIE = 2.0**-20
EXTREMA = (attn.ReduceKind.MAX, attn.ReduceKind.MIN)
_SWAPPED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge", "eq": "eq", "ne": "ne"}


_PASSING = (arith.AddfOp, arith.SubfOp, arith.MulfOp, arith.DivfOp, arith.NegfOp, math.AbsFOp, arith.SelectOp)
"""What keeps an error as large as it is, if not what is added, multiplied by or chosen from is small. Exponentials end it."""
_STEEP = (math.LogOp, math.SqrtOp, math.RsqrtOp, math.PowFOp)


def extremum_of_pair(result: SSAValue) -> attn.RowReduceOp | None:
    """The extremum, where a value and the extremum of such values are the two operands of an operation."""
    operands = result.owner.operands if isinstance(result.owner, Operation) else ()
    for value, row in permutations(operands) if len(operands) == 2 else ():
        best = row.owner
        if isinstance(best, attn.RowReduceOp) and best.kind.data in EXTREMA and best.value is value:
            return best
    return None


def is_fragile(op: Operation) -> bool:
    """Whether an operation is the difference of a value and its extremum, and code makes much of an error in it.

    As a division does by what is small together with it: (s - min) / (max - min + 1e-6) of a row with one key is 0.
    """
    if not isinstance(op, arith.SubfOp) or extremum_of_pair(op.result) is None:
        return False
    pending, met = [op.results[0]], {op.results[0]}
    while pending:
        value = pending.pop()
        for user in [use.operation for use in value.uses]:
            if isinstance(user, _STEEP) or _enlarges(user, value):
                return True
            if isinstance(user, _PASSING) and user.results[0] not in met:
                met.add(user.results[0])
                pending.append(user.results[0])
    return False


def _enlarges(user: Operation, value: SSAValue) -> bool:
    """Whether an operation divides a value by what the row says, or multiplies it by a quotient of the row."""
    if isinstance(user, arith.DivfOp):
        return user.rhs is value or any(isinstance(v.owner, attn.RowReduceOp) for v in behind([user.rhs]))
    if not isinstance(user, arith.MulfOp):
        return False
    factor = user.rhs if user.lhs is value else user.lhs
    of_row = behind([factor], _within_row)
    divides = any(isinstance(v.owner, arith.DivfOp | math.RsqrtOp | math.PowFOp) for v in of_row)
    reduces = any(isinstance(v.owner, attn.RowReduceOp) for v in of_row)
    return divides and reduces and not any(isinstance(v, BlockArgument) and v.index in (0, 4) for v in of_row)


def _within_row(value: SSAValue) -> Sequence[SSAValue]:
    """What a value is made of, down to reductions."""
    owner = value.owner
    return () if isinstance(owner, Block | attn.RowReduceOp) else tuple(owner.operands)


@dataclass(frozen=True)
class Attained:
    """Conditions on the key of an element, `kv`."""

    graph: Graph
    kv: SSAValue
    distances: set[SSAValue] = field(default_factory=set[SSAValue])
    alone: dict[SSAValue, attn.RowReduceOp] = field(default_factory=dict[SSAValue, attn.RowReduceOp])
    """Conditions that an element is the only one to attain this extremum."""

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

    # --- distances, which are exactly 0 where they are ---------------------------------------------

    def distance(self, value: SSAValue, row: SSAValue) -> SSAValue:
        """value - row, one of which is the extremum of the other: 0 for those that attain it."""
        graph = self.graph
        zeroed = graph.select(graph.compare(value, row, "oeq"), graph.constant(0.0), graph.sub(value, row))
        self.distances.add(zeroed)
        return zeroed

    def partial(self, op: arith.SelectOp) -> Term | None:
        """The derivative of a distance in the difference that it is: none where one element alone is the extremum.

        There it would be 1, and be taken away again with the gradient of the extremum, which another loop adds up.
        """
        best = extremum_of_pair(op.cond) if op.result in self.distances else None
        if best is None:
            return None
        alone = self.graph.emit(arith.AndIOp(op.cond, self._is_one(best)))
        self.alone[alone] = best
        return Term(guards=frozenset({(alone, False)}))

    def sum_of_others(self, alone: SSAValue, value: SSAValue) -> SSAValue:
        """The sum over all elements but one that alone is the extremum.

        It is added too, and taken away again, in one loop: where a row has no others 0 is left.
        """
        graph, best = self.graph, self.alone[alone]
        attaining = graph.reduce_where(attn.ReduceKind.SUM, self._equal(best.kind.data, best.value), value)
        taken = graph.select(self._is_one(best), attaining, graph.constant(0.0))
        return graph.sub(graph.reduce(attn.ReduceKind.SUM, value), taken)

    def _is_one(self, best: attn.RowReduceOp) -> SSAValue:
        return self.graph.compare(self.ties(best.kind.data, best.value), self.graph.constant(1.5), "olt")

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
