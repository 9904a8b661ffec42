"""The schedule that a target gets by default, fitted to its shared memory and registers."""

from __future__ import annotations

from collections.abc import Iterator

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import SSAValue

from attn_engine.arch import ARCHES, Arch, get_arch
from attn_engine.dialects import attn, tile
from attn_engine.errors import ScheduleError
from attn_engine.ir.schedule import Heads, KernelSchedule, Kind, Schedule
from attn_engine.runtime.devices import Target

CPU = Schedule(*(KernelSchedule(256, 256, 1, 1) for _ in Kind))
"""Large blocks: a CPU wants few and large products."""

# For each kernel, best first, by the larger head dim; the first that fits the device is taken.
_FORWARD = {64: (128, 128, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 4, 2)}
_ROWS = {64: (64, 64, 4, 1), 128: (64, 64, 4, 1), 256: (32, 32, 4, 1)}
_DQ = {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2)}
_DKDV = {64: (64, 128, 8, 3), 128: (64, 128, 8, 2), 256: (32, 64, 8, 1)}
_TABLES = {Kind.FORWARD: _FORWARD, Kind.ROWS: _ROWS, Kind.DQ: _DQ, Kind.DKDV: _DKDV}
_SMALLEST = KernelSchedule(16, 16, 4, 1)


def convert_spec(schedule: Schedule, pad: bool) -> str:
    """`convert-attn-to-tile{...}` with a schedule."""
    return f"convert-attn-to-tile{{{schedule.pass_options()} pad={str(pad).lower()}}}"


def default_schedule(target: Target, module: ModuleOp, tf32: bool = False) -> Schedule:
    """A schedule for the attention in a module that the target's device can hold."""
    if target.backend == "cpu" or target.arch not in ARCHES:
        return CPU if target.backend == "cpu" else _fitted(get_arch("sm_80"), module, tf32)
    return _fitted(get_arch(target.arch), module, tf32)


def _fitted(arch: Arch, module: ModuleOp, tf32: bool) -> Schedule:
    op = next(o for o in module.walk() if isinstance(o, attn.AttentionOp | attn.OnlineOp))
    heads = Heads(_channels(op.q), _channels(op.v), str(tile.element_of(op.q)))
    kernels = {kind: _first_fit(kind, arch, heads) for kind in Kind}
    return Schedule(*(kernels[kind] for kind in Kind), tf32=tf32 and arch.tf32)


def _channels(value: SSAValue) -> int:
    assert isinstance(value.type, TensorType)
    return value.type.get_shape()[3]


def _first_fit(kind: Kind, arch: Arch, heads: Heads) -> KernelSchedule:
    size = next(n for n in (64, 128, 256) if max(heads.qk, heads.v) <= n)
    error: ScheduleError | None = None
    for candidate in _shrinking(KernelSchedule(*_TABLES[kind][size]), heads):
        try:
            candidate.validate(kind, arch, heads)
        except ScheduleError as refused:
            error = refused
        else:
            return candidate
    assert error is not None
    raise error


def _shrinking(first: KernelSchedule, heads: Heads) -> Iterator[KernelSchedule]:
    """`first`, then fewer stages, then smaller blocks. Elements of 32 bits start at half the block."""
    m, n, warps, stages = first
    if heads.dtype == "f32":
        m, n = max(16, m // 2), max(16, n // 2)
    while m > 16 or n > 16:
        yield from (KernelSchedule(m, n, warps, s) for s in range(stages, 0, -1))
        m, n = (m // 2, n) if m >= n else (m, n // 2)
    yield _SMALLEST
