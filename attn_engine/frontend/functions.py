"""Elementwise torch functions on traced scalars, by name; each emits what torch computes, kinks and NaN included.

Automatic differentiation acts on what is emitted, so the form decides the gradient: a `select` gives
it to the side that it picks, `arith.maximumf` shares it on ties, `math.absf` gives 0 at 0.
"""

from __future__ import annotations

import math as pymath
import warnings
from collections.abc import Callable

import torch
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32, i1, i64
from xdsl.ir import Attribute, Operation, SSAValue

from attn_engine.errors import OperandError, PrecedenceWarning, UnsupportedFunctionError
from attn_engine.frontend.region import Function, RegionTrace, as_number, constant_op
from attn_engine.frontend.source import refuse, user_line
from attn_engine.frontend.symbols import Symbol

BinaryOp = Callable[[SSAValue, SSAValue], Operation]
UnaryOp = Callable[[SSAValue], Operation]

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
MAX_MULTIPLIED_POWER = 8


# Arithmetic
def _arithmetic(integer: BinaryOp, float_: BinaryOp) -> Function:
    def function(r: RegionTrace, a: object, b: object, *, alpha: object = 1) -> Symbol:
        if alpha != 1:
            b = multiply(r, b, alpha)
        left, right = r.common(a, b, at_least=i64)
        return r.emit((float_ if left.type == f32 else integer)(left.value, right.value))

    return function


def multiply(r: RegionTrace, a: object, b: object) -> Symbol:
    left, right = r.common(a, b, at_least=i64)
    return r.emit((arith.MulfOp if left.type == f32 else arith.MuliOp)(left.value, right.value))


def divide(r: RegionTrace, a: object, b: object, *, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "floor":
        return floor_divide(r, a, b)
    quotient = r.emit(arith.DivfOp(r.as_f32(a).value, r.as_f32(b).value))
    return quotient if rounding_mode is None else truncate(r, quotient)


def floor_divide(r: RegionTrace, a: object, b: object) -> Symbol:
    left, right = r.common(a, b, at_least=i64)
    if left.type == i64:
        return r.emit(arith.FloorDivSIOp(left.value, right.value))
    return r.emit(math.FloorOp(r.emit(arith.DivfOp(left.value, right.value)).value))


def remainder(r: RegionTrace, a: object, b: object) -> Symbol:
    """The remainder of floor division: it has the sign of b."""
    left, right = r.common(a, b, at_least=i64)
    return left - floor_divide(r, left, right) * right


def negate(r: RegionTrace, x: object) -> Symbol:
    (value,) = r.common(x, at_least=i64)
    if value.type == i64:
        return r.emit(arith.SubiOp(r.as_i64(0).value, value.value))
    return r.emit(arith.NegfOp(value.value))


def absolute(r: RegionTrace, x: object) -> Symbol:
    (value,) = r.common(x, at_least=i64)
    if value.type == i64:
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
    if not any(symbol.type == f32 for symbol in r.common(base, exponent)):
        refuse(
            OperandError,
            "an integer to a power that is no small constant",
            "make one of the two a float: x.float() ** n",
        )
    return r.emit(math.PowFOp(r.as_f32(base).value, r.as_f32(exponent).value))


def _whole_power(r: RegionTrace, base: object, exponent: int, at_least: Attribute) -> Symbol:
    (value,) = r.common(base, at_least=at_least)
    if exponent == 0:
        return r.symbol(1, value.type)
    if exponent % 2:
        return value if exponent == 1 else _whole_power(r, value, exponent - 1, at_least) * value
    half = _whole_power(r, value, exponent // 2, at_least)
    return half * half


# Comparisons and logic
def _comparison(integer: str, float_: str) -> Function:
    def function(r: RegionTrace, a: object, b: object) -> Symbol:
        left, right = r.common(a, b)
        if left.type == i1 and integer not in ("eq", "ne"):
            left, right = r.as_i64(left), r.as_i64(right)
        op = arith.CmpfOp if left.type == f32 else arith.CmpiOp
        return r.emit(op(left.value, right.value, float_ if left.type == f32 else integer))

    return function


def _bitwise(op: BinaryOp) -> Function:
    def function(r: RegionTrace, a: object, b: object) -> Symbol:
        left, right = r.common(a, b)
        if left.type == f32:
            refuse(OperandError, "&, | or ^ on a float", "compare first: (x > 0) & (y > 0)")
        if left.type == i64 and i1 in (r.symbol(a).type, r.symbol(b).type):
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
    if value.type == f32:
        refuse(OperandError, "~ on a float", "compare first: ~(x > 0)")
    ones = r.as_i1(True) if value.type == i1 else r.as_i64(-1)
    return r.emit(arith.XOrIOp(value.value, ones.value))


def _shift(op: BinaryOp) -> Function:
    return lambda r, a, b: r.emit(op(r.as_i64(a).value, r.as_i64(b).value))


def truth(r: RegionTrace, x: object) -> Symbol:
    """Whether a value is not zero."""
    value = r.symbol(x)
    return value if value.type == i1 else value != 0


def _logical(op: BinaryOp) -> Function:
    return lambda r, a, b: r.emit(op(truth(r, a).value, truth(r, b).value))


def select(r: RegionTrace, condition: object, a: object, b: object) -> Symbol:
    chosen = r.symbol(condition)
    if chosen.type != i1:
        refuse(OperandError, f"the condition of a where is {chosen.type}", "compare it: torch.where(x != 0, a, b)")
    left, right = r.common(a, b)
    return r.emit(arith.SelectOp(chosen.value, left.value, right.value))


# Extrema
def _extremum(integer: BinaryOp, logical: BinaryOp, float_: BinaryOp) -> Function:
    def function(r: RegionTrace, a: object, b: object) -> Symbol:
        left, right = r.common(a, b)
        op = float_ if left.type == f32 else integer if left.type == i64 else logical
        return r.emit(op(left.value, right.value))

    return function


maximum = _extremum(arith.MaxSIOp, arith.OrIOp, arith.MaximumfOp)
minimum = _extremum(arith.MinSIOp, arith.AndIOp, arith.MinimumfOp)


def clamp(r: RegionTrace, x: object, min: object = None, max: object = None) -> Symbol:
    """Between two bounds; the gradient passes inside and at the bounds themselves."""
    value = r.symbol(x)
    for bound, beyond in ((min, "lt"), (max, "gt")):
        if bound is not None:
            left, right = r.common(value, bound)
            value = select(r, r.apply(beyond, (left, right), {}), right, left)
    return value


# Functions of a float
def _unary(op: UnaryOp) -> Function:
    return lambda r, x: r.emit(op(r.as_f32(x).value))


def _rounding(op: UnaryOp) -> Function:
    def function(r: RegionTrace, x: object, *, decimals: int = 0) -> Symbol:
        value = r.symbol(x)
        if decimals:
            refuse(UnsupportedFunctionError, "rounding to decimals", "write torch.round(x * 100) / 100")
        return r.emit(op(value.value)) if value.type == f32 else value

    return function


truncate = _rounding(math.TruncOp)


def sign(r: RegionTrace, x: object) -> Symbol:
    (value,) = r.common(x, at_least=i64)
    return select(
        r, value > 0, r.symbol(1, value.type), select(r, value < 0, r.symbol(-1, value.type), r.symbol(0, value.type))
    )


def sigmoid(r: RegionTrace, x: object) -> Symbol:
    """1 / (1 + exp(-x)), with an exponent that is never positive: exact in both tails, finite gradient."""
    value = r.as_f32(x)
    negative = value < 0.0
    e = _unary(math.ExpOp)(r, select(r, negative, value, -value))
    return divide(r, select(r, negative, e, 1.0), 1.0 + r.as_f32(e))


def log_sigmoid(r: RegionTrace, x: object) -> Symbol:
    value = r.as_f32(x)
    negative = value < 0.0
    e = _unary(math.ExpOp)(r, select(r, negative, value, -value))
    return select(r, negative, value, 0.0) - r.as_f32(_unary(math.Log1pOp)(r, e))


def silu(r: RegionTrace, x: object) -> Symbol:
    return r.as_f32(x) * sigmoid(r, x)


def softplus(r: RegionTrace, x: object, beta: float = 1.0, threshold: float = 20.0) -> Symbol:
    """log(1 + exp(beta x)) / beta, and x itself above the threshold (where exp never sees it)."""
    value = r.as_f32(x)
    scaled = value if beta == 1 else value * beta
    linear = scaled > threshold
    e = _unary(math.ExpOp)(r, select(r, linear, 0.0, scaled))
    curved = r.as_f32(_unary(math.Log1pOp)(r, e))
    return select(r, linear, value, curved if beta == 1 else curved / beta)


def gelu(r: RegionTrace, x: object, approximate: str = "none") -> Symbol:
    value = r.as_f32(x)
    if approximate == "tanh":
        inner = pymath.sqrt(2 / pymath.pi) * (value + 0.044715 * (value * value * value))
        return 0.5 * value * (1.0 + r.as_f32(_unary(math.TanhOp)(r, inner)))
    return 0.5 * value * (1.0 + r.as_f32(_unary(math.ErfOp)(r, value * pymath.sqrt(0.5))))


def relu(r: RegionTrace, x: object) -> Symbol:
    """x above 0; NaN stays, the gradient at 0 is 0."""
    (value,) = r.common(x, at_least=i64)
    return select(r, value <= 0, r.symbol(0, value.type), value)


def leaky_relu(r: RegionTrace, x: object, negative_slope: float = 0.01) -> Symbol:
    value = r.as_f32(x)
    return select(r, value > 0.0, value, value * negative_slope)


def elu(r: RegionTrace, x: object, alpha: float = 1.0) -> Symbol:
    value = r.as_f32(x)
    positive = value > 0.0
    below = r.as_f32(_unary(math.ExpM1Op)(r, select(r, positive, 0.0, value)))
    return select(r, positive, value, below if alpha == 1 else below * alpha)


def hardtanh(r: RegionTrace, x: object, min_val: float = -1.0, max_val: float = 1.0) -> Symbol:
    value = r.as_f32(x)
    return select(r, value <= min_val, min_val, select(r, value >= max_val, max_val, value))


def is_nan(r: RegionTrace, x: object) -> Symbol:
    value = r.symbol(x)
    return r.symbol(False) if value.type != f32 else value != value  # noqa: PLR0124


def _magnitude_test(test: str) -> Function:
    def function(r: RegionTrace, x: object) -> Symbol:
        value = r.symbol(x)
        if value.type != f32:
            return r.symbol(test == "lt")
        return r.apply(test, (absolute(r, value), float("inf")), {})

    return function


# Casts and copies
def cast_to(r: RegionTrace, x: object, *args: object, dtype: object = None, **_: object) -> Symbol:
    """`.to(dtype)` and `.to(other)`; devices and memory formats mean nothing here."""
    value = r.symbol(x)
    for argument in (*args, dtype):
        if isinstance(argument, Symbol | torch.Tensor):
            argument = argument.dtype
        if isinstance(argument, torch.dtype):
            value = _cast(r, value, argument)
    return value


def _cast(r: RegionTrace, value: Symbol, dtype: torch.dtype) -> Symbol:
    if dtype == torch.float32:
        return r.as_f32(value)
    if dtype == torch.bool:
        return truth(r, value)
    if dtype in (torch.int32, torch.int64):
        return r.emit(arith.FPToSIOp(value.value, i64)) if value.type == f32 else r.as_i64(value)
    refuse(
        UnsupportedFunctionError,
        f"a cast to {dtype}",
        "scalars are float32, int64 and bool, whatever the dtype of the tensors; leave the cast out or cast to one of these",
    )


def _to(dtype: torch.dtype) -> Function:
    return lambda r, x: _cast(r, r.symbol(x), dtype)


def same(r: RegionTrace, x: object, *_: object, **__: object) -> Symbol:
    return r.symbol(x)


def _filled(number: float) -> Function:
    return lambda r, x, **_: full_like(r, x, number)


def full_like(r: RegionTrace, x: object, fill_value: object, **_: object) -> Symbol:
    """A constant that counts as an element of whatever `x` is an element of."""
    like = r.symbol(x)
    number = as_number(fill_value)
    if number is not None:
        return r.emit(constant_op(number, like.type), level=r.level(like))
    value = r.symbol(fill_value, like.type)
    return r.emit(arith.SelectOp(r.as_i1(True).value, value.value, value.value), level=r.level(like))


def refuse_detach(r: RegionTrace, x: object) -> Symbol:
    refuse(
        UnsupportedFunctionError,
        "detach() inside of a traced function",
        "detach the tensors before they are captured; gradients of scores cannot be stopped here",
    )


_ALIASES: dict[str, tuple[str, ...]] = {
    "abs": ("absolute", "__abs__"),
    "bitwise_and": ("and",),
    "bitwise_left_shift": ("lshift",),
    "bitwise_not": ("invert",),
    "bitwise_or": ("or",),
    "bitwise_right_shift": ("rshift",),
    "bitwise_xor": ("xor",),
    "clamp": ("clip",),
    "div": ("divide", "true_divide", "truediv"),
    "eq": ("equal_to",),
    "floor_divide": ("floordiv",),
    "ge": ("greater_equal",),
    "gt": ("greater",),
    "le": ("less_equal",),
    "log_sigmoid": ("logsigmoid",),
    "lt": ("less",),
    "mul": ("multiply",),
    "ne": ("not_equal",),
    "neg": ("negative",),
    "pow": ("float_power",),
    "remainder": ("mod",),
    "sigmoid": ("expit",),
    "sub": ("subtract",),
    "trunc": ("fix",),
}

_FUNCTIONS: dict[str, Function] = {
    "abs": absolute,
    "add": _arithmetic(arith.AddiOp, arith.AddfOp),
    "as_tensor": same,
    "bitwise_and": _bitwise(arith.AndIOp),
    "bitwise_left_shift": _shift(arith.ShLIOp),
    "bitwise_not": invert,
    "bitwise_or": _bitwise(arith.OrIOp),
    "bitwise_right_shift": _shift(arith.ShRSIOp),
    "bitwise_xor": _bitwise(arith.XOrIOp),
    "bool": _to(torch.bool),
    "ceil": _rounding(math.CeilOp),
    "clamp": clamp,
    "clamp_max": lambda r, x, max: clamp(r, x, None, max),
    "clamp_min": lambda r, x, min: clamp(r, x, min),
    "clone": same,
    "contiguous": same,
    "cos": _unary(math.CosOp),
    "detach": refuse_detach,
    "div": divide,
    "elu": elu,
    "eq": _comparison("eq", "oeq"),
    "erf": _unary(math.ErfOp),
    "exp": _unary(math.ExpOp),
    "exp2": _unary(math.Exp2Op),
    "expm1": _unary(math.ExpM1Op),
    "float": _to(torch.float32),
    "floor": _rounding(math.FloorOp),
    "floor_divide": floor_divide,
    "full_like": full_like,
    "ge": _comparison("sge", "oge"),
    "gelu": gelu,
    "gt": _comparison("sgt", "ogt"),
    "hardtanh": hardtanh,
    "int": _to(torch.int32),
    "isfinite": _magnitude_test("lt"),
    "isinf": _magnitude_test("eq"),
    "isnan": is_nan,
    "le": _comparison("sle", "ole"),
    "leaky_relu": leaky_relu,
    "log": _unary(math.LogOp),
    "log10": lambda r, x: r.as_f32(_unary(math.LogOp)(r, x)) * (1 / pymath.log(10)),
    "log1p": _unary(math.Log1pOp),
    "log2": _unary(math.Log2Op),
    "log_sigmoid": log_sigmoid,
    "logical_and": _logical(arith.AndIOp),
    "logical_not": lambda r, x: invert(r, truth(r, x)),
    "logical_or": _logical(arith.OrIOp),
    "logical_xor": _logical(arith.XOrIOp),
    "long": _to(torch.int64),
    "lt": _comparison("slt", "olt"),
    "masked_fill": lambda r, x, mask, value: select(r, mask, value, x),
    "maximum": maximum,
    "minimum": minimum,
    "mul": multiply,
    "ne": _comparison("ne", "une"),
    "neg": negate,
    "ones_like": _filled(1),
    "positive": same,
    "pow": power,
    "reciprocal": lambda r, x: divide(r, 1.0, x),
    "relu": relu,
    "relu6": lambda r, x: hardtanh(r, x, 0.0, 6.0),
    "remainder": remainder,
    "round": _rounding(math.RoundEvenOp),
    "rsqrt": _unary(math.RsqrtOp),
    "rsub": lambda r, a, b: r.apply("sub", (b, a), {}),
    "sgn": sign,
    "sigmoid": sigmoid,
    "sign": sign,
    "silu": silu,
    "sin": _unary(math.SinOp),
    "softplus": softplus,
    "sqrt": _unary(math.SqrtOp),
    "square": lambda r, x: multiply(r, x, x),
    "sub": _arithmetic(arith.SubiOp, arith.SubfOp),
    "tanh": _unary(math.TanhOp),
    "tensor": same,
    "to": cast_to,
    "trunc": truncate,
    "type": cast_to,
    "type_as": cast_to,
    "where": select,
    "zeros_like": _filled(0),
}

ELEMENTWISE: dict[str, Function] = _FUNCTIONS | {
    alias: _FUNCTIONS[name] for name, aliases in _ALIASES.items() for alias in aliases
}
