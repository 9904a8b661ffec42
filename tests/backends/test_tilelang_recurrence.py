"""Recurrences through TileLang: programs that run on the CPU, with all gradients, against the CPU backend; and lowered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from xdsl.parser import Parser

from attn_engine.backends.tilelang.backend import BACKEND
from attn_engine.errors import EndlessKernelError
from attn_engine.frontend.recurrence import Kind
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import run_passes
from attn_engine.runtime.recurrence_compile import Request, default_schedule, source_of
from attn_engine.universe import make_context
from tests.support.nvcc import find_nvcc, spilled_bytes
from tests.support.recurrences import check, operands

pytest.importorskip("tilelang")


@pytest.fixture
def on_cpu() -> Iterator[None]:
    from tests.support import tilelang_shim

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    with tilelang_shim.on_cpu():
        yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("kind", "dtype"), [("per token, weighted", torch.float16), ("delta", torch.float32)], ids=str)
def test_results_and_gradients(on_cpu, kind: str, dtype: torch.dtype):
    check(operands(kind, dtype), "tilelang", 1e-2 if dtype == torch.float16 else 1e-4)


BUFFER = "!tile.buffer<64x64xf32, register>"
VECTOR = "!tile.buffer<64xf32, register>"
ALONG_BOTH = f"""
  %g = tile.buffer_alloc : {VECTOR}
  tile.copy_in %x[%n, %n] dims [1] into %g : !tile.global<2 x f32>, {VECTOR}
  tile.buffer_map (%s, %g, %g) axes [[0, 1], [0], [1]] into (%s) : ({BUFFER}, {VECTOR}, {VECTOR}) into ({BUFFER}) {{
  ^bb0(%u: f32, %row: f32, %column: f32):
    %same = arith.cmpf oeq, %row, %column : f32
    %w = arith.select %same, %u, %row : f32
    tile.yield %w : f32
  }}"""
REDUCED = f"""
  %g = tile.buffer_alloc : {VECTOR}
  tile.buffer_reduce sum %s, 0 into %g : {BUFFER}, {VECTOR}
  tile.buffer_map (%s, %g) axes [[0, 1], [0]] into (%s) : ({BUFFER}, {VECTOR}) into ({BUFFER}) {{
  ^bb0(%u: f32, %row: f32):
    %w = arith.addf %u, %row : f32
    tile.yield %w : f32
  }}"""
OPERAND = f"""
  %p = tile.buffer_alloc : !tile.buffer<64x64xf16, register>
  tile.buffer_map (%s) axes [[0, 1]] into (%p) : ({BUFFER}) into (!tile.buffer<64x64xf16, register>) {{
  ^bb0(%u: f32):
    %w = arith.truncf %u : f32 to f16
    tile.yield %w : f16
  }}
  tile.gemm %p, %a, %s ieee split both : !tile.buffer<64x64xf16, register>, !tile.buffer<64x64xf16, shared>, {BUFFER}"""
LOADED = f"""
  %t = tile.buffer_alloc : !tile.buffer<64x64xf16, register>
  %u = tile.buffer_alloc : {BUFFER}
  %g = tile.buffer_alloc : {VECTOR}
  tile.copy_in %y[%n, %n] dims [0, 1] into %t : !tile.global<2 x f16>, !tile.buffer<64x64xf16, register>
  tile.buffer_map (%t) axes [[0, 1]] into (%u) : (!tile.buffer<64x64xf16, register>) into ({BUFFER}) {{
  ^bb0(%e: f16):
    %w = arith.extf %e : f16 to f32
    tile.yield %w : f32
  }}
  tile.buffer_reduce sum %u, 1 into %g : {BUFFER}, {VECTOR}
  tile.buffer_map (%s, %g) axes [[0, 1], [0]] into (%s) : ({BUFFER}, {VECTOR}) into ({BUFFER}) {{
  ^bb0(%e: f32, %row: f32):
    %w = arith.addf %e, %row : f32
    tile.yield %w : f32
  }}"""
OVER_ROWS = f"""
  %g = tile.buffer_alloc : {VECTOR}
  tile.buffer_reduce sum %s, 0 into %g : {BUFFER}, {VECTOR}
  tile.copy_out %g, %x[%n, %n] dims [1] : {VECTOR}, !tile.global<2 x f32>"""
ALTERNATING = f"""
  %g = tile.buffer_alloc : {VECTOR}
  tile.buffer_reduce sum %s, 0 into %g : !tile.buffer<128x64xf32, register>, {VECTOR}
  tile.copy_out %g, %x[%n, %n] dims [1] : {VECTOR}, !tile.global<2 x f32>"""
TOTAL = """
  %g = tile.buffer_alloc : !tile.buffer<128xf32, register>
  tile.buffer_reduce sum %s, 1 into %g : !tile.buffer<128x64xf32, register>, !tile.buffer<128xf32, register>
  %t = tile.buffer_total sum %g : !tile.buffer<128xf32, register> -> f32
  tile.store %t, %x[%n, %n] dims [] : f32, !tile.global<2 x f32>"""
TWO_PRODUCTS = f"""
  %r = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %t = tile.buffer_alloc : {BUFFER}
  %g = tile.buffer_alloc : {VECTOR}
  %h = tile.buffer_alloc : {VECTOR}
  tile.copy_in %y[%n, %n] dims [0, 1] into %r : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.buffer_fill %t, %zero : {BUFFER}, f32
  tile.gemm %r, %a, %t ieee split both : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, {BUFFER}
  tile.copy_in %x[%n, %n] dims [1] into %g : !tile.global<2 x f32>, {VECTOR}
  tile.buffer_map (%g) axes [[0]] into (%h) : ({VECTOR}) into ({VECTOR}) {{
  ^bb0(%e: f32):
    %w = math.exp2 %e : f32
    tile.yield %w : f32
  }}
  tile.buffer_map (%t, %g) axes [[0, 1], [1]] into (%t) : ({BUFFER}, {VECTOR}) into ({BUFFER}) {{
  ^bb0(%u: f32, %column: f32):
    %w = arith.mulf %u, %column : f32
    tile.yield %w : f32
  }}
  tile.buffer_map (%s, %h) axes [[0, 1], [1]] into (%s) : (!tile.buffer<128x64xf32, register>, {VECTOR}) into (!tile.buffer<128x64xf32, register>) {{
  ^bb0(%u: f32, %column: f32):
    %w = arith.mulf %u, %column : f32
    tile.yield %w : f32
  }}
  tile.copy_out %t, %x[%n, %n] dims [0, 1] : {BUFFER}, !tile.global<2 x f32>"""
REFUSED = {
    "along both axes": ALONG_BOTH,
    "reduced": REDUCED,
    "operand": OPERAND,
    "loaded": LOADED,
    "over rows": OVER_ROWS,
    "over alternating rows": ALTERNATING,
    "over rows of eight warps": ALTERNATING,
    "along columns of two products": TWO_PRODUCTS,
    "total of alternating rows": TOTAL,
}
"""What TileLang 0.1.15 finds no layout for, where the accumulator of a product decides that of %s."""
SHARED_COLUMNS = ("operand", "loaded", "over rows")
EIGHT_WARPS = ("over rows of eight warps", "along columns of two products")
TALL = ("over alternating rows", "total of alternating rows", *EIGHT_WARPS)
"""Of 128 rows, of which four warps hold 64 at a time."""
WIDE = (*SHARED_COLUMNS, *EIGHT_WARPS)


def kernel(form: str) -> str:
    split, threads = "both" if form in SHARED_COLUMNS else "rows", 256 if form in WIDE else 128
    rows = 128 if form in TALL else 64
    tall = BUFFER.replace("64x64", f"{rows}x64")
    return f"""
tile.kernel @k(%y: !tile.global<2 x f16>, %x: !tile.global<2 x f32>, %n: i32) attributes {{threads = {threads} : i64}} {{
  %a = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %l = tile.buffer_alloc : !tile.buffer<{rows}x64xf16, shared>
  %s = tile.buffer_alloc : {tall}
  %zero = arith.constant 0.0 : f32
  tile.copy_in %y[%n, %n] dims [0, 1] into %a : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.copy_in %y[%n, %n] dims [0, 1] into %l : !tile.global<2 x f16>, !tile.buffer<{rows}x64xf16, shared>
  tile.buffer_fill %s, %zero : {tall}, f32
  tile.gemm %l, %a, %s ieee split {split} : !tile.buffer<{rows}x64xf16, shared>, !tile.buffer<64x64xf16, shared>, {tall}
{REFUSED[form]}
  tile.copy_out %s, %x[%n, %n] dims [0, 1] : {tall}, !tile.global<2 x f32>
  tile.end
}}"""


def lowered(text: str, arch: str, without: str = "") -> str:
    from attn_engine.backends.tilelang.build import lower

    module = Parser(make_context(), text).parse_module()
    own = BACKEND.pipeline[BACKEND.pipeline.index("tilelang-flatten-loops") :]
    run_passes(module, tuple(name for name in own if name != without))
    return lower(BACKEND.emit(module), arch)["k"]


@pytest.mark.parametrize(
    ("form", "arch"),
    [
        *((form, "sm_90a") for form in REFUSED),
        *((form, "sm_80") for form in ("along both axes", "loaded", "over rows")),
        *((form, "gfx942") for form in ("operand", "loaded", "total of alternating rows")),
    ],
)
def test_layouts_are_found(form: str, arch: str):
    assert "k_kernel" in lowered(kernel(form), arch)


@pytest.mark.parametrize(
    ("form", "arch", "needed"),
    [
        ("along both axes", "sm_90a", "tilelang-share-vectors"),
        ("reduced", "sm_90a", "tilelang-share-vectors"),
        ("operand", "sm_90a", "tilelang-share-operands"),
        ("loaded", "sm_80", "tilelang-share-vectors"),
        ("over rows", "sm_80", "tilelang-share-rows"),
        ("over alternating rows", "sm_90a", "tilelang-share-rows"),
        ("over rows of eight warps", "sm_90a", "tilelang-share-rows"),
        ("along columns of two products", "sm_90a", "tilelang-share-vectors"),
        ("total of alternating rows", "sm_90a", "tilelang-share-rows"),
    ],
)
def test_layouts_that_tilelang_refuses(form: str, arch: str, needed: str):
    """Should this fail with a later TileLang, the pass can go."""
    with pytest.raises(Exception, match=r"indices|[Ll]ayout"):
        lowered(kernel(form), arch, without=needed)


def for_hopper(kind: Kind, name: str, heads: int, tokens: int, wrt: tuple[str, ...] = ()) -> str:
    """One kernel's CUDA, of a recurrence whose heads share queries and keys."""
    from attn_engine.backends.tilelang.build import lower

    schedule, place = default_schedule(Target("tilelang", "sm_90"), kind, heads, tokens, tf32=False, stepwise=False)
    source = source_of(Request(kind, "tilelang", schedule, grouped=True, place=place), wrt)
    head, table = source.split("KERNELS = {")
    (entry,) = [line for line in table.splitlines() if f'"{name}"' in line]
    return lower(f"{head}KERNELS = {{\n{entry}\n}}\n", "sm_90a")[name]


def test_weights_and_decays_per_token_end_on_hopper(monkeypatch: pytest.MonkeyPatch):
    """Without the twins of short vectors, half of the threads wait in a branch for the other half."""
    from attn_engine.backends.tilelang import vectors

    kind = Kind(torch.float16, 64, 64, "token", weight=True, initial=True)
    assert "__sync_thread_partial" in for_hopper(kind, "forward_o_sweep", 4, 200)
    monkeypatch.setattr(vectors, "_share_repeated", lambda kernel: None)
    with pytest.raises(EndlessKernelError, match="waits for 128 threads where 64 threads come"):
        for_hopper(kind, "forward_o_sweep", 4, 200)


def test_a_decay_per_token_for_hopper(tmp_path: Path):
    """Products are wgmma, the loop's blocks and sums of decays come by TMA, and the assembler spills nothing."""
    text = for_hopper(Kind(torch.float16, 64, 64, "token"), "forward_o_sweep", 64, 4096)
    assert len(re.findall(r"wgmma_[rs]s<", text)) == 4 and len(re.findall(r"tma_load\(", text)) == 4
    if find_nvcc() is None:
        pytest.skip("nvcc is not installed; pip install nvidia-cuda-nvcc")
    assert spilled_bytes(text, "sm_90a", tmp_path) == 0


@pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed; pip install nvidia-cuda-nvcc")
@pytest.mark.parametrize("name", ["backward_d_q_heads_states", "backward_d_q"])
def test_gradients_of_shared_heads_do_not_spill(name: str, tmp_path: Path):
    """Of the states at the ends of pieces, and of the sums over heads."""
    kind = Kind(torch.bfloat16, 128, 128, "token", weight=True, initial=True)
    text = for_hopper(kind, name, 64, 4096, ("q", "k", "v", "decay", "weight", "initial"))
    assert spilled_bytes(text, "sm_90a", tmp_path) == 0
