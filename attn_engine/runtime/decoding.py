"""Few queries over many keys, as in decoding: small blocks of queries, and keys in parts where programs are few."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from enum import IntEnum

import torch
from xdsl.dialects.builtin import ModuleOp

from attn_engine.backends.backend import Level, get_backend
from attn_engine.errors import ScheduleError
from attn_engine.frontend.checks import Sizes
from attn_engine.ir.schedule import KernelSchedule, Kind, Schedule
from attn_engine.runtime.devices import Target
from attn_engine.runtime.schedules import arch_for, heads_of

FEW, MANY = 16, 1024
"""Up to so many queries over at least so many keys have kernels of their own."""
PROGRAMS_PER_MULTIPROCESSOR = 2
PROGRAMS_PER_THREAD = 4
CPU_BLOCK = KernelSchedule(FEW, 1024, 1, 1)
GPU_BLOCKS = tuple(
    KernelSchedule(FEW, n, 4, stages) for depths in ((3, 2), (1,)) for n in (64, 32, 16) for stages in depths
)
"""In order of preference: what bounds these kernels is how fast keys and values arrive, and 64 keys at a time leave
room for several programs on a multiprocessor. Measured on an H200."""


class Decoding(IntEnum):
    """What is known of a call: many queries, few, or few and also too few programs for the device."""

    NO = 0
    WHOLE = 1
    PARTS = 2


def fill(target: Target) -> int:
    """How many programs keep a device busy."""
    if get_backend(target.backend).on_host:
        threads = torch.get_num_threads()
        return PROGRAMS_PER_THREAD * threads if threads > 1 else 1
    return PROGRAMS_PER_MULTIPROCESSOR * arch_for(target).multiprocessors


def decoding(sizes: Sizes, target: Target) -> Decoding:
    """The class of a call; each is a compilation of its own."""
    if sizes.q_len > FEW or sizes.kv_len < MANY or get_backend(target.backend).level is not Level.VALUE:
        return Decoding.NO
    return Decoding.PARTS if 2 * sizes.batch * sizes.heads <= fill(target) else Decoding.WHOLE


def adapted(schedule: Schedule, known: Decoding, target: Target, module: ModuleOp) -> Schedule:
    """A schedule with the forward pass for few queries."""
    if known is Decoding.NO:
        return schedule
    forward = CPU_BLOCK if get_backend(target.backend).on_host else _fitting(schedule.forward, target, module)
    return replace(schedule, forward=forward, programs=fill(target) if known is Decoding.PARTS else 0)


def _fitting(default: KernelSchedule, target: Target, module: ModuleOp) -> KernelSchedule:
    """The first block that the device can hold; the default where it holds none."""
    arch, heads = arch_for(target), heads_of(module)
    for block in GPU_BLOCKS:
        with suppress(ScheduleError):
            block.validate(Kind.FORWARD, arch, heads)
            return block
    return default
