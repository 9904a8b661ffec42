"""Rules of the buffered level that concern a whole kernel: what is written before it is read, and how loops carry."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects import scf
from xdsl.dialects.builtin import IntegerAttr, TensorType
from xdsl.ir import Block, Operation, SSAValue
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_compute import (
    BufferMapOp,
    BufferReduceOp,
    BufferScanOp,
    BufferScatterAddOp,
    BufferTotalOp,
    GemmOp,
)
from attn_engine.dialects.tile_buffer_layout import WAVE, waves_of
from attn_engine.dialects.tile_buffer_memory import (
    BarrierOp,
    BufferAllocOp,
    BufferAtomicAddOp,
    BufferFillOp,
    CopyInOp,
    CopyOp,
    CopyOutOp,
    fragment_layout,
    root,
)
from attn_engine.dialects.tile_types import BufferType


def _buffers(values: Sequence[SSAValue]) -> list[SSAValue]:
    return [value for value in values if isinstance(value.type, BufferType)]


def reads(op: Operation) -> list[SSAValue]:
    """The buffers that an op reads."""
    match op:
        case CopyOp():
            return [op.source]
        case CopyOutOp() | BufferAtomicAddOp():
            return [op.value]
        case GemmOp():
            return [op.a, op.b, *([op.acc] if op.clear is None else [])]
        case BufferMapOp() | BufferScatterAddOp():
            return _buffers(op.inputs)
        case BufferReduceOp() | BufferScanOp() | BufferTotalOp():
            return [op.source]
        case _:
            return []


def writes(op: Operation) -> list[SSAValue]:
    """The buffers that an op writes, whole."""
    match op:
        case BufferFillOp() | CopyInOp() | CopyOp() | BufferReduceOp() | BufferScanOp():
            return [op.target]
        case GemmOp():
            return [op.acc]
        case BufferMapOp():
            return list(op.outputs)
        case _:
            return []


def check_kernel(kernel: tile.KernelOp) -> None:
    """Raises if a kernel with buffers breaks a rule of the buffered level."""
    threads = kernel.attributes.get("threads")
    if not isinstance(threads, IntegerAttr) or threads.value.data < 32 or threads.value.data % 32:
        raise VerifyException(f"kernel @{kernel.sym_name.data} needs an attribute threads, a multiple of 32")
    for op in kernel.walk():
        _check_op(kernel, op, threads.value.data)
    _check_block(kernel.body.block, set())


def _check_op(kernel: tile.KernelOp, op: Operation, threads: int) -> None:
    if isinstance(op, BarrierOp) and "explicit_barriers" not in kernel.attributes:
        raise VerifyException("tile.barrier in a kernel without explicit_barriers: its target places barriers itself")
    if isinstance(op, BufferAllocOp):
        if op.parent_op() is not kernel:
            raise VerifyException("tile.buffer_alloc stands at the top of its kernel")
        layout = fragment_layout(op.result)
        if layout is not None and threads % (waves_of(layout) * WAVE):
            raise VerifyException(f"{layout} is for {waves_of(layout) * WAVE} threads, the kernel has {threads}")
    for value in (*op.operands, *op.results):
        if isinstance(value.type, TensorType):
            raise VerifyException(f"{op.name}: a kernel with buffers has no values of type {value.type}")


def _check_block(block: Block, written: set[SSAValue]) -> set[SSAValue]:
    """The buffers that are written for certain when the block ends."""
    written = set(written)
    for op in block.ops:
        for value in reads(op):
            if root(value) not in written:
                name = root(value).name_hint or "?"
                raise VerifyException(f"{op.name} reads buffer %{name}, which may not have been written before")
        written |= {root(value) for value in writes(op)}
        if isinstance(op, scf.ForOp):
            _check_block(op.body.block, written)  # it may run not even once
        if isinstance(op, scf.IfOp):
            branches = [_check_block(region.block, written) for region in op.regions if region.blocks]
            written |= set.intersection(*branches) if len(branches) == 2 else set()
    return written
