"""The CPU backend: every op against the tile interpreter, for batches of programs that do and do not agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine.backends.backend import get_backend
from attn_engine.errors import UnsupportedOpError
from attn_engine.interpreters.tile import run_plan
from attn_engine.universe import PASSES, make_context

EXAMPLE = Path(__file__).parents[1] / "filecheck" / "dialects" / "tile_value_forward.mlir"
CPU = get_backend("cpu")


def parse(text: str) -> ModuleOp:
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module


def emit(module: ModuleOp) -> str:
    """Source text; the same after printing and parsing."""
    again = parse(str(module))
    source = CPU.emit(module)
    assert CPU.emit(again) == source
    return source


def legalized(text: str) -> ModuleOp:
    module = parse(text)
    PASSES["cpu-legalize"]()().apply(make_context(), module)
    return module


def check(
    text: str, arguments: Sequence[torch.Tensor | float], name: str = "plan", rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Runs a plan on both and compares all tensors afterwards."""
    module = legalized(text)
    want = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    run_plan(parse(text), name, want)
    CPU.build(emit(module))[name](*arguments)
    for got, expected in zip(arguments, want, strict=True):
        if isinstance(got, torch.Tensor):
            torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)


def program(body: str, types: str, grid: tuple[int, int, int] = (2, 3, 2)) -> str:
    """A kernel over a grid: %i on axis 0, %h on axis 1 and %b on axis 2; and its plan."""
    names = ", ".join(part.split(":")[0] for part in types.split(", "))
    kinds = ", ".join(part.split(":")[1] for part in types.split(", "))
    return f"""
    tile.kernel @kernel({types}) {{
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      %c4 = arith.constant 4 : i32
      %i = tile.program_id 0
      %h = tile.program_id 1
      %b = tile.program_id 2
      %i4 = arith.muli %i, %c4 : i32
      {body}
      tile.end
    }}
    tile.plan @plan({types}) {{
      %x_ = arith.constant {grid[0]} : i32
      %y_ = arith.constant {grid[1]} : i32
      %z_ = arith.constant {grid[2]} : i32
      tile.launch @kernel grid(%x_, %y_, %z_) args({names}) : {kinds}
      tile.end
    }}"""


G4 = "!tile.global<4 x f32>"
XY = f"%x: {G4}, %y: {G4}"
LOAD = f"%t = tile.load %x[%b, %h, %i4, %c0] dims [2, 3] : {G4} -> tensor<4x4xf32>"
STORE = f"tile.store %r, %y[%b, %h, %i4, %c0] dims [2, 3] : tensor<4x4xf32>, {G4}"


def xy(rows: int = 8) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, rows, 4), torch.full((2, 3, rows, 4), 7.0)]


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


SCALARS = {
    "i": ["addi", "subi", "muli", "divsi", "remsi", "floordivsi", "ceildivsi", "minsi", "maxsi", "andi", "ori", "xori"],
    "shift": ["shli", "shrsi", "shrui"],
    "f": ["addf", "subf", "mulf", "divf", "maximumf", "minimumf", "maxnumf", "minnumf"],
}


@pytest.mark.parametrize("width", ["i32", "i64"])
@pytest.mark.parametrize("op", [*SCALARS["i"], *SCALARS["shift"]])
def test_integer_op(op: str, width: str):
    """On tensors in a map, on scalars that differ between programs, and on ones that do not."""
    big = 2**31 - 3 if width == "i32" else 2**63 - 3
    third = "%second = arith.constant 3" if op in SCALARS["shift"] else f"%second = arith.constant {-big}"
    ext = "" if width == "i32" else "%hw = arith.extsi %h1 : i32 to i64\n"
    h = "%h1" if width == "i32" else "%hw"
    body = f"""%h1 = arith.addi %h, %c1 : i32
      {ext}%n = tile.range %c1 : tensor<4xi32>
      %first = arith.constant {big} : {width}
      {third} : {width}
      %mine = arith.addi {h}, %second : {width}
      %u = arith.{op} %first, %second : {width}
      %p = arith.{op} %first, {h} : {width}
      %q = arith.{op} %mine, {h} : {width}
      %m = tile.map (%n, %first, %p) axes [[0], [], []] : (tensor<4xi32>, {width}, {width}) -> tensor<4x{width}> {{
      ^bb0(%a: i32, %e: {width}, %f: {width}):
        %z = arith.constant 1 : {width}
        {f"%w = arith.extsi %a : i32 to {width}" if width == "i64" else "%zero = arith.constant 0 : i32" + chr(10) + "%w = arith.addi %a, %zero : i32"}
        %d = arith.{op} %e, %w : {width}
        %g = arith.{op} %f, %z : {width}
        %s = arith.xori %d, %g : {width}
        tile.yield %s : {width}
      }}
      %c5 = arith.constant 5 : i32
      %c6 = arith.constant 6 : i32
      tile.store %m, %y[%b, %h, %c0] dims [2] : tensor<4x{width}>, !tile.global<3 x {width}>
      tile.store %u, %y[%b, %h, %c4] dims [] : {width}, !tile.global<3 x {width}>
      tile.store %p, %y[%b, %h, %c5] dims [] : {width}, !tile.global<3 x {width}>
      tile.store %q, %y[%b, %h, %c6] dims [] : {width}, !tile.global<3 x {width}>"""
    y = torch.zeros(2, 3, 7, dtype=torch.int32 if width == "i32" else torch.int64)
    check(program(body, f"%y: !tile.global<3 x {width}>", (1, 3, 2)), [y])


def float_program(expression: str) -> str:
    body = f"""%row = tile.load %x[%b, %h, %c0, %c0] dims [3] : {G4} -> tensor<4xf32>
      {LOAD}
      %mine = tile.load %x[%b, %h, %c1, %c1] dims [] : {G4} -> f32
      %r = tile.map (%t, %row, %mine) axes [[0, 1], [1], []] : (tensor<4x4xf32>, tensor<4xf32>, f32) -> tensor<4x4xf32> {{
      ^bb0(%a: f32, %e: f32, %f: f32):
        %half = arith.constant 0.5 : f32
        {expression}
        tile.yield %out : f32
      }}
      {STORE}"""
    return program(body, XY)


@pytest.mark.parametrize("op", SCALARS["f"])
@pytest.mark.parametrize(("left", "right"), [("a", "e"), ("half", "a"), ("e", "half"), ("f", "half")])
def test_float_op(op: str, left: str, right: str):
    x, y = xy()
    x[0, 0, :4, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    check(float_program(f"%out = arith.{op} %{left}, %{right} : f32"), [x, y])


FUNCTIONS = "absf ceil cos erf exp exp2 expm1 floor log log10 log1p log2 round roundeven rsqrt sin sqrt tan tanh trunc atan sinh cosh cbrt"


@pytest.mark.parametrize("function", FUNCTIONS.split())
def test_float_function(function: str):
    text = f"%p = math.{function} %a : f32\n%m = math.{function} %f : f32\n%out = arith.addf %p, %m : f32"
    x, y = xy()
    check(float_program(text), [x.abs() if function.startswith(("log", "sqrt", "rsqrt")) else x, y], rtol=2e-5)


@pytest.mark.parametrize(
    "predicate",
    ["false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true"],
)
def test_float_comparison(predicate: str):
    text = f"%p = arith.cmpf {predicate}, %a, %f : f32\n%out = arith.select %p, %half, %e : f32"
    x, y = xy()
    x[:, :, ::2, 1] = torch.nan
    x[:, :, 1, 1] = x[:, :, 1, 2]
    check(float_program(text), [x, y])


@pytest.mark.parametrize("predicate", ["eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"])
def test_integer_comparison(predicate: str):
    text = f"""%ia = arith.fptosi %a : f32 to i32
        %j = arith.fptosi %f : f32 to i32
        %p = arith.cmpi {predicate}, %ia, %j : i32
        %k = arith.extsi %p : i1 to i32
        %m = arith.extui %p : i1 to i64
        %k2 = arith.extsi %k : i32 to i64
        %s = arith.subi %k2, %m : i64
        %out = arith.sitofp %s : i64 to f32"""
    x, y = xy()
    check(float_program(text), [x * 3, y])


CASTS = {
    "bitcast": "%p = arith.bitcast %a : f32 to i32\n%out = arith.bitcast %p : i32 to f32",
    "half": "%p = arith.truncf %f : f32 to f16\n%q = arith.extf %p : f16 to f32\n%out = arith.addf %q, %a : f32",
    "bfloat": "%p = arith.truncf %a : f32 to bf16\n%out = arith.extf %p : bf16 to f32",
    "narrow": "%p = arith.fptosi %a : f32 to i64\n%q = arith.trunci %p : i64 to i1\n%r = arith.uitofp %q : i1 to f32\n%out = arith.addf %r, %f : f32",
    "negate": "%p = arith.negf %f : f32\n%out = arith.mulf %p, %a : f32",
    "fma": "%out = math.fma %a, %e, %half : f32",
    "constants_only": "%p = math.exp2 %half : f32\n%q = arith.divf %half, %p : f32\n%out = arith.maximumf %q, %half : f32",
    "choice_of_scalars": "%p = arith.cmpf olt, %f, %half : f32\n%out = arith.select %p, %half, %f : f32",
}


@pytest.mark.parametrize("name", CASTS)
def test_cast(name: str):
    check(float_program(CASTS[name]), xy())


def test_large_choice_is_exact():
    """Choices on bit patterns keep NaN, infinities and signed zeros."""
    from attn_engine.backends.cpu.support import select

    x = torch.randn(64, 512)
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    condition = torch.rand(1, 512) > 0.5
    condition[:, :4] = True
    for then, otherwise in ((x, -torch.inf), (x, 0.0), (0.0, x), (x, x + 1), (torch.nan, x)):
        got, want = select(condition, then, otherwise), torch.where(condition, then, otherwise)
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_unknown_op_names_op_and_backend():
    text = program("%r = arith.divui %c4, %c1 : i32", XY)
    with pytest.raises(UnsupportedOpError, match=r"backend 'cpu' cannot emit 'arith.divui'"):
        CPU.emit(parse(text))
