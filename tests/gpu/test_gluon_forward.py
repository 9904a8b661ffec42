"""The hand-written Hopper forward on a Hopper GPU, against dense attention in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from xdsl.parser import Parser

from attn_engine.backends.triton.emit_gluon import emit
from attn_engine.backends.triton.gluon_build import build, check
from attn_engine.universe import make_context

SOURCE = Path(__file__).parents[1] / "filecheck" / "tile" / "hopper_forward.mlir"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not check().ok, reason=check().reason)]


@pytest.fixture(scope="module")
def plans():
    return build(emit(Parser(make_context(), SOURCE.read_text()).parse_module()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("heads", "sizes"), [((2, 4, 4), (1024, 1024)), ((1, 8, 2), (2048, 2048)), ((2, 3, 1), (1000, 777))]
)
def test_forward(plans, heads: tuple[int, int, int], sizes: tuple[int, int], causal: bool):
    (batch, q_heads, kv_heads), (sq, skv) = heads, sizes
    torch.manual_seed(0)
    q = torch.randn(batch, q_heads, sq, 128, device="cuda").half()
    k, v = (torch.randn(batch, kv_heads, skv, 128, device="cuda").half() for _ in range(2))
    o, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device="cuda")
    plans["forward_causal" if causal else "forward_full"](q, k, v, o, lse, 128**-0.5)
    wide_k, wide_v = (x.double().repeat_interleave(q_heads // kv_heads, 1) for x in (k, v))
    s = q.double() @ wide_k.transpose(2, 3) * 128**-0.5
    if causal:
        rows, columns = (torch.arange(n, device="cuda") for n in s.shape[2:])
        s = s.masked_fill(rows[:, None] < columns, -torch.inf)
    torch.testing.assert_close(o.double(), s.softmax(-1) @ wide_v, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), s.logsumexp(-1), atol=1e-4, rtol=1e-5)
