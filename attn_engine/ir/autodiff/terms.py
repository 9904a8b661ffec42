"""Sums of products: the form in which gradients are added, cancelled and recognised.

A `Term` is coefficient * product of powers of values, 0 unless all its guards hold. Sums are never multiplied
out, except inside `vanishes`: user code keeps its own rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from random import Random

from xdsl.dialects import arith
from xdsl.ir import SSAValue

Guard = tuple[SSAValue, bool]
Powers = Mapping[SSAValue, float]
Key = tuple[frozenset[tuple[SSAValue, float]], frozenset[Guard]]

# Coefficients come from constants that were rounded to f32.
ROUNDING = 2.0**-21
EXPANSION_LIMIT = 200


@dataclass(frozen=True)
class Term:
    """coefficient * prod(value ** power), and 0 where a guard (condition, wanted value) fails."""

    coefficient: float = 1.0
    powers: Powers = field(default_factory=dict[SSAValue, float])
    guards: frozenset[Guard] = frozenset()

    @property
    def key(self) -> Key:
        return frozenset(self.powers.items()), self.guards

    def __mul__(self, other: Term) -> Term:
        powers = dict(self.powers)
        for value, power in other.powers.items():
            powers[value] = powers.get(value, 0.0) + power
        powers = {value: power for value, power in powers.items() if power}
        return Term(self.coefficient * other.coefficient, powers, self.guards | other.guards)

    def scaled(self, factor: float) -> Term:
        return Term(self.coefficient * factor, self.powers, self.guards)

    def without(self, value: SSAValue) -> Term:
        return Term(self.coefficient, {v: p for v, p in self.powers.items() if v is not value}, self.guards)

    def inverse(self) -> Term:
        assert not self.guards and self.coefficient
        return Term(1 / self.coefficient, {value: -power for value, power in self.powers.items()})

    def impossible(self) -> bool:
        """Whether two guards contradict each other."""
        return any((condition, not wanted) in self.guards for condition, wanted in self.guards)


Terms = list[Term]
ONE = Term()


def power(value: SSAValue, exponent: float = 1.0, coefficient: float = 1.0) -> Term:
    return Term(coefficient, {value: exponent})


def product(left: Iterable[Term], right: Sequence[Term]) -> Terms:
    return collect(a * b for a in left for b in right)


def collect(terms: Iterable[Term]) -> Terms:
    """Like terms added; what cancels up to the rounding of f32 constants is gone."""
    sums: dict[Key, tuple[Term, float, float]] = {}
    for term in terms:
        if term.impossible():
            continue
        _, total, size = sums.get(term.key, (term, 0.0, 0.0))
        sums[term.key] = (term, total + term.coefficient, size + abs(term.coefficient))
    kept = [(term, total) for term, total, size in sums.values() if abs(total) > ROUNDING * size]
    return [Term(total, term.powers, term.guards) for term, total in kept]


def addends(value: SSAValue) -> list[tuple[float, SSAValue]] | None:
    """The two signed terms of a sum or difference."""
    match value.owner:
        case arith.AddfOp() as op:
            return [(1.0, op.lhs), (1.0, op.rhs)]
        case arith.SubfOp() as op:
            return [(1.0, op.lhs), (-1.0, op.rhs)]
        case _:
            return None


def _sum_to_expand(terms: Sequence[Term]) -> SSAValue | None:
    found = (value for term in terms for value in term.powers if addends(value) is not None)
    return next(found, None)


def _expand(term: Term, value: SSAValue, as_term: Mapping[SSAValue, Term]) -> Terms:
    """One factor `value`, a sum, multiplied out as often as its (whole, positive) power says."""
    exponent = int(term.powers[value])
    parts = addends(value)
    assert parts is not None
    result = [term.without(value)]
    for _ in range(exponent):
        result = collect(r * as_term[part].scaled(sign) for r in result for sign, part in parts)
    return result


def _differs_somewhere(terms: Sequence[Term], as_term: Mapping[SSAValue, Term]) -> bool:
    """Whether the sum is not 0 for one choice of its values: a quick refutation, never a proof."""
    draw = Random(0)
    numbers: dict[SSAValue, float] = {}

    def of_value(value: SSAValue) -> float:
        if value not in numbers:
            parts = addends(value)
            numbers[value] = draw.uniform(0.5, 1.5) if parts is None else sum(c * of_term(as_term[v]) for c, v in parts)
        return numbers[value]

    def of_term(term: Term) -> float:
        return term.coefficient * prod(of_value(v) ** p for v, p in term.powers.items())

    sums: dict[frozenset[Guard], tuple[float, float]] = {}
    for term in terms:
        try:
            number = of_term(term)
        except (ZeroDivisionError, OverflowError):
            return False
        if isinstance(number, complex):
            return False
        total, size = sums.get(term.guards, (0.0, 0.0))
        sums[term.guards] = total + number, size + abs(number)
    return any(abs(total) > 1e-4 * size for total, size in sums.values())


def vanishes(terms: Sequence[Term], as_term: Mapping[SSAValue, Term]) -> bool:
    """Whether a sum is proved to be 0: denominators are cleared and sums multiplied out until all terms cancel.

    False means no proof. `as_term` gives the product that a value stands for.
    """
    terms = collect(terms)
    if _differs_somewhere(terms, as_term):
        return False
    while terms and len(terms) < EXPANSION_LIMIT:
        value = _sum_to_expand(terms)
        if value is None:
            return False
        lowest = min(0.0, *(term.powers.get(value, 0.0) for term in terms))
        cleared = [term * power(value, -lowest) for term in terms]
        if any(term.powers.get(value, 0.0) % 1 for term in cleared):
            return False
        terms = collect(
            new for term in cleared for new in (_expand(term, value, as_term) if value in term.powers else [term])
        )
    return not terms
