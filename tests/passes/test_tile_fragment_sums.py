"""Sums in the order of threads: the law of that order, what is left alone, and programs in groups of heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp, TensorType, f32
from xdsl.parser import Parser
from xdsl.utils.exceptions import VerifyException
from xdsl.utils.test_value import create_ssa_value

from attn_engine import pipelines
from attn_engine.backends.gluon.legalize import GRADIENTS
from attn_engine.dialects.tile_async_fragments import FromFragmentsOp, ToFragmentsOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.interpreters import tile, tile_async
from attn_engine.interpreters.tile_async_order import AsyncProtocolError
from attn_engine.interpreters.tile_async_rules import RULES
from attn_engine.passes import tile_defer_sums
from attn_engine.runtime import driver
from tests.passes.test_tile_async_backward import DEFINITIONS, Compiled, D, build, problem

HEADS, SIZES = (2, 4, 2), (150, 300)
BEYOND = "arith.constant 134217728"
"""The row to which the first step adds the sum of none before it."""


def run(op: ToFragmentsOp | FromFragmentsOp, value: Tensor) -> Tensor:
    role: Any = SimpleNamespace(values={op.value: value})
    return RULES[type(op)](role, op)[0]


@pytest.mark.parametrize("columns", [8, 32, 64])
def test_the_law_of_fragments(columns: int):
    value = torch.arange(64 * columns).reshape(64, columns)
    held = run(ToFragmentsOp(create_ssa_value(TensorType(f32, [64, columns]))), value)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        want = [
            value[16 * warp + 8 * h + lane // 4, 8 * j + 2 * (lane % 4) + e]
            for j in range(columns // 8)
            for h in range(2)
            for e in range(2)
        ]
        assert held[thread].tolist() == want


@pytest.mark.parametrize(("rows", "parts"), [(64, 1), (64, 2), (128, 2), (192, 3)])
def test_tiles_come_back_from_their_fragments(rows: int, parts: int):
    whole = torch.randn(rows, parts * 16)
    to = ToFragmentsOp(create_ssa_value(TensorType(f32, [64, 16])))
    blocks = [run(to, b) for row in whole.split(64) for b in row.split(16, 1)]
    back = FromFragmentsOp(create_ssa_value(TensorType(f32, [rows * 2 * parts, 8])), parts)
    back.verify()
    assert torch.equal(run(back, torch.cat(blocks)), whole)


def test_fragments_are_of_whole_products():
    with pytest.raises(VerifyException, match="64 rows"):
        ToFragmentsOp(create_ssa_value(TensorType(f32, [32, 64]))).verify()
    with pytest.raises(VerifyException, match="not fragments of 2 tiles"):
        FromFragmentsOp(create_ssa_value(TensorType(f32, [128, 32])), 2).verify()


# --- whole gradients ---------------------------------------------------------------------------

ORDERS = {
    "sums last": "tile-overlap-products{late_sums=true late_reads=true in_flight=2}",
    "sums first": "tile-overlap-products{late_reads=true in_flight=2}",
    "as by default": "tile-overlap-products",
}


def lower(name: str, dkdv: str, passes: tuple[str, ...]) -> Compiled:
    traced = build(DEFINITIONS[name], dtype=torch.float16, head_dim=D, head_dim_v=D, return_lse=True)
    module = driver.to_attn(traced.module, ("q", "k", "v"))
    convert = f"convert-attn-to-tile{{forward=64,64,4,2 dq=128,64,8,2 dkdv={dkdv} tables=true fused=true}}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP))
    scheduled = module.clone()
    driver.run_passes(scheduled, passes)
    return Compiled(module, scheduled, list(traced.captures))


def order(kind: str, *without: str) -> tuple[str, ...]:
    return tuple(
        ORDERS[kind] if p.startswith("tile-overlap") else p for p in GRADIENTS if p.partition("{")[0] not in without
    )


def agree(made: Compiled, heads: tuple[int, int, int], sizes: tuple[int, int], processors: int = 1) -> None:
    given = problem(made, heads, sizes)
    want = given.gradients(tile.run_plan, made.value)
    for seed in range(2):
        got = given.gradients(tile_async.run_plan, made.scheduled, seed=seed, processors=processors)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dkdv", ["64,128,8,2", "128,128,8,2"])
@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("sums last", ("tile-defer-sums",)),
        ("sums first", ("tile-defer-sums",)),
        ("sums last", ("tile-defer-sums", "tile-start-products", "tile-rotate-steps")),
    ],
)
def test_orders_of_products_mean_the_same(kind: str, without: tuple[str, ...], dkdv: str):
    """A step may have as many queries as the program has keys: each consumer then adds rows of its own."""
    made = lower("causal", dkdv, order(kind, *without))
    assert ("to_fragments" in str(made.scheduled)) and ("parts 2" in str(made.scheduled)) == dkdv.startswith("64")
    agree(made, HEADS, SIZES)


LATE = {
    "tile-pipeline-steps": "tile-pipeline-steps{spare=true}",
    "tile-overlap-products": "tile-overlap-products{late_sums=true in_flight=0}",
    "tile-rotate-steps": "tile-rotate-steps{last=true}",
    "tile-fragment-sums": "tile-defer-sums,tile-fragment-sums",
}


def late(**options: str) -> tuple[str, ...]:
    changed = LATE | {name.replace("_", "-"): spec for name, spec in options.items()}
    return tuple(changed.get(p.partition("{")[0], p) for p in GRADIENTS)


def test_sums_may_be_a_step_late():
    """Where what consumers share has a slot to spare, the product of the step before stands in front of dk's."""
    made = lower("causal", "64,128,8,2", late())
    assert "%x_passed = tile.ring : !tile.buffer<3x128x64xf16, shared>" in str(made.scheduled)
    assert BEYOND in str(made.scheduled)
    agree(made, HEADS, SIZES)


@pytest.mark.parametrize("dkdv", ["64,128,8,2", "64,128,8,3", "128,128,8,2"])
@pytest.mark.parametrize("name", ["causal", "full"])
def test_sums_of_two_slots_may_be_late(name: str, dkdv: str):
    """What consumers share is written behind the product of the step before, which has read the other slot."""
    passes = late(
        tile_pipeline_steps="tile-pipeline-steps",
        tile_rotate_steps="tile-rotate-steps{in_flight=3}",
    )
    made = lower(name, dkdv, passes)
    text = str(made.scheduled)
    assert BEYOND in text and "%x_passed = tile.ring : !tile.buffer<2x" in text
    agree(made, HEADS, SIZES)


def test_two_slots_are_not_written_before_they_are_read(monkeypatch: pytest.MonkeyPatch):
    """Or the test above would say nothing."""
    monkeypatch.setattr(tile_defer_sums, "_write_late", lambda _: None)
    made = lower("causal", "64,128,8,2", late(tile_pipeline_steps="tile-pipeline-steps"))
    with pytest.raises(AsyncProtocolError):
        for _ in range(4):
            agree(made, HEADS, SIZES)


def test_sums_that_leave_no_registers_are_not_late():
    with pytest.raises(AsyncUnsupportedError, match="leave no registers"):
        lower("causal", "64,128,8,2", late(tile_fragment_sums="tile-defer-sums{registers=95},tile-fragment-sums"))


@pytest.mark.parametrize("processors", [1, 7, 24])
def test_heads_go_side_by_side(processors: int):
    """With three blocks of keys a head and two heads of keys in each of three batches: one, two or all six together."""
    agree(lower("causal", "64,128,8,2", order("as by default")), (3, 2, 2), SIZES, processors)


def test_sums_that_are_read_otherwise_stay_as_they_are():
    made = lower("causal", "64,128,8,2", order("as by default", "tile-fragment-sums"))
    text = str(made.scheduled)
    read = "tile.load %dq_sums[%b, %h, %q0, %c0]"
    assert text.count(read) == 1
    for other in ("tile.load %dq_sums[%b, %h, %q0, %i]", "tile.load %dq_sums[%b, %h, %i, %c0]"):
        module: ModuleOp = Parser(driver.context(), text.replace(read, other)).parse_module()
        driver.run_passes(module, ("tile-fragment-sums",))
        assert "fragments" not in str(module)
