"""Elementwise functions of one float, emitted as torch computes them, kinks, tails and NaN included."""

from __future__ import annotations

import math as pymath
from collections.abc import Callable
from typing import TypeAlias

from xdsl.dialects import math
from xdsl.dialects.builtin import f32, i64
from xdsl.ir import Operation, SSAValue

from attn_engine.errors import UnsupportedFunctionError
from attn_engine.frontend.arithmetic import Unary, absolute, divide, select
from attn_engine.frontend.region import Function, RegionTrace
from attn_engine.frontend.source import refuse
from attn_engine.frontend.symbols import Symbol

UnaryOp: TypeAlias = Callable[[SSAValue], Operation]


def _unary(op: UnaryOp) -> Unary:
    return lambda r, x: r.emit(op(r.as_f32(x).value))


exp, expm1, log, log1p = _unary(math.ExpOp), _unary(math.ExpM1Op), _unary(math.LogOp), _unary(math.Log1pOp)
tanh, erf = _unary(math.TanhOp), _unary(math.ErfOp)


def _rounding(op: UnaryOp) -> Function:
    def function(r: RegionTrace, x: object, *, decimals: int = 0) -> Symbol:
        value = r.symbol(x)
        if decimals:
            refuse(UnsupportedFunctionError, "rounding to decimals", "write torch.round(x * 100) / 100")
        return r.emit(op(value.value)) if value.scalar_type == f32 else value

    return function


def sign(r: RegionTrace, x: object) -> Symbol:
    (value,) = r.common(x, at_least=i64)
    return select(
        r,
        value > 0,
        r.symbol(1, value.scalar_type),
        select(r, value < 0, r.symbol(-1, value.scalar_type), r.symbol(0, value.scalar_type)),
    )


def sigmoid(r: RegionTrace, x: object) -> Symbol:
    """1 / (1 + exp(-x)), with an exponent that is never positive: exact in both tails, finite gradient."""
    value = r.as_f32(x)
    negative = value < 0.0
    e = exp(r, select(r, negative, value, -value))
    return divide(r, select(r, negative, e, 1.0), 1.0 + e)


def log_sigmoid(r: RegionTrace, x: object) -> Symbol:
    value = r.as_f32(x)
    negative = value < 0.0
    e = exp(r, select(r, negative, value, -value))
    return select(r, negative, value, 0.0) - log1p(r, e)


def silu(r: RegionTrace, x: object) -> Symbol:
    return r.as_f32(x) * sigmoid(r, x)


def softplus(r: RegionTrace, x: object, beta: float = 1.0, threshold: float = 20.0) -> Symbol:
    """log(1 + exp(beta x)) / beta, and x itself above the threshold (where exp never sees it)."""
    value = r.as_f32(x)
    scaled = value if beta == 1 else value * beta
    linear = scaled > threshold
    e = exp(r, select(r, linear, 0.0, scaled))
    curved = log1p(r, e)
    return select(r, linear, value, curved if beta == 1 else curved / beta)


def gelu(r: RegionTrace, x: object, approximate: str = "none") -> Symbol:
    value = r.as_f32(x)
    if approximate == "tanh":
        inner = pymath.sqrt(2 / pymath.pi) * (value + 0.044715 * (value * value * value))
        return 0.5 * value * (1.0 + tanh(r, inner))
    return 0.5 * value * (1.0 + erf(r, value * pymath.sqrt(0.5)))


def relu(r: RegionTrace, x: object) -> Symbol:
    """x above 0; NaN stays, the gradient at 0 is 0."""
    (value,) = r.common(x, at_least=i64)
    return select(r, value <= 0, r.symbol(0, value.scalar_type), value)


def leaky_relu(r: RegionTrace, x: object, negative_slope: float = 0.01) -> Symbol:
    value = r.as_f32(x)
    return select(r, value > 0.0, value, value * negative_slope)


def elu(r: RegionTrace, x: object, alpha: float = 1.0) -> Symbol:
    value = r.as_f32(x)
    positive = value > 0.0
    below = expm1(r, select(r, positive, 0.0, value))
    return select(r, positive, value, below if alpha == 1 else below * alpha)


def hardtanh(r: RegionTrace, x: object, min_val: float = -1.0, max_val: float = 1.0) -> Symbol:
    value = r.as_f32(x)
    return select(r, value <= min_val, min_val, select(r, value >= max_val, max_val, value))


def is_nan(r: RegionTrace, x: object) -> Symbol:
    value = r.symbol(x)
    return r.symbol(False) if value.scalar_type != f32 else value != value


def _magnitude_test(test: str) -> Unary:
    def function(r: RegionTrace, x: object) -> Symbol:
        value = r.symbol(x)
        if value.scalar_type != f32:
            return r.symbol(test == "lt")
        return r.apply(test, (absolute(r, value), float("inf")), {})

    return function


def relu6(r: RegionTrace, x: object) -> Symbol:
    return hardtanh(r, x, 0.0, 6.0)


def log10(r: RegionTrace, x: object) -> Symbol:
    return log(r, x) * (1 / pymath.log(10))


ACTIVATIONS: dict[str, Function] = {
    "ceil": _rounding(math.CeilOp),
    "cos": _unary(math.CosOp),
    "elu": elu,
    "erf": erf,
    "exp": exp,
    "exp2": _unary(math.Exp2Op),
    "expm1": expm1,
    "floor": _rounding(math.FloorOp),
    "gelu": gelu,
    "hardtanh": hardtanh,
    "isfinite": _magnitude_test("lt"),
    "isinf": _magnitude_test("eq"),
    "isnan": is_nan,
    "leaky_relu": leaky_relu,
    "log": log,
    "log10": log10,
    "log1p": log1p,
    "log2": _unary(math.Log2Op),
    "log_sigmoid": log_sigmoid,
    "relu": relu,
    "relu6": relu6,
    "round": _rounding(math.RoundEvenOp),
    "rsqrt": _unary(math.RsqrtOp),
    "sgn": sign,
    "sigmoid": sigmoid,
    "sign": sign,
    "silu": silu,
    "sin": _unary(math.SinOp),
    "softplus": softplus,
    "sqrt": _unary(math.SqrtOp),
    "tanh": tanh,
    "trunc": _rounding(math.TruncOp),
}
