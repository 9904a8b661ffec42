"""The derivative of one scalar operation with respect to each of its operands, as sums of products.

Kinks follow torch: `maximumf` and `minimumf` share where both sides are equal, `absf` has 0 at 0, rounding has 0.
"""

from __future__ import annotations

import math as pymath
from collections.abc import Callable
from typing import Any

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import IntegerAttr, f32, i64
from xdsl.ir import Operation, SSAValue

from attn_engine.ir.autodiff.products import Products
from attn_engine.ir.autodiff.terms import ONE, Term, Terms, power

Partial = Callable[[Products, Any], list[Terms]]


def _none(_products: Products, op: Operation) -> list[Terms]:
    return [[] for _ in op.operands]


def _linear(*coefficients: float) -> Partial:
    return lambda products, op: [[Term(c)] for c in coefficients]


def _mul(products: Products, op: arith.MulfOp) -> list[Terms]:
    return [[products[op.rhs]], [products[op.lhs]]]


def _div(products: Products, op: arith.DivfOp) -> list[Terms]:
    inverse = products.inverse(op.rhs)
    return [[inverse], [products[op.result] * inverse.scaled(-1.0)]]


def _fma(products: Products, op: math.FmaOp) -> list[Terms]:
    return [[products[op.b]], [products[op.a]], [ONE]]


def _select(_products: Products, op: arith.SelectOp) -> list[Terms]:
    yes, no = (Term(guards=frozenset({(op.cond, wanted)})) for wanted in (True, False))
    return [[], [yes], [no]]


def _extremum(predicate: str) -> Partial:
    def rule(products: Products, op: arith.MaximumfOp | arith.MinimumfOp) -> list[Terms]:
        a, b = op.lhs, op.rhs
        graph = products.graph
        share = graph.select(graph.compare(a, b, "oeq"), graph.constant(0.5), graph.constant(1.0))
        first, second = ((graph.compare(x, y, predicate), True) for x, y in ((a, b), (b, a)))
        return [[Term(1.0, {share: 1.0}, frozenset({guard}))] for guard in (first, second)]

    return rule


def _abs(products: Products, op: math.AbsFOp) -> list[Terms]:
    zero = products.graph.constant(0.0)
    up, down = (frozenset({(products.graph.compare(op.operand, zero, name), True)}) for name in ("ogt", "olt"))
    return [[Term(guards=up), Term(-1.0, guards=down)]]


def _copysign(products: Products, op: math.CopySignOp) -> list[Terms]:
    graph = products.graph
    one = graph.constant(1.0)
    own, wanted = (graph.emit(math.CopySignOp(one, v)) for v in op.operands)
    return [[power(graph.mul(own, wanted))], []]


def _itself(coefficient: float = 1.0, added: float = 0.0) -> Partial:
    """(result + added) * coefficient."""

    def rule(products: Products, op: Operation) -> list[Terms]:
        result = op.results[0]
        if added:
            return [[power(products.graph.add(result, products.graph.constant(added)), 1.0, coefficient)]]
        return [[products[result].scaled(coefficient)]]

    return rule


def _log(coefficient: float) -> Partial:
    return lambda products, op: [[products.inverse(op.operands[0]).scaled(coefficient)]]


def _log1p(products: Products, op: math.Log1pOp) -> list[Terms]:
    return [[power(products.graph.add(op.operand, products.graph.constant(1.0)), -1.0)]]


def _of_result(exponent: float, coefficient: float) -> Partial:
    """coefficient * result ** exponent."""
    return lambda products, op: [[power(op.results[0], exponent, coefficient)]]


def _pow(products: Products, op: math.PowFOp) -> list[Terms]:
    graph, base, exponent = products.graph, op.operands[0], op.operands[1]
    number = graph.number(exponent)
    if number is not None:
        return [[power(base, number - 1.0, number)] if number else [], []]
    zero, one = graph.constant(0.0), graph.constant(1.0)
    smaller = graph.emit(math.PowFOp(base, graph.sub(exponent, one)))
    needed = (graph.compare(exponent, zero, "une"), True)
    to_base = Term(1.0, {smaller: 1.0, exponent: 1.0}, frozenset({needed}))
    at_zero = graph.compare(base, zero, "une")
    to_exponent = Term(1.0, {op.results[0]: 1.0, graph.log(base): 1.0}, frozenset({(at_zero, True)}))
    return [[to_base], [to_exponent]]


def _whole_pow(products: Products, op: math.FPowIOp) -> list[Terms]:
    graph, base, exponent = products.graph, op.operands[0], op.operands[1]
    one = graph.emit(arith.ConstantOp(IntegerAttr(1, i64)))
    smaller = graph.emit(math.FPowIOp(base, graph.emit(arith.SubiOp(exponent, one))))
    factor = graph.emit(arith.SIToFPOp(exponent, f32))
    needed = (graph.compare(factor, graph.constant(0.0), "une"), True)
    return [[Term(1.0, {smaller: 1.0, factor: 1.0}, frozenset({needed}))], []]


def _tanh(products: Products, op: math.TanhOp) -> list[Terms]:
    graph = products.graph
    square = graph.mul(op.result, op.result)
    return [[power(graph.sub(graph.constant(1.0), square))]]


def _one_plus_square(sign: float, exponent: float, coefficient: float = 1.0) -> Partial:
    """coefficient * (1 + sign * x * x) ** exponent."""

    def rule(products: Products, op: Operation) -> list[Terms]:
        graph, x = products.graph, op.operands[0]
        one, square = graph.constant(1.0), graph.mul(x, x)
        return [[power(graph.add(one, square) if sign > 0 else graph.sub(one, square), exponent, coefficient)]]

    return rule


def _other(kind: Callable[[SSAValue], Operation], coefficient: float = 1.0, exponent: float = 1.0) -> Partial:
    """coefficient * kind(x) ** exponent."""

    def rule(products: Products, op: Operation) -> list[Terms]:
        return [[power(products.graph.emit(kind(op.operands[0])), exponent, coefficient)]]

    return rule


def _erf(products: Products, op: math.ErfOp) -> list[Terms]:
    graph = products.graph
    exponent = graph.neg(graph.mul(op.operand, op.operand))
    return [[power(graph.emit(math.ExpOp(exponent)), 1.0, 2 / pymath.sqrt(pymath.pi))]]


PARTIALS: dict[type[Operation], Partial] = {
    arith.AddfOp: _linear(1.0, 1.0),
    arith.SubfOp: _linear(1.0, -1.0),
    arith.NegfOp: _linear(-1.0),
    arith.MulfOp: _mul,
    arith.DivfOp: _div,
    math.FmaOp: _fma,
    arith.SelectOp: _select,
    arith.MaximumfOp: _extremum("oge"),
    arith.MinimumfOp: _extremum("ole"),
    arith.MaxnumfOp: _extremum("oge"),
    arith.MinnumfOp: _extremum("ole"),
    math.AbsFOp: _abs,
    math.CopySignOp: _copysign,
    math.ExpOp: _itself(),
    math.Exp2Op: _itself(pymath.log(2)),
    math.ExpM1Op: _itself(added=1.0),
    math.LogOp: _log(1.0),
    math.Log2Op: _log(1 / pymath.log(2)),
    math.Log10Op: _log(1 / pymath.log(10)),
    math.Log1pOp: _log1p,
    math.SqrtOp: _of_result(-1.0, 0.5),
    math.RsqrtOp: _of_result(3.0, -0.5),
    math.CbrtOp: _of_result(-2.0, 1 / 3),
    math.PowFOp: _pow,
    math.FPowIOp: _whole_pow,
    math.TanhOp: _tanh,
    math.SinOp: _other(math.CosOp),
    math.CosOp: _other(math.SinOp, -1.0),
    math.TanOp: _other(math.CosOp, 1.0, -2.0),
    math.SinhOp: _other(math.CoshOp),
    math.CoshOp: _other(math.SinhOp),
    math.AtanOp: _one_plus_square(1.0, -1.0),
    math.AtanhOp: _one_plus_square(-1.0, -1.0),
    math.AsinOp: _one_plus_square(-1.0, -0.5),
    math.AsinhOp: _one_plus_square(1.0, -0.5),
    math.AcosOp: _one_plus_square(-1.0, -0.5, -1.0),
    math.ErfOp: _erf,
    math.FloorOp: _none,
    math.CeilOp: _none,
    math.RoundOp: _none,
    math.RoundEvenOp: _none,
    math.TruncOp: _none,
    arith.SIToFPOp: _none,
    arith.UIToFPOp: _none,
    arith.ExtFOp: _linear(1.0),
    arith.TruncFOp: _linear(1.0),
}
