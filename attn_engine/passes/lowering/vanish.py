"""Weights that vanish where their score is infinite: a mask may then hide the score, and weights have no mask of their own."""

from __future__ import annotations

import math as numbers
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import FloatAttr
from xdsl.ir import Operation, SSAValue

from attn_engine.ir.walks import bottom_up, operands_of
from attn_engine.passes.lowering.program import Program
from attn_engine.passes.simplify_rule import predicate_of


@dataclass(frozen=True)
class Some:
    """A finite number of which only the sign is known: 1 or -1."""

    sign: int


Known = float | bool | Some | None
"""A number, a condition, a sign, or nothing."""


def scores_behind(weight: SSAValue, rank: int, program: Program) -> tuple[set[Operation], SSAValue | None]:
    """The arithmetic on scores that makes a weight of one of them; no score if it reads several, or others read its steps."""
    ops, scores, work = set[Operation](), set[SSAValue](), [weight]
    while work:
        value = work.pop()
        owner = value.owner
        if owner in ops or len(program.axes(value)) < rank:
            continue
        if isinstance(owner, Operation) and owner.parent is program.block and type(owner) in _STEPS:
            ops.add(owner)
            work += owner.operands
        else:
            scores.add(value)
    alone = all(use.operation in ops for op in ops for r in op.results if r is not weight for use in r.uses)
    return ops, scores.pop() if alone and len(scores) == 1 else None


def vanishing(weight: SSAValue, score: SSAValue, program: Program) -> float | None:
    """The infinity that a score may be for its weight to be 0, if either makes it so."""
    for infinity in (-numbers.inf, numbers.inf):
        if known(weight, score, infinity, program) == 0.0:
            return infinity
    return None


def known(value: SSAValue, score: SSAValue, at: float, program: Program) -> Known:
    """What is known of a value where the score is an infinity."""
    found: dict[SSAValue, Known] = {score: at}

    def steps(of: SSAValue) -> Iterable[SSAValue]:
        owner = of.owner
        taken = of not in program.positive and isinstance(owner, Operation) and type(owner) in _STEPS
        return operands_of(of) if taken else ()

    def here(of: SSAValue) -> Known:
        owner = of.owner
        if of in program.positive:
            return Some(1)
        if isinstance(owner, arith.ConstantOp) and isinstance(owner.value, FloatAttr):
            return owner.value.value.data
        if not isinstance(owner, Operation) or type(owner) not in _STEPS:
            return None
        operands = [found[operand] for operand in owner.operands]
        if isinstance(owner, arith.CmpfOp):
            return _compare(predicate_of(owner), *operands)
        result = _RULES[type(owner)](*operands)
        return None if isinstance(result, float) and numbers.isnan(result) else result

    return bottom_up(value, steps, here, found)


def _compare(predicate: str, a: Known, b: Known) -> Known:
    compare = _COMPARISONS.get(predicate)
    return compare(a, b) if compare is not None and isinstance(a, float) and isinstance(b, float) else None


def _select(condition: Known, a: Known, b: Known) -> Known:
    return (a if condition else b) if isinstance(condition, bool) else None


def _sign(x: Known) -> int | None:
    if isinstance(x, Some):
        return x.sign
    return None if x is None or x == 0 else int(numbers.copysign(1, x))


def _multiply(a: Known, b: Known) -> Known:
    if isinstance(a, float) and isinstance(b, float):
        return a * b
    signs = _sign(a), _sign(b)
    if signs[0] is None or signs[1] is None:
        return None
    sign = signs[0] * signs[1]
    return sign * numbers.inf if any(isinstance(x, float) and numbers.isinf(x) for x in (a, b)) else Some(sign)


def _add(a: Known, b: Known) -> Known:
    if isinstance(a, float) and isinstance(b, float):
        return a + b
    return next((x for x in (a, b) if isinstance(x, float) and numbers.isinf(x) and None not in (a, b)), None)


def _negate(a: Known) -> Known:
    return Some(-a.sign) if isinstance(a, Some) else None if a is None else -a


def _subtract(a: Known, b: Known) -> Known:
    return _add(a, _negate(b))


def _divide(a: Known, b: Known) -> Known:
    if isinstance(b, float) and numbers.isinf(b):
        return 0.0 if isinstance(a, Some) or (a is not None and numbers.isfinite(a)) else None
    return a / b if isinstance(a, float) and isinstance(b, float) and b else None


def _exponential(a: Known) -> Known:
    return {-numbers.inf: 0.0, numbers.inf: numbers.inf, 0.0: 1.0}.get(a) if isinstance(a, float) else None


def _larger(a: Known, b: Known) -> Known:
    return max(a, b) if isinstance(a, float) and isinstance(b, float) else None


def _smaller(a: Known, b: Known) -> Known:
    return min(a, b) if isinstance(a, float) and isinstance(b, float) else None


_RULES: dict[type[Operation], Callable[..., Known]] = {
    arith.MulfOp: _multiply,
    arith.AddfOp: _add,
    arith.SubfOp: _subtract,
    arith.NegfOp: _negate,
    arith.DivfOp: _divide,
    arith.MaximumfOp: _larger,
    arith.MaxnumfOp: _larger,
    arith.MinimumfOp: _smaller,
    arith.MinnumfOp: _smaller,
    arith.SelectOp: _select,
    math.ExpOp: _exponential,
    math.Exp2Op: _exponential,
}
_STEPS = {*_RULES, arith.CmpfOp}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "olt": operator.lt,
    "ole": operator.le,
    "ogt": operator.gt,
    "oge": operator.ge,
}
