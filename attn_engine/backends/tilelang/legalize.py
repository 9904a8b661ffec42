"""tilelang-bounds: limits that are sizes of tensors become so in the kernel, where TileLang's own copies know them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from xdsl.context import Context
from xdsl.dialects import arith
from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, ModuleOp
from xdsl.ir import Block, BlockArgument, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter
from xdsl.utils.hints import isa

from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_types import BufferType

Copy = memory.CopyInOp | memory.CopyOutOp | memory.BufferAtomicAddOp
UNKNOWN = -1


def reach_of(kernel: tile.KernelOp, tensor: SSAValue, kind: str) -> tuple[int, ...]:
    """An entry per axis of a tensor argument of `extents`, `cuts` or `sizes`, -1 where nothing is known."""
    assert isinstance(tensor, BlockArgument)
    known: Any = kernel.attributes.get(kind)
    return tile.ints_of(known.data[tensor.index]) if known is not None else (UNKNOWN,) * _rank(tensor)


def _copies(kernel: tile.KernelOp) -> list[Copy]:
    return [op for op in kernel.walk() if isinstance(op, Copy)]


def tensor_of(op: Copy) -> SSAValue:
    """What a copy reads or writes in memory."""
    return op.source if isinstance(op, memory.CopyInOp) else op.target


def _rank(value: SSAValue) -> int:
    return value.type.rank.data if isinstance(value.type, tile.GlobalType) else 0


def _shape_of(op: Copy) -> tuple[int, ...]:
    buffer = op.target if isinstance(op, memory.CopyInOp) else op.value
    assert isinstance(buffer.type, BufferType)
    return buffer.type.get_shape()


def _constant(value: SSAValue) -> int | None:
    owner = value.owner
    if isinstance(owner, arith.ConstantOp) and isa(owner.value, IntegerAttr):
        return owner.value.value.data
    return None


# --- limits that are sizes ---------------------------------------------------------------------


def _is_size(launches: Iterable[tile.LaunchOp], limit: BlockArgument, axis: int) -> bool:
    """Whether every launch passes the size of that axis of some tensor."""
    sizes = [launch.arguments[limit.index].owner for launch in launches]
    return all(isinstance(size, tile.DimOp) and size.axis.value.data == axis for size in sizes)


def _is_uniform(kernel: tile.KernelOp, tensor: SSAValue, axis: int, limit: BlockArgument) -> bool:
    """Whether every copy of a tensor has the same limit along an axis."""
    copies = [op for op in _copies(kernel) if tensor_of(op) is tensor]
    return {_known_limit(op, axis, kernel.body.block) for op in copies} == {limit.index}


def _name_sizes(kernel: tile.KernelOp, launches: list[tile.LaunchOp]) -> dict[tuple[SSAValue, int], int]:
    """Replaces limits that are sizes by `tile.dim` of the tensor itself; says which arguments these sizes must be."""
    block = kernel.body.block
    named: dict[tuple[SSAValue, int], tile.DimOp] = {}
    equal: dict[tuple[SSAValue, int], int] = {}
    for op in _copies(kernel):
        tensor, dims = tensor_of(op), tile.ints_of(op.dims)
        first = len(op.indices) + (1 if isinstance(op, memory.CopyInOp) else 2)
        for place, (limit, t) in enumerate(zip(list(op.limits), tile.ints_of(op.bounded), strict=True), first):
            key = (tensor, dims[t])
            if not isinstance(limit, BlockArgument) or limit.block is not block:
                continue
            if _is_uniform(kernel, tensor, dims[t], limit) or not _is_size(launches, limit, dims[t]):
                continue
            if equal.setdefault(key, limit.index) != limit.index:
                continue
            if key not in named:
                named[key] = tile.DimOp(*key)
                Rewriter.insert_op(named[key], InsertPoint.at_start(block))
            op.operands[place] = named[key].result
    return equal


# --- sizes that are known ----------------------------------------------------------------------


def _known_extent(op: Copy, axis: int) -> int | None:
    """How far a copy reaches along an axis of its tensor, if that is a constant."""
    dims = tile.ints_of(op.dims)
    start = _constant(op.indices[axis])
    if axis not in dims or start is None:
        return None
    t = dims.index(axis)
    bounded = tile.ints_of(op.bounded)
    if t in bounded:
        return _constant(op.limits[bounded.index(t)])
    return start + _shape_of(op)[t]


def _known_limit(op: Copy, axis: int, block: Block) -> int | None:
    """The argument of the kernel that limits a copy along an axis of its tensor."""
    dims, bounded = tile.ints_of(op.dims), tile.ints_of(op.bounded)
    if axis not in dims or dims.index(axis) not in bounded:
        return None
    limit = op.limits[bounded.index(dims.index(axis))]
    return limit.index if isinstance(limit, BlockArgument) and limit.block is block else None


def _has_size(tensor: SSAValue, axis: int) -> bool:
    """Whether the kernel asks for a size, which then must be the whole one."""
    dims = [use.operation for use in tensor.uses if isinstance(use.operation, tile.DimOp)]
    return any(dim.axis.value.data == axis for dim in dims)


def _reach(kernel: tile.KernelOp, tensor: SSAValue) -> tuple[list[int], list[int]]:
    """Per axis of a tensor: the constant, and the argument of the kernel, beyond which nothing is touched."""
    rank = _rank(tensor)
    extents, cuts = [UNKNOWN] * rank, [UNKNOWN] * rank
    copies = [op for op in _copies(kernel) if tensor_of(op) is tensor]
    if not copies or any(not isinstance(use.operation, Copy | tile.DimOp) for use in tensor.uses):
        return extents, cuts
    for axis in range(rank):
        if _has_size(tensor, axis):
            continue
        constants = {_known_extent(op, axis) for op in copies}
        limits = {_known_limit(op, axis, kernel.body.block) for op in copies}
        bounded = any(_is_bounded(op, axis) for op in copies)
        if None not in constants and (len(constants) == 1 or not bounded):
            extents[axis] = max(c for c in constants if c is not None)
        elif limits != {None} and len(limits) == 1:
            cuts[axis] = next(limit for limit in limits if limit is not None)
    return extents, cuts


def _is_bounded(op: Copy, axis: int) -> bool:
    return any(tile.ints_of(op.dims)[t] == axis for t in tile.ints_of(op.bounded))


@dataclass(frozen=True)
class TilelangBoundsPass(ModulePass):
    """Says in the kernel how far it reaches in each tensor, so that a copy's limit is the end of what is passed.

    ```
    tile.kernel @k(%x: !tile.global<2 x f16>, %n: i32) attributes {threads = 128 : i64} {
      tile.copy_in %x[%r0, %c0] dims [0, 1] bounded [0] limits(%n) into %xs : !tile.global<2 x f16>, !tile.buffer<64x32xf16, shared>
    ```
    becomes
    ```
    tile.kernel @k(%x: !tile.global<2 x f16>, %n: i32)
        attributes {threads = 128 : i64, extents = [array<i64: -1, 32>, array<i64>], cuts = [array<i64: 1, -1>, array<i64>]} {
    ```
    for the kernel touches 32 columns of x, and as many rows as its argument 1 says. Where not every copy has that limit,
    but every launch passes a size of some tensor for it, the limit becomes the `tile.dim` of the tensor itself, and
    `sizes`, like `cuts`, says which argument that size must be: the launch checks it.
    """

    name = "tilelang-bounds"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        launches = [launch for launch in op.walk() if isinstance(launch, tile.LaunchOp)]
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            mine = [launch for launch in launches if launch.kernel.root_reference == kernel.sym_name]
            equal = _name_sizes(kernel, mine)
            arguments = kernel.body.block.args
            reach = [_reach(kernel, argument) for argument in arguments]
            kernel.attributes["extents"] = ArrayAttr(tile.ints(extents) for extents, _ in reach)
            kernel.attributes["cuts"] = ArrayAttr(tile.ints(cuts) for _, cuts in reach)
            sizes = [[equal.get((a, axis), UNKNOWN) for axis in range(_rank(a))] for a in arguments]
            kernel.attributes["sizes"] = ArrayAttr(map(tile.ints, sizes))
