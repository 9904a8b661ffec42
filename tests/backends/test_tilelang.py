"""The TileLang backend on the hand-written forward: what it lowers to for devices, and what its text computes on the CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine.backends.backend import get_backend
from attn_engine.backends.tilelang.build import check
from attn_engine.backends.tilelang.copies import TilelangCopiesPass
from attn_engine.backends.tilelang.legalize import TilelangBoundsPass
from attn_engine.backends.tilelang.numbers import TilelangKeepNumbersPass
from attn_engine.errors import UnsupportedOpError
from attn_engine.universe import make_context

pytest.importorskip("tilelang")

TILELANG = get_backend("tilelang")
TILES = Path(__file__).parents[1] / "filecheck" / "tile"
SOURCE = (TILES / "tilelang_forward.mlir").read_text()
# In f32 nothing is rounded on the way to the second product, and products may be in tf32.
SOURCE_F32 = re.sub(r"arith\.truncf (%\w) : f32 to f16", r"arith.maximumf \1, \1 : f32", SOURCE)
SOURCE_F32 = SOURCE_F32.replace("f16", "f32").replace("ieee", "tf32")
TEXTS = {torch.float16: SOURCE, torch.float32: SOURCE_F32}


def legalized(text: str) -> ModuleOp:
    context = make_context()
    module = Parser(context, text).parse_module()
    for step in (TilelangBoundsPass(), TilelangCopiesPass()):
        step.apply(context, module)
    module.verify()
    return module


@pytest.fixture(scope="module")
def sources() -> dict[torch.dtype, str]:
    return {dtype: TILELANG.emit(legalized(text)) for dtype, text in TEXTS.items()}


def errors(source: str, dtype: torch.dtype, causal: bool, sq: int, skv: int, heads: tuple[int, int, int]):
    """Largest errors of the output and of lse against dense attention in float64."""
    from tests.support.tilelang_shim import run_on_cpu

    batch, q_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(sq * 1000 + skv)
    q = torch.randn(batch, sq, q_heads, 64, generator=generator).to(dtype).transpose(1, 2)
    k, v = (torch.randn(batch, kv_heads, skv, 64, generator=generator).to(dtype) for _ in range(2))
    o, lse = torch.full_like(q, torch.nan), torch.full((batch, q_heads, sq), torch.nan)
    run_on_cpu(source, of_any_size=True)[f"forward_{'causal' if causal else 'full'}"](q, k, v, o, lse, 0.125)
    k, v = (x.double().repeat_interleave(q_heads // kv_heads, 1) for x in (k, v))
    s = q.double() @ k.transpose(2, 3) * 0.125
    if causal:
        s = s.masked_fill(torch.arange(sq)[:, None] < torch.arange(skv), -torch.inf)
    wrong = [o.double() - s.softmax(-1) @ v, lse.double() - s.logsumexp(-1)]
    return [float(x.abs().nan_to_num(torch.inf).max()) for x in wrong]


@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (64, 64), (65, 65), (130, 130), (70, 130)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.float32, 1e-5)])
def test_the_text_on_the_cpu(sources, dtype: torch.dtype, bound: float, causal: bool, sq: int, skv: int):
    out, lse = errors(sources[dtype], dtype, causal, sq, skv, (2, 4, 2))
    assert out < bound and lse < 1e-5


def test_a_changed_op_changes_the_result(sources):
    changed = SOURCE_F32.replace("%r = arith.addf %t, %new", "%r = arith.subf %t, %new", 1)
    out, _ = errors(TILELANG.emit(legalized(changed)), torch.float32, True, 130, 130, (1, 1, 1))
    assert out > 1e-2


DEVICES = {
    "sm_90a": ("wgmma", "tma_load", "mbarrier"),
    "sm_80": ("mma_sync", "cp_async"),
    "gfx942": ("mfma",),
}


@pytest.mark.parametrize("arch", DEVICES)
def test_what_devices_run(sources, arch: str):
    from attn_engine.backends.tilelang.build import lower

    texts = lower(sources[torch.float16], arch)
    assert list(texts) == ["forward"]
    for instruction in DEVICES[arch]:
        assert instruction in texts["forward"]


def test_printed_text_gives_the_same_source(sources):
    printed = str(legalized(SOURCE))
    assert TILELANG.emit(Parser(make_context(), printed).parse_module()) == sources[torch.float16]


def test_copies_end_where_what_is_passed_ends(sources):
    source = sources[torch.float16]
    assert source.count("T.copy(k[") == 1 and "v_size_2, 64)" in source
    assert "_cut(k, None, None, skv, 64)" in source
    assert "_cut(o, None, None, sq, 64)" in source


def mixed(limit: str) -> str:
    """A kernel that reads x once with a limit and once without."""
    return f"""
tile.kernel @k(%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>, %n: i32) attributes {{threads = 128 : i64}} {{
  %c0 = arith.constant 0 : i32
  %a = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %pid = tile.program_id 0
  tile.copy_in %x[%pid] dims [0] bounded [0] limits(%n) into %a : !tile.global<1 x f32>, !tile.buffer<64xf32, register>
  tile.copy_in %x[%pid] dims [0] into %a : !tile.global<1 x f32>, !tile.buffer<64xf32, register>
  tile.copy_out %a, %y[%pid] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  tile.end
}}
tile.plan @p(%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>) {{
  %n = tile.dim %{limit}, 0 : !tile.global<1 x f32>
  tile.launch @k grid(%n) args(%x, %y, %n) : !tile.global<1 x f32>, !tile.global<1 x f32>, i32
  tile.end
}}"""


def test_limits_that_are_sizes():
    """A size, of whatever tensor, is the end of what is passed: the launch sees to it. Any other limit is a guard."""
    sizes = [TILELANG.emit(legalized(mixed(name))) for name in ("x", "y")]
    for source in sizes:
        assert source.count("T.copy(x[") == 2 and "_whole(x, n)" in source and "_cut(x" not in source
    other = mixed("x").replace("grid(%n)", "grid(%m)").replace("%y, %n) :", "%y, %m) :")
    other = other.replace("  tile.launch", "  %m = arith.addi %n, %n : i32\n  tile.launch")
    guarded = TILELANG.emit(legalized(other))
    assert guarded.count("T.copy(x[") == 1 and "T.if_then_else" in guarded and "_whole(x" not in guarded


def test_f32_products_must_be_allowed_to_round():
    text = SOURCE_F32.replace("tf32", "ieee")
    with pytest.raises(
        UnsupportedOpError, match=r"backend 'tilelang' cannot emit 'tile\.gemm of f32 operands without rounding"
    ):
        TILELANG.emit(legalized(text))


def test_layouts_of_other_targets_are_refused():
    with pytest.raises(UnsupportedOpError, match=r"tile\.buffer_alloc with layout #tile.mfma"):
        TILELANG.emit(legalized((TILES / "hip_forward.mlir").read_text()))


def test_unknown_ops_are_errors():
    text = mixed("x").replace("%pid = tile.program_id 0", "%pid = tile.processor_count")
    with pytest.raises(UnsupportedOpError, match=r"'tilelang' cannot emit 'tile\.processor_count'"):
        TILELANG.emit(legalized(text))


def test_check_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attn_engine.backends.tilelang.build.find_spec", lambda name: None)
    assert "pip install 'attn-engine[tilelang]'" in check().reason


def test_the_manifest_does_not_import_tilelang():
    code = "import sys; from attn_engine.backends.backend import get_backend; get_backend('tilelang').check(); print('tilelang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


COPIED = """
tile.kernel @k(%x: !tile.global<1 x f32>, %n: i32, %m: i32) attributes {threads = 128 : i64} {
  %v = tile.buffer_alloc : !tile.buffer<64xf32, register>
  tile.copy_in %x[%n] dims [0] bounded [0] limits(%m) into %v : !tile.global<1 x f32>, !tile.buffer<64xf32, register>
  %far = arith.muli %n, %m : i32
  tile.copy_out %v, %x[%far] dims [0] bounded [0] limits(%m) : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  %farther = arith.addi %far, %m : i32
  tile.copy_out %v, %x[%farther] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  tile.end
}"""


def test_numbers_behind_copies_are_none_of_their_elements():
    """What TVM would write out again and again is kept there as it is elsewhere."""
    module = Parser(make_context(), COPIED).parse_module()
    TilelangKeepNumbersPass().apply(make_context(), module)
    text = TILELANG.emit(module)
    assert "far_kept = T.alloc_local(" in text and "farther_kept = T.alloc_local(" in text
