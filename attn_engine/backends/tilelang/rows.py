"""tilelang-share-rows: tiles whose columns warps share are summed over rows as threads would hold them without products."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.backends.tilelang.tiles import Tiles, is_tile
from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_compute import BufferReduceOp
from attn_engine.dialects.tile_buffer_memory import BufferAllocOp, CopyOp, buffer_type, shared_like


def _through_shared(kernel: tile.KernelOp, op: BufferReduceOp) -> None:
    source = op.source
    twin, own = shared_like(source, f"{source.name_hint or 't'}_shared"), BufferAllocOp(buffer_type(source))
    own.result.name_hint = source.name_hint
    Rewriter.insert_op([twin, own], InsertPoint.at_start(kernel.body.block))
    copies = [CopyOp(source, twin.result), CopyOp(twin.result, own.result)]
    Rewriter.insert_op(copies, InsertPoint.before(op))
    op.operands[0] = own.result


@dataclass(frozen=True)
class TilelangShareRowsPass(ModulePass):
    """Reduces no tile over its rows as a product fixes it, where warps share its columns.

    ```
    tile.gemm %a, %b, %acc ieee split both : ...
    tile.buffer_reduce sum %acc, 0 into %v : ...
    ```
    becomes
    ```
    tile.gemm %a, %b, %acc ieee split both : ...
    tile.copy %acc, %acc_shared
    tile.copy %acc_shared, %own
    tile.buffer_reduce sum %own, 0 into %v : ...
    ```
    Without tensor cores that warpgroups share, rows of such a tile alternate between warps, and TileLang finds no proof
    that each thread has whole parts of a column.
    """

    name = "tilelang-share-rows"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            tiles = Tiles.of(kernel)
            sums = [o for o in kernel.walk() if isinstance(o, BufferReduceOp) and o.axis.value.data == 0]
            for one in [o for o in sums if is_tile(o.source) and tiles.has_shared_columns(o.source)]:
                _through_shared(kernel, one)
