"""Registers of recurrences' kernels through TileLang on Hopper: what tiles take of a thread, and that nothing is spilled."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from xdsl.dialects.builtin import IntegerAttr, ModuleOp

from attn_engine.backends.tilelang.backend import BACKEND
from attn_engine.backends.tilelang.widen import Held, TilelangWidenBlocksPass
from attn_engine.dialects import tile
from attn_engine.frontend.recurrence import Kind, build_recurrence
from attn_engine.runtime.devices import Target
from attn_engine.runtime.recurrence_compile import Compiled, Request, default_schedule, scheduled, to_tile
from tests.support.nvcc import find_nvcc, spilled_bytes

pytest.importorskip("tilelang")

DECAYS = ("", "token", "channel")
VECTORS = ("", "weight", "beta")
MOST, WIDEST = TilelangWidenBlocksPass.registers, TilelangWidenBlocksPass.threads


@cache
def modules(decay: str, vector: str, dim: int) -> list[ModuleOp]:
    """The kernels of the forward and of all gradients; heads share queries and keys."""
    kind = Kind(torch.bfloat16, dim, dim, decay, beta=vector == "beta", weight=vector == "weight", initial=True)
    wrt = ("q", "k", "v", *filter(None, (decay and "decay", vector)), "initial")
    schedule, place = default_schedule(Target("tilelang", "sm_90"), kind, 4, 200, tf32=False, stepwise=False)
    request = Request(kind, "tilelang", schedule, wrt, grouped=True, place=place)
    plans = [build_recurrence(kind), Compiled(request).adjoint(False)]
    return [to_tile(scheduled(plan, request), request) for plan in plans]


def threads(kernel: tile.KernelOp) -> int:
    found = kernel.attributes["threads"]
    assert isinstance(found, IntegerAttr)
    return found.value.data


def registers(kernel: tile.KernelOp) -> float:
    """Of a thread, for tiles."""
    held = Held()
    held.before(kernel.body.block, set())
    return held.most / threads(kernel)


def kernels(module: ModuleOp) -> list[tile.KernelOp]:
    return [op for op in module.ops if isinstance(op, tile.KernelOp)]


def spills(kernel: tile.KernelOp, module: ModuleOp, folder: Path) -> int:
    """Bytes, of one kernel."""
    from attn_engine.backends.tilelang.build import lower

    name = kernel.sym_name.data
    head, table = BACKEND.emit(module.clone()).split("KERNELS = {")
    (entry,) = [line for line in table.splitlines() if f'"{name}"' in line]
    return spilled_bytes(lower(f"{head}KERNELS = {{\n{entry}\n}}\n", "sm_90a")[name], "sm_90a", folder)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize("decay", DECAYS)
def test_tiles_leave_registers(decay: str, vector: str, dim: int):
    """Of every kernel: tiles take at most half of what a thread has, or its block is of the widest."""
    for module in modules(decay, vector, dim):
        for kernel in kernels(module):
            assert registers(kernel) <= MOST or threads(kernel) == WIDEST, kernel.sym_name.data


@pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed; pip install nvidia-cuda-nvcc")
@pytest.mark.parametrize("vector", ["weight", "beta"])
@pytest.mark.parametrize("decay", DECAYS)
def test_the_fullest_kernels_do_not_spill(decay: str, vector: str, tmp_path: Path):
    """Of each width, that whose tiles take most of a thread."""
    found = [(kernel, module) for module in modules(decay, vector, 128) for kernel in kernels(module)]
    for width in {threads(kernel) for kernel, _ in found}:
        fullest = max((one for one in found if threads(one[0]) == width), key=lambda one: registers(one[0]))
        assert spills(*fullest, tmp_path) == 0, fullest[0].sym_name.data
