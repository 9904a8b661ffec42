"""tile-assign-memory: kernels over values become kernels over buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, IntegerAttr, ModuleOp, TensorType, i64
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_memory as buffers
from attn_engine.dialects.tile_buffer_compute import BufferReduceOp, BufferScanOp, BufferTotalOp, GemmOp, Split
from attn_engine.dialects.tile_types import MemorySpace
from attn_engine.errors import PassError
from attn_engine.passes.memory.held import (
    InBuffer,
    Memory,
    Positions,
    Splat,
    feeds_product,
    is_local_and_used_once,
)
from attn_engine.passes.memory.loops import convert_for, convert_if
from attn_engine.passes.memory.maps import convert_map, convert_scatter

SMALLEST_ROWS = 16
"""Rows of an accumulator that one warp handles at least."""


def _number(kernel: tile.KernelOp, name: str, default: int) -> int:
    value = kernel.attributes.get(name)
    return value.value.data if isinstance(value, IntegerAttr) else default


# --- values that are held nowhere --------------------------------------------------------------


def _constant(memory: Memory, op: arith.ConstantOp) -> None:
    assert isinstance(op.value, DenseIntOrFPElementsAttr)
    number = tile.splat_of(op.value)
    if number is None:
        raise PassError("tile-assign-memory", f"a tensor constant of different elements: {op}")
    memory.held[op.result] = Splat(number)


def _range(memory: Memory, op: tile.RangeOp) -> None:
    memory.held[op.result] = Positions(op.start)


def _transpose(memory: Memory, op: tile.TransposeOp) -> None:
    """Products read a buffer as its transpose; what else reads one needs it in shared memory."""
    held = memory.held[op.value]
    if not isinstance(held, InBuffer):
        raise PassError("tile-assign-memory", f"the transpose of what is in no buffer: {op}")
    buffer = held.buffer
    if any(not isinstance(use.operation, tile.DotOp) for use in op.result.uses):
        buffer = memory.to_shared(op.value, buffer)
    memory.held[op.result] = InBuffer(buffer, not held.transposed)


# --- memory ------------------------------------------------------------------------------------


def _limits(op: tile.Access) -> dict[int, SSAValue]:
    return dict(zip(tile.ints_of(op.bounded), op.limits, strict=True))


def _load(memory: Memory, op: tile.LoadOp) -> None:
    """What products read goes to shared memory, the rest to fragments."""
    space = MemorySpace.SHARED if feeds_product(op.result) else MemorySpace.REGISTER
    buffer = memory.alloc(op.result.type, space, op.result.name_hint)
    memory.held[op.result] = InBuffer(buffer)
    memory.insert(buffers.CopyInOp(op.source, list(op.indices), tile.ints_of(op.dims), buffer, _limits(op)))


def _store(memory: Memory, op: tile.StoreOp) -> None:
    value = memory.buffer(op.value)
    memory.insert(buffers.CopyOutOp(value, op.target, list(op.indices), tile.ints_of(op.dims), _limits(op)))


def _atomic_add(memory: Memory, op: tile.AtomicAddOp) -> None:
    value = memory.buffer(op.value)
    memory.insert(buffers.BufferAtomicAddOp(value, op.target, list(op.indices), tile.ints_of(op.dims), _limits(op)))


# --- computing ---------------------------------------------------------------------------------


def split_of(rows: int, warps: int) -> Split:
    """How warps share an accumulator with so many rows."""
    return Split.ROWS if rows >= SMALLEST_ROWS * warps else Split.BOTH


def _dot(memory: Memory, op: tile.DotOp) -> None:
    """acc + a @ b to a product in place, on acc's own buffer if nothing else reads it."""
    held = memory.held[op.acc]
    taken = isinstance(held, InBuffer) and op.result not in memory.preferred and isinstance(op.acc.owner, Operation)
    if taken and is_local_and_used_once(op.acc, op.parent):
        memory.preferred[op.result] = memory.buffer(op.acc)
    target = memory.target(op.result)
    memory.move(op.acc, target)
    a, b = memory.held[op.a], memory.held[op.b]
    assert isinstance(a, InBuffer) and isinstance(b, InBuffer)
    warps = _number(memory.kernel, "num_warps", 4)
    rows = tile.shape_of(op.acc)[0]
    gemm = GemmOp(
        memory.to_shared(_untransposed(op.a), a.buffer) if a.transposed else a.buffer,
        memory.to_shared(_untransposed(op.b), b.buffer),
        target,
        transpose_a=a.transposed,
        transpose_b=b.transposed,
        precision=op.precision.data,
        split=split_of(rows, warps),
    )
    memory.insert(gemm)
    memory.share(op.result)


def _untransposed(value: SSAValue) -> SSAValue:
    """The value that an operand is, or is the transpose of."""
    return value.owner.value if isinstance(value.owner, tile.TransposeOp) else value


def _reduce(memory: Memory, op: tile.ReduceOp) -> None:
    """Along one axis to a fragment; of a vector, to a number."""
    if not isinstance(op.result.type, TensorType):
        total = memory.insert(BufferTotalOp(op.kind.data, memory.buffer(op.value)))
        total.result.name_hint = op.result.name_hint
        op.result.replace_all_uses_with(total.result)
        return
    memory.insert(BufferReduceOp(op.kind.data, memory.buffer(op.value), op.axis.value.data, memory.target(op.result)))


def _scan(memory: Memory, op: tile.ScanOp) -> None:
    reverse, target = op.reverse is not None, memory.target(op.result)
    memory.insert(BufferScanOp(op.kind.data, memory.buffer(op.value), op.axis.value.data, target, reverse))
    memory.share(op.result)


# --- blocks ------------------------------------------------------------------------------------


def _for(memory: Memory, op: scf.ForOp) -> None:
    convert_for(memory, op, _convert, _number(memory.kernel, "num_stages", 1))


def _if(memory: Memory, op: scf.IfOp) -> None:
    convert_if(memory, op, _convert)


RULES: dict[type[Operation], Callable[..., None]] = {
    arith.ConstantOp: _constant,
    tile.RangeOp: _range,
    tile.TransposeOp: _transpose,
    tile.LoadOp: _load,
    tile.StoreOp: _store,
    tile.AtomicAddOp: _atomic_add,
    tile.ScatterAddOp: convert_scatter,
    tile.DotOp: _dot,
    tile.ReduceOp: _reduce,
    tile.ScanOp: _scan,
    tile.MapOp: convert_map,
    scf.ForOp: _for,
    scf.IfOp: _if,
}


def _has_tensors(op: Operation) -> bool:
    return any(isinstance(v.type, TensorType) for v in (*op.operands, *op.results))


def _convert(memory: Memory, block: Block) -> None:
    """Converts a block's ops in order; terminators are left to those who convert what they end."""
    outer = memory.at
    for op in list(block.ops):
        if op is block.last_op or not (_has_tensors(op) or isinstance(op, scf.ForOp | scf.IfOp)):
            continue
        if type(op) not in RULES or (isinstance(op, tile.LoadOp) and not tile.shape_of(op.result)):
            raise PassError("tile-assign-memory", f"no rule for {op.name}: {op}")
        memory.at = op
        RULES[type(op)](memory, op)
        memory.dead.append(op)
    memory.at = outer


def _loops_that_load(kernel: tile.KernelOp) -> int:
    loops = [o for o in kernel.walk() if isinstance(o, scf.ForOp)]
    return sum(any(isinstance(inner, tile.LoadOp) for inner in loop.body.block.ops) for loop in loops)


def _convert_kernel(kernel: tile.KernelOp, warp_size: int, one_pipeline: bool) -> None:
    if one_pipeline and _loops_that_load(kernel) > 1:
        kernel.attributes["num_stages"] = IntegerAttr(1, i64)
    memory = Memory(kernel)
    _convert(memory, kernel.body.block)
    for op in memory.dead:
        op.detach()
    for op in memory.dead:
        op.drop_all_references()
    memory.finish()
    kernel.attributes["threads"] = IntegerAttr(_number(kernel, "num_warps", 4) * warp_size, i64)
    for name in ("num_warps", "num_stages"):
        kernel.attributes.pop(name, None)


@dataclass(frozen=True)
class TileAssignMemoryPass(ModulePass):
    """Gives every tensor of a kernel a buffer, and writes results in place.

    ```
    %m = scf.for %i = %lo to %hi step %c64 iter_args(%m0 = %start) -> (tensor<64xf32>) : i32 {
      %k = tile.load %K[%i, %c0] dims [0, 1] : !tile.global<2 x f16> -> tensor<64x32xf16>
      %t = tile.transpose %k : tensor<64x32xf16> -> tensor<32x64xf16>
      %s = tile.dot %q, %t, %zero ieee : tensor<64x32xf16>, tensor<32x64xf16>, tensor<64x64xf32> -> tensor<64x64xf32>
      %m1 = tile.map (%m0, %s) ...
      scf.yield %m1 : tensor<64xf32>
    }
    ```
    becomes
    ```
    tile.buffer_fill %m, %start : !tile.buffer<64xf32, register>, f32
    scf.for %i = %lo to %hi step %c64 : i32 {
      tile.copy_in %K[%i, %c0] dims [0, 1] into %k : !tile.global<2 x f16>, !tile.buffer<64x32xf16, shared>
      tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
      tile.gemm %q, %k, %s transpose_b ieee split rows : ...
      tile.buffer_map (%m, %s) ... into (%m) ...
    } {stages = 2 : i64}
    ```
    What products read is in shared memory, but for left operands that the kernel computes; the rest is in fragments.
    """

    name = "tile-assign-memory"

    warp_size: int = 32
    """Threads of one warp; `num_warps` of them make `threads`."""

    one_pipeline: bool = False
    """Gives loops stages only in kernels with one loop that loads, for targets that refuse or misplace a second."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            _convert_kernel(kernel, self.warp_size, self.one_pipeline)
