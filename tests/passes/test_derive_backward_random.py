"""attn-derive-backward on row functions that nobody wrote: random programs, all gradients against the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tests.support.attn_cases import random_inputs
from tests.support.gradients import check_gradients
from tests.support.scalar_builder import At, Value, attention

Values = list[Value]


def stabilised(x: Value) -> Value:
    return (x - x.max()).exp()


def normalised(x: Value) -> Value:
    e = stabilised(x)
    return e / e.sum()


def lse(x: Value) -> Value:
    m = x.max()
    return m + (x - m).exp().sum().log()


# Functions that stay finite and smooth enough for a comparison at 1e-9, whatever they are applied to.
UNARY: list[Callable[[Value], Value]] = [
    lambda x: x * 0.5,
    lambda x: -x,
    lambda x: x.tanh(),
    lambda x: x.abs(),
    lambda x: x.sin(),
    lambda x: (x * x + 1.0).sqrt(),
    lambda x: (x * x + 1.0).log(),
    lambda x: x.tanh().exp(),
    lambda x: 1.0 / (1.0 + (-x).exp()),
    lambda x: (x > 0.3).where(x, 0.0),
    lambda x: x.maximum(0.2),
    lambda x: x.sum() * 0.125,
    lambda x: x.sum() / x.count(),
    lambda x: x.max(),
    lambda x: x.min(),
    stabilised,
    normalised,
    lse,
    lambda x: (x - lse(x)).exp(),
    lambda x: x / (x * x).sum().sqrt().maximum(0.5),
    lambda x: x / (x.abs().sum() + 1.0),
]
BINARY: list[Callable[[Value, Value], Value]] = [
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y.tanh(),
    lambda x, y: x / (y * y + 1.0),
    lambda x, y: x.maximum(y),
    lambda x, y: x.minimum(y),
    lambda x, y: (x > y).where(x, y * 0.5),
    lambda x, y: stabilised(x) * y.tanh().exp(),
    lambda x, y: stabilised(x) / (stabilised(x).sum() + y.tanh().exp()),
]


def program(seed: int) -> Callable[[Value, At], tuple[Value, Value]]:
    """A weight and one row output, from a few random steps on s, a capture per row and one per column."""

    def row(s: Value, at: At) -> tuple[Value, Value]:
        draw = random.Random(seed)
        values = [s, at.c[0][at.h], at.c[1][at.kv]]
        for _ in range(draw.randint(2, 7)):
            x, y = (values[-1 if draw.random() < 0.5 else draw.randrange(len(values))] for _ in range(2))
            values.append(draw.choice(UNARY)(x) if draw.random() < 0.6 else draw.choice(BINARY)(x, y))
        return values[-1] + values[-2] * s, draw.choice(values).sum()

    return row


def every_other_row_is_short(at: At) -> Value:
    return at.kv < at.q * 3


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_row_functions(first: int) -> None:
    for seed in range(first, first + 10):
        q, k, v = random_inputs(hq=2, hkv=1, sq=4, skv=7, seed=seed)
        captures = [torch.randn(n, dtype=torch.float64) for n in (2, 7)]
        module = attention(program(seed), mask=every_other_row_is_short if seed % 2 else None, captures=[1, 1])
        check_gradients(module, (q, k, v), captures, ["q", "k", "v", 0, 1], block=3)
