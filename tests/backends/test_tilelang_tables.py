"""Tables of blocks on TileLang: what they skip is never read, nothing visible is skipped, and their kernels are lowered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.ir.schedule import KernelSchedule, Schedule
from attn_engine.runtime.inspect import View
from tests.support.block_tables import check_skipped
from tests.support.nvcc import find_nvcc, spilled_bytes

pytest.importorskip("tilelang")

SMALL = Schedule(
    KernelSchedule(32, 32, 4, 1),
    KernelSchedule(32, 32, 4, 1),
    KernelSchedule(32, 16, 4, 1),
    KernelSchedule(16, 32, 4, 1),
)


@pytest.fixture
def on_cpu():
    from tests.support import tilelang_shim

    with tilelang_shim.on_cpu():
        yield


def test_skipped_keys_are_never_read(on_cpu):
    """Two runs of blocks."""
    check_skipped("tilelang", SMALL, 32, 8, heads=1, dtype=torch.float16)


def test_lowers(tmp_path: Path):
    """Bounds of terms lie along both axes, and come from tiles of other sizes: shared memory holds them."""
    from tests.backends.test_tilelang_devices import lowered

    definition = attn_engine.compile(mask_mod=library.document(torch.arange(64) // 9))
    text = lowered(definition.source("tilelang", View(torch.float16, 64)), "forward_q_ranges_64_128", "sm_90a")
    assert "bound_shared" in text
    if find_nvcc() is not None:
        assert spilled_bytes(text, "sm_90a", tmp_path) == 0
