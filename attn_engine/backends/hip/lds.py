"""hip-share-lds: tiles that are never needed at the same time lie in the same LDS."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import scf
from xdsl.dialects.builtin import FixedBitwidthType, ModuleOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.arch import ARCHES, Vendor
from attn_engine.backends.hip import types
from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_compute as compute
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_buffer_check import reads, writes
from attn_engine.dialects.tile_buffer_layout import MfmaAttr, SliceLayoutAttr
from attn_engine.dialects.tile_types import MemorySpace
from attn_engine.errors import ScheduleError, UnsupportedOpError

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
    for alloc in tiles_in_lds(kernel):
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


def _copies_last(block: Block) -> None:
    """Copies from global memory to LDS go down to where the tile is first read, so that it takes LDS no longer than needed."""
    for op in reversed(list(block.ops)):
        for region in op.regions:
            if isinstance(op, scf.ForOp | scf.IfOp) and region.blocks:
                _copies_last(region.block)
        if isinstance(op, memory.CopyInOp) and _in_lds(op.target):
            place = op.next_op
            while place is not None and not _keeps(op, place):
                place = place.next_op
            if place is not None and place is not op.next_op:
                op.detach()
                Rewriter.insert_op(op, InsertPoint.before(place))


def _keeps(copy: memory.CopyInOp, op: Operation) -> bool:
    """Whether the copy must stay before an op: it uses the tile, or writes to the tensor that is copied from."""
    inside = list(op.walk())
    written = [inner.target for inner in inside if isinstance(inner, _WRITE_GLOBAL)]
    if copy.source in written or op.next_op is None:
        return True
    return any(copy.target in (*reads(inner), *writes(inner)) for inner in inside)


_WRITE_GLOBAL = (tile.WriteAccess, compute.BufferScatterAddOp)


def _stops(copy: memory.CopyInOp, op: Operation) -> bool:
    """Whether the copy must stay behind an op: it needs its result, touches the same tile, or may read what it writes."""
    if any(result in copy.operands for result in op.results):
        return True
    if any(isinstance(inner, _WRITE_GLOBAL) for inner in op.walk()):
        return True
    return any(copy.target in (*reads(inner), *writes(inner)) for inner in op.walk()) or isinstance(op, memory.CopyInOp)


# --- size --------------------------------------------------------------------------------------


def tiles_in_lds(kernel: tile.KernelOp) -> list[memory.BufferAllocOp]:
    """The tiles that take LDS of their own."""
    allocs = [op for op in kernel.body.block.ops if isinstance(op, memory.BufferAllocOp)]
    return [a for a in allocs if _in_lds(a.result) and a.host is None]


NeedsScratch = compute.BufferReduceOp | compute.BufferScanOp | compute.BufferTotalOp
"""Ops along an axis that waves may share."""


def scratch_sizes(op: NeedsScratch) -> tuple[int, int]:
    """(numbers of each wave, waves that share the axis) of what waves tell each other through LDS."""
    held = memory.fragment_layout(op.source)
    if isinstance(held, SliceLayoutAttr):
        return 1, held.parent.split[1 - held.axis.data]
    if not isinstance(held, MfmaAttr) or isinstance(op, compute.BufferTotalOp):
        raise UnsupportedOpError(f"a fragment {op.source.type} held as {held}", types.BACKEND_NAME)
    axis = op.axis.value.data
    return memory.buffer_type(op.source).get_shape()[1 - axis], held.split[axis]


def _scratch(op: NeedsScratch) -> int:
    """Bytes by which waves that share an axis combine what each has; none where one wave has all."""
    length, waves = scratch_sizes(op)
    element = memory.buffer_type(op.source).element_type
    assert isinstance(element, FixedBitwidthType)
    return element.bitwidth // 8 * waves * length if waves > 1 else 0


def lds_bytes(kernel: tile.KernelOp) -> int:
    """What a kernel needs of LDS."""
    scratch = sum(_scratch(op) for op in kernel.walk() if isinstance(op, NeedsScratch))
    return scratch + sum(alloc.bytes for alloc in tiles_in_lds(kernel))


def _nest(kernel: tile.KernelOp) -> None:
    """Puts tiles into larger ones that are needed at other times, the largest first, until all fit: each costs barriers."""
    groups: list[list[memory.BufferAllocOp]] = []
    for alloc in sorted(tiles_in_lds(kernel), key=lambda a: -a.bytes):
        apart = (g for g in groups if all(_apart(_users(alloc), _users(other)) for other in g))
        group = next(apart, None) if lds_bytes(kernel) > SMALLEST_LDS else None
        if group is None:
            groups.append([alloc])
            continue
        type_, host = memory.buffer_type(alloc.result), group[0]
        new = memory.BufferAllocOp(type_, alloc.layout, host.result)
        new.result.name_hint = alloc.result.name_hint
        Rewriter.insert_op(new, InsertPoint.after(host))
        alloc.result.replace_all_uses_with(new.result)
        Rewriter.erase_op(alloc)
        group.append(new)


def _arrange(kernel: tile.KernelOp) -> None:
    _share(kernel)
    _nest(kernel)


def _check_size(kernel: tile.KernelOp) -> None:
    need = lds_bytes(kernel)
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
    Where LDS would be too small, tiles go into larger ones of another type too, and copies down to what needs them.
    """

    name = "hip-share-lds"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            early = kernel.clone()
            _copies_first(early.body.block)
            _arrange(early)
            if lds_bytes(early) <= SMALLEST_LDS:
                Rewriter.replace_op(kernel, early)
            else:
                _copies_last(kernel.body.block)
                _arrange(kernel)
                _check_size(kernel)
