"""HIP kernels of single ops, emulated, against the interpreter of the buffered level."""

from __future__ import annotations

import math

import pytest
import torch

from attn_engine.backends.hip.build import emulate
from attn_engine.backends.hip.emit import emit
from attn_engine.errors import UnsupportedOpError
from attn_engine.interpreters.tile_buffer import run_plan
from attn_engine.universe import PASSES, make_context
from tests.support.hip import emulates, parse

GEMM = """
tile.kernel @k(%a: !tile.global<2 x ELEM>, %b: !tile.global<2 x ELEM>, %c: !tile.global<2 x f32>, %r: !tile.global<1 x f32>, %t: !tile.global<1 x f32>) attributes {threads = 256 : i64, explicit_barriers} {
  %as = tile.buffer_alloc layout PLACE : !tile.buffer<LEFTxELEM, shared>
  %bs = tile.buffer_alloc layout PLACE : !tile.buffer<RIGHTxELEM, shared>
  %s = tile.buffer_alloc layout #tile.mfma<INSTR, acc, WAVES> : !tile.buffer<64x128xf32, register>
  %row = tile.buffer_alloc layout #tile.sliced<1, #tile.mfma<INSTR, acc, WAVES>> : !tile.buffer<64xf32, register>
  %col = tile.buffer_alloc layout #tile.sliced<0, #tile.mfma<INSTR, acc, WAVES>> : !tile.buffer<128xf32, register>
  %rs = tile.buffer_alloc : !tile.buffer<64xf32, shared>
  %c0 = arith.constant 0 : i32
  %edge = arith.constant 61 : i32
  %zero = arith.constant 0.0 : f32
  tile.copy_in %a[%c0, %c0] dims DIMS into %as : !tile.global<2 x ELEM>, !tile.buffer<LEFTxELEM, shared>
  tile.copy_in %b[%c0, %c0] dims [0, 1] into %bs : !tile.global<2 x ELEM>, !tile.buffer<RIGHTxELEM, shared>
  tile.buffer_fill %s, %zero : !tile.buffer<64x128xf32, register>, f32
  tile.barrier
  tile.gemm %as, %bs, %s FLAGS ieee : !tile.buffer<LEFTxELEM, shared>, !tile.buffer<RIGHTxELEM, shared>, !tile.buffer<64x128xf32, register>
  tile.buffer_reduce KIND %s, 1 into %row : !tile.buffer<64x128xf32, register>, !tile.buffer<64xf32, register>
  tile.buffer_reduce KIND %s, 0 into %col : !tile.buffer<64x128xf32, register>, !tile.buffer<128xf32, register>
  tile.copy %row, %rs : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, shared>
  tile.barrier
  tile.buffer_map (%s, %rs, %col) axes [[0, 1], [0], [1]] into (%s) : (!tile.buffer<64x128xf32, register>, !tile.buffer<64xf32, shared>, !tile.buffer<128xf32, register>) into (!tile.buffer<64x128xf32, register>) {
  ^bb0(%x: f32, %y: f32, %z: f32):
    %i = tile.index 0
    %j = tile.index 1
    %ij = arith.subi %i, %j : i32
    %wide = arith.extsi %ij : i32 to i64
    %odd = arith.trunci %wide : i64 to i1
    %sign = arith.sitofp %odd : i1 to f32
    %yz = arith.subf %y, %z : f32
    %part = arith.mulf %yz, %sign : f32
    %sum = arith.addf %x, %part : f32
    tile.yield %sum : f32
  }
  tile.copy_out %s, %c[%c0, %c0] dims [0, 1] bounded [0] limits(%edge) : !tile.buffer<64x128xf32, register>, !tile.global<2 x f32>
  tile.buffer_atomic_add %row, %r[%c0] dims [0] bounded [0] limits(%edge) : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  %rows = tile.buffer_total KIND %row : !tile.buffer<64xf32, register> -> f32
  %cols = tile.buffer_total KIND %col : !tile.buffer<128xf32, register> -> f32
  %last = arith.constant 63 : i32
  tile.atomic_add %rows, %r[%edge] dims [] : f32, !tile.global<1 x f32>
  tile.atomic_add %cols, %r[%last] dims [] : f32, !tile.global<1 x f32>
  tile.barrier
  tile.buffer_scatter_add (%s, %rs, %col) axes [[0, 1], [0], [1]] into %c : (!tile.buffer<64x128xf32, register>, !tile.buffer<64xf32, shared>, !tile.buffer<128xf32, register>) into !tile.global<2 x f32> {
  ^bb0(%x: f32, %y: f32, %z: f32):
    %i = tile.index 0
    %j = tile.index 1
    %part = arith.subf %y, %z : f32
    %k = arith.xori %i, %j : i32
    %small = arith.constant 31 : i32
    %place = arith.andi %k, %small : i32
    %keep = arith.cmpi sgt, %i, %j : i32
    tile.yield %part, %place, %j, %keep : f32, i32, i32, i1
  }
  tile.copy_out %col, %t[%c0] dims [0] : !tile.buffer<128xf32, register>, !tile.global<1 x f32>
  tile.end
}
tile.plan @run(%a: !tile.global<2 x ELEM>, %b: !tile.global<2 x ELEM>, %c: !tile.global<2 x f32>, %r: !tile.global<1 x f32>, %t: !tile.global<1 x f32>) {
  %one = arith.constant 1 : i32
  tile.launch @k grid(%one) args(%a, %b, %c, %r, %t) : !tile.global<2 x ELEM>, !tile.global<2 x ELEM>, !tile.global<2 x f32>, !tile.global<1 x f32>, !tile.global<1 x f32>
  tile.end
}
"""


def gemm(element: str, instruction: str, waves: str, place: str, kind: str, flags: str, dims: str = "[0, 1]") -> str:
    names = {
        "ELEM": element,
        "INSTR": instruction,
        "WAVES": waves,
        "PLACE": place,
        "KIND": kind,
        "FLAGS": flags,
        "DIMS": dims,
        "LEFT": "32x64" if "transpose_a" in flags else "64x32",
        "RIGHT": "128x32" if "transpose_b" in flags else "32x128",
    }
    text = GEMM
    for name, value in names.items():
        text = text.replace(name, value)
    return text


CASES = {
    "half": (gemm("f16", "32x32x8", "1x4", "#tile.padded<8>", "sum", ""), torch.float16),
    "half, waves along both axes": (gemm("f16", "32x32x8", "2x2", "#tile.padded<4>", "max", "transpose_b"), torch.float16),
    "small": (gemm("f16", "16x16x16", "4x1", "#tile.swizzled<8, 1, 4>", "min", "transpose_a"), torch.float16),
    "grouped": (gemm("f16", "32x32x16", "1x4", "#tile.padded<8, 16>", "max", "transpose_b"), torch.float16),
    "small, grouped": (gemm("bf16", "16x16x32", "2x2", "#tile.padded<8, 32>", "sum", "transpose_a"), torch.bfloat16),
    "chained float": (gemm("f32", "32x32x8", "1x4", "#tile.padded<4>", "max", ""), torch.float32),
    "bfloat": (gemm("bf16", "16x16x16", "2x2", "#tile.padded<0>", "sum", "transpose_a transpose_b"), torch.bfloat16),
    "float": (gemm("f32", "32x32x2", "2x2", "#tile.padded<4>", "max", ""), torch.float32),
    "small float": (gemm("f32", "16x16x4", "1x4", "#tile.swizzled<4, 2, 8>", "max", "transpose_b"), torch.float32),
}  # fmt: skip


def arguments(text: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    a = torch.randn(32, 64) if "transpose_a" in text else torch.randn(64, 32)
    b = torch.randn(128, 32) if "transpose_b" in text else torch.randn(32, 128)
    return [a.to(dtype), b.to(dtype), torch.zeros(64, 128), torch.full((64,), 0.5), torch.zeros(128)]


def compare(text: str, dtype: torch.dtype, infect: bool) -> None:
    module = parse(text)
    got, want = arguments(text, dtype), arguments(text, dtype)
    if infect:
        got[0][3, 7] = want[0][3, 7] = math.nan
    emulate(emit(module))["run"](*got)
    run_plan(module, "run", want)
    for mine, theirs in zip(got[2:], want[2:], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert torch.equal(got[2][61:], torch.zeros(3, 128)), "beyond the limit nothing is written"


@emulates
@pytest.mark.parametrize("name", CASES)
def test_products_and_reductions(name: str):
    text, dtype = CASES[name]
    compare(text, dtype, infect=False)
    compare(text, dtype, infect=True)


SCALARS = {
    "arith.divsi %i, %m : i32": "i32",
    "arith.remsi %i, %m : i32": "i32",
    "arith.shrsi %i, %two : i32": "i32",
    "arith.shrui %i, %two : i32": "i32",
    "arith.divui %i, %two : i32": "i32",
    "arith.maxsi %i, %m : i32": "i32",
    "arith.xori %i, %m : i32": "i32",
    "arith.cmpi ult, %i, %m : i32": "i1",
    "arith.cmpi sge, %i, %m : i32": "i1",
    **{f"arith.cmpf {p}, %x, %y : f32": "i1" for p in ("ord", "uno", "oeq", "ueq", "one", "une", "olt", "ult", "oge", "uge")},
    "arith.maximumf %x, %y : f32": "f32",
    "arith.minimumf %x, %y : f32": "f32",
    "arith.maxnumf %x, %y : f32": "f32",
    "arith.negf %x : f32": "f32",
    "arith.sitofp %i : i32 to f32": "f32",
    "arith.uitofp %i : i32 to f32": "f32",
    "arith.bitcast %x : f32 to i32": "i32",
    "math.exp %x : f32": "f32",
    "math.log %y : f32": "f32",
    "math.sin %big : f32": "f32",
    "math.cos %big : f32": "f32",
    "math.rsqrt %y : f32": "f32",
    "math.floor %x : f32": "f32",
    "math.absf %x : f32": "f32",
    "math.fma %x, %y, %x : f32": "f32",
}  # fmt: skip


def scalar_text() -> str:
    """Each op on 64 values, a row of the result each."""
    lines: list[str] = []
    for row, (op, type_) in enumerate(SCALARS.items()):
        convert = {"i32": "arith.sitofp %v : i32 to f32", "i1": "arith.uitofp %v : i1 to f32"}
        last = (
            f"      %w = {convert[type_]}\n      tile.yield %w : f32"
            if type_ in convert
            else "      tile.yield %v : f32"
        )
        lines.append(f"""
  %row{row} = arith.constant {row} : i32
  tile.buffer_map (%inputs) axes [[0]] into (%results) : (!tile.buffer<64xf32, register>) into (!tile.buffer<64xf32, register>) {{
  ^bb0(%x0: f32):
      %j = tile.index 0
      %two = arith.constant 2 : i32
      %shift = arith.constant 31 : i32
      %i = arith.subi %j, %shift : i32
      %m = arith.constant -7 : i32
      %nan = arith.constant 0x7FC00000 : f32
      %bad = arith.cmpi eq, %i, %m : i32
      %x = arith.select %bad, %nan, %x0 : f32
      %half = arith.constant 0.5 : f32
      %jf = arith.sitofp %j : i32 to f32
      %y = arith.addf %jf, %half : f32
      %large = arith.constant 1000.0 : f32
      %big = arith.mulf %x0, %large : f32
      %v = {op}
{last}
  }}
  tile.copy_out %results, %out[%row{row}, %c0] dims [1] : !tile.buffer<64xf32, register>, !tile.global<2 x f32>""")
    layout = "#tile.sliced<0, #tile.mfma<32x32x8, acc, 1x1>>"
    return f"""
tile.kernel @k(%in: !tile.global<1 x f32>, %out: !tile.global<2 x f32>) attributes {{threads = 64 : i64, explicit_barriers}} {{
  %inputs = tile.buffer_alloc layout {layout} : !tile.buffer<64xf32, register>
  %results = tile.buffer_alloc layout {layout} : !tile.buffer<64xf32, register>
  %c0 = arith.constant 0 : i32
  tile.copy_in %in[%c0] dims [0] into %inputs : !tile.global<1 x f32>, !tile.buffer<64xf32, register>{"".join(lines)}
  tile.end
}}
tile.plan @run(%in: !tile.global<1 x f32>, %out: !tile.global<2 x f32>) {{
  %one = arith.constant 1 : i32
  tile.launch @k grid(%one) args(%in, %out) : !tile.global<1 x f32>, !tile.global<2 x f32>
  tile.end
}}
"""


@emulates
def test_scalar_ops():
    module = parse(scalar_text())
    x = torch.linspace(-3, 3, 64)
    got, want = torch.zeros(len(SCALARS), 64), torch.zeros(len(SCALARS), 64)
    emulate(emit(module))["run"](x, got)
    run_plan(module, "run", [x, want])
    for name, mine, theirs in zip(SCALARS, got, want, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=2e-5, equal_nan=True), name


def test_what_cannot_be_emitted_is_named():
    """A kernel that is still at the value level, and an element type that lanes do not have."""
    value = "tile.kernel @k() attributes {threads = 64 : i64, explicit_barriers} {\n %c = arith.constant 0 : i32\n"
    value += " %r = tile.range %c : tensor<64xi32>\n tile.end\n}"
    with pytest.raises(UnsupportedOpError, match=r"backend 'hip' cannot emit 'tile\.range'"):
        emit(parse(value))
    double = "tile.plan @p(%x: !tile.global<2 x f64>) {\n tile.end\n}"
    with pytest.raises(UnsupportedOpError, match="the element type f64"):
        emit(parse(double))


NESTED = """
tile.kernel @k(%x: !tile.global<2 x f32>, %y: !tile.global<2 x f16>, %n: i32) attributes {threads = 256 : i64} {
  %a = tile.buffer_alloc : !tile.buffer<128x96xf32, shared>
  %b = tile.buffer_alloc layout #tile.padded<8> : !tile.buffer<128x96xf16, shared>
  %c0 = arith.constant 0 : i32
  %c128 = arith.constant 128 : i32
  scf.for %i = %c0 to %n step %c128 : i32 {
    %j = arith.addi %i, %n : i32
    tile.copy_in %x[%i, %c0] dims [0, 1] into %a : !tile.global<2 x f32>, !tile.buffer<128x96xf32, shared>
    tile.copy_in %y[%i, %c0] dims [0, 1] into %b : !tile.global<2 x f16>, !tile.buffer<128x96xf16, shared>
    tile.copy_out %a, %x[%j, %c0] dims [0, 1] : !tile.buffer<128x96xf32, shared>, !tile.global<2 x f32>
    tile.copy_out %b, %y[%j, %c0] dims [0, 1] : !tile.buffer<128x96xf16, shared>, !tile.global<2 x f16>
  }
  tile.end
}
tile.plan @run(%x: !tile.global<2 x f32>, %y: !tile.global<2 x f16>, %n: i32) {
  %one = arith.constant 1 : i32
  tile.launch @k grid(%one) args(%x, %y, %n) : !tile.global<2 x f32>, !tile.global<2 x f16>, i32
  tile.end
}
"""


@emulates
def test_a_tile_in_another_ones_memory():
    """Each is lost when the other is written, round after round; the interpreter knows where a barrier would lack."""
    module = parse(NESTED)
    for name in ("hip-share-lds", "hip-place-barriers"):
        PASSES[name]()().apply(make_context(), module)
    x, y = torch.randn(512, 96), torch.randn(512, 96).half()
    for run_it in (emulate(emit(module))["run"], lambda *values: run_plan(module, "run", values)):
        got = [x.clone(), y.clone()]
        run_it(*got, 256)
        assert torch.equal(got[0][256:], x[:256])
        assert torch.equal(got[1][256:], y[:256])
