"""Where a mask can and must be visible: key ranges as symbolic bounds, for a window of queries.

A `Range` over-approximates the keys that *some* query of the window sees, and under-approximates, inside it, the
keys that *every* query sees. `ranges_of` turns a condition on two positions into a union of such ranges,
whose bounds are free of both positions: they speak of the ends of the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_engine.ir.affine import (
    All,
    Any,
    Below,
    Choice,
    Condition,
    Extremum,
    Flag,
    Floor,
    Linear,
    Position,
    Term,
    Unknown,
    depends_on,
    extremum,
    floor_div,
    negated,
    over_window,
)

# No position reaches this; it stands for 'no bound' where a bound must be a number.
FAR = 1 << 30
# More members than this are joined: the bounds are computed once per block of queries, but not for nothing.
MOST_MEMBERS = 8
MOST_SPLITS = 6


@dataclass(frozen=True)
class Interval:
    """lo <= key < hi; None is no bound."""

    lo: Linear | None = None
    hi: Linear | None = None

    def __and__(self, other: Interval) -> Interval:
        lo = _tighter(True, self.lo, other.lo)
        return Interval(lo, _tighter(False, self.hi, other.hi))


def _tighter(larger: bool, a: Linear | None, b: Linear | None) -> Linear | None:
    if a is None or b is None:
        return b if a is None else a
    return extremum(larger, a, b)


@dataclass(frozen=True)
class Range:
    """`visible` holds every key that some query sees; all queries see all keys of `full` (None: no such keys)."""

    visible: Interval
    full: Interval | None

    def __and__(self, other: Range) -> Range:
        full = None if self.full is None or other.full is None else self.full & other.full
        return Range(self.visible & other.visible, full)


EVERYTHING = Range(Interval(), Interval())
PARTIAL = Range(Interval(), None)


@dataclass(frozen=True)
class Window:
    """Queries, as ends (first and last) of the position `over`, and the position `along` of the keys that are looked for.

    A key is visible if some query of the window `some` sees it, and full if every query of `every` does. Both begin as
    the same window. A bound on the query that stands beside a condition narrows them: in `a and b`, only queries
    with a can see a key by b; in `a or b`, only queries without a need b.
    """

    over: Position
    along: Position
    some: tuple[Linear, Linear]
    every: tuple[Linear, Linear]

    def ranges(self, condition: Condition) -> list[Range]:
        """Ranges whose union answers for the condition; any order, they may overlap and be empty."""
        match condition:
            case All():
                parts = _flat(All, condition)
                result = [EVERYTHING]
                for i, part in enumerate(parts):
                    window = replace(self, some=self._narrowed(self.some, [*parts[:i], *parts[i + 1 :]]))
                    found = window.ranges(part)
                    result = _joined([a & b for a in result for b in found])
                return result
            case Any():
                parts = _flat(Any, condition)
                union: list[Range] = []
                for i, part in enumerate(parts):
                    others = [negated(other) for other in (*parts[:i], *parts[i + 1 :])]
                    union += replace(self, every=self._narrowed(self.every, others)).ranges(part)
                return _joined(union)
            case Flag():
                switched = Interval(None, Linear.of(Choice(condition, Linear(FAR), Linear())))
                return [Range(switched, switched)]
            case Unknown():
                return [PARTIAL]
            case Below(x):
                return self._ranges_below(x)

    def _narrowed(self, window: tuple[Linear, Linear], conditions: list[Condition]) -> tuple[Linear, Linear]:
        """The part of a window in which those conditions hold that are bounds on its position."""
        first, last = window
        for condition in conditions:
            if not isinstance(condition, Below) or not (coefficient := condition.x.coefficient(self.over)):
                continue
            rest = condition.x.without(self.over)
            if depends_on(rest, self.over) or depends_on(rest, self.along):
                continue
            if coefficient > 0:
                last = extremum(False, last, floor_div(-rest, coefficient))
            else:
                first = extremum(True, first, -floor_div(-rest, -coefficient))
        return first, last

    def _bounds(self, x: Linear) -> tuple[Linear, Linear]:
        """The least value for some query, the most for every query."""
        return over_window(x, self.over, *self.some)[0], over_window(x, self.over, *self.every)[1]

    def _ranges_below(self, x: Linear) -> list[Range]:
        split = _split(x, MOST_SPLITS)
        if split is None:
            return [PARTIAL]
        if not isinstance(split, Below):
            return self.ranges(split)
        moving = [term for term, _ in x.terms if depends_on(Linear.of(term), self.along)]
        if not moving:
            return [self._switched(x)]
        if len(moving) > 1:
            return [PARTIAL]
        return self._solved(x, moving[0])

    def _switched(self, x: Linear) -> Range:
        """A condition that is free of the key: all keys or none."""
        least, most = self._bounds(x)
        some, every = (Interval(None, _switch(Below(bound))) for bound in (least, most))
        return Range(some, every)

    def _solved(self, x: Linear, term: Term) -> list[Range]:
        """coefficient * term + rest <= 0, solved for the key."""
        coefficient, rest = x.coefficient(term), x.without(term)
        if isinstance(term, Floor) and coefficient == 1:
            # floor(a / n) <= -rest  <=>  a <= n * -rest + n - 1
            return self._ranges_below(term.of + rest * term.by - (term.by - 1))
        if isinstance(term, Floor) and coefficient == -1:
            # floor(a / n) >= rest  <=>  a >= n * rest
            return self._ranges_below(rest * term.by - term.of)
        if term != self.along:
            return [PARTIAL]
        least, most = self._bounds(rest)
        some, every = (_solve(coefficient, bound) for bound in (least, most))
        return [Range(some, every)]


def _flat(kind: type[All] | type[Any], condition: Condition) -> list[Condition]:
    """The parts of a conjunction or disjunction, those of nested ones of the same kind included."""
    if not isinstance(condition, kind):
        return [condition]
    return [inner for part in condition.parts for inner in _flat(kind, part)]


def _switch(condition: Below) -> Linear:
    if not condition.x.terms:
        return Linear(FAR if condition.x.constant <= 0 else 0)
    return Linear.of(Choice(condition, Linear(FAR), Linear()))


def _solve(coefficient: int, rest: Linear) -> Interval:
    """The keys with coefficient * key + rest <= 0."""
    if coefficient > 0:
        return Interval(None, floor_div(-rest, coefficient) + 1)
    return Interval(-floor_div(-rest, -coefficient), None)


def _split(x: Linear, fuel: int) -> Condition | None:
    """x <= 0 without its first minimum, maximum or choice; Below(x) where there is none, None where there are too many."""
    for term, coefficient in x.terms:
        if isinstance(term, Extremum):
            left, right = (Below(x.without(term) + part * coefficient) for part in (term.left, term.right))
            both = term.larger == (coefficient > 0)
            parts = (_again(left, fuel), _again(right, fuel))
            return All(parts) if both else Any(parts)
        if isinstance(term, Choice):
            then, other = (_again(Below(x.without(term) + p * coefficient), fuel) for p in (term.then, term.other))
            return Any((All((term.condition, then)), All((negated(term.condition), other))))
    return Below(x)


def _again(below: Below, fuel: int) -> Condition:
    if fuel == 0:
        return Unknown()
    return _split(below.x, fuel - 1) or Unknown()


def _joined(ranges: list[Range]) -> list[Range]:
    """The same union with fewer members, where that is exact; at most MOST_MEMBERS in any case."""
    result: list[Range] = []
    for new in ranges:
        for i, old in enumerate(result):
            if (union := _exact_union(old, new)) is not None:
                result[i] = union
                break
        else:
            result.append(new)
    while len(result) > MOST_MEMBERS:
        *result, a, b = result
        result.append(hull(a, b))
    return result


def _exact_union(a: Range, b: Range) -> Range | None:
    """The union as one range, where the two share an end or one says nothing new."""
    for one, other in ((a, b), (b, a)):
        if one in (EVERYTHING, other):
            return one
        if other.full is None and one.visible in (Interval(), other.visible):
            return one
        if other.full is None and other.visible == Interval():
            return Range(Interval(), one.full)
    visible = _interval_union(a.visible, b.visible)
    if a.full is None and b.full is None:
        return Range(visible, None) if visible else None
    if visible is None or a.full is None or b.full is None:
        return None
    full = _interval_union(a.full, b.full)
    return Range(visible, full) if full else None


def _interval_union(a: Interval, b: Interval) -> Interval | None:
    """The union of intervals that have one end in common: no key between them is outside both."""
    if a.lo == b.lo:
        return Interval(a.lo, _wider(True, a.hi, b.hi))
    if a.hi == b.hi:
        return Interval(_wider(False, a.lo, b.lo), a.hi)
    return None


def _wider(larger: bool, a: Linear | None, b: Linear | None) -> Linear | None:
    return None if a is None or b is None else extremum(larger, a, b)


def hull(a: Range, b: Range) -> Range:
    """One range for both: full keys are those of one member, never the hull of the two."""
    lo = _wider(False, a.visible.lo, b.visible.lo)
    visible = Interval(lo, _wider(True, a.visible.hi, b.visible.hi))
    return Range(visible, a.full if a.full is not None else b.full)
