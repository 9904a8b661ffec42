"""The schedule that a target gets by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from xdsl.dialects import math
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import BlockArgument, SSAValue

from attn_engine.arch import ARCHES, Arch, get_arch
from attn_engine.backends.backend import Level, get_backend
from attn_engine.dialects import attn, tile
from attn_engine.ir import schedule_table
from attn_engine.ir.async_schedule import AsyncSchedule
from attn_engine.ir.axes import axes_of
from attn_engine.ir.schedule import BYTES, F32_BYTES, Heads, KernelSchedule, Kind, Length, Schedule
from attn_engine.passes.attn_analyze_mask import analyze_mask
from attn_engine.passes.lowering.distances import without_costly
from attn_engine.passes.simplify_constants import constant_of
from attn_engine.runtime.devices import Target

_LARGE, _SMALL = KernelSchedule(256, 256, 1, 1), KernelSchedule(64, 64, 1, 1)
CPU = Schedule(forward=_LARGE, rows=_LARGE, dq=_LARGE, dkdv=_LARGE)
"""Large blocks: a CPU wants few and large products."""
CPU_SHORT = Schedule(forward=_SMALL, rows=_SMALL, dq=_SMALL, dkdv=_SMALL)
"""But blocks are padded, so few positions want small ones."""

OLDEST = "sm_80"
"""Stands for a device that is not in the table."""


_ENDS = 4
"""Positions that say where one range of keys is visible, and where whole blocks of it are."""


def convert_spec(schedule: Schedule, flags: Mapping[str, int | str], channels: int = 0) -> str:
    """`convert-attn-to-tile{...}` with a schedule; `channels` is what tiles round head dims up to, 0 a power of two."""
    options = [schedule.pass_options(), *(f"{name}={str(value).lower()}" for name, value in flags.items())]
    options += [f"channels={channels}"] if channels else []
    return f"convert-attn-to-tile{{{' '.join(options)}}}"


def arch_for(target: Target) -> Arch:
    """The device that schedules are made for."""
    return get_arch(target.arch if target.arch in ARCHES else OLDEST)


def default_schedule(target: Target, module: ModuleOp, tf32: bool = False, length: Length = Length.LONG) -> Schedule:
    """A schedule for the attention in a module that the target's device can hold."""
    if get_backend(target.backend).on_host:
        return CPU_SHORT if length is Length.SHORT else CPU
    arch = arch_for(target)
    heads = heads_of(module)
    schedule = schedule_table.default_schedule(arch, heads, tf32, target.backend)
    if get_backend(target.backend).level is Level.ASYNC:
        return replace(schedule, forward=_async_forwards(module)[0])
    return schedule


def candidate_schedules(
    target: Target, module: ModuleOp, tf32: bool = False, length: Length = Length.LONG
) -> tuple[Schedule, ...]:
    """Schedules to try in order; only an assembler can say of some whether they run as they mean."""
    default = default_schedule(target, module, tf32, length)
    if get_backend(target.backend).level is not Level.ASYNC:
        return (default,)
    return tuple(replace(default, forward=forward) for forward in _async_forwards(module))


def _async_forwards(module: ModuleOp) -> tuple[KernelSchedule, ...]:
    op = next(o for o in module.walk() if isinstance(o, attn.AttentionOp | attn.OnlineOp))
    masked = op.mask is not None and bool(op.mask.blocks)
    return AsyncSchedule().candidates(
        heads_of(module, loads=True),
        (masked and _is_banded(module)) or _reads_keys(op),
        not masked and _has_exponentials(op),
    )


def _has_exponentials(op: attn.AttentionOp | attn.OnlineOp) -> bool:
    """Whether weights keep the unit for functions busy."""
    return any(isinstance(o, math.ExpOp | math.Exp2Op) for o in op.walk())


def _is_banded(module: ModuleOp) -> bool:
    """Whether a block of queries sees keys of several ranges, or of one that neither starts with the first key nor ends with the last."""
    copy = module.clone()
    for op in [o for o in copy.walk() if isinstance(o, attn.AttentionOp)]:
        analyze_mask(op)
    op = next(o for o in copy.walk() if isinstance(o, attn.AttentionOp | attn.OnlineOp))
    if op.blocks is None or not op.blocks.blocks or op.blocks.block.last_op is None:
        return False
    ends, length = op.blocks.block.last_op.operands, op.blocks.block.args[-1]
    return len(ends) > _ENDS or (constant_of(ends[0]) != 0 and ends[-1] is not length)


def _reads_keys(op: attn.AttentionOp | attn.OnlineOp, *names: str) -> bool:
    """Whether scores or their mask, or what is named of them, need a captured value for each key."""
    for name in names or ("score_mod", "mask"):
        region = getattr(op, name)
        if region is not None and region.blocks:
            axes = axes_of(op, name)
            loads = [o for o in region.block.walk() if isinstance(o, attn.LoadOp)]
            if any("kv" in axes[o.result] and "q" not in axes[o.result] for o in loads):
                return True
    return False


def with_gradients(
    schedule: Schedule, op: attn.BackwardOp, fused: bool = False, steps: int = 1, stored: frozenset[int] = frozenset()
) -> Schedule:
    """With the blocks that kernels of gradients have at the async level.

    `steps` go through the positions of one; the gradients of the captures `stored` have the types of these, others f32.
    """
    trained = [n.value.data for n in op.grad_captures]
    most = AsyncSchedule.least_stages if trained else AsyncSchedule.fused_stages
    own = AsyncSchedule(gradient_block=AsyncSchedule.gradient_block // steps, fused_stages=most)
    heads = _heads(op)
    leaving = sum(_bytes_of(op.captures[n]) if n in stored else F32_BYTES for n in trained if n in _tables(op))
    dq, dkdv = own.gradients(heads, Kind.DQ, leaving=leaving), own.gradients(heads, Kind.DKDV, fused)
    return replace(schedule, dq=dq or schedule.dq, dkdv=dkdv or schedule.dkdv)


def apart(op: attn.BackwardOp) -> bool:
    """Whether kernels of gradients at the async level find dk and dv apart."""
    return AsyncSchedule.apart(_heads(op))


def _heads(op: attn.BackwardOp) -> Heads:
    return Heads(_channels(op.q), _channels(op.v), str(tile.element_of(op.q)), _in_blocks(op))


def _tables(op: attn.BackwardOp) -> list[int]:
    """The captures that are read at [.., query, key], once for each load: they come in blocks."""
    block = op.element.block
    loads = [o for o in block.ops if isinstance(o, attn.LoadOp) and [*o.indices][-2:] == [*block.args[4:6]]]
    first = len(block.args) - len(op.captures)
    return [o.source.index - first for o in loads if isinstance(o.source, BlockArgument)]


def _in_blocks(op: attn.BackwardOp) -> int:
    """Bytes that these bring per score."""
    return sum(_bytes_of(op.captures[n]) for n in _tables(op))


def _bytes_of(value: SSAValue) -> int:
    return BYTES.get(str(tile.element_of(value)), F32_BYTES)


def heads_of(module: ModuleOp, loads: bool = False) -> Heads:
    """What a schedule must know of the attention in a module; `loads` as for `_gathered`."""
    op = next(o for o in module.walk() if isinstance(o, attn.AttentionOp | attn.OnlineOp))
    gathered = _gathered(op, loads)
    return Heads(_channels(op.q), _channels(op.v), str(tile.element_of(op.q)), gathered, _reads_keys(op, "mask"))


def _channels(value: SSAValue) -> int:
    assert isinstance(value.type, TensorType)
    return value.type.get_shape()[3]


def _gathered(op: attn.AttentionOp | attn.OnlineOp, loads: bool) -> int:
    """Bytes that captures bring per score: those indexed by query and key both.

    Numbers of distances count as well, as plain loops stage them like tables, unless they go from memory to registers
    (`loads`).
    """
    if op.score_mod is None or not op.score_mod.blocks:
        return 0
    axes, (ops, parts) = axes_of(op, "score_mod"), without_costly(op.score_mod.block)
    wide = [o for o in ops if isinstance(o, attn.LoadOp) and {"q", "kv"} <= axes[o.result]]
    tables = sum(BYTES.get(str(tile.element_of(o.source)), F32_BYTES) for o in wide)
    return tables if loads else tables + parts * F32_BYTES
