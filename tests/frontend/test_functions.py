"""Traced functions compute what torch computes, gradients, kinks, NaN and infinities included."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attn_engine.errors import OperandError
from tests.support.frontend_tracing import evaluate

INF, NAN = float("inf"), float("nan")
POINTS = torch.tensor(
    [-800.0, -30.0, -6.0, -3.0, -1.0, -0.5, -1e-9, 0.0, 1e-9, 0.5, 1.0, 2.5, 3.0, 6.0, 21.0, 800.0], dtype=torch.float64
)
POSITIVE = POINTS[POINTS > 0]

SMOOTH = {
    "lerp": lambda x: torch.lerp(x, x * x / 800, torch.sigmoid(x)),
    "lerp method": lambda x: x.lerp(2 * x, 0.7),
    "addcmul": lambda x: torch.addcmul(x, x, x / 800, value=2),
    "addcdiv": lambda x: torch.addcdiv(x, x, x * x + 1, value=0.5),
    "hypot": lambda x: torch.hypot(x, x * 0 + 3.0),
    "logaddexp": lambda x: torch.logaddexp(x, 0.5 * x),
    "cosh": lambda x: torch.cosh(x / 100),
    "sinh": lambda x: torch.sinh(x / 100),
    "erfc": lambda x: torch.erfc(x / 400),
    "tan": lambda x: torch.tan(x / 1000),
    "frac": torch.frac,
    "fmod": lambda x: torch.fmod(x, 2.25),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "softsign": F.softsign,
    "mish": F.mish,
    "tanhshrink": F.tanhshrink,
    "celu": lambda x: F.celu(x, alpha=1.5),
    "selu": F.selu,
    "threshold": lambda x: F.threshold(x, 0.7, -2.0),
    "logit": lambda x: torch.logit(torch.sigmoid(x / 100)),
    "xlogy": lambda x: torch.xlogy(x, x * x + 1),
    "xlogy where x is 0": lambda x: torch.xlogy(x, (x - 2).abs()) + torch.xlogy(torch.relu(x), torch.relu(x)),
    "degrees": lambda x: torch.rad2deg(x) + torch.deg2rad(x),
    "nan_to_num": lambda x: torch.nan_to_num(x, 3.0, 4.0, 5.0),
    "where method": lambda x: x.where(x > 0.7, 3 * x),
    "where method of a condition": lambda x: x * (x > -2).where(x > 0.7, x < -0.7),
    "where method of a tensor": lambda x: x * torch.tensor(2.0).where(x > 0.7, 3.0),
    "numpy numbers": lambda x: np.float32(0.5) * x + np.float64(2.0) - np.int64(3) * x * (np.float32(0.7) < x),
    "neg": lambda x: -x,
    "abs": abs,
    "torch.abs": torch.abs,
    "reflected": lambda x: 1 - 2 / (3 + x * x) + 2 * x,
    "square": lambda x: x**2,
    "cube": lambda x: x**3,
    "eighth": lambda x: (x / 800) ** 8,
    "ninth": lambda x: (x / 800) ** 9,
    "float square": lambda x: x**2.0,
    "2 ** x": lambda x: 2 ** (x / 100),
    "3 ** x": lambda x: 3.0 ** (x / 100),
    "exp": lambda x: torch.exp(x / 100),
    "exp2": lambda x: torch.exp2(x / 100),
    "expm1": lambda x: torch.expm1(x / 100),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "F.logsigmoid": F.logsigmoid,
    "relu": torch.relu,
    "method": lambda x: x.relu().tanh(),
    "F.relu": F.relu,
    "nn.ReLU": torch.nn.ReLU(),
    "leaky_relu": F.leaky_relu,
    "elu": lambda x: F.elu(x, alpha=1.5),
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "silu": F.silu,
    "softplus": F.softplus,
    "softplus beta": lambda x: F.softplus(x, beta=2.0, threshold=5.0),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "sign": torch.sign,
    "clamp": lambda x: torch.clamp(x, -1.0, 1.0),
    "clamp min": lambda x: x.clamp(min=0.5),
    "clamp_max": lambda x: x.clamp_max(0.5),
    "clip": lambda x: torch.clip(x, max=3),
    "maximum": lambda x: torch.maximum(x, x * 2),
    "max method": lambda x: torch.minimum(x, -x),
    "where": lambda x: torch.where(x > 0.5, x, 0.0),
    "nested where": lambda x: torch.where((x > -1) & (x < 1) | ~(x < 6), x * x, -x),
    "masked_fill": lambda x: x.masked_fill(x > 2, 7.0),
    "square()": torch.square,
    "remainder": lambda x: x % 3.0,
    "div floor": lambda x: torch.div(x, 3.0, rounding_mode="floor") + x,
    "add alpha": lambda x: torch.add(x, x * x, alpha=3),
    "to": lambda x: x.type_as(x) * 2,
    "logical": lambda x: torch.where(torch.logical_and(x != 0, torch.logical_not(x > 1)), x, 2 * x),
    "isinf": lambda x: torch.where(torch.isinf(x) | torch.isnan(x), 0.0, x),
    "zeros_like": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "full_like": lambda x: x * torch.full_like(x, 2.0) + torch.ones_like(x),
    "constant tensor": lambda x: torch.where(x > 0, x, torch.tensor(2.0)),
    "identity": lambda x: +x.clone().contiguous(),
}
ON_POSITIVE = {
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "x ** 0.5": lambda x: x**0.5,
    "x ** -0.5": lambda x: x**-0.5,
    "x ** -1": lambda x: x**-1,
    "x ** -2": lambda x: x**-2,
    "x ** 1.7": lambda x: x**1.7,
    "pow": lambda x: torch.pow(x / 100, x / 100),
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "reciprocal": torch.reciprocal,
}


@pytest.mark.parametrize("name", [*SMOOTH, *ON_POSITIVE])
def test_values_and_gradients_are_those_of_torch(name: str):
    function = (SMOOTH | ON_POSITIVE)[name]
    points = POINTS if name in SMOOTH else POSITIVE
    ours, theirs = points.clone().requires_grad_(), points.clone().requires_grad_()
    value = evaluate(lambda score, b, h, q_idx, kv_idx: function(score), ours)
    expected = function(theirs)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-12)
    if not (expected.requires_grad and value.requires_grad):
        assert name in ("sign",)
        return
    weights = torch.linspace(1, 2, len(points), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((value * weights).sum(), ours, allow_unused=True, materialize_grads=True)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), theirs, materialize_grads=True)
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        torch.relu,
        torch.sigmoid,
        F.softplus,
        torch.tanh,
        torch.abs,
        lambda x: x.clamp(-1, 1),
        lambda x: torch.maximum(x, -x),
    ],
)
def test_nan_and_infinities_pass_as_in_torch(function):
    points = torch.tensor([NAN, INF, -INF], dtype=torch.float64)
    value = evaluate(lambda score, *_: function(score), points)
    torch.testing.assert_close(value, function(points), equal_nan=True)


@pytest.mark.parametrize("function", [torch.sigmoid, F.softplus, F.logsigmoid, F.silu])
def test_tails_keep_their_digits(function):
    points = torch.tensor([-80.0, -40.0, 40.0, 80.0], dtype=torch.float64)
    value = evaluate(lambda score, *_: function(score), points)
    assert ((value - function(points)).abs() <= 1e-12 * function(points).abs()).all()


VALUES = {
    "x.max(0)": (lambda x: x.max(0), torch.relu),
    "x.min(other)": (lambda x: x.min(2 * x), lambda x: torch.minimum(x, 2 * x)),
    "torch.max(x, other)": (lambda x: torch.max(x, -x), torch.abs),
    "round()": (round, torch.round),
    "x // 2.0": (lambda x: x // 2.0,) * 2,
    "7.0 % x": (lambda x: 7.0 % (x + 900.0),) * 2,
    "divmod": (lambda x: divmod(x, 4.0)[1], lambda x: x % 4.0),
    "casts": (
        lambda x: x.to(torch.float32).long() + x.int() + x.bool().float(),
        lambda x: 2 * x.trunc() + (x != 0).double(),
    ),
    "math.floor": (math.floor, torch.floor),
    "math.trunc": (math.trunc, torch.trunc),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str):
    ours, theirs = VALUES[name]
    torch.testing.assert_close(evaluate(lambda score, *_: ours(score), POINTS), theirs(POINTS), check_dtype=False)


INTEGERS = {
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "- + *": lambda a, b: a * 3 - b + 1,
    "abs": lambda a, b: abs(a - b),
    "neg": lambda a, b: -a,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "~": lambda a, b: ~a,
    "<<": lambda a, b: a << 2,
    ">>": lambda a, b: a >> 1,
    "**": lambda a, b: a**3,
    "/": lambda a, b: a / b,
    "true + true": lambda a, b: (a > b) + (b > a) * 2,
    "reflected //": lambda a, b: 7 // b,
    "reflected %": lambda a, b: -7 % b,
    "divmod": lambda a, b: divmod(a, b)[0],
    "float": lambda a, b: a * 0.5,
    "trunc of float": lambda a, b: (a / b).__trunc__(),
    "floor of float": lambda a, b: math.floor(a / b),
    "eq of bools": lambda a, b: (a > 0) == (b > 0),
    "lt of bools": lambda a, b: (a > 0) < (b > 0),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_pythons(name: str):
    function = INTEGERS[name]
    pairs = [(a, b) for a in range(-7, 8) for b in (-3, -2, 1, 2, 5)]
    a, b = (torch.tensor(column) for column in zip(*pairs, strict=True))
    zero = torch.zeros((), dtype=torch.int64)
    value = evaluate(lambda s, b_, h, q_idx, kv_idx: 1.0 * function(q_idx, kv_idx), zero.double(), zero, zero, a, b)
    expected = torch.tensor([float(function(x, y)) for x, y in pairs], dtype=torch.float64)
    torch.testing.assert_close(value, expected)


CONDITIONS = {
    "+": lambda a, b: (a > 0) + (b > 0),
    "+ of three": lambda a, b: (a > 0) + (b > 0) + (a > b),
    "+ True": lambda a, b: (a > 0) + True,
    "torch.add": lambda a, b: torch.add(a > 0, b > 0),
    "*": lambda a, b: (a > 0) * (b > 0),
    "torch.mul": lambda a, b: torch.mul(a > 0, b > 0),
    "* ~": lambda a, b: (a > 0) * ~(b > 1) + (a == b),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_two_conditions_give_a_condition_as_in_torch(name: str):
    function = CONDITIONS[name]
    a, b = (torch.arange(-3, 4).repeat(7), torch.arange(-3, 4).repeat_interleave(7))
    zero = torch.zeros((), dtype=torch.int64)
    expected = function(a, b)
    assert expected.dtype == torch.bool
    value = evaluate(lambda b_, h, q, kv: function(q, kv), zero, zero, a, b, place="mask")
    assert torch.equal(value.bool(), expected)
    value = evaluate(lambda s, b_, h, q, kv: 1.0 * function(q, kv), zero.double(), zero, zero, a, b)
    assert torch.equal(value, expected.double())


def test_the_difference_of_two_conditions_is_refused_as_in_torch():
    with pytest.raises(OperandError, match=r"a \^ b"):
        evaluate(lambda s, b, h, q, kv: s + ((q > kv) - (q > 3)), torch.zeros(()).double())


def test_truncating_division_of_integers_gives_an_integer():
    a, b = (
        column.flatten()
        for column in torch.meshgrid(torch.arange(-7, 8), torch.tensor([-3, -2, 1, 2, 5]), indexing="ij")
    )
    table, zero = torch.arange(15.0), torch.zeros((), dtype=torch.int64)

    def function(s, b_, h, q, kv):
        return s + table[torch.div(q, kv, rounding_mode="trunc") + 7]

    assert torch.equal(
        evaluate(function, zero.double(), zero, zero, a, b),
        table[torch.div(a, b, rounding_mode="trunc") + 7].double(),
    )


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne])
def test_comparisons(compare):
    a, b = torch.tensor([1, 2, 3]), torch.tensor([2, 2, 2])
    zero = torch.zeros((), dtype=torch.int64)
    assert (
        evaluate(lambda b_, h, q, kv: compare(q, kv), zero, zero, a, b, place="mask").tolist() == compare(a, b).tolist()
    )
    assert (
        evaluate(lambda b_, h, q, kv: compare(q, 2), zero, zero, a, b, place="mask").tolist() == compare(a, 2).tolist()
    )
    assert (
        evaluate(lambda b_, h, q, kv: compare(2, q), zero, zero, a, b, place="mask").tolist() == compare(2, a).tolist()
    )


def test_precedence_of_bitwise_operators_is_kept_and_told():
    zero, q, kv = torch.tensor(0), torch.arange(4).view(4, 1), torch.arange(4)
    with pytest.warns(UserWarning, match="bind tighter"):
        for batch in (0, 1):
            b = torch.tensor(batch)
            value = evaluate(lambda b, h, q, kv: (q >= kv) & b % 2 == 0, b, zero, q, kv, place="mask")
            expected = [[((i >= j) & batch % 2) == 0 for j in range(4)] for i in range(4)]
            assert value.expand(4, 4).tolist() == expected
