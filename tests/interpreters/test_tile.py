"""The tile interpreter: each op on hand-written kernels, the forward example against dense attention, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine.interpreters.tile import matmul, run_plan
from attn_engine.interpreters.tile_memory import TileAccessError
from attn_engine.universe import make_context

EXAMPLE = Path(__file__).parents[1] / "filecheck" / "dialects" / "tile_value_forward.mlir"


def parse(text: str) -> ModuleOp:
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module


def run(body: str, *arguments: torch.Tensor | float, types: str, exact: bool = False, grid: int = 1) -> None:
    """Runs `body` as the only kernel; `types` are its arguments `%a: T, ...`, shared by the plan."""
    names = ", ".join(part.split(":")[0] for part in types.split(", "))
    kinds = ", ".join(part.split(":")[1] for part in types.split(", "))
    text = f"""
    tile.kernel @kernel({types}) {{
      %c0 = arith.constant 0 : i32
      {body}
      tile.end
    }}
    tile.plan @plan({types}) {{
      %n = arith.constant {grid} : i32
      tile.launch @kernel grid(%n) args({names}) : {kinds}
      tile.end
    }}"""
    run_plan(parse(text), "plan", arguments, exact=exact)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    s = q @ k.transpose(2, 3) * scale
    return s.softmax(-1) @ v, s.logsumexp(-1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sq", "skv"), [(1, 1, 64, 32), (2, 2, 65, 33), (4, 2, 1, 100), (3, 1, 130, 7)]
)
@pytest.mark.parametrize("exact", [False, True])
def test_forward_example(heads: int, kv_heads: int, sq: int, skv: int, exact: bool):
    torch.manual_seed(0)
    q = torch.randn(2, heads, sq, 16, dtype=torch.float16)
    k = torch.randn(2, kv_heads, skv, 16, dtype=torch.float16)
    v = torch.randn(2, kv_heads, skv, 16, dtype=torch.float16)
    want, want_lse = dense(q, k, v, 0.25)
    o, lse = torch.zeros_like(q), torch.zeros(2, heads, sq)
    if exact:
        q, k, v, o, lse = (t.double() for t in (q, k, v, o, lse))
    run_plan(parse(EXAMPLE.read_text()), "plan", [q, k, v, o, lse, 0.25], exact=exact)
    # 1.44269504 in the example is log2(e) to f32 precision only.
    tolerance = 1e-7 if exact else 2e-3
    assert torch.allclose(o.double(), want, atol=tolerance)
    assert torch.allclose(lse.double(), want_lse, atol=tolerance)


def test_empty_grid_runs_nothing():
    q, o = torch.zeros(1, 1, 0, 16, dtype=torch.float16), torch.zeros(1, 1, 0, 16, dtype=torch.float16)
    k = torch.zeros(1, 1, 4, 16, dtype=torch.float16)
    run_plan(parse(EXAMPLE.read_text()), "plan", [q, k, k, o, torch.zeros(1, 1, 0), 0.25])


def test_permuted_load_and_limits():
    x, y = torch.arange(12.0).reshape(3, 4), torch.full((4, 8), -1.0)
    run(
        """%c3 = arith.constant 3 : i32
        %t = tile.load %x[%c0, %c0] dims [1, 0] bounded [1] limits(%c3) : !tile.global<2 x f32> -> tensor<4x8xf32>
        tile.store %t, %y[%c0, %c0] dims [0, 1] : tensor<4x8xf32>, !tile.global<2 x f32>""",
        x, y, types="%x: !tile.global<2 x f32>, %y: !tile.global<2 x f32>",
    )  # fmt: skip
    assert torch.equal(y[:, :3], x.T) and (y[:, 3:] == 0).all()


def test_negative_index_within_limits_is_not_read():
    x, y = torch.arange(4.0), torch.zeros(4)
    run(
        """%m = arith.constant -2 : i32
        %n = arith.constant 4 : i32
        %t = tile.load %x[%m] dims [0] bounded [0] limits(%n) : !tile.global<1 x f32> -> tensor<4xf32>
        tile.store %t, %y[%c0] dims [0] : tensor<4xf32>, !tile.global<1 x f32>""",
        x, y, types="%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>",
    )  # fmt: skip
    assert y.tolist() == [0, 0, 0, 1]


def test_tensor_ops():
    x, y = torch.randn(4, 4), torch.zeros(4, 12)
    run(
        """%t = tile.load %x[%c0, %c0] dims [0, 1] : !tile.global<2 x f32> -> tensor<4x4xf32>
        %tt = tile.transpose %t : tensor<4x4xf32> -> tensor<4x4xf32>
        %left = tile.slice %tt, 1, 1 : tensor<4x4xf32> -> tensor<4x2xf32>
        %scan = tile.scan sum %t, 0 reverse 1 : tensor<4x4xf32> -> tensor<4x4xf32>
        %top = tile.scan max %t, 1 : tensor<4x4xf32> -> tensor<4x4xf32>
        %right = tile.slice %t, 1, 2 : tensor<4x4xf32> -> tensor<4x2xf32>
        %all = tile.concat %left, %scan, %top, %right axis 1 : tensor<4x2xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x2xf32> -> tensor<4x12xf32>
        tile.store %all, %y[%c0, %c0] dims [0, 1] : tensor<4x12xf32>, !tile.global<2 x f32>""",
        x, y, types="%x: !tile.global<2 x f32>, %y: !tile.global<2 x f32>",
    )  # fmt: skip
    want = [x.T[:, 1:3], x.flip(0).cumsum(0).flip(0), x.cummax(1).values, x[:, 2:]]
    assert torch.allclose(y, torch.cat(want, 1))


@pytest.mark.parametrize(("kind", "axis"), [("sum", 0), ("max", 1), ("min", 0)])
def test_reduce(kind: str, axis: int):
    x, y = torch.randn(4, 4), torch.zeros(5)
    x[1, 2] = torch.nan if kind != "sum" else 1.0
    run(
        f"""%t = tile.load %x[%c0, %c0] dims [0, 1] : !tile.global<2 x f32> -> tensor<4x4xf32>
        %r = tile.reduce {kind} %t, {axis} : tensor<4x4xf32> -> tensor<4xf32>
        %s = tile.reduce {kind} %r, 0 : tensor<4xf32> -> f32
        %c4 = arith.constant 4 : i32
        tile.store %r, %y[%c0] dims [0] : tensor<4xf32>, !tile.global<1 x f32>
        tile.store %s, %y[%c4] dims [] : f32, !tile.global<1 x f32>""",
        x, y, types="%x: !tile.global<2 x f32>, %y: !tile.global<1 x f32>",
    )  # fmt: skip
    function = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[kind]
    assert torch.allclose(y[:4], function(x, axis), equal_nan=True)
    assert torch.allclose(y[4], function(function(x, axis), 0), equal_nan=True)


def test_i32_wraps_and_i64_does_not():
    y, z = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    run(
        """%c = arith.constant 65536 : i32
        %p = arith.muli %c, %c : i32
        %w = arith.extsi %c : i32 to i64
        %q = arith.muli %w, %w : i64
        tile.store %p, %y[%c0] dims [] : i32, !tile.global<1 x i32>
        tile.store %q, %z[%c0] dims [] : i64, !tile.global<1 x i64>""",
        y, z, types="%y: !tile.global<1 x i32>, %z: !tile.global<1 x i64>",
    )  # fmt: skip
    assert y.item() == 0 and z.item() == 1 << 32


GATHER = """%r = tile.range %c0 : tensor<8xi32>
%t = tile.map (%x, %r) axes [[], [0]] : (!tile.global<1 x f32>, tensor<8xi32>) -> tensor<8xf32> {
^bb0(%g: !tile.global<1 x f32>, %i: i32):
  %n = arith.constant LIMIT : i32
  %ok = arith.cmpi slt, %i, %n : i32
  %v = tile.gather %g[%i : i32] if %ok : !tile.global<1 x f32> -> f32
  tile.yield %v : f32
}
tile.store %t, %y[%c0] dims [0] : tensor<8xf32>, !tile.global<1 x f32>"""
GLOBALS = "%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>"


def test_guarded_gather():
    x, y = torch.arange(5.0) + 1, torch.full((8,), -1.0)
    run(GATHER.replace("LIMIT", "5"), x, y, types=GLOBALS)
    assert y.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    with pytest.raises(TileAccessError, match="index 5 is outside axis 0 of size 5"):
        run(GATHER.replace("LIMIT", "6"), x, y, types=GLOBALS)


def test_scatter_and_atomic_add():
    y = torch.zeros(5)
    run(
        """%c3 = arith.constant 3 : i32
        %r = tile.range %c0 : tensor<8xi32>
        %i, %ok, %one = tile.map (%r, %c3) axes [[0], []] : (tensor<8xi32>, i32) -> (tensor<8xi32>, tensor<8xi1>, tensor<8xf32>) {
        ^bb0(%e: i32, %m: i32):
          %k = arith.remsi %e, %m : i32
          %ok = arith.cmpi ne, %e, %m : i32
          %v = arith.constant 1.0 : f32
          tile.yield %k, %ok, %v : i32, i1, f32
        }
        tile.scatter_add %one, %y[%i] where %ok axes [[0], [0]] : tensor<8xf32>, !tile.global<1 x f32>, tensor<8xi32> where tensor<8xi1>
        %five = arith.constant 5 : i32
        tile.atomic_add %one, %y[%c3] dims [0] bounded [0] limits(%five) : tensor<8xf32>, !tile.global<1 x f32>""",
        y, types="%y: !tile.global<1 x f32>", grid=2,
    )  # fmt: skip
    assert y.tolist() == [4, 6, 4, 2, 2]


def test_small_products_have_the_same_bits_in_blocks_of_any_size():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((32, 32), (32, 16)))
    whole = matmul(a, b)
    for right in (b, b.mT.contiguous().mT):
        for m, n in ((1, 1), (5, 3), (16, 8), (31, 16)):
            assert torch.equal(matmul(a[:m], right[:, :n]), whole[:m, :n])


def test_atomic_max():
    y = torch.tensor([0.5, 7.0])
    run(
        """%pid = tile.program_id 0
        %x = arith.sitofp %pid : i32 to f32
        %one = arith.constant 1 : i32
        tile.atomic_max %x, %y[%c0] dims [] : f32, !tile.global<1 x f32>
        tile.atomic_max %x, %y[%one] dims [] : f32, !tile.global<1 x f32>""",
        y, types="%y: !tile.global<1 x f32>", grid=4,
    )  # fmt: skip
    assert y.tolist() == [3, 7]


def test_branches_and_loops_carry_tiles():
    y = torch.zeros(2)
    run(
        """%pid = tile.program_id 0
        %one = arith.constant 1 : i32
        %first = arith.cmpi eq, %pid, %c0 : i32
        %f1 = arith.constant 1.0 : f32
        %f2 = arith.constant 2.0 : f32
        %start = scf.if %first -> (f32) {
          scf.yield %f1 : f32
        } else {
          scf.yield %f2 : f32
        }
        %n = arith.constant 3 : i32
        %r = scf.for %i = %c0 to %n step %one iter_args(%a = %start) -> (f32) : i32 {
          %b = arith.addf %a, %a : f32
          scf.yield %b : f32
        }
        tile.store %r, %y[%pid] dims [] : f32, !tile.global<1 x f32>""",
        y, types="%y: !tile.global<1 x f32>", grid=2,
    )  # fmt: skip
    assert y.tolist() == [8, 16]


@pytest.mark.parametrize("limit", ["", "bounded [0] limits(%c5)"])
def test_access_outside_raises(limit: str):
    body = f"""%c5 = arith.constant 5 : i32
    %t = tile.load %x[%c0] dims [0] {limit} : !tile.global<1 x f32> -> tensor<8xf32>"""
    with pytest.raises(TileAccessError, match="outside axis 0 of size 4"):
        run(body, torch.zeros(4), types="%x: !tile.global<1 x f32>")


def test_two_programs_storing_to_one_element_raise():
    body = """%one = arith.constant 1.0 : f32
    tile.store %one, %x[%c0] dims [] : f32, !tile.global<1 x f32>"""
    with pytest.raises(TileAccessError, match="two programs"):
        run(body, torch.zeros(4), types="%x: !tile.global<1 x f32>", grid=2)


def test_uninitialised_temporary_is_nan_until_filled():
    text = """
    tile.kernel @copy(%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>) {
      %i = tile.program_id 0
      %v = tile.load %x[%i] dims [] : !tile.global<1 x f32> -> f32
      tile.store %v, %y[%i] dims [] : f32, !tile.global<1 x f32>
      tile.end
    }
    tile.plan @plan(%y: !tile.global<1 x f32>) {
      %n = arith.constant 2 : i32
      %tmp = tile.alloc(%n) : !tile.global<1 x f32>
      FILL
      tile.launch @copy grid(%n) args(%tmp, %y) : !tile.global<1 x f32>, !tile.global<1 x f32>
      tile.end
    }"""
    y = torch.zeros(2)
    run_plan(parse(text.replace("FILL", "")), "plan", [y])
    assert y.isnan().all()
    fill = "%one = arith.constant 1.0 : f32\n tile.fill %tmp, %one : !tile.global<1 x f32>, f32"
    run_plan(parse(text.replace("FILL", fill)), "plan", [y])
    assert (y == 1).all()


def test_exact_casts_keep_the_range_and_do_not_round():
    body = """%v = tile.load %x[%c0] dims [] : !tile.global<1 x f32> -> f32
    %h = arith.truncf %v : f32 to f16
    %w = arith.extf %h : f16 to f32
    tile.store %w, %y[%c0] dims [] : f32, !tile.global<1 x f32>"""
    for value, exact, want in [(1 / 3, True, 1 / 3), (1e6, True, torch.inf), (1 / 3, False, 0.333251953125)]:
        dtype = torch.float64 if exact else torch.float32
        x, y = torch.tensor([value], dtype=dtype), torch.zeros(1, dtype=dtype)
        run(body, x, y, types=GLOBALS, exact=exact)
        assert y.item() == want
