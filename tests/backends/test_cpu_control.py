"""The CPU backend: loops and branches of programs that do and do not agree."""

from __future__ import annotations

import pytest
import torch

from tests.support.cpu import G4, LOAD, STORE, XY, check, program, xy

CONTROL = {
    "range_by_head": "scf.for %n = %c0 to %h step %c1",
    "range_by_batch": "scf.for %n = %b to %c4 step %c1",
    "range_by_both": "scf.for %n = %h to %hb step %c1",
    "unaligned": "scf.for %n = %h to %c4 step %c2",
    "plain": "scf.for %n = %c0 to %i step %c1",
    "empty": "scf.for %n = %c4 to %h step %c1",
}


@pytest.mark.parametrize("grid", [(2, 3, 2), (1, 1, 1), (1, 2, 9)])
@pytest.mark.parametrize("name", CONTROL)
def test_loops_of_different_length(name: str, grid: tuple[int, int, int]):
    """Every program stops where it should, in its carries and in what it writes."""
    body = f"""%c2 = arith.constant 2 : i32
      %two = arith.muli %b, %c2 : i32
      %hb = arith.addi %h, %two : i32
      %bh = arith.constant 1.0 : f32
      %z = arith.constant dense<0.0> : tensor<4x4xf32>
      %r, %u = {CONTROL[name]} iter_args(%acc = %z, %count = %bh) -> (tensor<4x4xf32>, f32) : i32 {{
        %t = tile.load %x[%b, %h, %n, %c0] dims [2, 3] : {G4} -> tensor<4x4xf32>
        %s = tile.map (%acc, %t, %count) axes [[0, 1], [0, 1], []] : (tensor<4x4xf32>, tensor<4x4xf32>, f32) -> tensor<4x4xf32> {{
        ^bb0(%a: f32, %e: f32, %w: f32):
          %m = arith.mulf %e, %w : f32
          %v = arith.addf %a, %m : f32
          tile.yield %v : f32
        }}
        %next = arith.addf %count, %count : f32
        tile.atomic_add %next, %y[%b, %h, %c4, %c0] dims [] : f32, {G4}
        tile.store %count, %y[%b, %h, %c4, %c1] dims [] : f32, {G4}
        scf.yield %s, %next : tensor<4x4xf32>, f32
      }}
      %rows = arith.constant 4 : i32
      tile.atomic_add %r, %y[%b, %h, %c0, %c0] dims [2, 3] : tensor<4x4xf32>, {G4}
      tile.atomic_add %u, %y[%b, %h, %c4, %c4] dims [] : f32, {G4}"""
    x, y = torch.randn(grid[2], grid[1], 24, 4), torch.zeros(grid[2], grid[1], 8, 5)
    text = program(body, XY, grid).replace("%i4 = arith.muli %i, %c4 : i32", "")
    # Blocks share the rows that they add to, and here also store to: one block at a time.
    check(text.replace("%x_ = arith.constant 2", "%x_ = arith.constant 1"), [x, y])


BRANCH = f"""%cond = arith.cmpi slt, %LEFT, %c1 : i32
      {LOAD}
      %k = arith.constant 3.0 : f32
      %r, %w = scf.if %cond -> (tensor<4x4xf32>, f32) {{
        %u = tile.transpose %t : tensor<4x4xf32> -> tensor<4x4xf32>
        tile.store %u, %z[%b, %h, %i4, %c0] dims [2, 3] : tensor<4x4xf32>, {G4}
        scf.yield %u, %k : tensor<4x4xf32>, f32
      }} else {{
        %f = tile.reduce sum %t, 0 : tensor<4x4xf32> -> tensor<4xf32>
        %g = tile.reduce sum %f, 0 : tensor<4xf32> -> f32
        scf.yield %t, %g : tensor<4x4xf32>, f32
      }}
      {STORE}
      tile.atomic_add %w, %z[%b, %h, %i4, %c1] dims [] : f32, {G4}"""


@pytest.mark.parametrize("left", ["h", "b", "i"])
def test_branches(left: str):
    x, y = xy()
    check(program(BRANCH.replace("LEFT", left), f"%x: {G4}, %y: {G4}, %z: {G4}"), [x, y, torch.zeros_like(y)])


def test_branch_without_results_and_nested_loop():
    body = f"""{LOAD}
      %odd = arith.cmpi eq, %h, %c1 : i32
      scf.if %odd {{
        scf.for %n = %b to %c4 step %c1 : i32 {{
          tile.atomic_add %t, %y[%b, %h, %i4, %c0] dims [2, 3] : tensor<4x4xf32>, {G4}
        }}
      }}"""
    check(program(body, XY), xy())
