"""`gluon-hold-diagonals`: which tiles of diagonals threads hold as products give them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import IntegerAttr, ModuleOp, UnitAttr
from xdsl.ir import Block
from xdsl.passes import ModulePass

from attn_engine.backends.triton.gluon_layout import LayoutTable
from attn_engine.backends.triton.gluon_types import Layout, Mma
from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp

_WARPS, _ROWS = (4, 1), 64
"""Of a warpgroup, which has tiles as its products give them."""
_DEFAULT_WARPS = 4


def _blocks(kernel: tile.KernelOp) -> Iterator[tuple[Block, int]]:
    """The functions that a kernel becomes, and the warps that run them."""
    warps = kernel.attributes.get("num_warps")
    yield kernel.body.block, warps.value.data if isinstance(warps, IntegerAttr) else _DEFAULT_WARPS
    for roles in [op for op in kernel.body.block.ops if isinstance(op, RolesOp)]:
        yield from ((region.block, role[2]) for region, role in zip(roles.bodies, roles.roles, strict=True))


def _is_held(layout: Layout | None, shape: tuple[int, ...]) -> bool:
    """In whole statements."""
    mine = isinstance(layout, Mma) and (layout.rows, layout.columns) == _WARPS
    return mine and shape[0] == _ROWS and not shape[1] % _ROWS


@dataclass(frozen=True)
class GluonHoldDiagonalsPass(ModulePass):
    """Marks loads and additions of diagonals whose tile a warpgroup holds as its products give it.

    A warp then loads or adds what its threads have of a diagonal once for all of them, in one statement; tiles that are held in
    any other way go element by element, or through shared memory.

    ```
    %d = tile.load_diagonals %numbers[%h, %o] from %q0, %n0 : !tile.global<2 x f32> -> tensor<64x128xf32>
    ```
    becomes, where the tile is added to a product,
    ```
    %d = tile.load_diagonals %numbers[%h, %o] from %q0, %n0 held : !tile.global<2 x f32> -> tensor<64x128xf32>
    ```
    """

    name = "gluon-hold-diagonals"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [o for o in op.ops if isinstance(o, tile.KernelOp)]:
            for block, warps in _blocks(kernel):
                self._mark(block, warps)

    @staticmethod
    def _mark(block: Block, warps: int) -> None:
        found = [o for o in block.walk() if isinstance(o, tile.LoadDiagonalsOp | tile.AddDiagonalsOp)]
        if not found:
            return
        table = LayoutTable(block, warps)
        for op in found:
            value = op.result if isinstance(op, tile.LoadDiagonalsOp) else op.value
            if _is_held(table.known(value), tile.shape_of(value)):
                op.properties["held"] = UnitAttr()
