"""Squares of values of a row in exponents: they are not taken apart, where parts are infinite or cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_engine
from tests.support.compare import qkv
from tests.support.engines import INTERPRETED


def spread(s: Any, amin: Any, amax: Any) -> Any:
    r = amin - amax
    return torch.softmax(s, -1) * torch.exp(-r * r) + 0.3 * torch.softmax(s * 0.5, -1)


def some_hidden(s: Any, q: Any, kv: Any) -> Any:
    return torch.where((q * 3 + kv * 5) % 7 < 2, -float("inf"), s - 10.0)


def far_from_zero(s: Any, q: Any, kv: Any) -> Any:
    return s + 3000.0


@pytest.mark.parametrize(
    ("score", "close"), [(some_hidden, 1e-6), (far_from_zero, 1e-4)], ids=["some hidden", "far from zero"]
)
@pytest.mark.parametrize("backend", ["cpu", INTERPRETED])
def test_a_square_is_computed_as_written(backend: str, score: Callable[..., Any], close: float):
    q, k, v = qkv(b=1, sq=17, skv=20, d=8)
    at = attn_engine.compile(
        score_mod=lambda s, b, h, i, j: score(s, i, j), row=lambda s: spread(s, s.amin(), s.amax()), backend=backend
    )
    o = at(q, k, v)
    scores = (
        q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    )
    i, j = torch.arange(17)[:, None], torch.arange(20)
    scores = score(scores, i, j)
    weights: Tensor = spread(scores, scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True))
    want = weights @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    torch.testing.assert_close(o.double(), want, atol=close, rtol=close)
