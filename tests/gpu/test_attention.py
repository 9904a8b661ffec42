"""Whole attentions on a GPU, forward and every gradient, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.backends.backend import get_backend
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.interpreters.attn import run_attention

BACKENDS = [name for name in ("triton", "gluon") if get_backend(name).check().ok]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not BACKENDS, reason="no GPU backend works here")]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 7e-3, torch.float32: 2e-5}


def definition(name: str, dim: int) -> Definition:
    slopes = torch.rand(4, device="cuda", requires_grad=True)
    bias = torch.randn(4, 200, 260, device="cuda", requires_grad=True)
    lengths = torch.tensor([0, 131], device="cuda")
    ids, key_ids = (torch.arange(n, device="cuda") // 70 for n in (200, 260))
    weight = torch.rand(dim, device="cuda", requires_grad=True)
    rotary = library.in_turn(library.rms_norm(weight), library.rotary(torch.rand(dim // 2, device="cuda")))
    return {
        "full": Definition(),
        "causal": Definition(mask_mod=library.causal),
        "alibi_window": Definition(score_mod=library.alibi(slopes), mask_mod=library.sliding_window(37)),
        "bias": Definition(score_mod=lambda s, b, h, q, kv: s + bias[h, q, kv]),
        "soft_cap": Definition(score_mod=library.soft_cap(5.0), mask_mod=library.causal),
        "lengths": Definition(mask_mod=lambda b, h, q, kv: kv < lengths[b]),
        "documents": Definition(mask_mod=lambda b, h, q, kv: (ids[q] == key_ids[kv]) & (q >= kv)),
        "first_or_document": Definition(mask_mod=lambda b, h, q, kv: (ids[q] == key_ids[kv]) | (kv < 9)),
        "rotary_norm": Definition(query_mod=rotary, key_mod=rotary, mask_mod=library.causal),
        "sigmoid": Definition(row=library.sigmoid, mask_mod=library.causal),
        "retention": Definition(row=library.retention),
        "two_pass": Definition(row=lambda s: torch.relu(torch.softmax(s, -1) - 0.01)),
    }[name]


NAMES = ["full", "causal", "alibi_window", "bias", "soft_cap", "lengths", "sigmoid", "retention", "two_pass"]
NAMES += ["documents", "first_or_document", "rotary_norm"]


@pytest.mark.parametrize("dim", [64, 128, 72])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_against_the_oracle(name: str, dtype: torch.dtype, dim: int):
    torch.manual_seed(0)
    made = definition(name, dim)
    q = torch.randn(2, 4, 200, dim, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, 2, 260, dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    compiled = attn_engine.Attention(made)
    o = compiled(q, k, v, scale=0.1)
    d_o = torch.randn_like(o)
    traced = build(made, dtype=dtype, head_dim=dim, head_dim_v=dim)
    leaves = [q, k, v, *(c for c in traced.captures if c.requires_grad)]
    found = torch.autograd.grad(o, leaves, d_o)
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    rest = iter(exact[3:])
    captures = [next(rest) if c.requires_grad else c.cpu() for c in traced.captures]
    wanted = run_attention(traced.module, *exact[:3], 0.1, captures)[0]
    gradients = torch.autograd.grad(wanted, exact, d_o.cpu().double())
    for mine, right in zip((o, *found), (wanted, *gradients), strict=True):
        error = (mine.detach().cpu().double() - right).norm() / right.norm().clamp(min=1e-6)
        assert error < TOLERANCE[dtype], f"relative error {error:.1e}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_agrees(backend: str):
    q, k, v = (torch.randn(1, 2, 300, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    plain = attn_engine.attention(q.float(), k.float(), v.float(), mask_mod=library.causal)
    o = attn_engine.attention(q, k, v, mask_mod=library.causal, backend=backend)
    assert ((o.float() - plain).norm() / plain.norm()).item() < 7e-3
