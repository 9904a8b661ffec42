"""Emitted Triton text compiled for devices that are not here: matrix instructions, spills, NaN, and the grid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.backends.triton_support import source_of

pytest.importorskip("triton")

from attn_engine.arch import get_arch
from attn_engine.backends.triton.ahead import compile_ahead
from attn_engine.frontend.recurrence import Kind
from attn_engine.runtime.devices import Target
from attn_engine.runtime.recurrence_compile import Request, default_schedule
from attn_engine.runtime.recurrence_compile import source_of as source_of_recurrence

FORWARD = (Path(__file__).parent.parent / "filecheck" / "dialects" / "tile_value_forward.mlir").read_text()
COUNT = {"sm_80": "mma", "sm_90": "wgmma", "gfx90a": "mfma", "gfx942": "mfma", "gfx950": "mfma"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


@pytest.mark.parametrize("arch", COUNT)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_matrix_instructions_and_no_spills(arch: str, dtype: str):
    kernel = compile_ahead(source_of(FORWARD.replace("f16", dtype)), "forward", get_arch(arch))
    counts = {"wgmma": kernel.wgmma, "mma": kernel.mma, "mfma": kernel.mfma}
    assert counts.pop(COUNT[arch]) > 0
    assert not any(counts.values())
    assert kernel.spills == 0
    assert 0 < kernel.registers <= get_arch(arch).registers_per_thread
    assert kernel.binary[:4] == b"\x7fELF"


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_recurrences_fit_the_registers_beside_operands_of_products(decay: str):
    """A state of 64 numbers a thread and chunks of 64 tokens spill 552 and 8816 bytes where operands take registers too."""
    kind = Kind(torch.bfloat16, 128, 128, decay)
    schedule, place = default_schedule(Target("triton", "sm_80"), kind, 128, 4096, tf32=False, stepwise=False)
    source = source_of_recurrence(Request(kind, "triton", schedule, place=place))
    kernel = compile_ahead(source, "forward_o_sweep", get_arch("sm_80"), ones=("group", "group_1", "group_2"))
    assert kernel.mma > 0
    assert kernel.spills == 0


def test_maximum_keeps_nan_in_one_instruction():
    kernel = compile_ahead(source_of(FORWARD), "forward", get_arch("sm_90"))
    assert "max.NaN.f32" in kernel.assembly
    assert not re.search(r"max\.f32", kernel.assembly)


def test_tiles_are_loaded_in_wide_pieces():
    """Strides and pointers are multiples of 16, so that a thread takes as much of a row as there is for it."""
    kernel = compile_ahead(source_of(FORWARD), "forward", get_arch("sm_90"))
    assert "ld.global.v4.b32" in kernel.assembly
    assert set(re.findall(r"cp\.async\.\w+\.shared\.global .*?, (0x\w+)", kernel.assembly)) == {"0x8"}


def test_options_of_the_kernel_reach_the_compiler():
    eight = FORWARD.replace("num_warps = 4", "num_warps = 8")
    assert ".reqntid 128" in compile_ahead(source_of(FORWARD), "forward", get_arch("sm_90")).assembly
    assert ".reqntid 256" in compile_ahead(source_of(eight), "forward", get_arch("sm_90")).assembly
