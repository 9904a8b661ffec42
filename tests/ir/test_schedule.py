"""Schedules: every default fits its device, and what does not fit says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attn_engine.arch import ARCHES, get_arch
from attn_engine.errors import ScheduleError
from attn_engine.ir.schedule import Heads, KernelSchedule, Kind, Schedule, padded
from attn_engine.ir.schedule_table import default_kernel_schedule, default_schedule

HEADS = Heads(128, 128, "bf16")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("sizes", [(16, 16), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)])
def test_defaults_fit(arch: str, dtype: str, sizes: tuple[int, int]):
    schedule = default_schedule(get_arch(arch), Heads(*sizes, dtype))
    schedule.validate(get_arch(arch), Heads(*sizes, dtype))
    assert schedule.pass_options().startswith("forward=")


def test_the_first_preference_that_fits_is_taken():
    for arch in ("sm_80", "sm_86"):
        assert tuple(default_kernel_schedule(get_arch(arch), HEADS, Kind.FORWARD)) == (64, 64, 4, 2)
    hopper = get_arch("sm_90")
    assert tuple(default_kernel_schedule(hopper, HEADS, Kind.DQ)) == (128, 64, 8, 3)
    for blocks in (
        (128, 64, 8, 2),
        (128, 64, 8, 1),
        (64, 64, 4, 1),
        (64, 32, 4, 1),
    ):  # fewer stages, then smaller blocks
        shared = KernelSchedule(*blocks).shared_bytes(Kind.DQ, hopper, HEADS)
        narrow = replace(hopper, shared_per_block=shared)
        assert tuple(default_kernel_schedule(narrow, HEADS, Kind.DQ)) == blocks


def test_exact_products_have_blocks_of_their_own():
    heads, hopper = Heads(128, 128, "f32"), get_arch("sm_90")
    assert default_schedule(hopper, heads, tf32=True).dq != default_schedule(hopper, heads).dq
    amd = get_arch("gfx90a")  # has matrix instructions for float32, and no tf32
    assert default_schedule(amd, heads, tf32=True) == default_schedule(amd, heads)


def test_shared_memory_is_what_the_compiler_uses():
    """The numbers of Triton 3.6 for a softmax forward and its gradients at head dim 128, to a few bytes."""
    hopper = get_arch("sm_90")
    assert KernelSchedule(128, 128, 8, 2).shared_bytes(Kind.FORWARD, hopper, HEADS) == 163840
    assert KernelSchedule(128, 128, 8, 3).shared_bytes(Kind.FORWARD, hopper, HEADS) == 229376
    assert KernelSchedule(128, 64, 8, 2).shared_bytes(Kind.DQ, hopper, HEADS) == 131072
    assert KernelSchedule(64, 128, 8, 2).shared_bytes(Kind.DKDV, hopper, HEADS) == 131072


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((96, 64, 4, 2), "block_m is 96; it must be a power of two"),
        ((8, 64, 4, 2), "block_m is 8"),
        ((64, 64, 3, 2), "num_warps is 3"),
        ((64, 64, 64, 2), "at most 32 warps"),
        ((64, 64, 4, 0), "num_stages is 0"),
        ((128, 128, 8, 4), "shared memory .* sm_90 has 232448; use smaller blocks or fewer stages"),
        ((128, 256, 4, 1), "registers per thread"),
    ],
)
def test_what_does_not_fit_says_why(blocks: tuple[int, int, int, int], message: str):
    with pytest.raises(ScheduleError, match=message):
        KernelSchedule(*blocks).validate(Kind.FORWARD, get_arch("sm_90"), HEADS)


def test_tf32_needs_the_device():
    kernel = KernelSchedule(32, 32, 4, 1)
    schedule = Schedule(kernel, kernel, kernel, kernel, tf32=True)
    schedule.validate(get_arch("sm_90"), HEADS)
    with pytest.raises(ScheduleError, match="gfx90a has no tf32"):
        schedule.validate(get_arch("gfx90a"), HEADS)


def test_unknown_names():
    with pytest.raises(ScheduleError, match=r"unknown architecture 'sm_70'.*sm_80"):
        get_arch("sm_70")
    with pytest.raises(ScheduleError, match="dtype 'i8'"):
        Heads(64, 64, "i8")
    assert get_arch("sm_90a") is get_arch("sm_90")
    assert get_arch("gfx942:sramecc+:xnack-") is get_arch("gfx942")


def test_padding():
    assert [padded(d) for d in (1, 16, 17, 80, 128, 192)] == [16, 16, 32, 128, 128, 256]


def test_heads_that_fit_nowhere():
    with pytest.raises(ScheduleError, match="no block size fits heads of 512 and 512 in f32 on gfx942"):
        default_schedule(get_arch("gfx942"), Heads(512, 512, "f32"))


def test_gathered_scores_take_shared_memory_too():
    plain, biased = (default_schedule(get_arch("sm_90"), Heads(64, 64, "bf16", gathered)).dq for gathered in (0, 16))
    assert biased.num_stages < plain.num_stages or biased.block_m * biased.block_n < plain.block_m * plain.block_n


def test_ids_of_keys_take_registers_on_hip():
    """Where the mask reads captures at keys, a block has fewer of them, and only there."""
    plain, masked = (
        [default_schedule(get_arch("gfx942"), Heads(d, d, "bf16", 0, by_key), backend="hip") for d in (64, 128)]
        for by_key in (False, True)
    )
    assert plain[0] == masked[0] and replace(plain[1], forward=masked[1].forward) == masked[1]
    assert masked[1].forward.block_n < plain[1].forward.block_n
    hopper = get_arch("sm_90")
    assert default_schedule(hopper, Heads(128, 128, "bf16", 0, True)) == default_schedule(
        hopper, Heads(128, 128, "bf16")
    )
