"""tile-split-distances: the same attention, without a conversion for each score; in kernels of 16 bits, one more rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from xdsl.dialects import arith

from attn_engine import library, pipelines
from attn_engine.backends.gluon.legalize import PREPARE
from attn_engine.dialects import tile as dialect
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile
from attn_engine.runtime import driver

torch.set_num_threads(1)
D, SIZES = 16, (150, 200)
SLOPES = torch.tensor([0.5, -0.25])
TABLE = torch.linspace(-1, 1, 200)
DEFINITIONS: dict[str, tuple[Definition, bool]] = {
    "alibi": (Definition(score_mod=library.alibi(SLOPES), mask_mod=library.sliding_window(90)), True),
    "the other way round": (Definition(score_mod=lambda s, b, h, q, kv: s + (q - kv) * SLOPES[h]), True),
    "a function of it": (Definition(score_mod=lambda s, b, h, q, kv: s * torch.cos(0.1 * (q - kv))), True),
    "twice": (Definition(score_mod=lambda s, b, h, q, kv: s + (kv - q) * SLOPES[h] + (kv - q) * 0.01), True),
    "two ranges": (
        Definition(
            score_mod=library.alibi(SLOPES),
            mask_mod=library.or_masks(library.sliding_window(70), lambda b, h, q, kv: kv < 40),
        ),
        True,
    ),
    "positions apart": (Definition(score_mod=lambda s, b, h, q, kv: s + 0.1 * q - 0.2 * kv), False),
    "a table of distances": (Definition(score_mod=lambda s, b, h, q, kv: s + TABLE[torch.abs(q - kv)]), False),
}


def lower(definition: Definition) -> tuple[Any, list[torch.Tensor]]:
    traced = build(definition, dtype=torch.float16, head_dim=D, head_dim_v=D, return_lse=True)
    module = driver.to_attn(traced.module, ())
    driver.run_passes(module, ("convert-attn-to-tile{forward=128,64,8,2}", *pipelines.TILE_CLEANUP))
    return module, list(traced.captures)


def conversions(module: Any) -> int:
    """Of whole tiles of scores."""
    maps = [op for op in module.walk() if isinstance(op, dialect.MapOp) and len(dialect.shape_of(op.outputs[0])) == 2]
    return sum(isinstance(op, arith.SIToFPOp) for inside in maps for op in inside.body.block.ops)


def run(module: Any, captures: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, D, generator=generator).half().double() for n in (SIZES[0], SIZES[1], SIZES[1]))
    results = [torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, dtype=torch.float64)]
    own = [c.double() if c.is_floating_point() else c for c in captures]
    tile.run_plan(module, "forward", [q, k, v, *results, *own, D**-0.5], exact=True)
    return results


@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_same_attention(name: str):
    definition, splits = DEFINITIONS[name]
    module, captures = lower(definition)
    want = run(module, captures)
    before = conversions(module)
    driver.run_passes(module, PREPARE)
    assert (conversions(module) < before) == splits
    for got, exact in zip(run(module, captures), want, strict=True):
        torch.testing.assert_close(got, exact, atol=1e-9, rtol=1e-9)
