"""Integer expressions that are affine in positions, and conditions made of them.

Plain data: `Linear` is a constant plus coefficients times terms, a term is a position, a value that
does not depend on positions (`Leaf`), a floor division, a minimum or maximum, or a choice.
`Condition` is a tree of conjunctions and disjunctions over `Below(x)`, which says x <= 0;
a negation never remains, since it is exact on every atom.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Position:
    """A position: of a query, of a key, or an end of a window of them."""

    name: str


@dataclass(frozen=True)
class Leaf:
    """An integer that is the same for all queries and keys of one head."""

    key: Hashable


@dataclass(frozen=True)
class Floor:
    """floor(of / by), by > 0."""

    of: Linear
    by: int


@dataclass(frozen=True)
class Extremum:
    """The larger (or smaller) of two."""

    larger: bool
    left: Linear
    right: Linear


@dataclass(frozen=True)
class Choice:
    """`then` where the condition holds, else `other`."""

    condition: Condition
    then: Linear
    other: Linear


Term: TypeAlias = Position | Leaf | Floor | Extremum | Choice


@dataclass(frozen=True, eq=False)
class Linear:
    """constant + sum of coefficient * term; terms are distinct and in no order, coefficients are not 0."""

    constant: int = 0
    terms: tuple[tuple[Term, int], ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Linear) and self.constant == other.constant and dict(self.terms) == dict(other.terms)

    def __hash__(self) -> int:
        return hash((self.constant, frozenset(self.terms)))

    @staticmethod
    def of(term: Term, coefficient: int = 1) -> Linear:
        return Linear(0, ((term, coefficient),) if coefficient else ())

    def __add__(self, other: Linear | int) -> Linear:
        if isinstance(other, int):
            return Linear(self.constant + other, self.terms)
        total = dict(self.terms)
        for term, coefficient in other.terms:
            total[term] = total.get(term, 0) + coefficient
        return Linear(self.constant + other.constant, tuple((t, c) for t, c in total.items() if c))

    def __mul__(self, factor: int) -> Linear:
        return Linear(self.constant * factor, tuple((t, c * factor) for t, c in self.terms if factor))

    def __neg__(self) -> Linear:
        return self * -1

    def __sub__(self, other: Linear | int) -> Linear:
        return self + -other

    def is_constant(self, number: int) -> bool:
        return self == Linear(number)

    def coefficient(self, term: Term) -> int:
        return dict(self.terms).get(term, 0)

    def without(self, term: Term) -> Linear:
        return Linear(self.constant, tuple((t, c) for t, c in self.terms if t != term))


@dataclass(frozen=True)
class Below:
    """x <= 0."""

    x: Linear


@dataclass(frozen=True)
class Flag:
    """A condition that is the same for all queries and keys of one head, or its negation."""

    key: Hashable
    holds: bool = True


@dataclass(frozen=True)
class Unknown:
    """A condition of which nothing is known."""


@dataclass(frozen=True)
class All:
    """Every part holds; of no parts: true."""

    parts: tuple[Condition, ...] = ()


@dataclass(frozen=True)
class Any:
    """Some part holds; of no parts: false."""

    parts: tuple[Condition, ...] = ()


Condition: TypeAlias = Below | Flag | Unknown | All | Any

TRUE, FALSE = All(), Any()


def negated(condition: Condition) -> Condition:
    """The exact opposite; what is unknown stays so."""
    match condition:
        case Below(x):
            return Below(-x + 1)
        case Flag(key, holds):
            return Flag(key, not holds)
        case All(parts):
            return Any(tuple(negated(p) for p in parts))
        case Any(parts):
            return All(tuple(negated(p) for p in parts))
        case Unknown():
            return condition


def depends_on(x: Linear | Condition, position: Position) -> bool:
    """Whether a position occurs in an expression or a condition."""
    match x:
        case Linear(_, terms):
            return any(_term_depends_on(term, position) for term, _ in terms)
        case Below(inner):
            return depends_on(inner, position)
        case All(parts) | Any(parts):
            return any(depends_on(part, position) for part in parts)
        case Flag():
            return False
        case Unknown():
            return True


def _term_depends_on(term: Term, position: Position) -> bool:
    match term:
        case Position():
            return term == position
        case Leaf():
            return False
        case Floor(of, _):
            return depends_on(of, position)
        case Extremum(_, left, right):
            return depends_on(left, position) or depends_on(right, position)
        case Choice(condition, then, other):
            return any(depends_on(x, position) for x in (condition, then, other))


def extremum(larger: bool, left: Linear, right: Linear) -> Linear:
    """The larger or smaller of two, decided here where their difference is a constant."""
    difference = left - right
    if difference.terms:
        return Linear.of(Extremum(larger, left, right))
    return left if (difference.constant >= 0) == larger else right


def floor_div(x: Linear, by: int) -> Linear:
    """floor(x / by) for by > 0; multiples of `by` come out of it."""
    if by == 1:
        return x
    outside = Linear(x.constant // by, tuple((t, c // by) for t, c in x.terms if c % by == 0))
    inside = Linear(x.constant % by, tuple((t, c) for t, c in x.terms if c % by))
    return outside + (Linear.of(Floor(inside, by)) if inside.terms else Linear(inside.constant // by))


def over_window(x: Linear, position: Position, first: Linear, last: Linear) -> tuple[Linear, Linear]:
    """Bounds of x for all first <= position <= last; attained where x is affine in the position."""
    low = high = Linear(x.constant)
    for term, coefficient in x.terms:
        least, most = _term_over_window(term, position, first, last)
        if coefficient < 0:
            least, most = most, least
        low, high = low + least * coefficient, high + most * coefficient
    return low, high


def _term_over_window(term: Term, position: Position, first: Linear, last: Linear) -> tuple[Linear, Linear]:
    if term == position:
        return first, last
    if not _term_depends_on(term, position):
        return Linear.of(term), Linear.of(term)
    if isinstance(term, Floor):
        low, high = over_window(term.of, position, first, last)
        return floor_div(low, term.by), floor_div(high, term.by)
    assert isinstance(term, Extremum | Choice)
    a, b = (term.left, term.right) if isinstance(term, Extremum) else (term.then, term.other)
    (a_low, a_high), (b_low, b_high) = (over_window(x, position, first, last) for x in (a, b))
    if isinstance(term, Extremum):
        return extremum(term.larger, a_low, b_low), extremum(term.larger, a_high, b_high)
    return extremum(False, a_low, b_low), extremum(True, a_high, b_high)


def evaluate(x: Linear, values: Mapping[Term, int], flags: Mapping[Hashable, bool]) -> int:
    """The number that an expression gives for these positions and leaves."""
    return x.constant + sum(c * _evaluate_term(t, values, flags) for t, c in x.terms)


def _evaluate_term(term: Term, values: Mapping[Term, int], flags: Mapping[Hashable, bool]) -> int:
    match term:
        case Position() | Leaf():
            return values[term]
        case Floor(of, by):
            return evaluate(of, values, flags) // by
        case Extremum(larger, left, right):
            pair = evaluate(left, values, flags), evaluate(right, values, flags)
            return max(pair) if larger else min(pair)
        case Choice(condition, then, other):
            return evaluate(then if holds(condition, values, flags) else other, values, flags)


def holds(condition: Condition, values: Mapping[Term, int], flags: Mapping[Hashable, bool]) -> bool:
    """Whether a condition without unknown parts holds."""
    match condition:
        case Below(x):
            return evaluate(x, values, flags) <= 0
        case Flag(key, sign):
            return flags[key] == sign
        case All(parts):
            return all(holds(part, values, flags) for part in parts)
        case Any(parts):
            return any(holds(part, values, flags) for part in parts)
        case Unknown():
            raise ValueError("an unknown condition has no truth value")
