"""Generated Hopper kernels on a Hopper GPU, through the public functions, against dense attention in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.backends.gluon.build import check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not check().ok, reason=check().reason)]

MODS = {"none": None, "soft cap": library.soft_cap(20.0)}
MASKS = {"full": None, "causal": library.causal, "window": library.sliding_window(200)}


Function = Callable[..., Any] | None


def dense(q: Any, k: Any, v: Any, score_mod: Function, mask_mod: Function, row: Function = None) -> Any:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    shapes = [[-1 if a == axis else 1 for a in range(4)] for axis in range(4)]
    index = [torch.arange(n, device="cuda").view(shape) for n, shape in zip(s.shape, shapes, strict=True)]
    s = s if score_mod is None else score_mod(s, *index)
    seen = torch.ones_like(s, dtype=torch.bool) if mask_mod is None else mask_mod(*index)
    if row is not None:
        return torch.where(seen, row(s), 0.0) @ v
    return s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_forward_and_backward(mod: str, mask: str, d: int, deterministic: bool):
    """Gradients of one kernel, and of two."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 700, d, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 777, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    functions = {"score_mod": MODS[mod], "mask_mod": MASKS[mask]}
    o = attn_engine.attention(*leaves, **functions, backend="gluon", deterministic=deterministic)
    want = dense(*exact, MODS[mod], MASKS[mask])
    weight = torch.randn_like(o)
    o.backward(weight)
    want.backward(weight.double())
    pairs = [(o, want), *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]
    for got, expected in pairs:
        assert float((got.double() - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("sizes", [(1, 1), (5, 0), (0, 5), (129, 127)])
def test_lengths(sizes: tuple[int, int]):
    sq, skv = sizes
    q = torch.randn(1, 2, sq, 64, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, 2, skv, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    o = attn_engine.attention(q, k, v, backend="gluon")
    want = dense(q.double(), k.double(), v.double(), None, None) if skv else torch.zeros_like(q).double()
    torch.testing.assert_close(o.double(), want, atol=2e-3, rtol=2e-3)
