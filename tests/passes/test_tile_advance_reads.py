"""Blocks of tables that are read in front of the wait for the scores: the same numbers, earlier."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp

from attn_engine import library, pipelines
from attn_engine.backends.gluon.legalize import PREPARE, SCHEDULE
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile_async
from attn_engine.runtime import driver

BIAS, PAIR = torch.randn(1, 2, 200, 300), torch.randn(2, 2, 200, 300)
CASES = {
    "bias": Definition(score_mod=lambda s, b, h, q, kv: s + BIAS[0, h, q, kv]),
    "two tables": Definition(score_mod=lambda s, b, h, q, kv: s * PAIR[b, h, q, kv] + BIAS[0, h, q, kv]),
    "masked": Definition(score_mod=lambda s, b, h, q, kv: s + PAIR[b, h, q, kv], mask_mod=library.causal),
    "none": Definition(mask_mod=library.causal),
}
NAME = "tile-advance-reads"


@cache
def scheduled(name: str, new: bool) -> tuple[ModuleOp, list[Tensor]]:
    traced = build(CASES[name], dtype=torch.float16, head_dim=32, head_dim_v=32, return_lse=True)
    module = driver.to_attn(traced.module, ())
    convert = "convert-attn-to-tile{forward=128,64,8,2 tables=false covered=true exact=true}"
    passes = [p for p in SCHEDULE if p != NAME]
    place = passes.index("tile-advance-waits") + 1
    passes[place:place] = [NAME] if new else []
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *PREPARE, *passes))
    module.verify()
    return module, list(traced.captures)


def run(name: str, seed: int, new: bool) -> list[Tensor]:
    module, captures = scheduled(name, new)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 32, generator=generator).double() for n in (200, 300, 300))
    results = [torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan).double()]
    arguments = [q, k, v, *results, *(c.double() for c in captures), 32**-0.5]
    tile_async.run_plan(module, "forward", arguments, seed=seed, processors=2, exact=True)
    return results


@pytest.mark.parametrize("name", CASES)
def test_it_means_the_same(name: str):
    want = run(name, 0, False)
    for seed in range(2):
        for got, expected in zip(run(name, seed, True), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("name", "tables"), [("bias", 1), ("two tables", 2), ("masked", 1)])
def test_reads_and_releases_stand_in_front_of_the_wait(name: str, tables: int):
    """Of every step: between the product for the scores and the wait for it, table by table."""
    for new in (False, True):
        text = str(scheduled(name, new)[0]).partition("role count 1")[0]
        marks = re.findall(r"tile\.(async_dot|wait|read|proxy_fence|barrier_arrive %table\w*_empty)", text)
        order = " ".join(mark.split()[0] for mark in marks)
        reads = " ".join(["read proxy_fence barrier_arrive"] * tables)
        assert (f"async_dot {reads} wait" in order) == new
        assert (f"wait {reads}" in order) == (not new)


def test_without_tables_nothing_changes():
    assert str(scheduled("none", True)[0]) == str(scheduled("none", False)[0])
