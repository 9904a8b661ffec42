"""Memory, control flow and tensor ops of the Triton backend, against torch and the tile interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_engine.interpreters.tile import run_plan
from tests.backends.triton_support import parse, run, source_of

torch.set_num_threads(1)


def program(body: str, arguments: dict[str, str], grid: str = "%one") -> str:
    """A kernel with this body, and a plan that launches it on its own arguments."""
    typed = ", ".join(f"%{name}: {type_}" for name, type_ in arguments.items())
    names, types = ", ".join(f"%{name}" for name in arguments), ", ".join(arguments.values())
    return f"""
tile.kernel @kernel({typed}) {{
  %c0 = arith.constant 0 : i32
{body}
  tile.end
}}
tile.plan @plan({typed}) {{
  %one = arith.constant 1 : i32
  tile.launch @kernel grid({grid}) args({names}) : {types}
  tile.end
}}
"""


G1, G2, I1 = "!tile.global<1 x f32>", "!tile.global<2 x f32>", "!tile.global<1 x i32>"


def both(text: str, *arguments: Tensor | float) -> list[Tensor]:
    """Runs here and in the tile interpreter; the tensors after, which must agree."""
    mine, oracle = ([a.clone() if isinstance(a, Tensor) else a for a in arguments] for _ in range(2))
    run(text, "plan", *mine)
    run_plan(parse(text), "plan", oracle)
    results = [m for m in mine if isinstance(m, Tensor)]
    for result, expected in zip(results, [o for o in oracle if isinstance(o, Tensor)], strict=True):
        torch.testing.assert_close(result, expected, equal_nan=True)
    return results


@pytest.mark.parametrize("start", [-5, 0, 30])
def test_limits_at_both_ends(start: int):
    body = """
  %x = tile.load %a[%r, %c0] dims [0, 1] bounded [0, 1] limits(%n, %m) : !tile.global<2 x f32> -> tensor<16x8xf32>
  tile.store %x, %b[%r, %c0] dims [0, 1] bounded [0] limits(%n) : tensor<16x8xf32>, !tile.global<2 x f32>"""
    text = program(body, {"a": G2, "b": G2, "r": "i32", "n": "i32", "m": "i32"})
    a, b = torch.randn(40, 8), torch.full((40, 8), 7.0)
    _, result = both(text, a, b, start, 35, 5)
    first, last = max(start, 0), min(start + 16, 35)
    assert torch.equal(result[first:last, :5], a[first:last, :5])
    assert (result[first:last, 5:] == 0).all()
    assert (result[:first] == 7).all() and (result[last:] == 7).all()


def test_addresses_have_64_bits():
    body = """
  %x = tile.load %a[%r] dims [0] : !tile.global<1 x f32> -> tensor<4xf32>
  tile.store %x, %b[%c0] dims [0] : tensor<4xf32>, !tile.global<1 x f32>"""
    source = source_of(program(body, {"a": G1, "b": G1, "r": "i32"}))
    for term in ("tl.cast(r, tl.int64) * a_stride_0", "tl.cast(tl.arange(0, 4), tl.int64) * a_stride_0"):
        assert term in source


def test_transposed_tile_and_scalars():
    body = """
  %x = tile.load %a[%c0, %c0] dims [1, 0] : !tile.global<2 x f32> -> tensor<8x16xf32>
  %y = tile.transpose %x : tensor<8x16xf32> -> tensor<16x8xf32>
  tile.store %y, %b[%c0, %c0] dims [0, 1] : tensor<16x8xf32>, !tile.global<2 x f32>
  %s = tile.load %a[%c0, %c0] dims [] : !tile.global<2 x f32> -> f32
  %one = arith.constant 1 : i32
  tile.store %s, %c[%one] dims [] : f32, !tile.global<1 x f32>"""
    a = torch.randn(16, 8)
    _, b, c = both(program(body, {"a": G2, "b": G2, "c": G1}), a, torch.zeros(16, 8), torch.zeros(2))
    assert torch.equal(a, b) and c[1] == a[0, 0]


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_keep_nan(kind: str, axis: int):
    size = (8, 16)[1 - axis]
    body = f"""
  %x = tile.load %a[%c0, %c0] dims [0, 1] : !tile.global<2 x f32> -> tensor<8x16xf32>
  %y = tile.reduce {kind} %x, {axis} : tensor<8x16xf32> -> tensor<{size}xf32>
  tile.store %y, %b[%c0] dims [0] : tensor<{size}xf32>, !tile.global<1 x f32>
  %z = tile.reduce {kind} %y, 0 : tensor<{size}xf32> -> f32
  tile.store %z, %c[%c0] dims [] : f32, !tile.global<1 x f32>"""
    a = torch.randn(8, 16)
    text = program(body, {"a": G2, "b": G1, "c": G1})
    both(text, a, torch.zeros(size), torch.zeros(1))
    a[3, 5] = math.nan
    _, b, c = both(text, a, torch.zeros(size), torch.zeros(1))
    assert b.isnan().sum() == 1 and c.isnan().all()


@pytest.mark.parametrize("reverse", ["", " reverse 1"])
@pytest.mark.parametrize("kind", ["sum", "max"])
def test_scans(kind: str, reverse: str):
    body = f"""
  %x = tile.load %a[%c0, %c0] dims [0, 1] : !tile.global<2 x f32> -> tensor<8x16xf32>
  %y = tile.scan {kind} %x, 1{reverse} : tensor<8x16xf32> -> tensor<8x16xf32>
  tile.store %y, %b[%c0, %c0] dims [0, 1] : tensor<8x16xf32>, !tile.global<2 x f32>"""
    both(program(body, {"a": G2, "b": G2}), torch.randn(8, 16), torch.zeros(8, 16))


def test_slices_and_concat():
    body = """
  %x = tile.load %a[%c0, %c0] dims [0, 1] : !tile.global<2 x f32> -> tensor<8x16xf32>
  %p = tile.slice %x, 1, 4 : tensor<8x16xf32> -> tensor<8x4xf32>
  %q = tile.slice %x, 1, 12 : tensor<8x16xf32> -> tensor<8x4xf32>
  %y = tile.concat %q, %p axis 1 : tensor<8x4xf32>, tensor<8x4xf32> -> tensor<8x8xf32>
  %t = tile.slice %y, 0, 4 : tensor<8x8xf32> -> tensor<4x8xf32>
  %u = tile.concat %t, %t axis 0 : tensor<4x8xf32>, tensor<4x8xf32> -> tensor<8x8xf32>
  tile.store %u, %b[%c0, %c0] dims [0, 1] : tensor<8x8xf32>, !tile.global<2 x f32>"""
    a = torch.randn(8, 16)
    _, b = both(program(body, {"a": G2, "b": G2}), a, torch.zeros(8, 8))
    half = torch.cat([a[4:, 12:], a[4:, 4:8]], 1)
    assert torch.equal(b, torch.cat([half, half]))


def test_gather_with_guards():
    body = """
  %i = tile.range %c0 : tensor<8xi32>
  %x = tile.map (%i, %i, %a, %n) axes [[0], [1], [], []] : (tensor<8xi32>, tensor<8xi32>, !tile.global<1 x f32>, i32) -> tensor<8x8xf32> {
  ^bb0(%r: i32, %c: i32, %g: !tile.global<1 x f32>, %lim: i32):
    %ok = arith.cmpi slt, %c, %lim : i32
    %v = tile.gather %g[%r : i32] if %ok : !tile.global<1 x f32> -> f32
    %z = arith.constant 0 : i32
    %yes = arith.cmpi sge, %r, %c : i32
    %w = tile.gather %g[%z : i32] if %yes : !tile.global<1 x f32> -> f32
    %y = arith.addf %v, %w : f32
    tile.yield %y : f32
  }
  tile.store %x, %b[%c0, %c0] dims [0, 1] : tensor<8x8xf32>, !tile.global<2 x f32>"""
    a = torch.randn(8)
    _, b = both(program(body, {"a": G1, "b": G2, "n": "i32"}), a, torch.zeros(8, 8), 5)
    low = torch.ones(8, 8).tril()
    assert torch.equal(b, a[:, None] * (torch.arange(8) < 5) + a[0] * low)


def test_scatter_and_atomic_add():
    body = """
  %p = tile.program_id 0
  %i = tile.range %c0 : tensor<8xi32>
  %k, %ok = tile.map (%i, %i) axes [[0], [1]] : (tensor<8xi32>, tensor<8xi32>) -> (tensor<8x8xi32>, tensor<8x8xi1>) {
  ^bb0(%re: i32, %ce: i32):
    %four = arith.constant 4 : i32
    %s = arith.addi %re, %ce : i32
    %m = arith.remsi %s, %four : i32
    %y = arith.cmpi sge, %re, %ce : i32
    tile.yield %m, %y : i32, i1
  }
  %x = tile.load %a[%c0, %c0] dims [0, 1] : !tile.global<2 x f32> -> tensor<8x8xf32>
  tile.scatter_add %x, %b[%k] where %ok axes [[0, 1], [0, 1]] : tensor<8x8xf32>, !tile.global<1 x f32>, tensor<8x8xi32> where tensor<8x8xi1>
  %row = tile.reduce sum %x, 1 : tensor<8x8xf32> -> tensor<8xf32>
  tile.scatter_add %row, %b[%p] axes [[]] : tensor<8xf32>, !tile.global<1 x f32>, i32
  tile.atomic_add %row, %c[%c0] dims [0] bounded [0] limits(%n) : tensor<8xf32>, !tile.global<1 x f32>"""
    text = program(body, {"a": G2, "b": G1, "c": G1, "n": "i32"}, "%n")
    _, b, c = both(text, torch.randn(8, 8), torch.zeros(4), torch.zeros(8), 3)
    assert (b != 0).all() and (c[3:] == 0).all() and (c[:3] != 0).all()


def test_sums_of_integers_and_largest_numbers():
    body = """
  %p = tile.program_id 0
  %x = tile.load %a[%p, %c0] dims [1] : !tile.global<2 x f32> -> tensor<8xf32>
  %whole = tile.map (%x) axes [[0]] : (tensor<8xf32>) -> tensor<8xi64> {
  ^bb0(%e: f32):
    %many = arith.constant 1.0e12 : f32
    %f = arith.mulf %e, %many : f32
    %i = arith.fptosi %f : f32 to i64
    tile.yield %i : i64
  }
  %at = arith.constant dense<1> : tensor<8xi64>
  tile.scatter_add %whole, %b[%at] axes [[0]] : tensor<8xi64>, !tile.global<1 x i64>, tensor<8xi64>
  %size = tile.reduce max %x, 0 : tensor<8xf32> -> f32
  tile.atomic_max %size, %c[%c0] dims [] : f32, !tile.global<1 x f32>"""
    text = program(body, {"a": G2, "b": "!tile.global<1 x i64>", "c": G1, "n": "i32"}, "%n")
    a = torch.rand(8, 8)
    _, b, c = both(text, a, torch.zeros(2, dtype=torch.int64), torch.zeros(1), 8)
    assert b[0] == 0 and b[1] == (a * 1e12).long().sum() and c[0] == a.max()


def test_carries_may_be_swapped_and_branches_merge():
    body = """
  %one = arith.constant 1 : i32
  %two = arith.constant 2 : i32
  %x = tile.load %a[%c0] dims [0] : !tile.global<1 x f32> -> tensor<8xf32>
  %y = tile.load %b[%c0] dims [0] : !tile.global<1 x f32> -> tensor<8xf32>
  %p, %q, %last = scf.for %i = %c0 to %n step %one iter_args(%u = %x, %v = %y, %w = %c0) -> (tensor<8xf32>, tensor<8xf32>, i32) : i32 {
    %inner = scf.for %j = %c0 to %i step %two iter_args(%t = %u) -> (tensor<8xf32>) : i32 {
      %dd = tile.map (%t) axes [[0]] : (tensor<8xf32>) -> tensor<8xf32> {
      ^bb0(%e: f32):
        %f = arith.addf %e, %e : f32
        tile.yield %f : f32
      }
      scf.yield %dd : tensor<8xf32>
    }
    scf.yield %v, %inner, %i : tensor<8xf32>, tensor<8xf32>, i32
  }
  %big = arith.cmpi sgt, %n, %two : i32
  %r, %s = scf.if %big -> (tensor<8xf32>, i32) {
    scf.yield %p, %last : tensor<8xf32>, i32
  } else {
    scf.yield %q, %n : tensor<8xf32>, i32
  }
  tile.store %r, %c[%c0] dims [0] : tensor<8xf32>, !tile.global<1 x f32>
  scf.if %big {
    tile.store %s, %d[%c0] dims [] : i32, !tile.global<1 x i32>
  }"""
    text = program(body, {"a": G1, "b": G1, "c": G1, "d": I1, "n": "i32"})
    for n in (0, 1, 2, 5):
        both(text, torch.randn(8), torch.randn(8), torch.zeros(8), torch.zeros(1, dtype=torch.int32), n)


def test_grid_axes_and_sizes():
    body = """
  %i = tile.program_id 0
  %j = tile.program_id 1
  %k = tile.program_id 2
  %rows = tile.dim %a, 1 : !tile.global<2 x f32>
  %t = arith.muli %j, %rows : i32
  %at = arith.addi %t, %i : i32
  %s = arith.sitofp %at : i32 to f32
  tile.store %s, %a[%k, %at] dims [] : f32, !tile.global<2 x f32>"""
    text = program(body, {"a": G2, "n": "i32"}, "%n, %one, %n")
    (a,) = both(text, torch.full((3, 5), -1.0), 3)
    assert torch.equal(a[:, :3], torch.arange(3.0).expand(3, 3)) and (a[:, 3:] == -1).all()


def test_second_axis_of_the_grid():
    body = """
  %i = tile.program_id 0
  %j = tile.program_id 1
  %k = tile.program_id 2
  %s = arith.sitofp %k : i32 to f32
  tile.store %s, %a[%j, %i] dims [] : f32, !tile.global<2 x f32>"""
    text = program(body, {"a": G2, "n": "i32", "m": "i32"}, "%n, %m, %one")
    (a,) = both(text, torch.full((4, 4), -1.0), 2, 3)
    assert (a == 0).sum() == 6 and (a[:3, :2] == 0).all()
