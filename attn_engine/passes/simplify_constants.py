"""Constants of scalar code: reading, making and folding them, in the arithmetic of their own type.

Integers wrap at their width; `f32` results are rounded once to `f32`, with infinities and NaN as IEEE 754 has them.
"""

from __future__ import annotations

import math as pymath
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import (
    BFloat16Type,
    Float16Type,
    Float32Type,
    Float64Type,
    FloatAttr,
    IntegerAttr,
    IntegerType,
    f32,
    i1,
)
from xdsl.ir import Attribute, Operation, SSAValue

Number: TypeAlias = int | float

# The result types that are folded.
FOLDED: frozenset[type[Attribute]] = frozenset((Float32Type, IntegerType))
INF = float("inf")
NAN = float("nan")


def constant_of(value: SSAValue) -> Number | None:
    """The number that a scalar `arith.constant` gives; i1 as 0 or 1, anything else than a constant as None."""
    owner = value.owner
    if type(owner) is not arith.ConstantOp:
        return None
    attribute = owner.value
    if isinstance(attribute, FloatAttr):
        return attribute.value.data
    if not isinstance(attribute, IntegerAttr):
        return None
    return attribute.value.data & 1 if attribute.type == i1 else attribute.value.data


def is_constant(value: SSAValue, number: Number) -> bool:
    """Whether the value is this very constant; 0.0 and -0.0 differ."""
    found = constant_of(value)
    return found is not None and found == number and pymath.copysign(1, found) == pymath.copysign(1, number)


def constant(number: Number, type_: Attribute) -> arith.ConstantOp:
    """A constant of an integer or float type; integers wrap."""
    if isinstance(type_, IntegerType):
        width = cast(IntegerType, type_).width.data
        return arith.ConstantOp.from_int_and_width(int(number), width, truncate_bits=True)
    assert isinstance(type_, Float16Type | BFloat16Type | Float32Type | Float64Type)
    with np.errstate(all="ignore"):
        rounded = float(np.float32(number)) if type_ == f32 else float(number)
    return arith.ConstantOp(FloatAttr(rounded, type_))


def _divide(round_: Callable[[int, int], int]) -> Callable[[int, int], int | None]:
    return lambda a, b: None if b == 0 else round_(a, b)


def _truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


INTEGER: dict[type[Operation], Callable[[int, int], int | None]] = {
    arith.AddiOp: lambda a, b: a + b,
    arith.SubiOp: lambda a, b: a - b,
    arith.MuliOp: lambda a, b: a * b,
    arith.FloorDivSIOp: _divide(lambda a, b: a // b),
    arith.CeilDivSIOp: _divide(lambda a, b: -(-a // b)),
    arith.DivSIOp: _divide(_truncated),
    arith.RemSIOp: _divide(lambda a, b: a - b * _truncated(a, b)),
    arith.MaxSIOp: max,
    arith.MinSIOp: min,
    arith.AndIOp: lambda a, b: a & b,
    arith.OrIOp: lambda a, b: a | b,
    arith.XOrIOp: lambda a, b: a ^ b,
    arith.ShLIOp: lambda a, b: a << b if 0 <= b < 64 else None,
    arith.ShRSIOp: lambda a, b: a >> b if 0 <= b < 64 else None,
}

COMPARE_INTEGERS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "slt": lambda a, b: a < b,
    "sle": lambda a, b: a <= b,
    "sgt": lambda a, b: a > b,
    "sge": lambda a, b: a >= b,
}

COMPARE_FLOATS: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


def compare_floats(predicate: str, a: float, b: float) -> bool:
    """An `arith.cmpf` predicate: `o...` is false and `u...` true where one side is NaN."""
    unordered = a != a or b != b
    if predicate in ("false", "true"):
        return predicate == "true"
    if predicate in ("ord", "uno"):
        return unordered == (predicate == "uno")
    return predicate[0] == "u" if unordered else COMPARE_FLOATS[predicate[1:]](a, b)


def _maximum(a: float, b: float) -> float:
    """IEEE 754 maximum: NaN wins, and 0.0 is above -0.0."""
    if a != a or b != b:
        return NAN
    return a if (a, pymath.copysign(1, a)) >= (b, pymath.copysign(1, b)) else b


BINARY: dict[type[Operation], Callable[[np.float32, np.float32], float | np.floating[Any]]] = {
    arith.AddfOp: lambda a, b: a + b,
    arith.SubfOp: lambda a, b: a - b,
    arith.MulfOp: lambda a, b: a * b,
    arith.DivfOp: lambda a, b: a / b,
    arith.MaximumfOp: lambda a, b: _maximum(float(a), float(b)),
    arith.MinimumfOp: lambda a, b: -_maximum(-float(a), -float(b)),
    math.PowFOp: lambda a, b: np.power(np.float64(a), np.float64(b)),
    math.Atan2Op: lambda a, b: np.arctan2(np.float64(a), np.float64(b)),
    math.CopySignOp: lambda a, b: np.copysign(a, b),
}

# The double result is rounded once more to f32: within half an ulp plus a hair of the exact value.
UNARY: dict[type[Operation], Callable[[np.float64], float | np.floating[Any]]] = {
    arith.NegfOp: lambda a: -a,
    math.AbsFOp: np.abs,
    math.ExpOp: np.exp,
    math.Exp2Op: np.exp2,
    math.ExpM1Op: np.expm1,
    math.LogOp: np.log,
    math.Log2Op: np.log2,
    math.Log10Op: np.log10,
    math.Log1pOp: np.log1p,
    math.SqrtOp: np.sqrt,
    math.RsqrtOp: lambda a: 1 / np.sqrt(a),
    math.SinOp: np.sin,
    math.CosOp: np.cos,
    math.TanOp: np.tan,
    math.AtanOp: np.arctan,
    math.SinhOp: np.sinh,
    math.CoshOp: np.cosh,
    math.TanhOp: np.tanh,
    math.FloorOp: np.floor,
    math.CeilOp: np.ceil,
    math.TruncOp: np.trunc,
    math.RoundEvenOp: np.rint,
    math.ErfOp: lambda a: pymath.erf(float(a)),
}

# i1 reads as 0 or 1 here but is 0 or -1 as a signed integer: these operations do not see the difference.
BOOLEAN = (arith.AndIOp, arith.OrIOp, arith.XOrIOp, arith.ExtUIOp, arith.UIToFPOp)

CONVERT = (arith.ExtSIOp, arith.TruncIOp, arith.SIToFPOp, arith.ExtFOp, arith.TruncFOp)


def _fold_compare(op: Operation, args: list[Number]) -> Number | None:
    if isinstance(op, arith.CmpfOp):
        return compare_floats(arith.CMPF_COMPARISON_OPERATIONS[op.predicate.value.data], *args)
    assert isinstance(op, arith.CmpiOp)
    compare = COMPARE_INTEGERS.get(arith.CMPI_COMPARISON_OPERATIONS[op.predicate.value.data])
    return None if compare is None else compare(int(args[0]), int(args[1]))


def _fold_cast(op: Operation, number: Number) -> Number | None:
    if isinstance(op, arith.ExtUIOp | arith.UIToFPOp):
        return number if number >= 0 else None
    if isinstance(op, arith.FPToSIOp):
        return int(number) if abs(number) < 2**31 else None
    return number if isinstance(op, CONVERT) else None


def fold_constants(op: Operation) -> arith.ConstantOp | None:
    """The constant that a one-result scalar operation on constants gives, or None."""
    if len(op.results) != 1 or not op.operands or type(op.results[0].type) not in FOLDED:
        return None
    args: list[Number] = []
    for operand in op.operands:
        number = constant_of(operand)
        if number is None:
            return None
        args.append(number)
    result = _evaluate(op, args)
    return None if result is None else constant(result, op.results[0].type)


def _evaluate(op: Operation, args: list[Number]) -> Number | None:
    kind = type(op)
    if op.operands[0].type == i1 and kind not in BOOLEAN:
        return None
    if kind in INTEGER:
        return INTEGER[kind](int(args[0]), int(args[1]))
    if kind in (arith.CmpiOp, arith.CmpfOp):
        return _fold_compare(op, args)
    if kind not in BINARY and kind not in UNARY:
        return _fold_cast(op, args[0])
    if op.results[0].type != f32:
        return None
    with np.errstate(all="ignore"):
        if kind in BINARY:
            return float(np.float32(BINARY[kind](np.float32(args[0]), np.float32(args[1]))))
        return float(np.float32(UNARY[kind](np.float64(args[0]))))
