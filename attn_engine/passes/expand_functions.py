"""Functions of `math` and integer division in terms of the few that every target has.

All are for f32. Coefficients are our own fits (weighted minimax, in the variable z = x * x where odd);
errors are at most 2e-7 relative unless a docstring says more, NaN in gives NaN out, and infinities,
zeros and signs are those of C.
"""

from __future__ import annotations

import math as m
from collections.abc import Callable

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32
from xdsl.ir import Operation

from attn_engine.passes.scalar_code import Scalar

INFINITY = m.inf
HALF_PI = m.pi / 2

_TANH = (-0.00572081269, 0.0206537989, -0.0537444291, 0.133315017, -0.333332843)
_ERF = (8.19377356e-05, -0.000809987576, 0.00519715468, -0.0268577915, 0.112836657, -0.376126317, 1.12837917)
_LOG2_ERFC = (0.000284474391, -0.00440832161, 0.0321390863, -0.150094266, -0.919082859, -1.62699875, -0.000256059968)
_ATAN = (
    *(-0.0017872911, 0.0108768867, -0.0310853488, 0.0578355154, -0.0839398495),
    *(0.109477878, -0.142630495, 0.199983744, -0.333332877, 0.999999998),
)
_EXPM1 = tuple(1 / m.factorial(n) for n in range(9, 0, -1))
_ATANH = tuple(2 / n for n in range(13, 0, -2))


# --- exponentials and logarithms ---------------------------------------------------------------


def expm1(x: Scalar) -> Scalar:
    return (x.abs() < 0.5).choose(x * x.polynomial(_EXPM1), x.exp() - 1.0)


def log1p(x: Scalar) -> Scalar:
    """Near 0 the series of 2 atanh(x / (x + 2)), in which nothing cancels."""
    near = (x > -0.4) & (x < 0.5)
    s = near.choose(x, 0.0)
    s = s / (s + 2.0)
    return near.choose(s * (s * s).polynomial(_ATANH), (x + 1.0).log())


def log10(x: Scalar) -> Scalar:
    return x.log() * m.log10(m.e)


def powf(x: Scalar, y: Scalar) -> Scalar:
    """The error grows with the exponent: 2e-7 * (1 + |y log2 x|)."""
    a, half = x.abs(), y * 0.5
    power = (y * a.log2()).exp2()
    power = (a.equals(1.0) | y.equals(0.0)).choose(x.lift(1.0), power)
    whole = y.floor().equals(y)
    odd = whole & half.floor().differs(half)
    signed = odd.choose(power.with_sign_of(x), power)
    nan = (x < 0.0) & whole.choose(x.code.constant(0, whole.value.type), a < INFINITY)
    signed = nan.choose(x.lift(m.nan), signed)
    return x.equals(1.0).choose(x.lift(1.0), signed)


def fpowi(x: Scalar, n: Scalar) -> Scalar:
    return powf(x, x.code.add(arith.SIToFPOp(n.value, f32)))


def cbrt(x: Scalar) -> Scalar:
    """One Newton step after an estimate by exponentials."""
    a = x.abs()
    y = (a.log2() * (1 / 3)).exp2()
    y = y - (y - a / (y * y)) * (1 / 3)
    return ((a > 0.0) & (a < INFINITY)).choose(y.with_sign_of(x), x)


# --- hyperbolic --------------------------------------------------------------------------------


def tanh(x: Scalar) -> Scalar:
    a, z = x.abs(), x * x
    large = x.lift(1.0) - x.lift(2.0) / ((a * (2 * m.log2(m.e))).exp2() + 1.0)
    return (a < 0.6).choose(a * z * z.polynomial(_TANH) + a, large).with_sign_of(x)


def _half_exponential(a: Scalar) -> tuple[Scalar, Scalar]:
    """exp(a) / 2 as a product of two numbers, neither of which overflows before it does."""
    h = (a * 0.5).exp()
    return h, h * 0.5


def sinh(x: Scalar) -> Scalar:
    a = x.abs()
    e = expm1(a)
    h, g = _half_exponential(a)
    return (a < 20.0).choose((e + e / (e + 1.0)) * 0.5, h * g).with_sign_of(x)


def cosh(x: Scalar) -> Scalar:
    a = x.abs()
    e = a.exp()
    h, g = _half_exponential(a)
    return (a < 20.0).choose((e + x.lift(1.0) / e) * 0.5, h * g)


def asinh(x: Scalar) -> Scalar:
    a = x.abs()
    small = log1p(a + a * a / ((a * a + 1.0).sqrt() + 1.0))
    return (a < 1e8).choose(small, a.log() + m.log(2)).with_sign_of(x)


def acosh(x: Scalar) -> Scalar:
    t = x - 1.0
    return (x > 1e8).choose(x.log() + m.log(2), log1p(t + (t * (t + 2.0)).sqrt()))


def atanh(x: Scalar) -> Scalar:
    a = x.abs()
    return (log1p(a * 2.0 / (x.lift(1.0) - a)) * 0.5).with_sign_of(x)


def erf(x: Scalar) -> Scalar:
    a = x.abs()
    t = a.min(4.0)
    tail = x.lift(1.0) - t.polynomial(_LOG2_ERFC).exp2()
    return (a < 0.93).choose(x * (x * x).polynomial(_ERF), tail.with_sign_of(x))


# --- trigonometric -----------------------------------------------------------------------------


def tan(x: Scalar) -> Scalar:
    return x.apply(math.SinOp) / x.apply(math.CosOp)


def _atan_of_ratio(y: Scalar, x: Scalar) -> Scalar:
    """atan(y / x) in [0, pi/2] for y and x not negative; 0 / 0 counts as 0."""
    low, high = y.min(x), y.max(x)
    ratio = high.equals(0.0).choose(low, low / high)
    ratio = low.equals(INFINITY).choose(x.lift(1.0), ratio)
    angle = ratio * (ratio * ratio).polynomial(_ATAN)
    return (y > x).choose(x.lift(HALF_PI) - angle, angle)


def atan(x: Scalar) -> Scalar:
    return _atan_of_ratio(x.abs(), x.lift(1.0)).with_sign_of(x)


def atan2(y: Scalar, x: Scalar) -> Scalar:
    angle = _atan_of_ratio(y.abs(), x.abs())
    left = x.lift(1.0).with_sign_of(x) < 0.0
    return left.choose(x.lift(m.pi) - angle, angle).with_sign_of(y)


def asin(x: Scalar) -> Scalar:
    a = x.abs()
    return _atan_of_ratio(a, ((x.lift(1.0) - a) * (a + 1.0)).sqrt()).with_sign_of(x)


def acos(x: Scalar) -> Scalar:
    one = x.lift(1.0)
    return _atan_of_ratio((one - x).sqrt(), (one + x).sqrt()) * 2.0


# --- rounding and signs ------------------------------------------------------------------------


def copysign(x: Scalar, y: Scalar) -> Scalar:
    return x.with_sign_of(y)


def trunc(x: Scalar) -> Scalar:
    return x.abs().floor().with_sign_of(x)


def round_away(x: Scalar) -> Scalar:
    a = x.abs()
    low = a.floor()
    return (a - low < 0.5).choose(low, low + 1.0).with_sign_of(x)


def round_even(x: Scalar) -> Scalar:
    a = x.abs()
    low = a.floor()
    rest, half = a - low, low * 0.5
    down = (rest < 0.5) | (rest.equals(0.5) & half.floor().equals(half))
    down = down | rest.differs(rest)
    return down.choose(low, low + 1.0).with_sign_of(x)


# --- integers ----------------------------------------------------------------------------------


def floor_divide(a: Scalar, b: Scalar) -> Scalar:
    quotient, rest = a / b, a % b
    return (rest.differs(0) & ((rest ^ b) < 0)).choose(quotient - 1, quotient)


def ceil_divide(a: Scalar, b: Scalar) -> Scalar:
    quotient, rest = a / b, a % b
    return (rest.differs(0) & ((rest ^ b) >= 0)).choose(quotient + 1, quotient)


def integer_power(a: Scalar, n: Scalar) -> Scalar:
    """By squaring. Exponents beyond 63 overflow anyway, unless the base is 0, 1 or -1, where only parity counts."""
    power, square = a.lift(1), a
    odd = n & 1
    small = (n < 64).choose(n, odd + 62)
    for bit in range(6):
        power = (small & (1 << bit)).differs(0).choose(power * square, power)
        square = square * square
    parity = odd.differs(0).choose(a, a * a)
    inverse = a.equals(1).choose(a, a.equals(-1).choose(parity, a.lift(0)))
    return (n < 0).choose(inverse, power)


def unsigned_min(a: Scalar, b: Scalar) -> Scalar:
    return a.below(b).choose(a, b)


def unsigned_max(a: Scalar, b: Scalar) -> Scalar:
    return a.below(b).choose(b, a)


FLOAT_FUNCTIONS: dict[type[Operation], Callable[..., Scalar]] = {
    math.ExpM1Op: expm1,
    math.Log1pOp: log1p,
    math.Log10Op: log10,
    math.PowFOp: powf,
    math.FPowIOp: fpowi,
    math.CbrtOp: cbrt,
    math.TanhOp: tanh,
    math.SinhOp: sinh,
    math.CoshOp: cosh,
    math.AsinhOp: asinh,
    math.AcoshOp: acosh,
    math.AtanhOp: atanh,
    math.ErfOp: erf,
    math.TanOp: tan,
    math.AtanOp: atan,
    math.Atan2Op: atan2,
    math.AsinOp: asin,
    math.AcosOp: acos,
    math.CopySignOp: copysign,
    math.TruncOp: trunc,
    math.RoundOp: round_away,
    math.RoundEvenOp: round_even,
}

INTEGER_FUNCTIONS: dict[type[Operation], Callable[..., Scalar]] = {
    arith.FloorDivSIOp: floor_divide,
    arith.CeilDivSIOp: ceil_divide,
    math.IPowIOp: integer_power,
    arith.MinUIOp: unsigned_min,
    arith.MaxUIOp: unsigned_max,
}
