"""Whole attentions through the pipeline: forward and backward in Triton's interpreter against autograd, and ahead of time."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.utils.arg_spec import parse_pipeline

from attn_engine.arch import get_arch
from attn_engine.backends.triton.ahead import compile_ahead
from attn_engine.backends.triton.backend import BACKEND
from attn_engine.backends.triton.emit import emit
from attn_engine.backends.triton.interpret import interpret
from attn_engine.universe import PASSES, make_context
from tests.backends.triton_support import parse

torch.set_num_threads(1)
HEADS, KV_HEADS, SQ, SKV, D = 4, 2, 70, 90, 16
SCALE = 0.3

MASK = """mask {
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64):
    %c = arith.cmpi sge, %qi, %kv : i64
    attn.yield %c : i1
  }"""
SOFTCAP = """score_mod {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64):
    %t = math.tanh %s : f32
    attn.yield %t : f32
  }"""


def attention(element: str, head_dim: int, score: str = "", mask: str = "") -> str:
    """Softmax attention with its lse, as text."""
    t, row = f"tensor<?x?x?x{head_dim}x{element}>", "tensor<?x?x?xf32>"
    return f"""
func.func @attention(%q: {t}, %k: {t}, %v: {t}, %scale: f32) -> ({t}, {row}) {{
  %o, %lse = attn.attention %q, %k, %v scale %scale : {t}, {t}, {t} -> {t} outputs {row}
  {score} {mask} row {{
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64):
    %m = attn.row_reduce max %s
    %x = arith.subf %s, %m : f32
    %e = math.exp %x : f32
    %l = attn.row_reduce sum %e
    %p = arith.divf %e, %l : f32
    %ll = math.log %l : f32
    %lse = arith.addf %m, %ll : f32
    attn.yield %p, %lse : f32, f32
  }}
  func.return %o, %lse : {t}, {row}
}}
"""


def lower(text: str, convert: str = "") -> ModuleOp:
    module, context = parse(text), make_context()
    passes = (
        "attn-simplify",
        "attn-analyze-mask",
        "attn-derive-backward{wrt=q,k,v}",
        "attn-derive-online",
        "attn-simplify",
    )
    tiles = (f"convert-attn-to-tile{{{convert}}}", "attn-simplify", "tile-hoist", *BACKEND.pipeline)
    for spec in (*passes, *tiles):
        for parsed in parse_pipeline(spec):
            PASSES[parsed.name]().from_pass_spec(parsed).apply(context, module)
    module.verify()
    return module


def reference(q: Tensor, k: Tensor, v: Tensor, softcap: bool, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = q @ k.mT * SCALE
    scores = scores.tanh() if softcap else scores
    if causal:
        scores = scores.masked_fill(torch.arange(SQ)[:, None] < torch.arange(SKV), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = [(2, HEADS, SQ, D), (2, KV_HEADS, SKV, D), (2, KV_HEADS, SKV, D)]
    return [torch.randn(s).to(dtype) for s in shapes]


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


@pytest.mark.parametrize(
    ("element", "dtype", "tolerance"), [("f32", torch.float32, 1e-5), ("f16", torch.float16, 5e-3)]
)
@pytest.mark.parametrize(("softcap", "causal"), [(False, False), (True, True)])
def test_forward_and_backward(element: str, dtype: torch.dtype, tolerance: float, softcap: bool, causal: bool):
    module = lower(attention(element, D, SOFTCAP if softcap else "", MASK if causal else ""))
    source = emit(module)
    assert emit(parse(str(module))) == source
    plans = interpret(source)
    q, k, v = inputs(dtype)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    o_ref, lse_ref = reference(*exact, softcap, causal)
    names = re.search(r"def forward\((.*)\):", source).group(1).split(", ")  # type: ignore[union-attr]
    o, rows = torch.full_like(q, math.nan), [poisoned(2, HEADS, SQ) for _ in names[4:-1]]
    plans["forward"](q, k, v, o, *rows, SCALE)
    torch.testing.assert_close(o.double(), o_ref.detach(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        rows[0].double(), lse_ref.detach(), atol=1e-3 if dtype == torch.float16 else 1e-5, rtol=0
    )

    d_o, d_lse = torch.randn_like(q), torch.randn(2, HEADS, SQ)
    expected = torch.autograd.grad([o_ref, lse_ref], exact, [d_o.double(), d_lse.double()])
    gradients = [torch.full_like(t, math.nan) for t in (q, k, v)]
    plans["backward"](q, k, v, o, d_o, *rows[1:], d_lse, *gradients, SCALE)
    for gradient, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient.double(), right, atol=8 * tolerance, rtol=8 * tolerance)


@pytest.mark.parametrize(
    ("arch", "forward", "names"),
    [
        ("sm_80", "128,64,8,2", ["forward_kernel"]),
        ("gfx90a", "64,64,4,2", ["forward_kernel"]),
        ("gfx942", "64,64,4,2", ["forward_kernel"]),
        ("sm_90", "64,64,4,2", ["forward_kernel", "backward_rows", "backward_dq", "backward_dkdv"]),
    ],
)
def test_kernels_compile_ahead(
    arch: str, forward: str, names: list[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    source = emit(lower(attention("bf16", 64, mask=MASK), f"forward={forward} dq=64,32,4,2 dkdv=32,64,4,2"))
    for name in names:
        kernel = compile_ahead(source, name, get_arch(arch))
        assert kernel.wgmma + kernel.mma + kernel.mfma > 0 or "rows" in name
        assert kernel.shared <= get_arch(arch).shared_per_block
        assert kernel.spills == 0
