"""The CPU backend: tiles, loads and stores against the tile interpreter, for batches of programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_engine.errors import UnsupportedOpError
from tests.support.cpu import CPU, G4, LOAD, STORE, XY, check, emit, parse, program, xy

EXAMPLE = Path(__file__).parents[1] / "filecheck" / "dialects" / "tile_value_forward.mlir"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sq", "skv"), [(1, 1, 64, 32), (4, 2, 65, 33), (3, 1, 130, 7), (9, 9, 1, 70)]
)
def test_forward_example(heads: int, kv_heads: int, sq: int, skv: int):
    torch.manual_seed(0)
    q = torch.randn(2, heads, sq, 16, dtype=torch.float16)
    k, v = (torch.randn(2, kv_heads, skv, 16, dtype=torch.float16) for _ in range(2))
    o, lse = torch.full_like(q, 9.0), torch.zeros(2, heads, sq)
    check(EXAMPLE.read_text(), [q, k, v, o, lse, 0.25], rtol=2e-3, atol=1e-3)


def test_strided_layouts():
    """Positions before heads in memory, and an expanded head axis: layouts are strides."""
    q = torch.randn(2, 40, 4, 16, dtype=torch.float16).transpose(1, 2)
    k, v = (torch.randn(2, 1, 33, 16, dtype=torch.float16).expand(2, 2, 33, 16) for _ in range(2))
    o = torch.zeros(2, 40, 4, 16, dtype=torch.float16).transpose(1, 2)
    check(EXAMPLE.read_text(), [q, k, v, o, torch.zeros(2, 4, 40), 0.25], rtol=2e-3, atol=1e-3)


def test_empty_sizes_run_nothing():
    q, o = torch.zeros(1, 2, 0, 16, dtype=torch.float16), torch.zeros(1, 2, 0, 16, dtype=torch.float16)
    k = torch.zeros(1, 2, 4, 16, dtype=torch.float16)
    check(EXAMPLE.read_text(), [q, k, k, o, torch.zeros(1, 2, 0), 0.25])
    q, o, k = q.new_ones(1, 2, 3, 16), o.new_zeros(1, 2, 3, 16), k.new_zeros(1, 2, 0, 16)
    check(EXAMPLE.read_text(), [q, k, k, o, torch.zeros(1, 2, 3), 0.25])


def test_a_mutated_op_changes_the_result():
    text = EXAMPLE.read_text()
    q, k, v = (torch.randn(1, 2, 40, 16, dtype=torch.float16) for _ in range(3))
    results = []
    for module in (parse(text), parse(text.replace("arith.subf %a, %c", "arith.addf %a, %c"))):
        o = torch.zeros_like(q)
        CPU.build(emit(module))["plan"](q, k, v, o, torch.zeros(1, 2, 40), 0.25)
        results.append(o)
    assert not torch.allclose(*results)


TENSOR_OPS = {
    "transpose": "%r = tile.transpose %t : tensor<4x4xf32> -> tensor<4x4xf32>",
    "scan": "%r = tile.scan sum %t, 0 : tensor<4x4xf32> -> tensor<4x4xf32>",
    "scan_reverse": "%r = tile.scan max %t, 1 reverse 1 : tensor<4x4xf32> -> tensor<4x4xf32>",
    "scan_min": "%r = tile.scan min %t, 1 : tensor<4x4xf32> -> tensor<4x4xf32>",
    "slice_concat": """%a = tile.slice %t, 1, 3 : tensor<4x4xf32> -> tensor<4x1xf32>
      %d = tile.slice %t, 1, 0 : tensor<4x4xf32> -> tensor<4x3xf32>
      %r = tile.concat %a, %d axis 1 : tensor<4x1xf32>, tensor<4x3xf32> -> tensor<4x4xf32>""",
    "concat_with_constant": """%a = arith.constant dense<2.0> : tensor<1x4xf32>
      %d = tile.slice %t, 0, 0 : tensor<4x4xf32> -> tensor<3x4xf32>
      %r = tile.concat %a, %d axis 0 : tensor<1x4xf32>, tensor<3x4xf32> -> tensor<4x4xf32>""",
    "dot": "%r = tile.dot %t, %t, %t ieee : tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32> -> tensor<4x4xf32>",
    "dot_constant": """%k = arith.constant dense<2.0> : tensor<4x4xf32>
      %z = arith.constant dense<0.0> : tensor<4x4xf32>
      %s = tile.dot %k, %t, %k ieee : tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32> -> tensor<4x4xf32>
      %r = tile.dot %s, %k, %z ieee : tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32> -> tensor<4x4xf32>""",
    "dense_constant": """%k = arith.constant dense<[1.0, 2.0, 3.0, 4.0]> : tensor<4xf32>
      %r = tile.map (%t, %k) axes [[0, 1], [1]] : (tensor<4x4xf32>, tensor<4xf32>) -> tensor<4x4xf32> {
      ^bb0(%a: f32, %e: f32):
        %m = arith.mulf %a, %e : f32
        tile.yield %m : f32
      }""",
    "reduce_and_map": """%m = tile.reduce max %t, 1 : tensor<4x4xf32> -> tensor<4xf32>
      %l = tile.reduce min %t, 0 : tensor<4x4xf32> -> tensor<4xf32>
      %n = tile.reduce sum %m, 0 : tensor<4xf32> -> f32
      %r = tile.map (%t, %m, %l, %n, %h) axes [[0, 1], [0], [1], [], []] : (tensor<4x4xf32>, tensor<4xf32>, tensor<4xf32>, f32, i32) -> tensor<4x4xf32> {
      ^bb0(%a: f32, %e: f32, %f: f32, %g: f32, %k: i32):
        %s = arith.subf %a, %e : f32
        %u = arith.mulf %s, %f : f32
        %v = arith.addf %u, %g : f32
        %kf = arith.sitofp %k : i32 to f32
        %w = arith.addf %v, %kf : f32
        tile.yield %w : f32
      }""",
    "map_without_operands": """%r = tile.map () axes [] : () -> tensor<4x4xf32> {
        %v = arith.constant 1.5 : f32
        tile.yield %v : f32
      }""",
    "map_narrow_yield": """%m = tile.reduce max %t, 1 : tensor<4x4xf32> -> tensor<4xf32>
      %r = tile.map (%m) axes [[0]] : (tensor<4xf32>) -> tensor<4x4xf32> {
      ^bb0(%a: f32):
        tile.yield %a : f32
      }""",
    "range": """%n = tile.range %i4 : tensor<4xi32>
      %r = tile.map (%n, %h) axes [[1], []] : (tensor<4xi32>, i32) -> tensor<4x4xf32> {
      ^bb0(%a: i32, %e: i32):
        %s = arith.muli %a, %e : i32
        %f = arith.sitofp %s : i32 to f32
        tile.yield %f : f32
      }""",
    "swapped_carries": """%u = tile.transpose %t : tensor<4x4xf32> -> tensor<4x4xf32>
      %r, %q = scf.for %n = %c0 to %c1 step %c1 iter_args(%a = %t, %d = %u) -> (tensor<4x4xf32>, tensor<4x4xf32>) : i32 {
        scf.yield %d, %a : tensor<4x4xf32>, tensor<4x4xf32>
      }""",
}


@pytest.mark.parametrize("name", TENSOR_OPS)
def test_tensor_op(name: str):
    check(program(f"{LOAD}\n      {TENSOR_OPS[name]}\n      {STORE}", XY), xy())


ACCESSES = {
    "tail": "%t = tile.load %x[%b, %h, %i4, %c0] dims [2, 3] bounded [0] limits(%c6) : G -> tensor<4x4xf32>",
    "negative": "%t = tile.load %x[%b, %h, %m2, %c0] dims [2, 3] bounded [0] limits(%c4) : G -> tensor<4x4xf32>",
    "nothing": "%t = tile.load %x[%b, %h, %c6, %c0] dims [2, 3] bounded [0] limits(%c4) : G -> tensor<4x4xf32>",
    "permuted": "%t = tile.load %x[%b, %h, %i4, %c0] dims [3, 2] bounded [1] limits(%c6) : G -> tensor<4x4xf32>",
    "start_by_head": "%t = tile.load %x[%b, %h, %h, %c0] dims [2, 3] : G -> tensor<4x4xf32>",
    "limit_by_head": "%t = tile.load %x[%b, %h, %i4, %c0] dims [2, 3] bounded [0] limits(%h) : G -> tensor<4x4xf32>",
    "one_for_all": "%t = tile.load %x[%c0, %c1, %i4, %c0] dims [2, 3] : G -> tensor<4x4xf32>",
    "reversed_heads": "%t = tile.load %x[%b, %back, %i4, %c0] dims [2, 3] : G -> tensor<4x4xf32>",
    "grouped_heads": "%t = tile.load %x[%b, %half, %i4, %c0] dims [2, 3] : G -> tensor<4x4xf32>",
    "batch_as_head": "%t = tile.load %x[%c1, %b, %i4, %c0] dims [2, 3] : G -> tensor<4x4xf32>",
    "both_in_one": "%t = tile.load %x[%mix, %h, %i4, %c0] dims [2, 3] : G -> tensor<4x4xf32>",
    "head_axis": "%t = tile.load %x[%b, %c0, %i4, %h] dims [2, 1] bounded [1] limits(%c3) : G -> tensor<4x4xf32>",
}


@pytest.mark.parametrize("name", ACCESSES)
@pytest.mark.parametrize("grid", [(1, 3, 2), (1, 3, 1), (1, 1, 2), (1, 1, 1)])
def test_loads(name: str, grid: tuple[int, int, int]):
    body = f"""%c6 = arith.constant 6 : i32
      %c2 = arith.constant 2 : i32
      %c3 = arith.constant 3 : i32
      %m2 = arith.constant -2 : i32
      %back = arith.subi %c2, %h : i32
      %half = arith.divsi %h, %c2 : i32
      %sum = arith.addi %h, %b : i32
      %mix = arith.remsi %sum, %c2 : i32
      {ACCESSES[name].replace("G", G4)}
      %r = tile.scan sum %t, 0 : tensor<4x4xf32> -> tensor<4x4xf32>
      {STORE}"""
    check(program(body, XY, grid), xy())


STORES = {
    "tail": "tile.store %t, %y[%b, %h, %i4, %c0] dims [2, 3] bounded [0] limits(%c6) : tensor<4x4xf32>, G",
    "limit_by_head": "tile.store %t, %y[%b, %h, %i4, %c0] dims [2, 3] bounded [0] limits(%h) : tensor<4x4xf32>, G",
    "permuted": "tile.store %t, %y[%b, %h, %i4, %c0] dims [3, 2] bounded [1] limits(%c6) : tensor<4x4xf32>, G",
    "atomic_own": "tile.atomic_add %t, %y[%b, %h, %i4, %c0] dims [2, 3] bounded [0] limits(%c6) : tensor<4x4xf32>, G",
    "atomic_shared": "tile.atomic_add %t, %y[%b, %c0, %i4, %c0] dims [2, 3] : tensor<4x4xf32>, G",
    "atomic_all": "tile.atomic_add %t, %y[%c0, %c0, %c0, %c0] dims [2, 3] bounded [0] limits(%c6) : tensor<4x4xf32>, G",
    "atomic_group": "tile.atomic_add %t, %y[%b, %half, %i4, %c0] dims [2, 3] : tensor<4x4xf32>, G",
    "atomic_constant": """%k = arith.constant dense<1.0> : tensor<4x4xf32>
      tile.atomic_add %k, %y[%c1, %c0, %c0, %c0] dims [2, 3] : tensor<4x4xf32>, G""",
    "atomic_scalar": """%k = arith.constant 1.0 : f32
      tile.atomic_add %k, %y[%c1, %c0, %i, %c0] dims [] : f32, G""",
    "atomic_max": """%k = arith.sitofp %h : i32 to f32
      tile.atomic_max %k, %y[%c1, %c0, %i, %c0] dims [] : f32, G""",
    "scalar": """%k = arith.sitofp %h : i32 to f32
      tile.store %k, %y[%b, %h, %i, %c1] dims [] : f32, G""",
    "read_then_write": """%u = tile.load %y[%b, %h, %i4, %c0] dims [2, 3] : G -> tensor<4x4xf32>
      tile.store %t, %y[%b, %h, %i4, %c0] dims [2, 3] : tensor<4x4xf32>, G
      tile.atomic_add %u, %y[%b, %h, %i4, %c0] dims [2, 3] : tensor<4x4xf32>, G""",
}


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("grid", [(2, 3, 2), (2, 1, 1)])
def test_stores(name: str, grid: tuple[int, int, int]):
    body = f"""%c6 = arith.constant 6 : i32
      %c2 = arith.constant 2 : i32
      %half = arith.divsi %h, %c2 : i32
      {LOAD}
      {STORES[name].replace("G", G4)}"""
    check(program(body, XY, grid), xy())


def test_unknown_op_names_op_and_backend():
    text = program("%r = arith.divui %c4, %c1 : i32", XY)
    with pytest.raises(UnsupportedOpError, match=r"backend 'cpu' cannot emit 'arith.divui'"):
        CPU.emit(parse(text))
