"""Waits for an output in front of weights, or of half of them, and maxima in trees: the same numbers, in another order."""

from __future__ import annotations

import re
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
NEW = ("tile-reduce-in-trees", "tile-advance-waits")
HALVES, EARLY = (f"tile-advance-waits{{halves={value}}}" for value in ("true", "false"))


def with_new(names: tuple[str, ...], halves: bool = False) -> tuple[str, ...]:
    """A pipeline with both passes behind the order of products."""
    kept = [name for name in names if name not in NEW]
    place = kept.index("tile-order-async") + 1
    return (*kept[:place], NEW[0], HALVES if halves else EARLY, *kept[place:])


@cache
def scheduled(name: str, new: bool, halves: bool = False) -> tuple[ModuleOp, list[Tensor]]:
    definition = CASES[name]
    lse = definition.row is None
    traced = build(definition, dtype=torch.float16, head_dim=32, head_dim_v=32, return_lse=lse)
    module = driver.to_attn(traced.module, ())
    convert = "convert-attn-to-tile{forward=128,64,8,2 tables=false}"
    passes = with_new(SCHEDULE, halves) if new else tuple(name for name in SCHEDULE if name not in NEW)
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *PREPARE, *passes))
    module.verify()
    return module, list(traced.captures)


def run(name: str, seed: int, new: bool, halves: bool = False) -> list[Tensor]:
    module, captures = scheduled(name, new, halves)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 32, generator=generator).double() for n in (200, 300, 300))
    results = [torch.full_like(q, torch.nan)]
    results += [torch.full(q.shape[:3], torch.nan).double()] if CASES[name].row is None else []
    arguments = [q, k, v, *results, *(c.double() for c in captures), 32**-0.5]
    tile_async.run_plan(module, "forward", arguments, seed=seed, processors=2, exact=True)
    return results


@pytest.mark.parametrize("name", CASES)
def test_it_means_the_same(name: str):
    want = run(name, 0, new=False)
    for seed, halves in enumerate((False, True, True)):
        for got, expected in zip(run(name, seed, True, halves), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


def marks(name: str, halves: bool) -> list[str]:
    """What stands around the wait for the output in the overlapped loop of a consumer."""
    text = str(scheduled(name, True, halves)[0]).partition("role count 1")[0]
    tail = text[text.rindex("tile.wait 1") :].partition("scf.yield")[0]
    found = ("tile.split_columns", "tile.pin", "tile.wait 0", "math.exp2", "tile.join_columns", "tile.dot_operand")
    return [mark for mark in sorted(found, key=tail.find) if mark in tail]


@pytest.mark.parametrize("name", ["causal", "soft cap", "alibi"])
def test_the_wait_stands_behind_the_greatest_score(name: str):
    """And in front of all weights; the first exponential is that of a factor of the row."""
    assert marks(name, halves=False)[-3:] == ["tile.pin", "tile.wait 0", "tile.dot_operand"]
    text = str(scheduled(name, True)[0]).partition("role count 1")[0]
    assert text.count("tile.pin") == 1 and "tile.reduce_partial max" in text


@pytest.mark.parametrize(("name", "halves"), [("causal", True), ("alibi", True), ("sigmoid", True), ("relu", True)])
def test_the_wait_stands_between_two_halves(name: str, halves: bool):
    """The pin is on the sums of the first half."""
    found = [mark for mark in marks(name, halves) if mark != "math.exp2"]
    assert found == ["tile.split_columns", "tile.pin", "tile.wait 0", "tile.join_columns", "tile.dot_operand"]
    assert str(scheduled(name, True, halves)[0]).count("tile.split_columns") == 1


@pytest.mark.parametrize(("name", "halves"), [("cosine", True), ("sigmoid", False), ("relu", False)])
def test_other_weights_are_left_alone(name: str, halves: bool):
    """Those that two sums read; without halves, those that are made of scores alone."""
    found = marks(name, halves)
    assert "tile.split_columns" not in found and found[-3:] == ["tile.pin", "tile.wait 0", "tile.dot_operand"]


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


@pytest.mark.parametrize(("halves", "before"), [(False, range(6)), (True, range(30, 38))])
def test_weights_follow_the_wait(halves: bool, before: range):
    """In the machine code: exponentials behind the wait for the output, all or half; nothing spills or is moved."""
    pytest.importorskip("triton")
    from attn_engine.backends.triton.gluon_ahead import compile_ahead

    traced = build(CASES["causal"], dtype=torch.bfloat16, head_dim=128, head_dim_v=128, return_lse=True)
    backend = get_backend("gluon")
    backend = replace(backend, pipeline=with_new(backend.pipeline, halves))
    schedule = default_schedule(Target("gluon", "sm_90"), traced.module)
    request = driver.Request((), "gluon", schedule, driver.Facts(positive_scale=True))
    compiled = compile_ahead(
        emit(driver.to_tile(driver.to_attn(traced.module, ()), request, backend)), "forward_kernel"
    )
    assert compiled.warnings == () and compiled.spilled_bytes == 0
    loop = compiled.loops()[1]
    place = next(n for n, text in enumerate(loop) if "WARPGROUP.DEPBAR" in text and text.rstrip().endswith("0x0"))
    sides = [sum("MUFU.EX2" in text for text in side) for side in (loop[:place], loop[place:])]
    assert sum(sides) == 66 and sides[0] in before
    # Its warps meet once, in front of the wait for keys: threads release slots each for itself.
    assert [sum(name in text for text in loop) for name in ("BAR.SYNC", "ARRIVES.LDGSTSBAR")] == [1, 2]
    assert not any(re.search(r"\b(LDS|STS|LDL|STL)\b", text) for text in loop)


TABLE = torch.zeros(1, 4, 64, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(("d", "table", "halves"), [(64, True, True), (64, False, False), (128, True, False)])
def test_short_products_leave_time_for_halves_beside_a_table(d: int, table: bool, halves: bool):
    definition = Definition(score_mod=library.bias(TABLE)) if table else CASES["causal"]
    traced = build(definition, dtype=torch.bfloat16, head_dim=d, head_dim_v=d, return_lse=True)
    module = driver.to_attn(traced.module, ())
    convert = "convert-attn-to-tile{forward=128,128,8,2 tables=false}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *PREPARE, *SCHEDULE))
    text = str(module)
    assert ("tile.split_columns" in text) == halves
    assert text.rindex("%pinned = tile.pin") < text.rindex("tile.wait 0, %pending")


def test_maxima_of_eight_numbers_a_thread_come_in_trees():
    assert "groups 4 width 2 tree 4" in str(scheduled("causal", True)[0])
    assert "tree" not in str(scheduled("causal", False)[0])
