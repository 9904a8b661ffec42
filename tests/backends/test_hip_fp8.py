"""Floats of 8 bits on HIP: casts against torch's, products and a forward pass emulated, instructions on each device."""

from __future__ import annotations

import math
import re

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp

from attn_engine.arch import get_arch
from attn_engine.backends.hip.backend import PIPELINE
from attn_engine.backends.hip.build import emulate
from attn_engine.backends.hip.emit import emit
from attn_engine.backends.hip.predict import predict
from attn_engine.backends.hip.toolchain import has_compiler, inspect
from attn_engine.errors import UnsupportedOpError
from attn_engine.interpreters import tile as value_level
from attn_engine.runtime.driver import run_passes
from tests.backends.test_hip_forward import TEXT, run
from tests.support.hip import emulates, needs_clang, parse

DTYPES = {"f8E4M3FN": torch.float8_e4m3fn, "f8E4M3FNUZ": torch.float8_e4m3fnuz}
kinds = pytest.mark.parametrize("kind", DTYPES)

CASTS = """
tile.kernel @k(%x: !tile.global<1 x f32>, %narrow: !tile.global<1 x KIND>, %all: !tile.global<1 x KIND>, %wide: !tile.global<1 x f32>) attributes {threads = 64 : i64, explicit_barriers} {
  %a = tile.buffer_alloc layout #tile.sliced<0, #tile.mfma<32x32x8, acc, 1x1>> : !tile.buffer<512xf32, register>
  %b = tile.buffer_alloc layout #tile.sliced<0, #tile.mfma<32x32x8, acc, 1x1>> : !tile.buffer<512xKIND, register>
  %c0 = arith.constant 0 : i32
  tile.copy_in %x[%c0] dims [0] into %a : !tile.global<1 x f32>, !tile.buffer<512xf32, register>
  tile.buffer_map (%a) axes [[0]] into (%b) : (!tile.buffer<512xf32, register>) into (!tile.buffer<512xKIND, register>) {
  ^bb0(%e: f32):
    %n = arith.truncf %e : f32 to KIND
    tile.yield %n : KIND
  }
  tile.copy_out %b, %narrow[%c0] dims [0] : !tile.buffer<512xKIND, register>, !tile.global<1 x KIND>
  tile.copy_in %all[%c0] dims [0] into %b : !tile.global<1 x KIND>, !tile.buffer<512xKIND, register>
  tile.buffer_map (%b) axes [[0]] into (%a) : (!tile.buffer<512xKIND, register>) into (!tile.buffer<512xf32, register>) {
  ^bb0(%e: KIND):
    %w = arith.extf %e : KIND to f32
    tile.yield %w : f32
  }
  tile.copy_out %a, %wide[%c0] dims [0] : !tile.buffer<512xf32, register>, !tile.global<1 x f32>
  tile.end
}
tile.plan @run(%x: !tile.global<1 x f32>, %narrow: !tile.global<1 x KIND>, %all: !tile.global<1 x KIND>, %wide: !tile.global<1 x f32>) {
  %one = arith.constant 1 : i32
  tile.launch @k grid(%one) args(%x, %narrow, %all, %wide) : !tile.global<1 x f32>, !tile.global<1 x KIND>, !tile.global<1 x KIND>, !tile.global<1 x f32>
  tile.end
}
"""


@emulates
@kinds
def test_casts(kind: str):
    """Every number of the type; halves between neighbours, subnormals, what is too large, infinity, NaN."""
    dtype = DTYPES[kind]
    codes = (torch.arange(512) % 256).to(torch.uint8)
    steps = torch.linspace(0, 0.05, 200).tolist()
    edges = [0.0, -0.0, 240.0, 247.9, 248.0, 256.0, 448.0, 463.9, 464.0, 480.0, 1e9, math.inf, -math.inf, math.nan]
    between = (torch.arange(1, 200) * 0.3125).tolist()
    x = torch.tensor((steps + edges + between + [-1.0625, -2.125])[:512])
    x = torch.cat([x, -torch.rand(512 - len(x), generator=torch.Generator().manual_seed(0))])
    narrow, wide = torch.zeros(512).to(dtype), torch.zeros(512)
    emulate(emit(parse(CASTS.replace("KIND", kind))))["run"](x, narrow, codes.view(dtype), wide)
    assert torch.equal(wide.nan_to_num(-9e9), codes.view(dtype).float().nan_to_num(-9e9))
    want = x.to(dtype)
    assert torch.equal(narrow.float().nan_to_num(-9e9), want.float().nan_to_num(-9e9))


def test_arithmetic_is_refused():
    text = CASTS.replace("KIND", "f8E4M3FN").replace(
        "%w = arith.extf %e", "%d = arith.negf %e : f8E4M3FN\n    %w = arith.extf %d"
    )
    with pytest.raises(UnsupportedOpError, match=r"arith\.negf on f8E4M3FN"):
        emit(parse(text))


PRODUCT = """
tile.kernel @k(%a: !tile.global<2 x KIND>, %b: !tile.global<2 x KIND>, %c: !tile.global<2 x f32>, %n: i32) attributes {num_warps = 4 : i64} {
  %c0 = arith.constant 0 : i32
  %zero = arith.constant dense<0.0> : tensor<128x64xf32>
  %x = tile.load %a[%c0, %c0] dims [0, 1] bounded [0] limits(%n) : !tile.global<2 x KIND> -> tensor<128x64xKIND>
  %y = tile.load %b[%c0, %c0] dims [0, 1] bounded [0] limits(%n) : !tile.global<2 x KIND> -> tensor<64x64xKIND>
  %t = tile.transpose %y : tensor<64x64xKIND> -> tensor<64x64xKIND>
  %s = tile.dot %x, %t, %zero ieee : tensor<128x64xKIND>, tensor<64x64xKIND>, tensor<128x64xf32> -> tensor<128x64xf32>
  %p = tile.map (%s) axes [[0, 1]] : (tensor<128x64xf32>) -> tensor<128x64xKIND> {
  ^bb0(%e: f32):
    %w = arith.truncf %e : f32 to KIND
    tile.yield %w : KIND
  }
  %o = tile.dot %p, %y, %zero ieee : tensor<128x64xKIND>, tensor<64x64xKIND>, tensor<128x64xf32> -> tensor<128x64xf32>
  tile.store %o, %c[%c0, %c0] dims [0, 1] : tensor<128x64xf32>, !tile.global<2 x f32>
  tile.end
}
tile.plan @run(%a: !tile.global<2 x KIND>, %b: !tile.global<2 x KIND>, %c: !tile.global<2 x f32>) {
  %one = arith.constant 1 : i32
  %n = tile.dim %a, 0 : !tile.global<2 x KIND>
  tile.launch @k grid(%one) args(%a, %b, %c, %n) : !tile.global<2 x KIND>, !tile.global<2 x KIND>, !tile.global<2 x f32>, i32
  tile.end
}
"""


def legalized(text: str) -> ModuleOp:
    """A module at the value level, through the passes of the backend."""
    module = parse(text)
    run_passes(module, PIPELINE)
    return module


@emulates
@kinds
def test_two_products(kind: str):
    """The second reads the first one's result where it is, and b the other way round; rows beyond the end are 0."""
    dtype, generator = DTYPES[kind], torch.Generator().manual_seed(1)
    a, b = (torch.randn(n, 64, generator=generator).mul(0.25).to(dtype) for n in (100, 64))
    got, want = torch.zeros(128, 64), torch.zeros(128, 64)
    text = PRODUCT.replace("KIND", kind)
    emulate(emit(legalized(text)))["run"](a, b, got)
    value_level.run_plan(parse(text), "run", [a, b, want])
    assert want.abs().max() > 0.5
    # A sum in another order may round to the neighbour of 8 bits.
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)
    assert (got - want).abs().mean() < 1e-4


@needs_clang
@kinds
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950"])
def test_instructions(kind: str, arch: str):
    """Where the device multiplies this type it does so; elsewhere the exact way through half. Counts as predicted."""
    if not has_compiler(arch):
        pytest.skip("pip install ziglang")
    module = legalized(PRODUCT.replace("KIND", kind))
    (kernel,) = inspect(emit(module), arch).values()
    needs = predict(module, get_arch(arch))["k"]
    assert (kernel.spills, kernel.shared, kernel.mfma) == (0, needs.shared, needs.mfma)
    native = len(re.findall(r"v_mfma_f32_32x32x16_fp8_fp8", kernel.machine))
    assert native == (kernel.mfma if get_arch(arch).fp8 == kind else 0)


def in_fp8(kind: str) -> str:
    """The hand-written forward with q, k, v and the weights in 8 bits, an instruction 16 deep; o stays in 16 bits."""
    text = TEXT.replace("32x32x8, ", "32x32x16, ").replace("f16", kind).replace("%half", "%narrow")
    wide = [
        r"(%o(?:f)?: !tile\.global<4 x )K",
        r"(%of = .*x)K",
        r"(into \(%of\) .* into .*x)K",
        r"(truncf %z : f32 to )K",
    ]
    wide += [
        r"(copy_out %of.*buffer<64x128x)K",
        r"(copy_out %of.*global<4 x )K",
        r"(launch .*K>, .*K>, .*K>, .*global<4 x )K",
    ]
    for pattern in wide:
        text, found = re.subn(pattern.replace("K", kind), r"\1f16", text)
        assert found, pattern
    head, tail = text.split("truncf %z : f32 to f16")
    return head + "truncf %z : f32 to f16" + tail.replace(f"tile.yield %narrow : {kind}", "tile.yield %narrow : f16", 1)


@emulates
@kinds
@pytest.mark.parametrize("causal", [False, True])
def test_forward(kind: str, causal: bool):
    """Against exact softmax of the same 8-bit operands; the weights have 3 bits of mantissa."""
    error, lse_error = run(emulate(emit(parse(in_fp8(kind)))), causal, 130, 130, (2, 1), DTYPES[kind], torch.float16)
    assert error < 0.1
    assert lse_error < 1e-5
