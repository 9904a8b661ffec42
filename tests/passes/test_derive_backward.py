"""attn-derive-backward: every gradient of every row function is that of torch autograd on the oracle, in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attn_engine.dialects import attn
from tests.support.attn_cases import MASKS, ROWS, SCORE_MODS, attention_module, captures_for, random_inputs
from tests.support.gradients import check_gradients, derive
from tests.support.scalar_builder import At, Value, attention

LN2 = math.log(2)


def inputs(kind: str = "normal", **sizes: int) -> tuple[torch.Tensor, ...]:
    return random_inputs(**({"b": 2, "hq": 4, "hkv": 2, "sq": 5, "skv": 9} | sizes), kind=kind)


def every_third_row_sees_nothing(at: At) -> Value:
    return (at.q - (at.q / 3) * 3 > 0) & (at.kv < at.q + 5)


# --- row functions: (function, row vectors saved, extra loops over the keys, tolerance) -------------


def softmax(s: Value) -> tuple[Value, Value, Value]:
    m = s.max()
    e = (s - m).exp()
    return m, e, e.sum()


def plain(s: Value, at: At) -> Value:
    _, e, total = softmax(s)
    return e / total


def inverse_outside(s: Value, at: At) -> Value:
    _, e, total = softmax(s)
    return e * (1.0 / total)


def naive(s: Value, at: At) -> Value:
    e = s.exp()
    return e / e.sum()


def with_lse(s: Value, at: At) -> tuple[Value, Value]:
    m, e, total = softmax(s)
    return e / total, m + total.log()


def lse_form(s: Value, at: At) -> Value:
    m, _, total = softmax(s)
    return (s - (m + total.log())).exp()


def base_two(s: Value, at: At) -> tuple[Value, Value]:
    t = s * (1 / LN2)
    m = t.max()
    e = (t - m).exp2()
    total = e.sum()
    return e / total, (m + total.log2()) * LN2


def scaled_inside(s: Value, at: At) -> Value:
    e = ((s - s.max()) * (1 / LN2)).exp2()
    return e / e.sum()


def guarded(s: Value, at: At) -> Value:
    """A user's own guards against dead rows and zero sums."""
    m = s.max()
    m = m.equals(-math.inf).where(0.0, m)
    e = (s - m).exp()
    total = e.sum()
    total = total.equals(0.0).where(1.0, total)
    return e / total


def softmax_one(s: Value, at: At) -> Value:
    m, e, total = softmax(s)
    return e / (total + (-m).exp())


def wrong_softmax_one(s: Value, at: At) -> Value:
    """Here the maximum is no stabiliser: it changes the result, and has a gradient."""
    _, e, total = softmax(s)
    return e / (total + 1.0)


def with_maximum(s: Value, at: At) -> tuple[Value, Value]:
    m, e, total = softmax(s)
    return e / total, m


def first_of_maxima(s: Value, at: At) -> tuple[Value, Value]:
    _, e, total = softmax(s)
    return e / total, s.reduce("max", attn.TieRule.FIRST)


def squared_relu(s: Value, at: At) -> Value:
    r = (s > 0.0).where(s, 0.0)
    return r * r


def p_norm(s: Value, at: At) -> Value:
    return s / ((s.abs() ** 3.0).sum() ** (1 / 3))


def thresholded(s: Value, at: At) -> Value:
    return (plain(s, at) - 0.1).maximum(0.0)


def centred_exp(s: Value, at: At) -> Value:
    e = (s - s.sum() / s.count()).exp()
    return e / e.sum()


def layer_norm(s: Value, at: At) -> Value:
    mean = s.sum() / s.count()
    centred = s - mean
    return centred * ((centred * centred).sum() / s.count() + 0.01).rsqrt()


def min_max(s: Value, at: At) -> Value:
    low, high = s.min(), s.max()
    return (s - low) / (high - low + 0.5)


def two_softmaxes(s: Value, at: At) -> Value:
    _, e, total = softmax(s)
    _, f, other = softmax(s * 2.0)
    return e / total - 0.5 * (f / other)


def entropy(s: Value, at: At) -> tuple[Value, Value]:
    m, e, total = softmax(s)
    p = e / total
    return p, (p * (s - m - total.log())).sum()


ROW_FUNCTIONS: dict[str, tuple[Any, int, int, float]] = {
    "plain": (plain, 1, 0, 1e-9),
    "inverse outside": (inverse_outside, 1, 0, 1e-9),
    "naive": (naive, 1, 0, 1e-9),
    "with lse": (with_lse, 1, 0, 1e-9),
    "lse form": (lse_form, 1, 0, 1e-9),
    "base two": (base_two, 1, 0, 1e-6),
    "scaled inside": (scaled_inside, 1, 0, 1e-6),
    "guarded": (guarded, 1, 0, 1e-9),
    "softmax one": (softmax_one, 1, 0, 1e-9),
    "wrong softmax one": (wrong_softmax_one, 2, 1, 1e-9),
    "with maximum": (with_maximum, 1, 1, 1e-9),
    "first of maxima": (first_of_maxima, 1, 1, 1e-9),
    "sigmoid": (lambda s, at: 1.0 / (1.0 + (-s).exp()), 0, 0, 1e-9),
    "silu": (lambda s, at: s / (1.0 + (-s).exp()), 0, 0, 1e-9),
    "relu": (lambda s, at: (s > 0.0).where(s, 0.0), 0, 0, 1e-9),
    "squared relu": (squared_relu, 0, 0, 1e-9),
    "linear": (lambda s, at: s, 0, 0, 1e-9),
    "unnormalised exp": (lambda s, at: (s * 0.3).exp(), 0, 0, 1e-9),
    "tanh": (lambda s, at: s.tanh() + s.sin() * s.cos() + s.erf() + s.atan(), 0, 0, 1e-6),
    "roots": (lambda s, at: (s * s + 1.0).sqrt() + (s * s + 1.0).log1p() + (s * 0.1).expm1(), 0, 0, 1e-9),
    "retention": (lambda s, at: s / s.abs().sum().maximum(1.0), 1, 0, 1e-9),
    "saturated retention": (lambda s, at: s / s.abs().sum().maximum(1e4), 1, 0, 1e-9),
    "cosine": (lambda s, at: s / (s * s).sum().sqrt(), 1, 0, 1e-9),
    "p norm": (p_norm, 1, 0, 1e-6),
    "centred": (lambda s, at: s - s.sum() / s.count(), 2, 1, 1e-9),
    "times sum": (lambda s, at: s * s.sum(), 1, 1, 1e-9),
    "thresholded softmax": (thresholded, 1, 1, 1e-9),
    "exp of centred": (centred_exp, 1, 0, 1e-9),
    "layer norm": (layer_norm, 3, 1, 1e-9),
    "min max": (min_max, 2, 1, 1e-9),
    "two softmaxes": (two_softmaxes, 2, 1, 1e-9),
    "entropy": (entropy, 3, 0, 1e-9),
    "mean": (lambda s, at: 1.0 / s.count(), 1, 0, 1e-9),
    "powers of two": (lambda s, at: s / (s.abs().sum() + 1.0) ** 2.0, 1, 0, 1e-9),
}


@pytest.mark.parametrize("name", ROW_FUNCTIONS)
def test_row_functions(name: str) -> None:
    function, saved, steps, tolerance = ROW_FUNCTIONS[name]
    for mask in (None, every_third_row_sees_nothing):
        forward, backward = check_gradients(attention(function, mask=mask), inputs(), tolerance=tolerance)
        assert (len(forward.saved), len(backward.row_steps)) == (saved, steps)


@pytest.mark.parametrize("kind", ["large", "low"])
@pytest.mark.parametrize("row", ROWS)
def test_hard_scores(row: str, kind: str) -> None:
    for score_mod, mask in zip(SCORE_MODS, MASKS, strict=True):
        q, k, v = inputs(kind)
        captures = captures_for(q, k, row, score_mod, mask)
        wrt = ["q", "k", "v", *(i for i, c in enumerate(captures) if c.is_floating_point())]
        check_gradients(attention_module(row, score_mod, mask), (q, k, v), captures, wrt)


def test_rows_of_minus_infinity() -> None:
    """A live row with scores of -inf, and a row of nothing else, under every spelling of softmax."""
    q, k, v = inputs()
    bias = torch.randn(q.shape[2], k.shape[2], dtype=torch.float64)
    bias[1, ::2] = -math.inf
    bias[3] = -math.inf
    for row in (
        plain,
        inverse_outside,
        with_lse,
        lse_form,
        softmax_one,
        guarded,
        thresholded,
        entropy_free,
        min_max_free,
    ):
        module = attention(row, lambda x, at: x + at.c[0][at.q, at.kv], captures=[2])
        check_gradients(module, (q, k, v), [bias], ["q", "k", "v", 0])


def entropy_free(s: Value, at: At) -> tuple[Value, Value]:
    """A maximum that only an output reads: its dead rows are dead rows of the weights too."""
    return 1.0 / (1.0 + (-s).exp()), s.max() * 0.0


def min_max_free(s: Value, at: At) -> Value:
    return (s - s.max() > -1.0).where(s.count() * 0.1, 0.25)


def test_long_chains() -> None:
    """The paths through twenty steps are a million; neither the code nor the time to derive it grows like that."""

    def chain(y: Value) -> Value:
        for _ in range(20):
            y = y * 0.5 * y.tanh() + y.sin()
        return y

    for function in (lambda s, at: chain(s - s.sum() / s.count()), lambda s, at: s * chain(s.sum() * 0.125)):
        _, backward = check_gradients(attention(function), inputs())
        assert sum(1 for _ in backward.walk()) < 1000


def test_saved_values_are_the_last_ones_that_serve() -> None:
    """cosine: the norm is all that backward reads, not the sum of squares; the cut is next to the reader."""
    forward, _ = derive(attention(lambda s, at: s / (s * s).sum().sqrt()), ["q"])
    saved = forward.row.block.last_op.operands[1]  # type: ignore[union-attr]
    assert saved.owner.name == "math.sqrt"  # type: ignore[union-attr]


def test_deriving_is_deterministic() -> None:
    texts = set[str]()
    for _ in range(3):
        module = attention(layer_norm)
        derive(module, ["q", "k", "v"])
        texts.add(str(module))
    assert len(texts) == 1


def test_ties() -> None:
    """Equal scores share the gradient of a maximum, or the first takes it."""
    q, k, v = inputs()
    k[:, :, 1] = k[:, :, 2] = k[:, :, 0] = 3 * k[:, :, 0]
    for function in (wrong_softmax_one, with_maximum, first_of_maxima, min_max):
        check_gradients(attention(function), (q, k, v))


def test_sum_of_zero() -> None:
    """p = s * sum(s) with sum 0: o and delta are 0, and say nothing of the gradient of the sum."""
    q, k, v = (torch.ones(1, 1, n, 2, dtype=torch.float64) for n in (1, 2, 2))
    k[:, :, 1], v[:, :, 1] = -k[:, :, 0], 2.0
    check_gradients(attention(lambda s, at: s * s.sum()), (q, k, v))


def test_overflowing_exponentials() -> None:
    """1 / (1 + exp(-s)) at s = -1000 and its kin: no inf / inf."""
    q, k, v = inputs("large")
    sigmoids = [
        lambda s, at: 1.0 / (1.0 + (-s * 4.0).exp()),
        lambda s, at: 1.0 / ((-s * 4.0).exp() + 2.0),
        lambda s, at: s / (1.0 + (s * -4.0).exp2()),
        lambda s, at: 1.0 / (1.0 + (s * s).exp()),
        lambda s, at: (1.0 + (-s * 4.0).exp()) ** -2.0,
    ]
    for function in sigmoids:
        check_gradients(attention(function), (q, k, v), tolerance=1e-6)


def test_modifications() -> None:
    q, k, v = inputs()
    mods: dict[str, Any] = {
        "query_mod": lambda x, at: x * x.tanh() * at.h.real(),
        "key_mod": lambda x, at: x * (at.h + 1).real() + (x * at.kv.real()).sin(),
        "value_mod": lambda x, at: x.exp() + at.c[0][at.b] * x,
    }
    scale = torch.rand(q.shape[0], dtype=torch.float64)
    _, backward = check_gradients(attention(with_lse, captures=[1], **mods), (q, k, v), [scale])
    assert backward.query_vjp and backward.key_vjp and backward.value_vjp
