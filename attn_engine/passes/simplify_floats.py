"""Algebra on floats that holds for every input, infinities, NaN and -0.0 included."""

from __future__ import annotations

import math as pymath

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f16
from xdsl.ir import Operation, SSAValue

from attn_engine.passes.simplify_constants import INF, constant, constant_of, is_constant
from attn_engine.passes.simplify_rule import Change, Rule, defined_by


def never_negative_zero(value: SSAValue, depth: int = 8) -> bool:
    """Whether no input makes this value -0.0."""
    number, op = constant_of(value), value.owner
    if number is not None:
        return number != 0 or pymath.copysign(1, number) > 0
    if not depth or not isinstance(op, Operation):
        return False
    if isinstance(op, math.ExpOp | math.Exp2Op | math.AbsFOp | arith.SIToFPOp | arith.UIToFPOp):
        return True
    if isinstance(op, arith.AddfOp):
        # A sum is -0.0 only where both terms are.
        return any(never_negative_zero(v, depth - 1) for v in op.operands)
    if isinstance(op, arith.SelectOp):
        return all(never_negative_zero(v, depth - 1) for v in (op.lhs, op.rhs))
    return False


def _addf(op: Operation) -> Change:
    a, b = op.operands
    if is_constant(b, -0.0) or (is_constant(b, 0.0) and never_negative_zero(a)):
        return a
    if negated := defined_by(b, arith.NegfOp):
        return [arith.SubfOp(a, negated.operands[0])]
    if negated := defined_by(a, arith.NegfOp):
        return [arith.SubfOp(b, negated.operands[0])]
    # A factor is seen by what looks for factors.
    return [two := constant(2.0, a.type), arith.MulfOp(a, two)] if a is b else None


def _subf(op: Operation) -> Change:
    a, b = op.operands
    if is_constant(b, 0.0):
        return a
    if is_constant(a, -0.0):
        return [arith.NegfOp(b)]
    if negated := defined_by(b, arith.NegfOp):
        return [arith.AddfOp(a, negated.operands[0])]
    return None


def _mulf(op: Operation) -> Change:
    a, b = op.operands
    if is_constant(b, 1.0):
        return a
    if is_constant(b, -1.0):
        return [arith.NegfOp(a)]
    left, right = defined_by(a, arith.NegfOp), defined_by(b, arith.NegfOp)
    if left and right:
        return [arith.MulfOp(left.operands[0], right.operands[0])]
    number = constant_of(b)
    if left and number is not None:
        return [minus := constant(-number, b.type), arith.MulfOp(left.operands[0], minus)]
    return None


def _reciprocal(number: float) -> float | None:
    """1 / number where number is a power of two and the reciprocal a normal f32: then the product is exact."""
    if number == 0 or not pymath.isfinite(number) or abs(pymath.frexp(number)[0]) != 0.5:
        return None
    return 1 / number if 2.0**-126 <= abs(1 / number) < 2.0**128 else None


def _divf(op: Operation) -> Change:
    a, b = op.operands
    number = constant_of(b)
    if is_constant(b, 1.0):
        return a
    if b.type == f16 or number is None or (inverse := _reciprocal(number)) is None:
        return None
    return [factor := constant(inverse, b.type), arith.MulfOp(a, factor)]


def _negf(op: Operation) -> Change:
    if inner := defined_by(op.operands[0], arith.NegfOp):
        return inner.operands[0]
    if (inner := defined_by(op.operands[0], arith.MulfOp)) and len(list(inner.results[0].uses)) == 1:
        number = constant_of(inner.operands[1])
        if number is not None:
            return [minus := constant(-number, inner.results[0].type), arith.MulfOp(inner.operands[0], minus)]
    return None


def _absf(op: Operation) -> Change:
    inner = defined_by(op.operands[0], arith.NegfOp, math.AbsFOp)
    return [math.AbsFOp(inner.operands[0])] if inner else None


def _extremum_of_floats(neutral: float) -> Rule:
    """maximumf with -inf, minimumf with inf, or either of equal values: NaN stays NaN."""

    def rule(op: Operation) -> Change:
        a, b = op.operands
        return a if a is b or is_constant(b, neutral) else None

    return rule


def _powf(op: Operation) -> Change:
    a, b = op.operands
    if is_constant(b, 1.0):
        return a
    if is_constant(b, 2.0):
        return [arith.MulfOp(a, a)]
    if constant_of(b) == 0 or is_constant(a, 1.0):
        return [constant(1.0, a.type)]
    if is_constant(b, -1.0):
        return [one := constant(1.0, a.type), arith.DivfOp(one, a)]
    return None


def _truncf(op: Operation) -> Change:
    inner = defined_by(op.operands[0], arith.ExtFOp)
    return inner.operands[0] if inner and inner.operands[0].type == op.results[0].type else None


FLOAT_RULES: dict[type[Operation], Rule] = {
    arith.AddfOp: _addf,
    arith.SubfOp: _subf,
    arith.MulfOp: _mulf,
    arith.DivfOp: _divf,
    arith.NegfOp: _negf,
    math.AbsFOp: _absf,
    arith.MaximumfOp: _extremum_of_floats(-INF),
    arith.MinimumfOp: _extremum_of_floats(INF),
    math.PowFOp: _powf,
    arith.TruncFOp: _truncf,
}
