"""Arithmetic, comparisons, logic and choice on traced scalars, in Python's and torch's meaning.

Automatic differentiation acts on what is emitted, so the form decides the gradient: a `select` gives
it to the side that it picks, `arith.maximumf` shares it on ties, `math.absf` gives 0 at 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeAlias

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32, i1, i64
from xdsl.ir import Attribute, Operation, SSAValue

from attn_engine.errors import OperandError, PrecedenceWarning
from attn_engine.frontend.region import Function, RegionTrace, as_number
from attn_engine.frontend.source import refuse, user_line
from attn_engine.frontend.symbols import Symbol

BinaryOp: TypeAlias = Callable[[SSAValue, SSAValue], Operation]
Unary: TypeAlias = Callable[[RegionTrace, object], Symbol]
Binary: TypeAlias = Callable[[RegionTrace, object, object], Symbol]

MAX_MULTIPLIED_POWER = 8


# Arithmetic
def _by_type(logical: BinaryOp, integer: BinaryOp, float_: BinaryOp) -> Binary:
    """The op of the type that torch computes in: two conditions give a condition."""

    def function(r: RegionTrace, a: object, b: object) -> Symbol:
        left, right = r.common(a, b)
        op = float_ if left.scalar_type == f32 else integer if left.scalar_type == i64 else logical
        return r.emit(op(left.value, right.value))

    return function


multiply = _by_type(arith.AndIOp, arith.MuliOp, arith.MulfOp)
_sum = _by_type(arith.OrIOp, arith.AddiOp, arith.AddfOp)


def add(r: RegionTrace, a: object, b: object, *, alpha: object = 1) -> Symbol:
    return _sum(r, a, b if alpha == 1 else multiply(r, b, alpha))


def subtract(r: RegionTrace, a: object, b: object, *, alpha: object = 1) -> Symbol:
    left, right = r.common(a, b if alpha == 1 else multiply(r, b, alpha))
    if left.scalar_type == i1:
        refuse(OperandError, "- of two conditions", "write a ^ b where they differ, a & ~b, or a.long() - b.long()")
    return r.emit((arith.SubfOp if left.scalar_type == f32 else arith.SubiOp)(left.value, right.value))


def divide(r: RegionTrace, a: object, b: object, *, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "floor":
        return floor_divide(r, a, b)
    if rounding_mode == "trunc":
        return _truncating_divide(r, a, b)
    return r.emit(arith.DivfOp(r.as_f32(a).value, r.as_f32(b).value))


def _truncating_divide(r: RegionTrace, a: object, b: object) -> Symbol:
    """Towards zero; integers give an integer."""
    left, right = r.common(a, b, at_least=i64)
    if left.scalar_type == f32:
        return r.emit(math.TruncOp(divide(r, left, right).value))
    size = floor_divide(r, absolute(r, left), absolute(r, right))
    return select(r, (left < 0) ^ (right < 0), -size, size)


def floor_divide(r: RegionTrace, a: object, b: object) -> Symbol:
    left, right = r.common(a, b, at_least=i64)
    if left.scalar_type == i64:
        return r.emit(arith.FloorDivSIOp(left.value, right.value))
    return r.emit(math.FloorOp(r.emit(arith.DivfOp(left.value, right.value)).value))


def remainder(r: RegionTrace, a: object, b: object) -> Symbol:
    """The remainder of floor division: it has the sign of b."""
    left, right = r.common(a, b, at_least=i64)
    return left - floor_divide(r, left, right) * right


def negate(r: RegionTrace, x: object) -> Symbol:
    (value,) = r.common(x, at_least=i64)
    if value.scalar_type == i64:
        return r.emit(arith.SubiOp(r.as_i64(0).value, value.value))
    return r.emit(arith.NegfOp(value.value))


def absolute(r: RegionTrace, x: object) -> Symbol:
    (value,) = r.common(x, at_least=i64)
    if value.scalar_type == i64:
        return r.emit(arith.MaxSIOp(value.value, negate(r, value).value))
    return r.emit(math.AbsFOp(value.value))


def power(r: RegionTrace, base: object, exponent: object) -> Symbol:
    number = as_number(exponent)
    if number is not None and float(number).is_integer() and 0 <= number <= MAX_MULTIPLIED_POWER:
        return _whole_power(r, base, int(number), f32 if isinstance(number, float) else i64)
    if number == 0.5:
        return r.emit(math.SqrtOp(r.as_f32(base).value))
    if number == -0.5:
        return r.emit(math.RsqrtOp(r.as_f32(base).value))
    if number == -1:
        return divide(r, 1.0, r.as_f32(base))
    if as_number(base) == 2:
        return r.emit(math.Exp2Op(r.as_f32(exponent).value))
    if not any(symbol.scalar_type == f32 for symbol in r.common(base, exponent)):
        refuse(
            OperandError,
            "an integer to a power that is no small constant",
            "make one of the two a float: x.float() ** n",
        )
    return r.emit(math.PowFOp(r.as_f32(base).value, r.as_f32(exponent).value))


def _whole_power(r: RegionTrace, base: object, exponent: int, at_least: Attribute) -> Symbol:
    (value,) = r.common(base, at_least=at_least)
    if exponent == 0:
        return r.symbol(1, value.scalar_type)
    if exponent % 2:
        return value if exponent == 1 else _whole_power(r, value, exponent - 1, at_least) * value
    half = _whole_power(r, value, exponent // 2, at_least)
    return half * half


# Comparisons and logic
def _comparison(integer: str, float_: str) -> Binary:
    def function(r: RegionTrace, a: object, b: object) -> Symbol:
        left, right = r.common(a, b)
        if left.scalar_type == i1 and integer not in ("eq", "ne"):
            left, right = r.as_i64(left), r.as_i64(right)
        op = arith.CmpfOp if left.scalar_type == f32 else arith.CmpiOp
        return r.emit(op(left.value, right.value, float_ if left.scalar_type == f32 else integer))

    return function


def _bitwise(op: BinaryOp) -> Binary:
    def function(r: RegionTrace, a: object, b: object) -> Symbol:
        left, right = r.common(a, b)
        if left.scalar_type == f32:
            refuse(OperandError, "&, | or ^ on a float", "compare first: (x > 0) & (y > 0)")
        if left.scalar_type == i64 and i1 in (r.symbol(a).scalar_type, r.symbol(b).scalar_type):
            warnings.warn(
                "a condition meets an integer in &, | or ^, which bind tighter than ==, < and the like;"
                f" parenthesise: (a >= b) & (c % 2 == 0)\n{user_line()}",
                PrecedenceWarning,
                stacklevel=2,
            )
        return r.emit(op(left.value, right.value))

    return function


def invert(r: RegionTrace, x: object) -> Symbol:
    """Not, on conditions; the complement, on integers."""
    value = r.symbol(x)
    if value.scalar_type == f32:
        refuse(OperandError, "~ on a float", "compare first: ~(x > 0)")
    ones = r.as_i1(True) if value.scalar_type == i1 else r.as_i64(-1)
    return r.emit(arith.XOrIOp(value.value, ones.value))


def _shift(op: BinaryOp) -> Binary:
    return lambda r, a, b: r.emit(op(r.as_i64(a).value, r.as_i64(b).value))


def truth(r: RegionTrace, x: object) -> Symbol:
    """Whether a value is not zero."""
    value = r.symbol(x)
    return value if value.scalar_type == i1 else value != 0


def _logical(op: BinaryOp) -> Binary:
    return lambda r, a, b: r.emit(op(truth(r, a).value, truth(r, b).value))


def select(r: RegionTrace, condition: object, a: object, b: object) -> Symbol:
    chosen = r.symbol(condition)
    if chosen.scalar_type != i1:
        refuse(
            OperandError, f"the condition of a where is {chosen.scalar_type}", "compare it: torch.where(x != 0, a, b)"
        )
    left, right = r.common(a, b)
    return r.emit(arith.SelectOp(chosen.value, left.value, right.value))


# Extrema
maximum = _by_type(arith.OrIOp, arith.MaxSIOp, arith.MaximumfOp)
minimum = _by_type(arith.AndIOp, arith.MinSIOp, arith.MinimumfOp)


def clamp(r: RegionTrace, x: object, min: object = None, max: object = None) -> Symbol:
    """Between two bounds; the gradient passes inside and at the bounds themselves."""
    value = r.symbol(x)
    for bound, beyond in ((min, "lt"), (max, "gt")):
        if bound is not None:
            left, right = r.common(value, bound)
            value = select(r, r.apply(beyond, (left, right), {}), right, left)
    return value


def _clamp_max(r: RegionTrace, x: object, max: object) -> Symbol:
    return clamp(r, x, None, max)


def _masked_fill(r: RegionTrace, x: object, mask: object, value: object) -> Symbol:
    return select(r, mask, value, x)


def _reciprocal(r: RegionTrace, x: object) -> Symbol:
    return divide(r, 1.0, x)


def _reversed_subtract(r: RegionTrace, a: object, b: object) -> Symbol:
    return r.apply("sub", (b, a), {})


def _square(r: RegionTrace, x: object) -> Symbol:
    return multiply(r, x, x)


def _logical_not(r: RegionTrace, x: object) -> Symbol:
    return invert(r, truth(r, x))


ARITHMETIC: dict[str, Function] = {
    "abs": absolute,
    "add": add,
    "bitwise_and": _bitwise(arith.AndIOp),
    "bitwise_left_shift": _shift(arith.ShLIOp),
    "bitwise_not": invert,
    "bitwise_or": _bitwise(arith.OrIOp),
    "bitwise_right_shift": _shift(arith.ShRSIOp),
    "bitwise_xor": _bitwise(arith.XOrIOp),
    "clamp": clamp,
    "clamp_max": _clamp_max,
    "clamp_min": clamp,
    "div": divide,
    "eq": _comparison("eq", "oeq"),
    "floor_divide": floor_divide,
    "ge": _comparison("sge", "oge"),
    "gt": _comparison("sgt", "ogt"),
    "le": _comparison("sle", "ole"),
    "logical_and": _logical(arith.AndIOp),
    "logical_not": _logical_not,
    "logical_or": _logical(arith.OrIOp),
    "logical_xor": _logical(arith.XOrIOp),
    "lt": _comparison("slt", "olt"),
    "masked_fill": _masked_fill,
    "maximum": maximum,
    "minimum": minimum,
    "mul": multiply,
    "ne": _comparison("ne", "une"),
    "neg": negate,
    "pow": power,
    "reciprocal": _reciprocal,
    "remainder": remainder,
    "rsub": _reversed_subtract,
    "square": _square,
    "sub": subtract,
    "where": select,
}
