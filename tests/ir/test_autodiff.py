"""Derivatives of single operations against torch, and the algebra of sums of products."""

from __future__ import annotations

from typing import Any

import pytest
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.ir.autodiff.graph import Graph, Needs, Slicer
from attn_engine.ir.autodiff.partials import PARTIALS
from attn_engine.ir.autodiff.products import Products
from attn_engine.ir.autodiff.signs import Signs
from attn_engine.ir.autodiff.terms import Term, collect, power, vanishes
from attn_engine.ir.autodiff.writer import Writer
from tests.support.attn_cases import random_inputs
from tests.support.gradients import check_gradients
from tests.support.scalar_builder import At, Value, attention

CASTS = (arith.SIToFPOp, arith.UIToFPOp, arith.ExtFOp, arith.TruncFOp)


def applied(kind: type[Operation], x: Value, y: Value, at: At) -> Value:
    """One operation on values in (0, 1), where every function here is smooth."""
    if kind is arith.SelectOp:
        return (x > y).where(x * 2.0, y)
    if kind is math.FmaOp:
        return x.make(math.FmaOp(x.value, y.value, x.value))
    if kind is math.FPowIOp:
        return x.make(kind(x.value, at.kv.value)) + x.make(kind(x.value, (at.q - 2).value))  # type: ignore[call-arg]
    if len(kind.get_irdl_definition().operands) == 1:  # type: ignore[attr-defined]
        return x.make(kind(x.value))  # type: ignore[call-arg]
    return x.make(kind(x.value, y.value))  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [k for k in PARTIALS if k not in CASTS], ids=lambda k: k.name)
def test_operations(kind: type[Operation]) -> None:
    def row(s: Value, at: At) -> Value:
        x, y = s.tanh() * 0.375 + 0.5, s.sin() * 0.25 + 0.5
        return applied(kind, x, y, at)

    q, k, v = random_inputs(sq=3, skv=5)
    check_gradients(attention(row), (q, k, v), tolerance=1e-6)


@pytest.mark.parametrize("kind", [arith.MaximumfOp, arith.MinimumfOp, math.AbsFOp])
def test_kinks(kind: Any) -> None:
    """Equal sides share; the absolute value has no slope at 0."""
    q, k, v = random_inputs(sq=3, skv=5)
    q[:, :, 1] = 0.0

    def row(s: Value, at: At) -> Value:
        return s.make(kind(s.value)) if kind is math.AbsFOp else s.make(kind(s.value, (s * 2.0).value))

    check_gradients(attention(row), (q, k, v))


# --- sums of products ------------------------------------------------------------------------------


def graph_with(*needs: Needs) -> tuple[Graph, list[SSAValue]]:
    graph = Graph()
    return graph, [graph.argument(f32, need) for need in needs]


def test_like_terms_cancel() -> None:
    _, (a, b) = graph_with(Needs.NOTHING, Needs.NOTHING)
    left = power(a) * power(b, -1.0)
    assert collect([left, left.scaled(-1.0)]) == []
    assert [t.coefficient for t in collect([left, left])] == [2.0]
    # log2(e) * ln(2) in f32 is 1 but for its rounding.
    assert collect([left, left.scaled(-1.00000005)]) == []
    assert len(collect([left, left.scaled(-1.001)])) == 1


def test_a_guard_and_its_opposite_are_never_true_together() -> None:
    graph, (a, b) = graph_with(Needs.NOTHING, Needs.NOTHING)
    condition = graph.compare(a, b, "ogt")
    yes, no = (Term(guards=frozenset({(condition, wanted)})) for wanted in (True, False))
    assert collect([yes * no * power(a)]) == []


def test_vanishing_sums_are_proved_through_denominators() -> None:
    graph, (a, b) = graph_with(Needs.FORWARD, Needs.FORWARD)
    total = graph.add(a, b)
    terms = [power(a) * power(total, -1.0), power(b) * power(total, -1.0), Term(-1.0)]
    as_term = {v: power(v) for v in (a, b, total)}
    assert vanishes(terms, as_term)
    assert not vanishes(terms[:2], as_term)
    assert not vanishes([*terms[:2], Term(-2.0)], as_term)


def test_row_factors_become_one_vector() -> None:
    """P * dp - P * delta / l is written as P * (dp - vector)."""
    graph, (p, dp, delta, total) = graph_with(Needs.ELEMENT, Needs.ELEMENT, Needs.NOTHING, Needs.FORWARD)
    writer = Writer(graph, Products(graph, Signs(graph), p))
    value = writer.write([power(p) * power(dp), power(p, 1.0, -1.0) * power(delta) * power(total, -1.0)])
    names = [op.name for op in graph.block.ops if not isinstance(op, arith.ConstantOp)]
    assert names == ["arith.divf", "arith.subf", "arith.mulf"]
    assert value.owner.name == "arith.mulf"  # type: ignore[union-attr]


def test_equal_operations_exist_once() -> None:
    graph, (a, b) = graph_with(Needs.NOTHING, Needs.NOTHING)
    assert graph.add(a, b) is graph.add(a, b)
    assert graph.add(a, b) is not graph.add(b, a)
    assert graph.reduce(attn.ReduceKind.SUM, a) is not graph.emit(attn.RowReduceOp(attn.ReduceKind.SUM, a))


def test_slices_hold_what_is_needed_and_nothing_else() -> None:
    graph, (a, b) = graph_with(Needs.NOTHING, Needs.NOTHING)
    used, _ = graph.mul(a, b), graph.add(a, b)
    target = graph.block.__class__(arg_types=[f32, f32])
    Slicer(target, dict(zip((a, b), target.args, strict=True))).value(used)
    assert [op.name for op in target.ops] == ["arith.mulf"]
    with pytest.raises(ValueError, match="argument"):
        Slicer(target, {a: target.args[0]}).value(used)


def test_signs() -> None:
    graph, (x,) = graph_with(Needs.ELEMENT)
    signs = Signs(graph)
    m = graph.emit(attn.RowReduceOp(attn.ReduceKind.MAX, x))
    stable = graph.emit(math.ExpOp(graph.sub(x, m)))
    plain = graph.emit(math.ExpOp(x))
    total, other = (graph.emit(attn.RowReduceOp(attn.ReduceKind.SUM, e)) for e in (stable, plain))
    assert signs.positive(total) and signs.positive(other) and not signs.positive(x)
    # exp(x) can be 0 in floating point, and so can its sum; exp(max - max) cannot.
    assert signs.above_zero(total) and not signs.above_zero(other)
    zero = graph.constant(0.0)
    assert signs.decided(arith.CmpfOp(total, zero, "oeq")) is False
    assert signs.decided(arith.CmpfOp(other, zero, "oeq")) is None
    assert signs.decided(arith.CmpfOp(m, graph.constant(float("-inf")), "une")) is True
