"""Torch functions that are short formulas in others."""

from __future__ import annotations

import math as pymath

from xdsl.dialects import math
from xdsl.dialects.builtin import f32

from attn_engine.frontend.activations import erf, exp, hardtanh, log, log1p, sigmoid, softplus, tanh
from attn_engine.frontend.arithmetic import absolute, clamp, divide, maximum, minimum, multiply, select
from attn_engine.frontend.region import Function, RegionTrace
from attn_engine.frontend.symbols import Symbol


def lerp(r: RegionTrace, start: object, end: object, weight: object) -> Symbol:
    """start + weight * (end - start), from the nearer end as torch does it: exact at both."""
    a, b, w = r.as_f32(start), r.as_f32(end), r.as_f32(weight)
    return select(r, absolute(r, w) < 0.5, a + w * (b - a), b - (b - a) * (1.0 - w))


def addcmul(r: RegionTrace, x: object, a: object, b: object, *, value: object = 1) -> Symbol:
    return r.symbol(x) + multiply(r, multiply(r, a, b), value)


def addcdiv(r: RegionTrace, x: object, a: object, b: object, *, value: object = 1) -> Symbol:
    return r.symbol(x) + multiply(r, divide(r, a, b), value)


def hypot(r: RegionTrace, a: object, b: object) -> Symbol:
    x, y = r.as_f32(a), r.as_f32(b)
    return r.emit(math.SqrtOp((x * x + y * y).value))


def logaddexp(r: RegionTrace, a: object, b: object) -> Symbol:
    """log(exp(a) + exp(b)), both infinite ends included."""
    x, y = r.as_f32(a), r.as_f32(b)
    top, bottom = maximum(r, x, y), minimum(r, x, y)
    distance = select(r, x == y, 0.0, bottom - top)
    return top + log1p(r, exp(r, distance))


def cosh(r: RegionTrace, x: object) -> Symbol:
    value = r.as_f32(x)
    return 0.5 * exp(r, value) + 0.5 * exp(r, -value)


def sinh(r: RegionTrace, x: object) -> Symbol:
    """From expm1, which does not cancel near 0."""
    value = r.as_f32(x)
    up, down = r.emit(math.ExpM1Op(value.value)), r.emit(math.ExpM1Op((-value).value))
    return 0.5 * up - 0.5 * down


def erfc(r: RegionTrace, x: object) -> Symbol:
    return 1.0 - erf(r, x)


def tan(r: RegionTrace, x: object) -> Symbol:
    value = r.as_f32(x)
    return r.emit(math.SinOp(value.value)) / r.emit(math.CosOp(value.value))


def frac(r: RegionTrace, x: object) -> Symbol:
    value = r.as_f32(x)
    return value - r.emit(math.TruncOp(value.value))


def fmod(r: RegionTrace, a: object, b: object) -> Symbol:
    """The remainder of truncating division: it has the sign of a."""
    x, y = r.common(a, b)
    if x.scalar_type == f32:
        return x - r.emit(math.TruncOp((x / y).value)) * y
    size = absolute(r, x) % absolute(r, y)
    return select(r, x < 0, -size, size)


def hardsigmoid(r: RegionTrace, x: object) -> Symbol:
    return hardtanh(r, r.as_f32(x) + 3.0, 0.0, 6.0) / 6.0


def hardswish(r: RegionTrace, x: object) -> Symbol:
    return r.as_f32(x) * hardsigmoid(r, x)


def softsign(r: RegionTrace, x: object) -> Symbol:
    value = r.as_f32(x)
    return value / (1.0 + absolute(r, value))


def mish(r: RegionTrace, x: object) -> Symbol:
    return r.as_f32(x) * tanh(r, softplus(r, x))


def tanhshrink(r: RegionTrace, x: object) -> Symbol:
    return r.as_f32(x) - tanh(r, x)


def celu(r: RegionTrace, x: object, alpha: float = 1.0) -> Symbol:
    value = r.as_f32(x)
    positive = value > 0.0
    below = r.emit(math.ExpM1Op(select(r, positive, 0.0, value / alpha).value))
    return select(r, positive, value, below * alpha)


def selu(r: RegionTrace, x: object) -> Symbol:
    alpha, size = 1.6732632423543772, 1.0507009873554805
    value = r.as_f32(x)
    positive = value > 0.0
    below = r.emit(math.ExpM1Op(select(r, positive, 0.0, value).value))
    return size * select(r, positive, value, below * alpha)


def threshold(r: RegionTrace, x: object, threshold: object, value: object) -> Symbol:
    found = r.as_f32(x)
    return select(r, found > threshold, found, r.as_f32(value))  # type: ignore[operator]


def logit(r: RegionTrace, x: object, eps: float | None = None) -> Symbol:
    value = r.as_f32(x) if eps is None else clamp(r, r.as_f32(x), eps, 1.0 - eps)
    return log(r, value / (1.0 - value))


def nan_to_num(
    r: RegionTrace, x: object, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Symbol:
    value, largest = r.as_f32(x), 3.4028234663852886e38
    bounded = select(r, value == float("inf"), largest if posinf is None else posinf, value)
    bounded = select(r, value == -float("inf"), -largest if neginf is None else neginf, bounded)
    return select(r, value != value, nan, bounded)


def xlogy(r: RegionTrace, x: object, y: object) -> Symbol:
    """x log(y), and 0 where x is 0, also beside a logarithm that is infinite or none; where it is finite x has its gradient."""
    factor, number = r.as_f32(x), r.as_f32(y)
    zero = (factor == 0.0) & ~((number > 0.0) & (number < float("inf")))
    return select(r, zero, 0.0, factor * log(r, select(r, zero, 1.0, number)))


def _degrees(factor: float) -> Function:
    def function(r: RegionTrace, x: object) -> Symbol:
        return multiply(r, r.as_f32(x), factor)

    return function


def swish(r: RegionTrace, x: object) -> Symbol:
    return r.as_f32(x) * sigmoid(r, x)


COMPOSITES: dict[str, Function] = {
    "_threshold": threshold,
    "addcdiv": addcdiv,
    "addcmul": addcmul,
    "celu": celu,
    "cosh": cosh,
    "deg2rad": _degrees(pymath.pi / 180),
    "erfc": erfc,
    "fmod": fmod,
    "frac": frac,
    "hardsigmoid": hardsigmoid,
    "hardswish": hardswish,
    "hypot": hypot,
    "lerp": lerp,
    "logaddexp": logaddexp,
    "logit": logit,
    "mish": mish,
    "nan_to_num": nan_to_num,
    "rad2deg": _degrees(180 / pymath.pi),
    "selu": selu,
    "sinh": sinh,
    "softsign": softsign,
    "swish": swish,
    "tan": tan,
    "tanhshrink": tanhshrink,
    "threshold": threshold,
    "xlogy": xlogy,
}
