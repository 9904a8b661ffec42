"""Sums of products back to code, with common factors taken out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from xdsl.dialects import arith, math
from xdsl.ir import SSAValue

from attn_engine.ir.autodiff.graph import Graph
from attn_engine.ir.autodiff.products import Products
from attn_engine.ir.autodiff.terms import Guard, Term, Terms, collect

Signed = tuple[float, SSAValue]
"""A value and the sign, 1 or -1, with which it counts."""


class Writer:
    """Writes sums of products into a graph.

    A sum that differs from key to key gets one row factor per product, so that all row-level work is done once a
    row: P * dp - P * delta becomes P * (dp - delta).
    """

    def __init__(self, graph: Graph, products: Products):
        self.graph = graph
        self.products = products

    def write(self, terms: Iterable[Term]) -> SSAValue:
        sign, value = self._signed(collect(terms))
        return value if sign > 0 else self.graph.neg(value)

    def _signed(self, terms: Terms) -> Signed:
        """The sum, one group of guards after the other."""
        is_element = any(map(self.graph.is_element, (v for t in terms for v in self._values(t))))
        items = self._hoisted(terms) if is_element else terms
        groups: dict[frozenset[Guard], Terms] = {}
        for term in items:
            groups.setdefault(term.guards, []).append(Term(term.coefficient, term.powers))
        total: Signed | None = None
        for guards, group in groups.items():
            sign, value = self._factored(group)
            total = self._plus(total, (sign, self._guarded(value, guards)))
        return total or (1.0, self.graph.constant(0.0))

    @staticmethod
    def _values(term: Term) -> list[SSAValue]:
        return [*term.powers, *(condition for condition, _ in term.guards)]

    def _hoisted(self, terms: Terms) -> Terms:
        """One term per product of elements, its row factors made one value."""
        groups: dict[object, tuple[Term, Terms]] = {}
        for term in terms:
            element, row = self.products.split(term)
            groups.setdefault(element.key, (element, []))[1].append(row)
        result: Terms = []
        for element, rows in groups.values():
            if len(rows) == 1 and self._is_plain(rows[0]):
                result.append(element * rows[0])
                continue
            sign, value = self._signed(rows)
            result.append(element * Term(sign, {value: 1.0}))
        return result

    @staticmethod
    def _is_plain(row: Term) -> bool:
        """A number, or a row value with a sign."""
        if row.guards or not row.powers:
            return not row.guards
        return list(row.powers.values()) == [1.0] and abs(row.coefficient) == 1.0

    def _guarded(self, value: SSAValue, guards: Iterable[Guard]) -> SSAValue:
        zero = self.graph.constant(0.0)
        for condition, wanted in sorted(guards, key=lambda g: self.graph.order[g[0]]):
            value = self.graph.select(condition, *((value, zero) if wanted else (zero, value)))
        return value

    # --- one group -------------------------------------------------------------------------------

    def _factored(self, terms: Terms) -> Signed:
        """Takes out the factor that most terms share, again and again."""
        if len(terms) == 1:
            return self._product(terms[0])
        common = self._common(terms)
        if common is None:
            ordered = sorted(terms, key=lambda t: t.coefficient < 0)
            total: Signed | None = None
            for term in ordered:
                total = self._plus(total, self._product(term))
            assert total is not None
            return total
        factor = Term(1.0, {common[0]: common[1]})
        inside = [t * factor.inverse() for t in terms if self._has(t, common)]
        sign, value = self._factored(collect(inside))
        taken = (sign, self._multiplied(value, factor))
        outside = [t for t in terms if not self._has(t, common)]
        return self._plus(taken, self._factored(outside)) if outside else taken

    @staticmethod
    def _has(term: Term, common: tuple[SSAValue, float]) -> bool:
        found = term.powers.get(common[0], 0.0)
        return found >= common[1] if common[1] > 0 else found <= common[1]

    def _common(self, terms: Sequence[Term]) -> tuple[SSAValue, float] | None:
        counts: Counter[tuple[SSAValue, bool]] = Counter()
        for term in terms:
            counts.update((v, p > 0) for v, p in term.powers.items())
        shared = [(n, key) for key, n in counts.items() if n > 1]
        if not shared:
            return None
        _, (value, positive) = min(shared, key=lambda item: (-item[0], self.graph.order[item[1][0]]))
        powers = [t.powers[value] for t in terms if value in t.powers and (t.powers[value] > 0) == positive]
        return value, min(powers) if positive else max(powers)

    def _plus(self, a: Signed | None, b: Signed) -> Signed:
        if a is None:
            return b
        if a[0] == b[0]:
            return a[0], self.graph.add(a[1], b[1])
        return (1.0, self.graph.sub(a[1], b[1])) if a[0] > 0 else (1.0, self.graph.sub(b[1], a[1]))

    # --- one product -----------------------------------------------------------------------------

    def _product(self, term: Term) -> Signed:
        sign = 1.0 if term.coefficient >= 0 else -1.0
        value = self.graph.constant(abs(term.coefficient))
        return sign, self._multiplied(value, Term(1.0, term.powers))

    def _multiplied(self, value: SSAValue, factors: Term) -> SSAValue:
        """value * factors; what divides is multiplied up and divided by once, or its known reciprocal is used."""
        below: SSAValue | None = None
        one = self.graph.constant(1.0)
        number = self.graph.number(value)
        above = None if number is not None else value
        for factor, exponent in sorted(factors.powers.items(), key=lambda item: self.graph.order[item[0]]):
            reciprocal = self.graph.existing(arith.DivfOp(one, factor)) if exponent < 0 else None
            if exponent > 0 or reciprocal is not None:
                above = self._times(above, self._power(reciprocal or factor, abs(exponent)))
            else:
                below = self._times(below, self._power(factor, -exponent))
        if above is None:
            above = value
        elif number is not None and number != 1.0:
            above = self.graph.mul(above, value)
        return above if below is None else self.graph.div(above, below)

    def _times(self, a: SSAValue | None, b: SSAValue) -> SSAValue:
        return b if a is None else self.graph.mul(a, b)

    def _power(self, value: SSAValue, exponent: float) -> SSAValue:
        if exponent % 1 or exponent > 8:
            if exponent == 0.5:
                return self.graph.emit(math.SqrtOp(value))
            return self.graph.emit(math.PowFOp(value, self.graph.constant(exponent)))
        result = value
        for _ in range(int(exponent) - 1):
            result = self.graph.mul(result, value)
        return result
