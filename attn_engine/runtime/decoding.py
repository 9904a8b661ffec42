"""Few queries over many keys, as in decoding: small blocks of queries, heads of a group in one block, keys in parts where programs are few."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, get_num_threads
from xdsl.dialects.builtin import ModuleOp

from attn_engine.backends.backend import Level, get_backend
from attn_engine.errors import ScheduleError
from attn_engine.frontend.checks import Sizes
from attn_engine.ir.schedule import KernelSchedule, Kind, Schedule
from attn_engine.passes.attn_pack_heads import AttnPackHeadsPass
from attn_engine.runtime.devices import Target
from attn_engine.runtime.schedules import arch_for, heads_of
from attn_engine.universe import make_context

FEW, MANY = 16, 1024
"""Up to so many queries over at least so many keys have kernels of their own."""
ROWS = (16, 32, 64)
"""Of a block of queries: of one head, or of all heads that share keys."""
PROGRAMS_PER_MULTIPROCESSOR = 1
PROGRAMS_PER_THREAD = 4
CPU_KEYS = 1024
GPU_KEYS = tuple((n, stages) for depths in ((3, 2), (1,)) for n in (64, 32, 16) for stages in depths)
"""Keys of a block and stages, in order of preference: what bounds these kernels is how fast keys and values arrive, and 64 keys
at a time leave room for two programs on a multiprocessor."""
DEEPEST = (64, 4)
"""Preferred where programs are many, and a multiprocessor has the next one when one ends. Both measured on an H200."""


class Decoding(NamedTuple):
    """What is known of a call; each is a compilation of its own."""

    rows: int = 0
    """Of a block of queries; 0 if there are many queries."""
    parts: bool = False
    """Programs are too few for the device."""
    group: int = 1
    """So many query heads are rows of one head."""
    single: bool = False
    """Each of them has one query."""

    @property
    def few(self) -> bool:
        return self.rows > 0


def fill(target: Target) -> int:
    """How many programs keep a device busy."""
    if get_backend(target.backend).on_host:
        threads = get_num_threads()
        return PROGRAMS_PER_THREAD * threads if threads > 1 else 1
    return PROGRAMS_PER_MULTIPROCESSOR * arch_for(target).multiprocessors


def decoding(sizes: Sizes, target: Target, trains: bool = False) -> Decoding:
    """The class of a call. Gradients are of heads one by one, and read what their forward has saved."""
    if sizes.q_len > FEW or sizes.kv_len < MANY or get_backend(target.backend).level is not Level.VALUE:
        return Decoding()
    group = 1 if trains else sizes.heads // sizes.kv_heads
    needed = group * sizes.q_len
    rows = next((rows for rows in ROWS if rows >= needed), ROWS[-1])
    programs = sizes.batch * (sizes.heads // group) * -(-needed // rows)
    return Decoding(rows, 2 * programs <= fill(target), group, group > 1 and sizes.q_len == 1)


def adapted(schedule: Schedule, known: Decoding, target: Target, module: ModuleOp) -> Schedule:
    """A schedule with the forward pass for few queries."""
    if not known.few:
        return schedule
    on_host = get_backend(target.backend).on_host
    blocks = [(CPU_KEYS, 1)] if on_host else [*GPU_KEYS] if known.parts else [DEEPEST, *GPU_KEYS]
    found = [KernelSchedule(known.rows, n, 1 if on_host else 4, stages) for n, stages in blocks]
    forward = found[0] if on_host else _fitting(found, schedule.forward, target, module)
    return replace(schedule, forward=forward, programs=fill(target) if known.parts else 0)


def _fitting(blocks: list[KernelSchedule], default: KernelSchedule, target: Target, module: ModuleOp) -> KernelSchedule:
    """The first block that the device can hold; the default where it holds none."""
    arch, heads = arch_for(target), heads_of(module)
    for block in blocks:
        with suppress(ScheduleError):
            block.validate(Kind.FORWARD, arch, heads)
            return block
    return default


# --- heads as rows -----------------------------------------------------------------------------


def packed_module(module: ModuleOp, known: Decoding) -> ModuleOp:
    """A traced attention whose heads of a group are rows."""
    result = module.clone()
    AttnPackHeadsPass(known.group, known.single).apply(make_context(), result)
    return result


def pack(q: Tensor, group: int) -> Tensor:
    """[B, H, Sq, D] as [B, H / group, Sq * group, D]; no copy if Sq is 1."""
    b, h, s, d = q.shape
    if s == 1:
        return q.reshape(b, h // group, group, d)
    return q.reshape(b, h // group, group, s, d).transpose(2, 3).reshape(b, h // group, s * group, d)


def unpack(x: Tensor, group: int) -> Tensor:
    """A result [B, Hkv, Sq * group, ...] of packed queries as [B, H, Sq, ...]."""
    b, h, rows = x.shape[:3]
    if rows == group:
        return x.reshape(b, h * group, 1, *x.shape[3:])
    heads = x.reshape(b, h, rows // group, group, *x.shape[3:]).transpose(2, 3)
    return heads.reshape(b, h * group, rows // group, *x.shape[3:])
