"""What kernels need, told from their IR before anything is compiled: LDS, matrix instructions, registers of fragments."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp, f32
from xdsl.ir import SSAValue

from attn_engine.arch import Arch
from attn_engine.backends.hip.emit_buffer import NEEDS_SCRATCH, scratch_sizes
from attn_engine.backends.hip.lds import lds_bytes
from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_compute as compute
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_buffer_layout import MfmaAttr
from attn_engine.dialects.tile_types import MemorySpace

_DEPTH_OF_F32 = {32: 2, 16: 4}


@dataclass(frozen=True)
class Needs:
    shared: int
    """Bytes of LDS of one program."""
    mfma: int
    """Matrix instructions in the text of the kernel, each loop's once."""


def predict(module: ModuleOp, arch: Arch) -> dict[str, Needs]:
    """By kernel, of a module at the level that `emit` takes."""
    return {k.sym_name.data: _needs(k, arch) for k in module.ops if isinstance(k, tile.KernelOp)}


def _needs(kernel: tile.KernelOp, arch: Arch) -> Needs:
    allocs = [op for op in kernel.body.block.ops if isinstance(op, memory.BufferAllocOp)]
    tiles = sum(lds_bytes(a) for a in allocs if memory.buffer_type(a.result).memory_space is MemorySpace.SHARED)
    shared_axes = [op for op in kernel.walk() if isinstance(op, NEEDS_SCRATCH)]
    products = [op for op in kernel.walk() if isinstance(op, compute.GemmOp)]
    return Needs(tiles + sum(map(_scratch, shared_axes)), sum(_instructions(op, arch) for op in products))


def _scratch(op: compute.BufferReduceOp | compute.BufferScanOp | compute.BufferTotalOp) -> int:
    """Bytes by which waves that share an axis combine what each has; none where one wave has all."""
    length, waves = scratch_sizes(op)
    return 4 * waves * length if waves > 1 else 0


def _instructions(op: compute.GemmOp, arch: Arch) -> int:
    """Of one wave: its part of the accumulator in blocks, as often as the device's depth goes into the product's."""
    held = _layout(op.acc)
    rows, columns = memory.buffer_type(op.acc).get_shape()
    shape = memory.buffer_type(op.a).get_shape()
    depth = shape[0 if op.transpose_a is not None else 1]
    blocks = rows // (held.m.data * held.split[0]) * (columns // (held.n.data * held.split[1]))
    return blocks * depth // min(held.k.data, _depth(op, held.m.data, arch))


def _layout(value: SSAValue) -> MfmaAttr:
    held = memory.fragment_layout(value)
    assert isinstance(held, MfmaAttr)
    return held


def _depth(op: compute.GemmOp, size: int, arch: Arch) -> int:
    if memory.buffer_type(op.a).element_type == f32:
        return _DEPTH_OF_F32[size]
    return next(matrix.k for matrix in arch.matrix if matrix.m == size)
