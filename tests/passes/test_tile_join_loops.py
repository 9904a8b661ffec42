"""Loops over several ranges of blocks become one loop each for masked and full ones, and visit the same blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from xdsl.dialects import scf
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.parser import Parser

from attn_engine import library, pipelines
from attn_engine.backends.gluon.legalize import PREPARE, SCHEDULE
from attn_engine.dialects import tile as dialect
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_product import WaitOp
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile, tile_async
from attn_engine.runtime import driver

LOOPS = """
tile.kernel @k(%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>, {bounds}) {{
  %c0 = arith.constant 0 : i32
  %c4 = arith.constant 4 : i32
  %c16 = arith.constant 16 : i32
  %zero = arith.constant dense<0.0> : tensor<4xf32>
  {loops}
  tile.store %s{last}, %y[%c0] dims [0] : tensor<4xf32>, !tile.global<1 x f32>
  tile.end
}}
tile.plan @forward(%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>, {bounds}) {{
  %one = arith.constant 1 : i32
  tile.launch @k grid(%one) args(%x, %y, {values}) : !tile.global<1 x f32>, !tile.global<1 x f32>, {types}
  tile.end
}}
"""
"""The sum of some blocks of x, plus 1000 for each of every second loop, plus a block that was loaded before the loop."""
HOLE = """
    %further = arith.addi %n, %c4 : i32
    %is_near = arith.cmpi slt, %n, %c16 : i32
    %at = arith.select %is_near, %n, %further : i32"""
THOUSAND = """
    %thousand = arith.constant dense<1000.0> : tensor<4xf32>
    %more = tile.map (%b, %thousand) axes [[0], [0]] : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> {{
    ^bb0(%u: f32, %v: f32):
      %w = arith.addf %u, %v : f32
      tile.yield %w : f32
    }}"""
LOOP = """
  %f{0} = arith.addi {first}, %c4 : i32
  %p{0} = tile.load %x[%f{0}] dims [0] : !tile.global<1 x f32> -> tensor<4xf32>
  %s{0} = scf.for %n = %lo{0} to %hi{0} step %c4 iter_args(%a = {before}) -> (tensor<4xf32>) : i32 {{{hole}
    %b = tile.load %x[{at}] dims [0] : !tile.global<1 x f32> -> tensor<4xf32>{thousand}
    %next = tile.map (%a, {value}, %p{0}) axes [[0], [0], [0]] : (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> {{
    ^bb0(%u: f32, %v: f32, %w: f32):
      %once = arith.addf %u, %v : f32
      %twice = arith.addf %once, %w : f32
      tile.yield %twice : f32
    }}
    scf.yield %next : tensor<4xf32>
  }}{behind}"""
BETWEEN = """
  tile.store {1}, %y[%c4] dims [0] : tensor<4xf32>, !tile.global<1 x f32>"""


def module(count: int, between: int | None = None, first: tuple[str, ...] = (), stored: str = "") -> ModuleOp:
    """`count` loops; the even ones skip a block, the odd ones add 1000. Behind one of them, sums are stored.

    `first` says behind what the block lies that is loaded before each loop.
    """
    bounds = [f"%{side}{n}" for n in range(count) for side in ("lo", "hi")]
    loops = [
        LOOP.format(
            n,
            first=first[n] if first else "%c0",
            before=f"%s{n - 1}" if n else "%zero",
            hole=HOLE.format(n) if n % 2 == 0 else "",
            at="%n" if n % 2 else "%at",
            thousand=THOUSAND.format() if n % 2 else "",
            value="%more" if n % 2 else "%b",
            behind=BETWEEN.format(n, stored or f"%s{n}") if n == between else "",
        )
        for n in range(count)
    ]
    text = LOOPS.format(
        bounds=", ".join(f"{b}: i32" for b in bounds),
        values=", ".join(bounds),
        types=", ".join("i32" for _ in bounds),
        loops="".join(loops),
        last=count - 1,
    )
    return Parser(driver.context(), text).parse_module()


def joined(before: ModuleOp) -> ModuleOp:
    after = before.clone()
    driver.run_passes(after, ("tile-join-loops",))
    after.verify()
    return after


def loops_of(module: ModuleOp) -> int:
    return sum(isinstance(op, scf.ForOp) for op in module.walk())


ENDS = st.lists(st.tuples(st.integers(0, 40), st.integers(-9, 20)), min_size=2, max_size=5)


@settings(max_examples=30, deadline=None)
@given(ENDS)
def test_the_same_blocks_are_visited(ranges: list[tuple[int, int]]):
    """Ranges may be empty, or less than so, and end within a block. Every block has a sum of its own."""
    bounds = [bound for low, size in ranges for bound in (low, low + size)]
    before = module(len(ranges))
    after = joined(before)
    assert loops_of(after) == 2
    x = (2.0 ** torch.arange(80, dtype=torch.float64)).remainder(1e9 + 7)
    found = []
    for kernel in (before, after):
        y = torch.zeros(4, dtype=torch.float64)
        tile.run_plan(kernel, "forward", [x, y, *bounds], exact=True)
        found.append(y)
    assert torch.equal(*found)


@pytest.mark.parametrize(("count", "between", "stored"), [(1, None, ""), (2, None, ""), (3, 1, ""), (4, 1, "%zero")])
def test_loops_that_differ_stay(count: int, between: int | None, stored: str):
    """With two loops there is nothing to join, nor with one in front of a store and others behind it."""
    before = module(count, between, stored=stored)
    assert str(joined(before)) == str(before)


@pytest.mark.parametrize(("first", "left"), [(("%lo0", "%lo0", "%lo0"), 2), (("%lo0", "%lo0", "%hi0"), 3)])
def test_what_is_computed_again_is_the_same(first: tuple[str, ...], left: int):
    """Code that was hoisted out of the loops stands in front of each; a block of another place keeps loops apart."""
    after = joined(module(3, first=first))
    assert loops_of(after) == left
    assert str(after).count("tile.load") == 2 * left


def test_the_kernels_of_another_plan_stay():
    before = module(4)
    after = before.clone()
    next(op for op in after.ops if isinstance(op, dialect.PlanOp)).properties["sym_name"] = StringAttr("backward")
    text = str(after)
    driver.run_passes(after, ("tile-join-loops{plan=backward}",))
    assert loops_of(after) == 2 and str(after) != text


DOCUMENTS = torch.tensor([0] * 300 + [1] * 340)


def early(q: Any, kv: Any) -> Any:
    return kv < 70


MASKS = {
    "first keys or window": lambda b, h, q, kv: (q >= kv) & (early(q, kv) | (q - kv < 260)),
    "prefix or window": lambda b, h, q, kv: (kv < 140) | ((q >= kv) & (q - kv < 260)),
    "first keys or document": library.or_masks(library.document(DOCUMENTS), lambda b, h, q, kv: early(q, kv)),
}
SIZE, D = 640, 16


def lowered(name: str) -> tuple[ModuleOp, list[Tensor]]:
    traced = build(Definition(mask_mod=MASKS[name]), dtype=torch.float16, head_dim=D, head_dim_v=D, return_lse=True)
    module = driver.to_attn(traced.module, ())
    driver.run_passes(module, ("convert-attn-to-tile{forward=128,64,8,2}", *pipelines.TILE_CLEANUP))
    return module, list(traced.captures)


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 1, SIZE, D, generator=generator).half().double() for _ in range(3)]


def forward(run: Any, module: ModuleOp, captures: list[Tensor], **options: Any) -> list[Tensor]:
    q, k, v = operands()
    results = [torch.full_like(q, torch.nan), torch.full((1, 1, SIZE), torch.nan, dtype=torch.float64)]
    run(module, "forward", [q, k, v, *results, *captures, D**-0.5], exact=True, **options)
    return results


def runs_of_full_blocks(name: str, rows: int, columns: int) -> int:
    """The most of them that a block of queries has."""
    i = torch.arange(SIZE)
    seen = MASKS[name](0, 0, i[:, None], i[None, :]).expand(SIZE, SIZE)
    full = seen.reshape(SIZE // rows, rows, SIZE // columns, columns).all(3).all(1)
    starts = full & ~torch.cat([torch.zeros_like(full[:, :1]), full[:, :-1]], 1)
    return int(starts.sum(1).max())


@pytest.mark.parametrize("name", MASKS)
def test_all_full_blocks_of_a_forward_overlap(name: str):
    """Two loops of a consumer are left; the one over the full blocks of both ranges has two products in flight."""
    assert runs_of_full_blocks(name, 128, 64) == 2
    module, captures = lowered(name)
    scheduled = module.clone()
    driver.run_passes(scheduled, (*PREPARE, *SCHEDULE))
    consumer = next(op for op in scheduled.walk() if isinstance(op, RolesOp)).bodies[0]
    loops = [op for op in consumer.walk() if isinstance(op, scf.ForOp)]
    waits = [[op.properties["count"].value.data for op in loop.walk() if isinstance(op, WaitOp)] for loop in loops]
    assert waits == [[0, 0], [1, 0]]
    want = forward(tile.run_plan, module, captures)
    for seed in range(2):
        for a, b in zip(forward(tile_async.run_plan, scheduled, captures, seed=seed), want, strict=True):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)
