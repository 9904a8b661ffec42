"""What TileLang makes of generated kernels for devices that need not be here: instructions, and code without spills."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.inspect import View
from attn_engine.runtime.schedules import default_schedule
from tests.support.nvcc import find_nvcc, spilled_bytes

pytest.importorskip("tilelang")
KERNELS = ("forward_kernel", "backward_dq", "backward_dkdv")


@pytest.fixture(scope="module")
def source() -> str:
    view = View(dtype=torch.float16, head_dim=64, backward=True, return_lse=True)
    return attn_engine.compile(mask_mod=library.causal).source("tilelang", view)


def one_kernel(source: str, name: str) -> str:
    """The text with one kernel in its table."""
    head, table = source.split("KERNELS = {")
    entries, plans = table.split("}", 1)
    kept = [line for line in entries.splitlines() if f'"{name}"' in line]
    return f"{head}KERNELS = {{\n" + "\n".join(kept) + "\n}" + plans


@cache
def lowered(source: str, name: str, arch: str) -> str:
    from attn_engine.backends.tilelang.build import lower

    return lower(one_kernel(source, name), arch)[name]


@pytest.mark.parametrize("name", KERNELS)
def test_hopper_copies_ahead_in_threads_of_their_own(source: str, name: str, tmp_path: Path):
    """Products are wgmma, the loop's blocks come by TMA into a ring, and the assembler spills nothing."""
    text = lowered(source, name, "sm_90a")
    products, loads = {"forward_kernel": (4, 3), "backward_dq": (3, 2), "backward_dkdv": (4, 2)}[name]
    assert len(re.findall(r"wgmma_[rs]s<", text)) == products
    assert len(re.findall(r"tma_load\(", text)) == loads
    assert "cp_async" not in text
    assert "Barrier" in text
    if find_nvcc() is None:
        pytest.skip("nvcc is not installed; pip install nvidia-cuda-nvcc")
    assert spilled_bytes(text, "sm_90a", tmp_path) == 0


def test_products_of_f32_operands(tmp_path: Path):
    """Their weights go through shared memory: threads hold left operands of tf32 otherwise than results."""
    module = build(Definition(mask_mod=library.causal), dtype=torch.float32, head_dim=64, head_dim_v=64).module
    schedule = replace(default_schedule(Target("tilelang", "sm_90"), module), tf32=True)
    request = driver.Request((), "tilelang", schedule, driver.Facts(positive_scale=True))
    (part,) = driver.to_parts(driver.to_attn(module, ()), request)
    text = lowered(part.source, "forward_kernel", "sm_90a")
    assert "kTensorFloat32" in text and "wgmma" not in text


def test_hopper_runs_a_product_beside_the_next_weights(source: str):
    """Between the start of the late product and the wait for it stands what computes weights."""
    text = lowered(source, "forward_kernel", "sm_90a")
    loop = text[text.index("for (int trip_1 = 1;") :]
    late, wait = loop.index("wgmma_rs<"), loop.index("wait_wgmma<0>")
    assert loop.index("wgmma_ss<") < late < loop.index("wait_wgmma<1>") < loop.index("exp2f") < wait
    assert "tma_store" in text and "wait_wgmma<0>" in text[: text.index("for (int trip_1 = 1;")]


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_a_scheduled_forward_runs_in_order_elsewhere(source: str, arch: str):
    text = lowered(source, "forward_kernel", arch)
    assert ("mma_sync" if arch == "sm_80" else "mfma") in text and "wgmma" not in text


def test_a_scheduled_forward_runs_in_order_on_tensors_that_lie_otherwise(source: str):
    """One of them cannot be copied in bulk: then none is."""
    from attn_engine.backends.tilelang.build import lower

    one = one_kernel(source, "forward_kernel")
    text = lower(one.replace("ahead = HOPPER and q_unit", "ahead = False and q_unit"), "sm_90a")["forward_kernel"]
    assert "tma_load" not in text and "wgmma" in text


def test_gradients_for_amd(source: str):
    assert "mfma" in lowered(source, "backward_dq", "gfx90a")


def test_blocks_are_walked_in_one_loop(source: str):
    """Of dk and dv over heads as well; sums are set to zero before it, and stay where they are in it."""
    kernels = [kernel for kernel in source.split("_program(")[1:] if "@T.prim_func" in kernel]
    loops = [(kernel.count("T.Pipelined("), kernel.count("T.serial(")) for kernel in kernels]
    assert loops == [(1, 0), (0, 0), (1, 0), (1, 0)]
    before, loop = kernels[3].split("T.Pipelined(")
    assert before.count("T.fill(d") == 2
    assert "T.copy(dk_" in before and "T.copy(dk_" not in loop.split("T.gemm(")[0]


def test_only_the_loop_copies_ahead(source: str):
    """TileLang waits for earlier bulk copies in the loop, which may run not even once."""
    for kernel in source.split("@T.prim_func")[1:]:
        before, _, inside = kernel.partition("T.Pipelined(")
        is_scheduled = "T.annotate_ws_schedule" in before
        assert ("disable_tma=not" in before) == is_scheduled
        facts = set(re.findall(r"disable_tma=not (\w+)", kernel))
        assert facts == {"ahead"} if is_scheduled else "ahead" not in facts
        assert ("k_unit" in facts) or ("q_unit" in facts) or is_scheduled or not inside


def test_registers_are_shared_where_there_are_enough_threads(source: str):
    view = View(dtype=torch.float16, head_dim=128, backward=True)
    wide = attn_engine.compile().source("tilelang", view)
    assert wide.count("T.annotate_consumer_reg_alloc(232)") == 1 and "threads=256" in wide
    assert "max_nreg=24)" in wide and "max_nreg=240)" in wide
    assert "T.annotate_consumer_reg_alloc" not in source and "threads=256" not in source
