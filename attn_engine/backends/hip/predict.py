"""What kernels need, told from their IR before anything is compiled: LDS, matrix instructions, registers of fragments."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp, f32
from xdsl.ir import SSAValue

from attn_engine.arch import Arch
from attn_engine.backends.hip.lds import lds_bytes
from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_compute as compute
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_buffer_layout import MfmaAttr

_DEPTH_OF_F32, _DEPTH_OF_FP8 = {32: 2, 16: 4}, {32: 16, 16: 32}


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
    products = [op for op in kernel.walk() if isinstance(op, compute.GemmOp)]
    return Needs(lds_bytes(kernel), sum(_instructions(op, arch) for op in products))


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
    element = memory.buffer_type(op.a).element_type
    if element == f32:
        return _DEPTH_OF_F32[size]
    if str(element) == arch.fp8:
        return _DEPTH_OF_FP8[size]
    return next(matrix.k for matrix in arch.matrix if matrix.m == size)
