"""The CPU backend: gathers and scattered sums against the tile interpreter."""

from __future__ import annotations

import pytest
import torch

from attn_engine.backends.cpu.gather import gather
from tests.support.cpu import G4, LOAD, STORE, XY, check, program, xy

GATHER = """%n = tile.range %i4 : tensor<4xi32>
      %r = tile.map (%x, %n, %b, %h) axes [[], [0], [], []] : (!tile.global<4 x f32>, tensor<4xi32>, i32, i32) -> tensor<4x4xf32> {
      ^bb0(%g: !tile.global<4 x f32>, %a: i32, %gb: i32, %gh: i32):
        %c = arith.constant 0 : i32
        %lim = arith.constant 6 : i32
        %ok = arith.cmpi slt, %a, %lim : i32
        %v = tile.gather %g[%gb, %gh, %a, %c : i32, i32, i32, i32] IF : !tile.global<4 x f32> -> f32
        tile.yield %v : f32
      }
      """


@pytest.mark.parametrize(("guard", "rows"), [("", 8), ("if %ok", 6)])
def test_gather(guard: str, rows: int):
    x, y = xy(rows)[0], xy()[1]
    check(program(GATHER.replace("IF", guard) + STORE, XY), [x, y])


def test_a_guard_hides_any_number():
    """Nothing as long as the distance of two of them is made."""
    memory, far = torch.arange(8.0), 2**40
    index = torch.tensor([0, 1, 2, far])
    assert gather(memory, [index], index < 8).tolist() == [0, 1, 2, 0]
    assert gather(memory, [torch.tensor([-far, 0, far])], torch.tensor([False, True, False])).tolist() == [0, 0, 0]
    assert gather(memory, [torch.tensor([0, 2, 4])], torch.tensor([True, True, False])).tolist() == [0, 2, 0]


GATHERED = {
    "block": ("%e", "%a", 0, 8),
    "block_with_tail": ("%e", "%a", 0, 5),
    "columns_by_rows": ("%a", "%e", 0, 8),
    "steps": ("%e2", "%a", 0, 8),
    "repeats": ("%e", "%half", 0, 8),
    "diagonal": ("%a", "%a", 0, 8),
    "negative": ("%e", "%less", 0, 8),
    "backwards": ("%e", "%back", 0, 8),
}


@pytest.mark.parametrize("name", GATHERED)
def test_gather_of_blocks(name: str):
    """Indices that make a block of the memory, and ones that do not."""
    first, second, low, high = GATHERED[name]
    body = f"""%n = tile.range %i4 : tensor<4xi32>
      %m = tile.range %c0 : tensor<4xi32>
      %r = tile.map (%x, %n, %m, %h) axes [[], [0], [1], []] : (!tile.global<4 x f32>, tensor<4xi32>, tensor<4xi32>, i32) -> tensor<4x4xf32> {{
      ^bb0(%g: !tile.global<4 x f32>, %a: i32, %e: i32, %gh: i32):
        %zero = arith.constant {low} : i32
        %one = arith.constant 1 : i32
        %two = arith.constant 2 : i32
        %three = arith.constant 3 : i32
        %top = arith.constant {high} : i32
        %e2 = arith.muli %e, %two : i32
        %half = arith.divsi %a, %two : i32
        %less = arith.subi %a, %two : i32
        %back = arith.subi %three, %a : i32
        %p = arith.cmpi slt, {first}, %top : i32
        %q = arith.cmpi slt, {second}, %top : i32
        %s = arith.cmpi sge, {second}, %zero : i32
        %pq = arith.andi %p, %q : i1
        %ok = arith.andi %pq, %s : i1
        %v = tile.gather %g[%one, %gh, {first}, {second} : i32, i32, i32, i32] if %ok : !tile.global<4 x f32> -> f32
        tile.yield %v : f32
      }}
      {STORE}"""
    x = torch.randn(2, 3, high, high)
    check(program(body, XY), [x, xy()[1]])


def test_gather_from_nothing():
    body = GATHER.replace("IF", "if %ok").replace("constant 6", "constant 0") + STORE
    check(program(body, XY), [torch.zeros(2, 3, 0, 4), xy()[1]])


@pytest.mark.parametrize("grid", [(2, 3, 2), (1, 1, 1)])
@pytest.mark.parametrize("guard", [True, False])
def test_scatter_add(grid: tuple[int, int, int], guard: bool):
    body = f"""{LOAD}
      %n = tile.range %c0 : tensor<4xi32>
      %k, %ok = tile.map (%n, %h) axes [[0], []] : (tensor<4xi32>, i32) -> (tensor<4xi32>, tensor<4xi1>) {{
      ^bb0(%a: i32, %e: i32):
        %two = arith.constant 2 : i32
        %s = arith.divsi %a, %two : i32
        %o = arith.cmpi sge, %a, %e : i32
        tile.yield %s, %o : i32, i1
      }}
      tile.scatter_add %t, %y[%b, %h, %k, %n] {"where %ok" if guard else ""} axes [[], [], [0], [1]{", [0]" if guard else ""}]
        : tensor<4x4xf32>, {G4}, i32, i32, tensor<4xi32>, tensor<4xi32> {"where tensor<4xi1>" if guard else ""}"""
    check(program(body, XY, grid), xy())


@pytest.mark.parametrize("grid", [(2, 3, 2), (1, 1, 1)])
@pytest.mark.parametrize("start", ["%c0", "%c2"])
@pytest.mark.parametrize("batch", ["%b", "%c1"])
def test_scatter_add_of_blocks(grid: tuple[int, int, int], start: str, batch: str):
    """Programs that meet in a block all count, and what is outside of the memory is guarded."""
    body = f"""%c2 = arith.constant 2 : i32
      {LOAD}
      %m = tile.range %c0 : tensor<4xi32>
      %n = tile.range {start} : tensor<4xi32>
      %ok = tile.map (%n) axes [[0]] : (tensor<4xi32>) -> tensor<4xi1> {{
      ^bb0(%a: i32):
        %four = arith.constant 4 : i32
        %o = arith.cmpi slt, %a, %four : i32
        tile.yield %o : i1
      }}
      tile.scatter_add %t, %y[{batch}, %h, %m, %n] where %ok axes [[], [], [0], [1], [1]]
        : tensor<4x4xf32>, {G4}, i32, i32, tensor<4xi32>, tensor<4xi32> where tensor<4xi1>"""
    check(program(body, XY, grid), xy())
