"""Which tiles of a kernel threads hold alike, and how products fix that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from networkx.utils import UnionFind
from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_compute import BufferScanOp, GemmOp, Split
from attn_engine.dialects.tile_buffer_map import BufferMapOp
from attn_engine.dialects.tile_buffer_memory import CopyOp, buffer_type, is_fragment
from attn_engine.dialects.tile_types import BufferType

ROWS_OF_A_WARP = 16
WARPS_OF_A_GROUP = 4


def is_tile(value: SSAValue) -> bool:
    return isinstance(value.type, BufferType) and is_fragment(value) and len(buffer_type(value).get_shape()) > 1


@dataclass
class Tiles:
    """Products fix how threads hold their operands and accumulators, and what is computed with these element by element."""

    alike: UnionFind[SSAValue]
    products: dict[SSAValue, GemmOp]
    """By one tile of each class that has one."""

    @classmethod
    def of(cls, kernel: tile.KernelOp) -> Tiles:
        alike: UnionFind[SSAValue] = UnionFind()
        products: list[GemmOp] = []
        for op in kernel.walk():
            match op:
                case BufferMapOp():
                    alike.union(*filter(is_tile, (*op.inputs, *op.outputs)))
                case CopyOp() | BufferScanOp() if is_tile(op.source) and is_tile(op.target):
                    alike.union(op.source, op.target)
                case GemmOp():
                    products.append(op)
                case _:
                    pass
        return cls(alike, {alike[value]: op for op in products for value in filter(is_tile, op.operands)})

    def sizes(self, shape: tuple[int, ...], tiles: Iterable[SSAValue]) -> tuple[int, ...]:
        """A tile's sizes, if no product fixes how it lies."""
        return () if any(self.alike[tile] in self.products for tile in tiles) else shape

    def has_shared_columns(self, value: SSAValue) -> bool:
        """Whether warps share the columns of a tile."""
        product = self.products.get(self.alike[value])
        return product is not None and product.split is not None and product.split.data is not Split.ROWS

    def has_rows_of_groups(self, value: SSAValue) -> bool:
        """Whether the rows of a tile are more than four warps hold at a time."""
        rows = buffer_type(value).get_shape()[0]
        return self.alike[value] in self.products and rows > ROWS_OF_A_WARP * WARPS_OF_A_GROUP

    def has_alternating_rows(self, value: SSAValue, threads: int) -> bool:
        """Whether the rows of a tile are more than warps hold at a time: each has some here and some further down."""
        rows = buffer_type(value).get_shape()[0]
        return self.alike[value] in self.products and rows > ROWS_OF_A_WARP * (threads // 32)
