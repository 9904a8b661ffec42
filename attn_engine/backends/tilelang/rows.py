"""tilelang-share-rows: rows of products are summed as threads would hold them without products, where each has parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.backends.tilelang.printer import integer_attribute
from attn_engine.backends.tilelang.tiles import Tiles, is_tile
from attn_engine.backends.tilelang.vectors import is_vector, vectors_alike
from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_compute import BufferReduceOp, BufferTotalOp
from attn_engine.dialects.tile_buffer_map import BufferMapOp
from attn_engine.dialects.tile_buffer_memory import BufferAllocOp, CopyOp, buffer_type, shared_like


def _through_shared(kernel: tile.KernelOp, op: BufferReduceOp | BufferTotalOp) -> None:
    source = op.source
    twin, own = shared_like(source, f"{source.name_hint or 't'}_shared"), BufferAllocOp(buffer_type(source))
    own.result.name_hint = source.name_hint
    Rewriter.insert_op([twin, own], InsertPoint.at_start(kernel.body.block))
    copies = [CopyOp(source, twin.result), CopyOp(twin.result, own.result)]
    Rewriter.insert_op(copies, InsertPoint.before(op))
    op.operands[0] = own.result


@dataclass
class _Rows:
    """What a kernel's warps hold of rows."""

    kernel: tile.KernelOp
    tiles: Tiles

    def alternate(self, value: SSAValue) -> bool:
        return is_tile(value) and self.tiles.has_alternating_rows(value, integer_attribute(self.kernel, "threads", 128))

    def are_scattered(self, value: SSAValue) -> bool:
        """Whether TileLang finds no part of a tile's columns that a thread has whole."""
        if not is_tile(value):
            return False
        return self.tiles.has_shared_columns(value) or self.tiles.has_rows_of_groups(value) or self.alternate(value)

    def vectors(self) -> Iterator[SSAValue]:
        """Vectors with an element for each row of a tile whose rows alternate."""
        for op in self.kernel.walk():
            match op:
                case BufferMapOp() if any(map(self.alternate, (*op.inputs, *op.outputs))):
                    along = zip(op.inputs, tile.axes_of(op.axes), strict=True)
                    yield from (value for value, axes in along if is_vector(value) and tuple(axes) == (0,))
                case BufferReduceOp() if op.axis.value.data == 1 and self.alternate(op.source):
                    yield op.target
                case _:
                    pass


def _scattered(kernel: tile.KernelOp) -> Iterator[BufferReduceOp | BufferTotalOp]:
    """Sums over rows that lie in parts."""
    rows, alike = _Rows(kernel, Tiles.of(kernel)), vectors_alike(kernel)
    vectors = {alike[vector] for vector in rows.vectors()}
    for op in kernel.walk():
        match op:
            case BufferReduceOp() if op.axis.value.data == 0 and rows.are_scattered(op.source):
                yield op
            case BufferTotalOp() if alike[op.source] in vectors:
                yield op
            case _:
                pass


@dataclass(frozen=True)
class TilelangShareRowsPass(ModulePass):
    """Sums over no rows as a product fixes them, where each warp has parts of them: its columns are shared by warps, or
    its rows are more than four warps, or all of them, hold at a time.

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
    and likewise the total of a vector that has an element for each such row. Rows of such a tile alternate between
    warps (where warps share columns: without tensor cores that warpgroups share), and TileLang finds no proof that each
    thread has whole parts of a column.
    """

    name = "tilelang-share-rows"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            for one in list(_scattered(kernel)):
                _through_shared(kernel, one)
