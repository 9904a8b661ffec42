"""The logistic function as the front end spells it, with an exponent that is never positive."""

from __future__ import annotations

from math import e as euler
from math import log2

from xdsl.dialects import arith, math
from xdsl.ir import Operation, SSAValue

from attn_engine.passes.simplify_constants import constant_of
from attn_engine.passes.simplify_rule import predicate_of


def logistic_of(op: Operation) -> tuple[SSAValue, float] | None:
    """x and k of (x < 0 ? e : 1) / (1 + e) with e = exp2(-k |x|): that is 1 / (1 + exp2(-k x)), and never overflows."""
    if not isinstance(op, arith.DivfOp):
        return None
    choice, total = op.lhs.owner, op.rhs.owner
    if not isinstance(choice, arith.SelectOp) or not isinstance(total, arith.AddfOp):
        return None
    e = choice.lhs
    if constant_of(choice.rhs) != 1.0 or [e, 1.0] not in _orders(total):
        return None
    size, factor = _exponent(e)
    return _side(choice.cond, size, factor)


def _orders(total: arith.AddfOp) -> list[list[object]]:
    return [[total.lhs, constant_of(total.rhs)], [total.rhs, constant_of(total.lhs)]]


def _exponent(e: SSAValue) -> tuple[SSAValue | None, float]:
    """size and k of exp2(k * size)."""
    owner = e.owner
    if isinstance(owner, math.ExpOp):
        return owner.operand, log2(euler)
    product = owner.operand.owner if isinstance(owner, math.Exp2Op) else None
    if not isinstance(product, arith.MulfOp) or (factor := constant_of(product.rhs)) is None:
        return None, 0.0
    return product.lhs, float(factor)


def _side(test: SSAValue, size: SSAValue | None, factor: float) -> tuple[SSAValue, float] | None:
    """x and k where the size is x < 0 ? x : -x, by the same test."""
    choice = size.owner if size is not None else None
    if not isinstance(choice, arith.SelectOp) or choice.cond is not test or factor <= 0:
        return None
    below = test.owner
    if not isinstance(below, arith.CmpfOp) or predicate_of(below) != "olt":
        return None
    compared = below.lhs is choice.lhs and constant_of(below.rhs) == 0.0
    return (choice.lhs, factor) if compared and _are_opposite(choice.lhs, choice.rhs) else None


def _are_opposite(x: SSAValue, y: SSAValue) -> bool:
    """Whether one is the other with its sign turned: of -x, the other is x itself."""
    return any(isinstance(a.owner, arith.NegfOp) and a.owner.operand is b for a, b in ((x, y), (y, x)))
