"""The CPU backend on whole attentions: forward and backward kernels as the passes make them."""

from __future__ import annotations

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser
from xdsl.utils.arg_spec import parse_pipeline

from attn_engine.backends.backend import get_backend
from attn_engine.interpreters.tile import run_plan
from attn_engine.universe import PASSES, make_context
from tests.support.attn_cases import attention_text, captures_for, random_inputs
from tests.support.attn_lowered import SOFTMAX_BACKWARD

CPU = get_backend("cpu")
COMMON = "attn-simplify,attn-analyze-mask,attn-derive-online,attn-simplify"


def run_passes(module: ModuleOp, pipeline: str) -> ModuleOp:
    for spec in parse_pipeline(pipeline):
        PASSES[spec.name]().from_spec(spec).apply(make_context(), module)
        module.verify()
    return module


def compile_text(text: str, d: int, pipeline: str) -> tuple[ModuleOp, dict[str, object]]:
    """The tile module, and the plans that the CPU backend builds from its printed form."""
    text = text.replace("tensor<?x?x?x?xf32>", f"tensor<?x?x?x{d}xf32>")
    module = run_passes(Parser(make_context(), text).parse_module(), pipeline)
    final = run_passes(module.clone(), ",".join(CPU.pipeline))
    source = CPU.emit(final)
    assert CPU.emit(Parser(make_context(), str(final)).parse_module()) == source
    return module, dict(CPU.build(source))


@pytest.mark.parametrize(("sq", "skv"), [(40, 40), (17, 33), (33, 9), (3, 0)])
@pytest.mark.parametrize(
    ("row", "score_mod", "mask"),
    [
        ("softmax", None, "causal"),
        ("softmax_lse", "alibi", "window"),
        ("softmax", "bias", "lengths"),
        ("sigmoid", "softcap", "holes"),
        ("softmax_sink", None, None),
        ("retention", "temperature", "lengths"),
    ],
)
def test_forward(row: str, score_mod: str | None, mask: str | None, sq: int, skv: int):
    q, k, v = random_inputs(b=3, hq=4, hkv=2, sq=sq, skv=skv, d=8, dtype=torch.float32)
    captures = [c.float() if c.is_floating_point() else c for c in captures_for(q, k, row, score_mod, mask)]
    outputs = [torch.full(q.shape[:3], 7.0)] if row == "softmax_lse" else []
    module, plans = compile_text(
        attention_text(row, score_mod, mask), 8, f"{COMMON},convert-attn-to-tile{{forward=16,16,4,1 pad=false}}"
    )
    results = []
    for run in (lambda *a: run_plan(module, "forward", a, exact=True), plans["forward"]):
        o, rows = torch.full_like(q, 7.0), [r.clone() for r in outputs]
        run(q, k, v, o, *rows, *captures, 0.3)
        results.append([o, *rows])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("sq", "skv"), [(40, 40), (17, 33), (33, 9), (3, 0)])
@pytest.mark.parametrize("analyze", [False, True])
def test_backward(sq: int, skv: int, analyze: bool):
    d = 8
    q, k, v = random_inputs(b=3, hq=4, hkv=2, sq=sq, skv=skv, d=d, dtype=torch.float32)
    d_o, slopes, o, lse = torch.randn_like(q), torch.rand(4) + 0.5, torch.randn_like(q), torch.randn(3, 4, sq) + 3
    blocks = "rows=16,16,4,1 dq=16,32,4,1 dkdv=32,16,4,1 pad=false"
    passes = f"{'attn-analyze-mask,' if analyze else ''}convert-attn-to-tile{{{blocks}}}"
    module, plans = compile_text(SOFTMAX_BACKWARD, d, passes)
    results = []
    for run in (lambda *a: run_plan(module, "backward", a, exact=True), plans["backward"]):
        gradients = [torch.full_like(t, 7.0) for t in (q, k, v, slopes)]
        run(q, k, v, o, d_o, lse, slopes, *gradients, 0.3)
        results.append(gradients)
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
