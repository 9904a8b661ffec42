"""Errors against float64: at most twice those of torch with the same roundings, plus one unit in the last place.

Where a gradient is a difference, one float32 unit of what is subtracted is allowed as well.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import attn_engine
from tests.numerics.yardstick import DISTANCE, FLOAT32_NAMES, NAMES, Problem, exact, rms, rounded, terms
from tests.support.compare import leaf
from tests.support.engines import poisoned_memory

SEEDS, D = 3, 32
LENGTHS = (0, 1, 63, 64, 65, 127, 129, 200)
KINDS = ("normal", "low", "large", "huge", "holes", "one key")
captured: dict[str, Tensor] = {}


def score_mod(s, b, h, q, kv):
    return s + captured["bias"][h, q, kv] + captured["slopes"][h] * ((kv - q) * DISTANCE)


def mask_mod(b, h, q, kv):
    return captured["visible"][q, kv]


@cache
def attention() -> attn_engine.Attention:
    return attn_engine.compile(score_mod=score_mod, mask_mod=mask_mod, backend="cpu")


def problem(kind: str, length: int, dtype: torch.dtype, seed: int) -> Problem:
    """`low`: every logit near -120; `large`: q and k 30 times larger; `huge`: 300 times, logits of 2e5, keys alike in groups of
    four, so that neighbours compete where a float32 has steps of 1 / 64; `holes`: every third row sees no key."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    sq, skv = length, 1 if kind == "one key" else length
    q, k, v = draw(1, 2, sq, D), draw(1, 2, skv, D), draw(1, 2, skv, D)
    if kind == "large":
        q, k = 30 * q, 30 * k
    if kind == "huge":
        q, k = 300 * q, 300 * k[:, :, torch.arange(skv) // 4 * 4]
    if kind == "low":
        q, k = 0.3 * q, 0.3 * k
        q[..., 0], k[..., 0] = 1.0, -120.0 * D**0.5
    visible = torch.rand(sq, skv, generator=generator) < 0.8
    visible[:, :1] = True
    if kind == "holes":
        visible[1::3] = False
    q, k, v, d_o = (t.to(dtype) for t in (q, k, v, draw(1, 2, sq, D)))
    return Problem(q, k, v, draw(2, sq, skv), draw(2), visible, d_o, draw(1, 2, sq))


def ours(p: Problem) -> dict[str, Tensor]:
    leaves = [leaf(t) for t in (p.q, p.k, p.v, p.bias, p.slopes)]
    captured.update(bias=leaves[3], slopes=leaves[4], visible=p.visible)
    with poisoned_memory():
        o, lse = attention()(*leaves[:3], return_lse=True)
        grads = torch.autograd.grad((o, lse), leaves, (p.d_o, p.d_lse))
    return dict(zip(NAMES, (t.detach().double() for t in (o, lse, *grads)), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_error_is_at_most_twice_the_yardstick(kind: str, length: int, dtype: torch.dtype):
    problems = [problem(kind, length, dtype, seed) for seed in range(SEEDS)]
    right, mine, theirs = ([f(p) for p in problems] for f in (exact, ours, rounded))
    subtracted = [terms(p) for p in problems]
    for name in NAMES:
        unit = torch.finfo(torch.float32 if name in FLOAT32_NAMES else dtype).eps
        allowed = 2 * rms([t[name] - r[name] for t, r in zip(theirs, right, strict=True)])
        allowed += unit * rms([r[name] for r in right])
        if name in subtracted[0]:
            allowed += torch.finfo(torch.float32).eps * rms([t[name] for t in subtracted])
        error = rms([m[name] - r[name] for m, r in zip(mine, right, strict=True)])
        for m, r in zip(mine, right, strict=True):
            assert torch.equal(m[name].isfinite(), r[name].isfinite()), f"{name}: infinities differ"
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
