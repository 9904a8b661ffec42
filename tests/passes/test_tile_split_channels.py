"""Heads in parts: what the forward means does not change, under random schedules, with queries in registers or shared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp

from attn_engine import library, pipelines
from attn_engine.backends.gluon.legalize import PREPARE, SCHEDULE
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile_async
from attn_engine.passes.tile_split_channels import parts_of
from attn_engine.runtime import driver

SHAPES = [(48, 16, "registers"), (16, 48, "shared"), (72, 40, "registers"), (112, 112, "shared")]
"""Channels of keys and of values, and where queries are read; tiles hold multiples of 16."""


def scheduled(d: int, dv: int, queries: str, definition: Definition) -> ModuleOp:
    traced = build(definition, dtype=torch.float16, head_dim=d, head_dim_v=dv, return_lse=True)
    module = driver.to_attn(traced.module, ())
    convert = "convert-attn-to-tile{forward=128,64,8,2 channels=16}"
    passes = (f'tile-pipeline{{queries="{queries}"}}' if s == "tile-pipeline" else s for s in SCHEDULE)
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *PREPARE, *passes))
    module.verify()
    return module


def operands_of(d: int, dv: int, sq: int, skv: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(d + dv)
    shapes = ((1, 2, sq, d), (1, 1, skv, d), (1, 1, skv, dv))
    return [torch.randn(*shape, generator=generator).half().double() for shape in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return s.masked_fill(~seen, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize(("d", "dv", "queries"), SHAPES)
def test_parts_mean_the_same(d: int, dv: int, queries: str):
    module = scheduled(d, dv, queries, Definition(mask_mod=library.causal))
    sizes = {size for op in module.walk() for size in _sizes(op)}
    assert sizes and all(len(parts_of(size)) == 1 for size in sizes)
    operands = operands_of(d, dv, 200, 300)
    want = dense(*operands)
    for seed in range(2):
        o, lse = torch.full_like(want, torch.nan), torch.empty(*want.shape[:3], dtype=torch.float64)
        tile_async.run_plan(module, "forward", [*operands, o, lse, d**-0.5], seed=seed, processors=2, exact=True)
        torch.testing.assert_close(o, want, atol=2e-6, rtol=2e-6)


def _sizes(op: object) -> list[int]:
    """Columns of the slots and tiles of an op."""
    types = [r.type for r in getattr(op, "results", ())]
    shapes = [t.get_shape() for t in types if hasattr(t, "get_shape")]
    return [shape[-1] for shape in shapes if len(shape) >= 2]


def test_parts_are_powers_of_two():
    assert [parts_of(n) for n in (192, 96, 128, 112)] == [[128, 64], [64, 32], [128], [64, 32, 16]]


def test_products_in_flight_are_counted_in_parts():
    """The scores of a block, in two products, may be waited for with both parts of the output still in flight."""
    module = scheduled(48, 48, "registers", Definition())
    text = str(module)
    assert "tile.wait 2, " in text and "tile.wait 1, " not in text
    assert text.count("tile.barrier_expect") == str(scheduled(32, 32, "registers", Definition())).count(
        "tile.barrier_expect"
    )


def test_a_map_of_queries_is_one_of_each_part():
    halved = Definition(query_mod=lambda x: x * 0.5, mask_mod=library.causal)
    text = str(scheduled(48, 16, "registers", halved))
    assert text.count("tile.read %q") == 2 and "x48x" not in text
