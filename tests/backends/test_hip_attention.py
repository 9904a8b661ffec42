"""Definitions of users through the whole pipeline to HIP text: emulated against eager torch, and compiled for AMD."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.arch import get_arch
from attn_engine.backends.hip.build import check as check_device
from attn_engine.backends.hip.emit import emit
from attn_engine.backends.hip.predict import Needs, predict
from attn_engine.backends.hip.toolchain import has_compiler, inspect
from attn_engine.errors import ScheduleError
from attn_engine.ir.schedule import KernelSchedule, Schedule
from attn_engine.runtime import inspect as runtime_inspect
from attn_engine.runtime.inspect import View
from attn_engine.universe import PASSES, make_context
from tests.support.compare import check, plain, qkv
from tests.support.hip import EMULATED, SMALL, emulates, emulation, needs_clang, needs_gfx950, parse


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulation():
        yield


def causal():
    return {"mask_mod": library.causal}


def sigmoid_window():
    return {"row": library.sigmoid, "mask_mod": library.sliding_window(20), "score_mod": library.soft_cap(5.0)}


def modified():
    return {"query_mod": lambda x: x * 0.5, "key_mod": lambda x: x * 2.0, "value_mod": lambda x: x.exp()}


def document(ids: torch.Tensor):
    return {"mask_mod": library.document(ids)}


@emulates
@pytest.mark.parametrize(
    ("make", "sizes", "dtype"),
    [
        (causal, {"h": 4, "hkv": 2, "sq": 130, "d": 32}, torch.float16),
        (plain, {"sq": 33, "d": 20, "dv": 40}, torch.bfloat16),
        (plain, {"sq": 70, "skv": 33, "d": 32}, torch.float32),
        (sigmoid_window, {"sq": 70, "d": 32}, torch.float16),
        (modified, {"sq": 70, "d": 32}, torch.float16),
    ],
    ids=["causal", "padded", "float", "sigmoid", "modified"],
)
def test_results_and_gradients(make, sizes: dict[str, int], dtype: torch.dtype):
    check(make, qkv(dtype=dtype, **sizes), backend=EMULATED, schedule=SMALL)


DEEP = Schedule(
    KernelSchedule(64, 32, 4, 2),
    KernelSchedule(64, 64, 4, 2),
    KernelSchedule(64, 32, 4, 3),
    KernelSchedule(32, 64, 4, 2),
)


@emulates
@pytest.mark.parametrize(
    ("make", "sizes", "dtype"),
    [
        (causal, {"h": 4, "hkv": 2, "sq": 130, "d": 32}, torch.float16),
        (plain, {"sq": 33, "skv": 1, "d": 20, "dv": 40}, torch.float32),
    ],
    ids=["causal", "one key"],
)
def test_prefetched(make, sizes: dict[str, int], dtype: torch.dtype):
    """Loops that never run, that run once, and that run often; nothing is read beyond the last block."""
    check(make, qkv(dtype=dtype, **sizes), backend=EMULATED, schedule=DEEP)


@emulates
def test_channels_apart():
    """Tensors whose channels do not lie side by side take the other road through the same copies."""
    tensors = [t.mT.contiguous().mT for t in qkv(sq=70, d=32, dtype=torch.float16)]
    assert tensors[1].stride(-1) != 1
    check(causal, tensors, backend=EMULATED, schedule=DEEP)


@emulates
def test_documents():
    check(document, qkv(sq=70, d=32, dtype=torch.float16), {"ids": torch.arange(70) // 17}, EMULATED, schedule=SMALL)


def dense_bias(w: torch.Tensor):
    """One element for every score; queries that no key sees add nothing."""
    return {"score_mod": library.bias(w), "mask_mod": library.causal_bottom_right(70, 40)}


def slopes(w: torch.Tensor):
    return {"score_mod": library.alibi(w), "mask_mod": library.causal}


def sinks(w: torch.Tensor):
    return {"row": library.softmax_with_sink(w)}


def distances(w: torch.Tensor):
    """Many scores add to one element, and some to none."""
    return {"score_mod": lambda s, b, h, q, kv: s + w[h, (q - kv).abs() % 50] * (kv % 3 != 0)}


def positions(w: torch.Tensor):
    return {"score_mod": lambda s, b, h, q, kv: s * w[h, q] - w[h, kv], "mask_mod": library.causal}


CAPTURES = {
    "bias": (dense_bias, (2, 70, 40), 40),
    "slopes": (slopes, (2,), 70),
    "sinks": (sinks, (2,), 40),
    "distances": (distances, (2, 50), 40),
    "positions": (positions, (2, 70), 70),
}


@emulates
@pytest.mark.parametrize("name", CAPTURES)
def test_gradients_of_captures(name: str):
    """Each lane that holds an element alone adds it, at its own place."""
    make, shape, skv = CAPTURES[name]
    w = 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(5))
    got = check(make, qkv(sq=70, skv=skv, d=32, dtype=torch.float16), {"w": w}, EMULATED, schedule=SMALL)
    assert got["dw"].abs().max() > 0.03


def text_and_needs(definition: attn_engine.Attention, view: View) -> tuple[str, dict[str, Needs]]:
    return definition.source("hip", view), predict(parse(definition.ir("tile", view)), get_arch(view.arch))


def check_needs(source: str, needs: dict[str, Needs], arch: str) -> None:
    """Nothing in scratch; LDS and matrix instructions exactly as the IR says."""
    for name, kernel in inspect(source, arch).items():
        assert kernel.spills == 0, name
        assert (kernel.shared, kernel.mfma) == (
            needs[name.removesuffix("_kernel")].shared,
            needs[name.removesuffix("_kernel")].mfma,
        )


@needs_clang
@pytest.mark.parametrize(
    ("arch", "head_dim"), [("gfx90a", 64), ("gfx942", 64), ("gfx942", 128), ("gfx942", 256), ("gfx950", 64)]
)
def test_compiles_as_predicted(arch: str, head_dim: int):
    """Forward and backward at the default schedule; the products that a block of keys needs, masked and full."""
    if not has_compiler(arch):
        pytest.skip("pip install ziglang")
    definition = attn_engine.compile(mask_mod=library.causal)
    source, needs = text_and_needs(definition, View(torch.bfloat16, head_dim, head_dim, True, False, arch, "hip"))
    assert len(needs) == 4
    assert all(n.mfma > 0 for name, n in needs.items() if name != "backward_rows")
    check_needs(source, needs, arch)
    assert source.count("attn::barrier();") == 3 * 4, "two in each of the two loops of three kernels"


@needs_gfx950
def test_deeper_instructions_where_the_device_has_them():
    """The same text on a device with instructions of twice the depth: half as many of them."""
    source, needs = text_and_needs(attn_engine.compile(), View(torch.bfloat16, 64, 64, False, False, "gfx950", "hip"))
    (old,) = predict(
        parse(attn_engine.compile().ir("tile", View(torch.bfloat16, 64, 64, False, False, "gfx942", "hip"))),
        get_arch("gfx942"),
    ).values()
    (new,) = needs.values()
    assert old.mfma == 2 * new.mfma
    check_needs(source, needs, "gfx950")
    (kernel,) = inspect(source, "gfx950").values()
    assert len(re.findall(r"v_mfma_f32_32x32x16_bf16", kernel.machine)) == new.mfma


def test_text_of_printed_ir_is_the_same():
    definition = attn_engine.compile(mask_mod=library.causal)
    view = View(torch.float16, 64, 64, True, True, "gfx942", "hip")
    assert emit(parse(definition.ir("tile", view))) == definition.source("hip", view)


@needs_clang
@pytest.mark.parametrize("head_dim", [32, 256])
def test_float_blocks_fit(head_dim: int):
    """32 bits take the same road as 16: right operands in registers, no spills."""
    view = View(torch.float32, head_dim, head_dim, True, False, "gfx90a", "hip")
    check_needs(*text_and_needs(attn_engine.compile(mask_mod=library.causal), view), "gfx90a")


def with_forward(schedule: KernelSchedule) -> str:
    with mock.patch.object(runtime_inspect, "default_schedule", lambda *_: replace(SMALL, forward=schedule)):
        view = View(torch.float32, 128, 128, False, False, "gfx942", "hip")
        return attn_engine.compile().source("hip", view)


def test_blocks_that_no_instruction_divides():
    text = """
tile.kernel @k(%x: !tile.global<2 x f32>) attributes {threads = 256 : i64} {
  %a = tile.buffer_alloc : !tile.buffer<8x16xf32, shared>
  %b = tile.buffer_alloc : !tile.buffer<16x16xf32, shared>
  %s = tile.buffer_alloc : !tile.buffer<8x16xf32, register>
  %c0 = arith.constant 0 : i32
  %zero = arith.constant 0.0 : f32
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %a : !tile.global<2 x f32>, !tile.buffer<8x16xf32, shared>
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %b : !tile.global<2 x f32>, !tile.buffer<16x16xf32, shared>
  tile.buffer_fill %s, %zero : !tile.buffer<8x16xf32, register>, f32
  tile.gemm %a, %b, %s ieee : !tile.buffer<8x16xf32, shared>, !tile.buffer<16x16xf32, shared>, !tile.buffer<8x16xf32, register>
  tile.end
}"""
    with pytest.raises(ScheduleError, match=r"tiles of .*8x16.* do not divide among 4 waves; use larger blocks"):
        PASSES["hip-choose-layouts"]()().apply(make_context(), parse(text))


def test_tiles_that_lds_cannot_hold():
    with pytest.raises(ScheduleError, match="of LDS, but a program has 65536; use smaller blocks"):
        with_forward(KernelSchedule(64, 128, 4, 1))


@emulates
@pytest.mark.parametrize("size", [32, 16])
def test_few_rows_for_many_waves(size: int):
    """Right operands go through LDS as well, and waves share both axes; a single block is computed by each of them."""
    schedule = Schedule(*[KernelSchedule(size, size, 4, 1)] * 4)
    check(causal, qkv(sq=33, d=32), backend=EMULATED, schedule=schedule)


def test_the_backend_says_what_is_missing():
    if not check_device().ok:
        assert "ROCm" in check_device().reason or "clang" in check_device().reason
