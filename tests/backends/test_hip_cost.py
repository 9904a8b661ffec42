"""What kernels cost, read from machine code: loops found, instructions counted, cycles corrected, Triton as the measure."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.arch import get_arch
from attn_engine.backends.hip import toolchain
from attn_engine.backends.hip.cost import KINDS, Loop, clocks, hot_loops, pressure, waves_per_simd
from attn_engine.ir.schedule import Heads, Kind
from attn_engine.ir.schedule_table import default_kernel_schedule
from attn_engine.runtime import inspect as runtime_inspect
from attn_engine.runtime.devices import Target
from attn_engine.runtime.inspect import View
from tests.support.hip import needs_clang

LOOPS = """
  s_load_dwordx2 s[0:1], s[2:3], 0x0
  s_cbranch_scc1 .LBB0_9
.LBB0_1:                                ; a loop without products
  v_add_u32_e32 v0, 1, v0
  s_cbranch_scc0 .LBB0_1
.LBB0_2:                                ; an outer loop
  v_mov_b32_e32 v1, 0
.LBB0_3:                                ; the loop
  s_cbranch_scc1 .LBB0_8
; %bb.4:
  global_load_dwordx4 v[4:7], v[0:1], off
.LBB0_5:
  ds_write_b128 v8, v[4:7]
  s_barrier
  s_waitcnt lgkmcnt(0)
  v_mfma_f32_32x32x8_f16 v[16:31], v[4:5], v[6:7], v[16:31]
  v_accvgpr_read_b32 v40, a0
  v_exp_f32_e32 v41, v40
  v_mul_f32_e32 v41, v41, v41
  s_cbranch_scc0 .LBB0_3
; %bb.6:
  s_cbranch_scc0 .LBB0_2
  s_branch .LBB0_9
.LBB0_8:                                ; tensors whose channels lie apart
  global_load_ushort v4, v[0:1], off
  v_lshl_or_b32 v4, v5, 16, v4
  s_branch .LBB0_5
.LBB0_9:
  s_endpgm
"""


def test_the_loop_around_products_is_found():
    """Its blocks in the order of a usual round; the road of single elements is not counted, waits are of no kind."""
    (loop,) = hot_loops(LOOPS)
    assert loop.counts == {"mfma": 1, "exp": 1, "valu": 2, "lds": 1, "memory": 1, "barrier": 1, "scalar": 2}
    assert [line.split()[0] for line in loop.body][1:4] == ["global_load_dwordx4", "ds_write_b128", "s_barrier"]


@needs_clang
def test_cycles_are_corrected():
    """An exponential counts four times what another vector instruction does; a product as many passes as it takes."""
    plain = Loop(("v_mul_f32_e32 v1, v2, v3",))
    slow = Loop(("v_exp_f32_e32 v1, v2",))
    matrix = Loop(("v_mfma_f32_32x32x8f16 v[16:31], v[4:5], v[6:7], v[16:31]",))
    assert pressure(slow, "gfx942").vector == 4 * pressure(plain, "gfx942").vector > 0
    assert pressure(matrix, "gfx90a").matrix == 2 * pressure(matrix, "gfx942").matrix == 64
    both = pressure(Loop((*slow.body, *matrix.body)), "gfx942")
    assert clocks(both, waves=2) == max(both.matrix, both.vector)
    assert clocks(both, waves=1) == both.matrix + both.vector


NO_END = """
ds_read2_b64 v[34:37], v30 offset0:64 offset1:160
v_mov_b32_e32 v30, s23
v_add_co_u32_e32 v60, vcc, s22, v60
v_addc_co_u32_e32 v59, vcc, v59, v30, vcc
v_mfma_f32_16x16x16bf16_1k v[6:9], v[34:35], v[76:77], v[6:9]
v_addc_co_u32_e32 v19, vcc, v59, v19, vcc
global_load_dwordx4 v[18:21], v[18:19], off
"""


@needs_clang
def test_a_loop_that_llvm_mca_cannot_simulate():
    found = pressure(Loop(tuple(NO_END.split("\n"))), "gfx90a")
    assert (found.matrix, found.vector, found.lds) == (32, 16, 32)


def ours(head_dim: int) -> tuple[list[Loop], toolchain.KernelObject, int]:
    view = View(torch.bfloat16, head_dim, head_dim, False, False, "gfx942", "hip")
    source = attn_engine.compile(mask_mod=library.causal).source("hip", view)
    with tempfile.TemporaryDirectory() as directory:
        text = toolchain.compile_assembly(source, "gfx942", Path(directory)).read_text()
    (kernel,) = toolchain.read_notes(text, toolchain.bodies(text)).values()
    return hot_loops(text), kernel, int(re.findall(r"ATTN_KERNEL\((\d+)\)", source)[0])


@needs_clang
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_row_is_worse_than_tritons(
    head_dim: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    """Triton's own code for the same attention in the same blocks: the loop over full blocks and the masked one."""
    pytest.importorskip("triton")
    from attn_engine.backends.triton.ahead import compile_ahead

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    view, arch = View(torch.bfloat16, head_dim, head_dim, False, False, "gfx942", "triton"), get_arch("gfx942")
    choose = runtime_inspect.default_schedule
    monkeypatch.setattr(runtime_inspect, "default_schedule", lambda t, *rest: choose(Target("hip", t.arch), *rest))
    source = attn_engine.compile(mask_mod=library.causal).source("triton", view)
    theirs = compile_ahead(source, re.findall(r"def (forward\w*)\(", source)[0], arch)
    loops, kernel, threads = ours(head_dim)
    assert len(loops) == 2
    for mine, other in zip(loops, hot_loops(theirs.assembly), strict=True):
        worse = {
            k: (mine.counts[k], other.counts[k]) for k in KINDS if k != "scalar" and mine.counts[k] > other.counts[k]
        }
        assert not worse
        assert pressure(mine, "gfx942").bound <= pressure(other, "gfx942").bound
    assert kernel.registers <= theirs.registers
    warps = int(re.findall(r"num_warps\W+(\d+)", source)[0])
    assert threads == 64 * warps
    waves = [waves_per_simd(k.registers, k.shared, arch, threads) for k in (kernel, theirs)]
    assert waves[0] >= waves[1] > 0


RESULTS = Path(__file__).parents[2] / "bench" / "results" / "hip_static.md"
RANKED = re.compile(
    r"^\| (gfx\w+) \| (forward|dq|dkdv) \| (\d+) \| \((\d+), (\d+), (\d+)\) \| ([\d.]+) \|", re.MULTILINE
)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
@pytest.mark.parametrize("kind", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_defaults_are_the_cheapest(arch: str, kind: str, head_dim: int):
    """What was published: no candidate has a lower static cost than the blocks that a device gets."""
    rows = [row for row in RANKED.findall(RESULTS.read_text()) if row[:3] == (arch, kind, str(head_dim))]
    costs = {tuple(map(int, row[3:6])): float(row[6]) for row in rows}
    assert len(costs) > 1
    mine = default_kernel_schedule(get_arch(arch), Heads(head_dim, head_dim, "bf16"), Kind(kind), "hip")
    assert costs[mine.block_m, mine.block_n, mine.num_warps] == min(costs.values())


@pytest.mark.parametrize("row", ["mfma", "exp", "valu", "lds", "memory", "barrier", "registers", "waves per SIMD"])
def test_no_published_row_is_worse(row: str):
    """Heads of 64 and 128, causal and full, on both devices: a lower count, or more waves, or as many."""
    lines = [line.strip("| ").split(" | ") for line in RESULTS.read_text().split("\n") if line.startswith("| ")]
    place, pairs = lines[0].index(row), [line for line in lines if line[4:5] in (["HIP"], ["Triton"])]
    assert len(pairs) == 2 * 2 * 2 * 2 * 2
    for ours_, theirs in zip(pairs[::2], pairs[1::2], strict=True):
        assert ours_[:4] == theirs[:4]
        mine, other = int(ours_[place]), int(theirs[place])
        assert mine >= other if row == "waves per SIMD" else mine <= other, ours_[:4]
