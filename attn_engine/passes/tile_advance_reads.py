"""`tile-advance-reads`: blocks of tables are read while the product for the scores that they meet is in flight."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.ir import Block, Operation
from xdsl.passes import ModulePass

from attn_engine.dialects.tile_async_copy import BarrierArriveOp, BarrierWaitOp, ProxyFenceOp
from attn_engine.dialects.tile_async_memory import ReadOp
from attn_engine.dialects.tile_async_product import WaitOp
from attn_engine.passes.hopper.role_steps import chain
from attn_engine.passes.hopper.steps import roles_of


def _group(read: ReadOp) -> list[Operation]:
    """A read, the wait for its slot and what both need, and the release of the slot; nothing for a read of another form."""
    body, fence = read.parent, read.next_op
    assert body is not None
    release = fence.next_op if isinstance(fence, ProxyFenceOp) else None
    before = [op for op in body.ops if isinstance(op, BarrierWaitOp) and op.is_before_in_block(read)]
    if not before or not isinstance(release, BarrierArriveOp):
        return []
    return [*chain(body, [before[-1], read, release])[:-1], fence, release]  # type: ignore[list-item]


def _advance(body: Block) -> None:
    for read in [op for op in body.ops if isinstance(op, ReadOp)]:
        waits = [op for op in body.ops if isinstance(op, WaitOp) and op.is_before_in_block(read)]
        late = [op for op in _group(read) if waits and waits[-1].is_before_in_block(op)]
        if any(isinstance(op, WaitOp) for op in late):
            continue
        for op in late:
            op.detach()
            body.insert_op_before(op, waits[-1])


@dataclass(frozen=True)
class TileAdvanceReadsPass(ModulePass):
    """Reads blocks of tables from shared memory in front of the wait for a product, not behind it.

    A read, the fence behind it and the meeting of warps at the release of its slot take as long as a product does to
    become known. Registers hold the block meanwhile.

    ```
    %s = tile.wait 1, %sp; barrier_wait %full; %t = tile.read %slot; proxy_fence; barrier_arrive %empty; map(%s, %t)
    ```
    becomes
    ```
    barrier_wait %full; %t = tile.read %slot; proxy_fence; barrier_arrive %empty; %s = tile.wait 1, %sp; map(%s, %t)
    ```
    """

    name = "tile-advance-reads"

    plan: str = "forward"
    """The plan whose kernel is changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for roles in roles_of(op, self.plan):
            blocks = [block for region in roles.bodies for block in _blocks(region.block)]
            for block in blocks:
                _advance(block)


def _blocks(block: Block) -> list[Block]:
    """A block and those in it."""
    inner = [b for op in block.ops for region in op.regions for b in region.blocks]
    return [block, *(found for b in inner for found in _blocks(b))]
