"""Gradients of masked scores: one select a score where the gradient is a multiple of the weight, two where it must be."""

from __future__ import annotations

import pytest
import torch
from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import f32

import attn_engine
from attn_engine import library, pipelines
from attn_engine.backends.gluon.legalize import GRADIENTS
from attn_engine.dialects import tile as dialect
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile, tile_async
from attn_engine.runtime import driver
from tests.passes.test_tile_async_backward import Compiled, D, problem

torch.set_num_threads(1)
SLOPES = torch.tensor([0.5, -0.25])
IDS = torch.arange(1000) // 200
DEFINITIONS = {
    "causal": (Definition(mask_mod=library.causal), 1),
    "documents": (Definition(mask_mod=library.document(IDS)), 1),
    "trained slopes": (Definition(score_mod=library.alibi(SLOPES), mask_mod=library.causal), 1),
    "soft cap": (Definition(score_mod=library.soft_cap(2.0), mask_mod=library.causal), 1),
    "sigmoid": (Definition(row=library.sigmoid, mask_mod=library.causal), 1),
    "relu": (Definition(row=library.relu, mask_mod=library.causal), 2),
    "logarithm of the distance": (
        Definition(score_mod=lambda s, b, h, q, kv: s * torch.log(1.0 + q - kv), mask_mod=library.causal),
        2,
    ),
}


def lower(definition: Definition, options: str, wrt: tuple[str, ...]) -> Compiled:
    traced = build(definition, dtype=torch.float16, head_dim=D, head_dim_v=D, return_lse=definition.row is None)
    module = driver.to_attn(traced.module, wrt)
    convert = f"convert-attn-to-tile{{forward=64,64,4,2 dq=128,64,8,2 dkdv=64,128,8,2 {options}}}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP))
    return Compiled(module, module.clone(), list(traced.captures))


def masks_of(made: Compiled) -> int:
    """How many selects a masked step of dk and dv has more than one without a mask."""
    kernel = next(o for o in made.value.ops if isinstance(o, dialect.KernelOp) and o.sym_name.data == "backward_dkdv")
    steps = [
        o
        for o in kernel.walk()
        if isinstance(o, scf.ForOp) and not any(isinstance(i, scf.ForOp) for i in o.body.block.ops)
    ]
    counts = [sum(isinstance(o, arith.SelectOp) and o.result.type == f32 for o in step.walk()) for step in steps]
    assert len(counts) == 2
    return max(counts) - min(counts)


@pytest.mark.parametrize(
    ("name", "fused"), [*((name, False) for name in DEFINITIONS), ("documents", True), ("trained slopes", True)]
)
def test_lengths_that_blocks_divide(name: str, fused: bool):
    """Nothing goes beyond the end, so that vectors of rows hold numbers; under random schedules, and at the value level."""
    definition, masks = DEFINITIONS[name]
    wrt = ("q", "k", "v", *(("0",) if name.startswith("trained") else ()))
    made = lower(definition, f"whole=true covered=true fused={str(fused).lower()}", wrt)
    driver.run_passes(made.scheduled, GRADIENTS)
    assert masks_of(made) == masks
    plain = lower(definition, "", wrt)
    given = problem(plain, (1, 2, 1), (256, 256))
    want = given.gradients(tile.run_plan, plain.value)
    assert all(torch.isfinite(w).all() for w in want)
    for run, module, options in ((tile.run_plan, made.value, {}), (tile_async.run_plan, made.scheduled, {"seed": 1})):
        for a, b in zip(given.gradients(run, module, **options), want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_what_a_mask_hides_may_be_infinite():
    """The derivative of a score that no weight reaches."""
    leaves = [torch.randn(1, 1, 64, 16, requires_grad=True) for _ in range(3)]
    attend = attn_engine.compile(
        score_mod=lambda s, b, h, q, kv: s * torch.log(1.0 + q - kv), mask_mod=library.causal, backend="cpu"
    )
    o = attend(*leaves)
    found = torch.autograd.grad(o.square().sum(), leaves)
    assert all(torch.isfinite(g).all() for g in found)


def test_backends_may_want_two_masks():
    definition, _ = DEFINITIONS["causal"]
    assert masks_of(lower(definition, "whole=true masks_once=false", ("q", "k", "v"))) == 2
