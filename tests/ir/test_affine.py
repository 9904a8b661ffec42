"""Affine expressions and conditions agree with plain Python arithmetic."""

from hypothesis import given
from hypothesis import strategies as st

from attn_engine.ir.affine import (
    All,
    Any,
    Below,
    Choice,
    Extremum,
    Flag,
    Floor,
    Leaf,
    Linear,
    Position,
    evaluate,
    extremum,
    floor_div,
    holds,
    negated,
    over_window,
)

Q, KV, LENGTH = Position("q"), Position("kv"), Leaf("length")
SMALL = st.integers(-9, 9)
ATOMS = st.sampled_from([Linear.of(Q), Linear.of(KV), Linear.of(LENGTH)]) | SMALL.map(Linear)


def _grow(inner):
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda p: p[0] + p[1]),
        pairs.map(lambda p: p[0] - p[1]),
        st.tuples(inner, st.integers(-4, 4)).map(lambda p: p[0] * p[1]),
        st.tuples(inner, st.integers(1, 6)).map(lambda p: Linear.of(Floor(*p))),
        st.tuples(st.booleans(), inner, inner).map(lambda p: Linear.of(Extremum(*p))),
        st.tuples(inner, inner, inner).map(lambda p: Linear.of(Choice(Below(p[0]), p[1], p[2]))),
    )


EXPRESSIONS = st.recursive(ATOMS, _grow, max_leaves=6)
CONDITIONS = st.recursive(
    EXPRESSIONS.map(Below) | st.booleans().map(lambda sign: Flag("on", sign)),
    lambda inner: st.lists(inner, max_size=3).map(tuple).flatmap(lambda p: st.sampled_from([All(p), Any(p)])),
    max_leaves=5,
)
VALUES = st.tuples(SMALL, SMALL, SMALL).map(lambda v: dict(zip((Q, KV, LENGTH), v, strict=True)))
NO_FLAGS = {}


@given(EXPRESSIONS, EXPRESSIONS, st.integers(1, 7), VALUES)
def test_arithmetic(a, b, by, values):
    left, right = evaluate(a, values, NO_FLAGS), evaluate(b, values, NO_FLAGS)
    assert evaluate(a - b * 3 + 2, values, NO_FLAGS) == left - 3 * right + 2
    assert evaluate(floor_div(a, by), values, NO_FLAGS) == left // by
    assert evaluate(extremum(True, a, b), values, NO_FLAGS) == max(left, right)
    assert evaluate(extremum(False, a, b), values, NO_FLAGS) == min(left, right)


@given(EXPRESSIONS, st.integers(-9, 9), st.integers(1, 5), VALUES)
def test_bounds_over_a_window_hold(x, first, size, values):
    low, high = over_window(x, Q, Linear(first), Linear(first + size - 1))
    seen = [evaluate(x, values | {Q: q}, NO_FLAGS) for q in range(first, first + size)]
    # The other values stay free: no bound may speak of q.
    ends = [evaluate(bound, values | {Q: 10**6}, NO_FLAGS) for bound in (low, high)]
    assert ends[0] <= min(seen) and max(seen) <= ends[1]


@given(st.integers(-4, 4), st.integers(-9, 9), st.integers(1, 5))
def test_bounds_of_a_multiple_are_attained(factor, first, size):
    low, high = over_window(Linear.of(Q, factor) + 3, Q, Linear(first), Linear(first + size - 1))
    seen = [factor * q + 3 for q in range(first, first + size)]
    assert (low, high) == (Linear(min(seen)), Linear(max(seen)))


@given(CONDITIONS, VALUES, st.booleans())
def test_negation_is_exact(condition, values, on):
    assert holds(negated(condition), values, {"on": on}) != holds(condition, values, {"on": on})


def test_equality_does_not_depend_on_the_order_of_terms():
    a, b = Linear.of(Q) + Linear.of(KV), Linear.of(KV) + Linear.of(Q)
    assert a == b and hash(a) == hash(b)
    assert a - b == Linear()
