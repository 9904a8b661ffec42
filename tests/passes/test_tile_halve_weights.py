"""Weights in two halves around the wait for an output, and maxima in trees: the same numbers, in another order."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp, TensorType, f16, f32
from xdsl.ir import Block
from xdsl.utils.exceptions import VerifyException

from attn_engine import library, pipelines
from attn_engine.backends.backend import get_backend
from attn_engine.backends.gluon.emit import emit
from attn_engine.backends.gluon.legalize import PREPARE, SCHEDULE
from attn_engine.dialects.tile_async_product import JoinColumnsOp, SplitColumnsOp
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile_async
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.schedules import default_schedule

SLOPES = torch.tensor([0.5, 0.25])
CASES = {
    "causal": Definition(mask_mod=library.causal),
    "soft cap": Definition(score_mod=library.soft_cap(2.0)),
    "alibi": Definition(score_mod=library.alibi(SLOPES), mask_mod=library.causal),
    "sigmoid": Definition(row=library.sigmoid, mask_mod=library.causal),
    "relu": Definition(row=library.relu),
    "cosine": Definition(row=library.cosine),
}
NEW = ("tile-reduce-in-trees", "tile-halve-weights")


def with_new(names: tuple[str, ...]) -> tuple[str, ...]:
    """A pipeline with both passes behind the order of products."""
    kept = [name for name in names if name not in NEW]
    place = kept.index("tile-order-async") + 1
    return (*kept[:place], *NEW, *kept[place:])


@cache
def scheduled(name: str, new: bool) -> tuple[ModuleOp, list[Tensor]]:
    definition = CASES[name]
    lse = definition.row is None
    traced = build(definition, dtype=torch.float16, head_dim=32, head_dim_v=32, return_lse=lse)
    module = driver.to_attn(traced.module, ())
    convert = "convert-attn-to-tile{forward=128,64,8,2 tables=false}"
    passes = with_new(SCHEDULE) if new else tuple(name for name in SCHEDULE if name not in NEW)
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *PREPARE, *passes))
    module.verify()
    return module, list(traced.captures)


def run(name: str, new: bool, seed: int) -> list[Tensor]:
    module, captures = scheduled(name, new)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 32, generator=generator).double() for n in (200, 300, 300))
    results = [torch.full_like(q, torch.nan)]
    results += [torch.full(q.shape[:3], torch.nan).double()] if CASES[name].row is None else []
    arguments = [q, k, v, *results, *(c.double() for c in captures), 32**-0.5]
    tile_async.run_plan(module, "forward", arguments, seed=seed, processors=2, exact=True)
    return results


@pytest.mark.parametrize("name", CASES)
def test_halves_mean_the_same(name: str):
    """Where weights are made of scores and numbers of rows, and are summed up; relu's need no sum."""
    want = run(name, False, 0)
    for seed in range(2):
        for got, expected in zip(run(name, True, seed), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_what_is_halved(name: str):
    """The scores of the overlapped loop, once; the pin is on the sums of the first half, and the wait follows.

    Weights that more than one sum reads (for their norm) stay whole.
    """
    text = str(scheduled(name, True)[0]).partition("role count 1")[0]
    if name == "cosine":
        assert "tile.split_columns" not in text
        return
    assert text.count("tile.split_columns") == text.count("tile.join_columns") == 1
    tail = text[text.index("tile.split_columns") :]
    marks = ["tile.split_columns", "tile.pin", "tile.wait 0", "tile.join_columns"]
    places = [tail.index(mark) for mark in marks]
    assert places == sorted(places) and text.count("tile.pin") == 1
    assert ("tile.reduce_partial max" in text) == (CASES[name].row is None)


def test_weights_that_something_else_reads_are_left_alone():
    """Without sums in parts the sum of weights exchanges numbers between threads in every step."""
    traced = build(CASES["causal"], dtype=torch.float16, head_dim=32, head_dim_v=32, return_lse=True)
    module = driver.to_attn(traced.module, ())
    passes = [name for name in with_new(SCHEDULE) if name != "tile-split-sums"]
    convert = "convert-attn-to-tile{forward=128,64,8,2 tables=false}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *PREPARE, *passes))
    module.verify()
    assert "tile.split_columns" not in str(module)


@pytest.mark.parametrize("half", [TensorType(f32, [8, 3]), TensorType(f16, [8, 2]), TensorType(f32, [4, 2])])
def test_halves_fit(half: TensorType):
    block = Block(arg_types=[TensorType(f32, [8, 4]), half])
    split = SplitColumnsOp.build(operands=[block.args[0]], result_types=[half, half])
    join = JoinColumnsOp.build(operands=[block.args[1], block.args[1]], result_types=[TensorType(f32, [8, 4])])
    for op in (split, join):
        block.add_op(op)
        with pytest.raises(VerifyException, match="not half"):
            op.verify()


def test_weights_of_the_second_half_follow_the_wait():
    """In the machine code: exponentials on both sides of the wait for the output; nothing spills or is moved."""
    pytest.importorskip("triton")
    from attn_engine.backends.triton.gluon_ahead import compile_ahead

    traced = build(CASES["causal"], dtype=torch.bfloat16, head_dim=128, head_dim_v=128, return_lse=True)
    backend = get_backend("gluon")
    backend = replace(backend, pipeline=with_new(backend.pipeline))
    schedule = default_schedule(Target("gluon", "sm_90"), traced.module)
    request = driver.Request((), "gluon", schedule, driver.Facts(positive_scale=True))
    compiled = compile_ahead(
        emit(driver.to_tile(driver.to_attn(traced.module, ()), request, backend)), "forward_kernel"
    )
    assert compiled.warnings == () and compiled.spilled_bytes == 0
    loop = compiled.loops()[1]
    place = next(n for n, text in enumerate(loop) if "WARPGROUP.DEPBAR" in text and text.rstrip().endswith("0x0"))
    sides = [sum("MUFU.EX2" in text for text in side) for side in (loop[:place], loop[place:])]
    assert sum(sides) == 66 and min(sides) >= 30
    assert not any(name in text for text in loop for name in ("LDS", "STS", "LDL", "STL"))
