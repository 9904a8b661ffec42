"""Functions of scores by the hardware's own: as exact as weights of 16 bits need them, and nothing else where that does not do."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp

from attn_engine import pipelines
from attn_engine.backends.backend import get_backend
from attn_engine.backends.gluon.emit import emit
from attn_engine.backends.gluon.legalize import PREPARE, RELAX
from attn_engine.dialects.tile import KernelOp, PlanOp
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile
from attn_engine.runtime import driver

PER_ROW = torch.tensor([[-3.0, 0.0, 40.0, -torch.inf] * 25])
CASES = {
    "sine": Definition(score_mod=lambda s, b, h, q, kv: s + torch.sin(s * 1000.0)),
    "cosine": Definition(score_mod=lambda s, b, h, q, kv: s + torch.cos(s)),
    "sum of exponentials": Definition(score_mod=lambda s, b, h, q, kv: torch.logaddexp(s, PER_ROW[b, q])),
    "logarithm": Definition(score_mod=lambda s, b, h, q, kv: torch.log(torch.abs(s) + 0.01)),
}
NAME = "tile-relax-functions"


@cache
def lowered(name: str, relaxed: bool) -> tuple[ModuleOp, list[Tensor]]:
    traced = build(CASES[name], dtype=torch.float16, head_dim=32, head_dim_v=32, return_lse=True)
    module = driver.to_attn(traced.module, ())
    convert = "convert-attn-to-tile{forward=64,64,4,2 tables=false}"
    passes = tuple(p for p in PREPARE if relaxed or p != NAME)
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *passes))
    return module, list(traced.captures)


def run(name: str, relaxed: bool) -> list[Tensor]:
    module, captures = lowered(name, relaxed)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 32, generator=generator).double() for n in (100, 130, 130))
    results = [torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan).double()]
    arguments = [q, k, v, *results, *(c.double() for c in captures), 32**-0.5]
    tile.run_plan(module, "forward", arguments, exact=True)
    return results


@pytest.mark.parametrize("name", CASES)
def test_results_differ_by_what_is_allowed(name: str):
    assert "fastmath<afn>" in str(lowered(name, True)[0]) and "fastmath<afn>" not in str(lowered(name, False)[0])
    for got, want in zip(run(name, True), run(name, False), strict=True):
        assert bool(torch.isfinite(want).all())
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0)


FACTORS = {
    "sine": (Definition(score_mod=lambda s, b, h, q, kv: s + torch.sin(s)), True),
    "cosine": (Definition(score_mod=lambda s, b, h, q, kv: 3.0 * torch.cos(s)), False),
}
"""Scores, and whether their derivatives may be approximate: 1 + cos is rounded like 1, a sine near 0 is known far better."""


@cache
def gradients(name: str, relaxed: bool) -> tuple[ModuleOp, list[Tensor]]:
    traced = build(FACTORS[name][0], dtype=torch.float16, head_dim=32, head_dim_v=32)
    module = driver.to_attn(traced.module, ("q", "k", "v"))
    convert = (
        "convert-attn-to-tile{forward=64,64,4,2 rows=64,64,4,1 dq=64,64,4,2 dkdv=64,64,4,2 tables=false fused=true}"
    )
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *(p for p in RELAX if relaxed or p != NAME)))
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_o = (torch.randn(1, 2, n, 32, generator=generator).double() for n in (100, 130, 130, 100))
    plan = next(op for op in module.ops if isinstance(op, PlanOp) and op.sym_name.data == "backward")
    forward = [q, k, v, torch.zeros_like(q), torch.zeros(q.shape[:3]).double()]
    tile.run_plan(module, "forward", [*forward, 32**-0.5], exact=True)
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    assert len(plan.body.block.args) == 10
    tile.run_plan(module, "backward", [*forward[:4], d_o, forward[4], *found, 32**-0.5], exact=True)
    return module, found


@pytest.mark.parametrize("name", FACTORS)
def test_what_multiplies_gradients(name: str):
    """An error times a gradient of unknown size is small beside it, if what is off is not small itself."""
    allowed = FACTORS[name][1]
    module, found = gradients(name, True)
    kernels = [op for op in module.ops if isinstance(op, KernelOp) and op.sym_name.data.startswith("backward")]
    assert ("fastmath<afn>" in "".join(map(str, kernels))) == allowed
    for got, want in zip(found, gradients(name, False)[1], strict=True):
        assert bool(torch.isfinite(want).all())
        torch.testing.assert_close(got, want, atol=2e-6 * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize(("name", "instruction"), [("sine", "SINE"), ("cosine", "COSINE"), ("logarithm", "LOGARITHM")])
def test_they_are_printed_as_instructions(name: str, instruction: str):
    pytest.importorskip("triton")
    traced = build(CASES[name], dtype=torch.float16, head_dim=64, head_dim_v=64, return_lse=True)
    module = driver.to_attn(traced.module, ())
    convert = "convert-attn-to-tile{forward=128,64,8,2 tables=false}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *get_backend("gluon").pipeline))
    text = emit(module)
    kernel = text[text.index("def forward_kernel_role_0") :]
    assert (
        f"inline_asm_elementwise({instruction}" in kernel
        and "gl.sin(" not in kernel
        and "gl.log" not in kernel.partition("total =")[0]
    )
