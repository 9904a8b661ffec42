"""hip-share-lds: tiles that are never needed at the same time lie in the same LDS."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import scf
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.arch import ARCHES, Vendor
from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_compute as compute
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_buffer_check import reads, writes
from attn_engine.dialects.tile_buffer_layout import PaddedAttr
from attn_engine.dialects.tile_types import MemorySpace
from attn_engine.errors import ScheduleError

SMALLEST_LDS = min(arch.shared_per_block for arch in ARCHES.values() if arch.vendor is Vendor.AMD)


def _users(alloc: memory.BufferAllocOp) -> list[Operation]:
    return [use.operation for use in alloc.result.uses]


def _span(users: list[Operation], block: Block) -> tuple[int, int] | None:
    """First and last place in a block at which any of these ops stands; None if one stands outside of it."""
    order = {op: place for place, op in enumerate(block.ops)}
    places: list[int] = []
    for user in users:
        ancestor = block.find_ancestor_op_in_block(user)
        if ancestor is None:
            return None
        places.append(order[ancestor])
    return (min(places), max(places)) if places else None


def _innermost(users: list[Operation]) -> Block:
    """The innermost block that holds all of these ops."""
    block = users[0].parent
    assert block is not None
    while any(block.find_ancestor_op_in_block(user) is None for user in users):
        parent = block.parent_op()
        assert parent is not None and parent.parent is not None
        block = parent.parent
    return block


def _apart(a: list[Operation], b: list[Operation]) -> bool:
    """Whether one tile is done with before the other is written, each time round."""
    if not a or not b:
        return False
    block = _innermost([*a, *b])
    first, second = _span(a, block), _span(b, block)
    assert first is not None and second is not None
    return first[1] < second[0] or second[1] < first[0]


def _share(kernel: tile.KernelOp) -> None:
    kept: list[memory.BufferAllocOp] = []
    for alloc in [op for op in kernel.body.block.ops if isinstance(op, memory.BufferAllocOp)]:
        if memory.buffer_type(alloc.result).memory_space is not MemorySpace.SHARED:
            continue
        host = next((k for k in kept if _alike(k, alloc) and _apart(_users(k), _users(alloc))), None)
        if host is None:
            kept.append(alloc)
            continue
        alloc.result.replace_all_uses_with(host.result)
        Rewriter.erase_op(alloc)


def _alike(a: memory.BufferAllocOp, b: memory.BufferAllocOp) -> bool:
    return a.result.type == b.result.type and a.layout == b.layout


# --- copies ------------------------------------------------------------------------------------


def _in_lds(value: SSAValue) -> bool:
    return memory.buffer_type(value).memory_space is MemorySpace.SHARED


def _copies_first(block: Block) -> None:
    """Copies from global memory to LDS go up to what they depend on, so that several wait at one barrier."""
    for op in list(block.ops):
        for region in op.regions:
            if isinstance(op, scf.ForOp | scf.IfOp) and region.blocks:
                _copies_first(region.block)
        if isinstance(op, memory.CopyInOp) and _in_lds(op.target):
            _move_up(op)


def _move_up(copy: memory.CopyInOp) -> None:
    place = copy.prev_op
    while place is not None and not _stops(copy, place):
        place = place.prev_op
    if place is copy.prev_op:
        return
    block = copy.parent
    assert block is not None
    copy.detach()
    Rewriter.insert_op(copy, InsertPoint.after(place) if place is not None else InsertPoint.at_start(block))


_WRITE_GLOBAL = (
    memory.CopyOutOp,
    memory.BufferAtomicAddOp,
    compute.BufferScatterAddOp,
    tile.AtomicAddOp,
    tile.StoreOp,
)


def _stops(copy: memory.CopyInOp, op: Operation) -> bool:
    """Whether the copy must stay behind an op: it needs its result, touches the same tile, or may read what it writes."""
    if any(result in copy.operands for result in op.results):
        return True
    if any(isinstance(inner, _WRITE_GLOBAL) for inner in op.walk()):
        return True
    return any(copy.target in (*reads(inner), *writes(inner)) for inner in op.walk()) or isinstance(op, memory.CopyInOp)


# --- size --------------------------------------------------------------------------------------


def lds_bytes(alloc: memory.BufferAllocOp) -> int:
    type_ = memory.buffer_type(alloc.result)
    size = type_.byte_size
    if isinstance(alloc.layout, PaddedAttr):
        size += size // type_.get_shape()[-1] * alloc.layout.elements.data
    return size


def _check_size(kernel: tile.KernelOp) -> None:
    allocs = [op for op in kernel.body.block.ops if isinstance(op, memory.BufferAllocOp)]
    shared = [a for a in allocs if memory.buffer_type(a.result).memory_space is MemorySpace.SHARED]
    need = sum(map(lds_bytes, shared))
    if need > SMALLEST_LDS:
        raise ScheduleError(
            f"hip: the tiles of kernel @{kernel.sym_name.data} need {need} bytes of LDS, but a program has {SMALLEST_LDS};"
            " use smaller blocks, or operands of 16 bits"
        )


@dataclass(frozen=True)
class HipShareLdsPass(ModulePass):
    """Merges tiles in LDS of one type and layout whose uses lie apart, such as those of two loops, one after the other.

    ```
    scf.for ... { tile.copy_in %k[...] into %a ; tile.gemm %a, ... }
    scf.for ... { tile.copy_in %k[...] into %b ; tile.gemm %b, ... }
    ```
    becomes
    ```
    scf.for ... { tile.copy_in %k[...] into %a ; tile.gemm %a, ... }
    scf.for ... { tile.copy_in %k[...] into %a ; tile.gemm %a, ... }
    ```
    Before that, copies from global memory to LDS move up to what they depend on, so that several wait at one barrier.
    A tile is written before it is read wherever its uses stand, so that none is carried from one round to the next.
    """

    name = "hip-share-lds"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            _copies_first(kernel.body.block)
            _share(kernel)
            _check_size(kernel)
