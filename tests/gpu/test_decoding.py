"""Few queries over many keys on a GPU: keys in parts, combined for every kind of row function."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.backends.backend import get_backend
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.interpreters.attn import run_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not get_backend("triton").check().ok, reason="no GPU")]

DEFINITIONS = {
    "softmax": Definition(),
    "retention": Definition(row=library.retention),
    "two loops": Definition(row=lambda s: torch.relu(torch.softmax(s, -1) - 1e-4)),
    "lengths": Definition(mask_mod=lambda b, h, q, kv: kv < 1500 * b),
}


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("queries", [1, 5])
def test_parts(name: str, queries: int):
    torch.manual_seed(0)
    q = torch.randn(2, 4, queries, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 4099, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    attend = attn_engine.Attention(DEFINITIONS[name])
    o = attend(q, k, v, scale=0.1)
    (compiled,) = attend._memory.compiled.values()
    assert "forward_combine" in compiled.source
    traced = build(DEFINITIONS[name], dtype=torch.bfloat16, head_dim=128, head_dim_v=128)
    wanted = run_attention(traced.module, *(x.cpu().double() for x in (q, k, v)), 0.1)[0]
    assert (o.cpu().double() - wanted).norm() / wanted.norm().clamp(min=1e-6) < 7e-3


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "keys"), [(8, 2, 4099), (24, 1, 1500), (64, 64 // 4, 1024)])
def test_heads_that_share_keys_are_rows(queries: int, heads: int, kv_heads: int, keys: int):
    torch.manual_seed(0)
    slopes = torch.rand(heads, device="cuda")
    definition = Definition(
        score_mod=lambda s, b, h, q, kv: s + slopes[h] * (kv - q - keys), mask_mod=lambda b, h, q, kv: kv < keys - 5 + q
    )
    q = torch.randn(2, heads, queries, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, kv_heads, keys, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    attend = attn_engine.Attention(definition)
    o, lse = attend(q, k, v, return_lse=True)
    ((*_, known),) = attend._memory.compiled
    assert known.decoding.group == heads // kv_heads
    exact = attn_engine.Attention(definition, backend="reference")
    wanted_o, wanted_lse = exact(q.double(), k.double(), v.double(), return_lse=True)
    assert (o.double() - wanted_o).norm() / wanted_o.norm() < 7e-3
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-3, rtol=1e-3)
