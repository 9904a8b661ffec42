"""Sums in the order of blocks: the same in every run, whatever order the roles and programs take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr, f32, i32
from xdsl.utils.exceptions import VerifyException
from xdsl.utils.test_value import create_ssa_value

from attn_engine.backends.gluon.legalize import GRADIENTS
from attn_engine.dialects import tile as tile_dialect
from attn_engine.dialects.tile import GlobalType
from attn_engine.dialects.tile_flag import AwaitTurnOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.interpreters import tile, tile_async
from attn_engine.runtime import driver
from tests.passes.test_tile_async_backward import Compiled, problem
from tests.passes.test_tile_fragment_sums import lower

SIZES = (150, 640)
"""Five blocks of keys: enough for their sums to differ in the last bit."""


def passes(*more: str) -> tuple[str, ...]:
    return tuple(p for spec in GRADIENTS for p in ((spec, *more) if spec == "tile-fragment-sums" else (spec,)))


def runs(made: Compiled, heads: tuple[int, int, int], seeds: int, processors: int = 1) -> list[list[Tensor]]:
    given = problem(made, heads, SIZES)
    want = given.gradients(tile.run_plan, made.value)
    found = [
        given.gradients(tile_async.run_plan, made.scheduled, seed=seed, processors=processors) for seed in range(seeds)
    ]
    for got in found:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    return [[*got] for got in found]


def same(found: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for got in found[1:] for a, b in zip(got, found[0], strict=True))


@pytest.mark.parametrize("processors", [1, 20])
@pytest.mark.parametrize(
    ("heads", "dkdv"), [((1, 2, 1), "64,128,8,2"), ((1, 2, 2), "64,128,8,3"), ((1, 1, 1), "128,128,8,2")]
)
def test_sums_are_the_same_in_every_run(heads: tuple[int, int, int], dkdv: str, processors: int):
    made = lower("full", dkdv, passes("tile-order-sums"))
    assert "tile.await_turn" in str(made.scheduled)
    assert same(runs(made, heads, 3, processors))


def test_they_are_not_without_an_order():
    """Or the test above would say nothing."""
    assert not same(runs(lower("full", "64,128,8,2", passes()), (1, 2, 1), 4))


def test_a_role_of_its_own_adds():
    text = str(lower("full", "64,128,8,2", passes("tile-order-sums")).scheduled)
    consumer, adder = text.partition("role count 2 warps 1")[::2]
    assert "async_reduce_add" not in consumer and adder.count("async_reduce_add") == adder.count("pass_turn") > 0
    assert adder.index("await_turn") < adder.index("async_reduce_add") < adder.index("pass_turn")


def test_programs_that_leave_blocks_out_have_no_order():
    with pytest.raises(AsyncUnsupportedError, match="do not go through all blocks"):
        lower("causal", "64,128,8,2", passes("tile-order-sums"))


def test_other_sums_have_no_order():
    """As those of a captured tensor, to which rows add."""
    late = tuple(p for p in passes("tile-order-sums") if p != "tile-order-sums")
    module = lower("full", "64,128,8,2", late).scheduled
    kernels = [o for o in module.walk() if isinstance(o, tile_dialect.KernelOp)]
    kernel = next(k for k in kernels if k.sym_name.data == "backward_rows")
    first = kernel.body.block.first_op
    memory = next(a for a in kernel.body.block.args if isinstance(a.type, GlobalType) and a.type.rank.data == 3)
    assert first is not None
    zero, one = arith.ConstantOp.from_int_and_width(0, 32), arith.ConstantOp(FloatAttr(1.0, f32))
    add = tile_dialect.AtomicAddOp(one, memory, [zero] * 3, [])
    kernel.body.block.insert_ops_before([zero, one, add], first)
    with pytest.raises(AsyncUnsupportedError, match="in no order"):
        driver.run_passes(module, ("tile-order-sums",))


def test_turns_are_counted_in_i32():
    turns, number = create_ssa_value(GlobalType(1, f32)), create_ssa_value(i32)
    with pytest.raises(VerifyException, match="flags are i32"):
        AwaitTurnOp(turns, [number], number).verify_()
