"""tilelang-share-operands: left operands that threads cannot hold as they hold results are read from shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, f32
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_compute import GemmOp, Split
from attn_engine.dialects.tile_buffer_memory import CopyOp, buffer_type, is_fragment, shared_like


def _share_left(kernel: tile.KernelOp, op: GemmOp) -> None:
    twin = shared_like(op.a, f"{op.a.name_hint or 'v'}_shared")
    Rewriter.insert_op(twin, InsertPoint.at_start(kernel.body.block))
    Rewriter.insert_op(CopyOp(op.a, twin.result), InsertPoint.before(op))
    op.operands[0] = twin.result


def _is_held_otherwise(op: GemmOp) -> bool:
    """Whether threads hold the left operand otherwise than an accumulator of its shape: of columns that warps share each
    needs all, and has a part in an accumulator; of f32, rounded to tf32, it needs others."""
    shares_columns = op.split is not None and op.split.data is not Split.ROWS
    return is_fragment(op.a) and (shares_columns or buffer_type(op.a).element_type == f32)


@dataclass(frozen=True)
class TilelangShareOperandsPass(ModulePass):
    """Lets no fragment be both like an accumulator and a left operand, where warps share the columns of accumulators, or
    elements are f32.

    ```
    tile.gemm %p, %vs, %acc ieee split both : !tile.buffer<64x64xf16, register>, ...
    ```
    becomes
    ```
    tile.copy %p, %p_shared
    tile.gemm %p_shared, %vs, %acc ieee split both : !tile.buffer<64x64xf16, shared>, ...
    ```
    TileLang infers one layout for each fragment, and refuses what has two.
    """

    name = "tilelang-share-operands"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            for product in [o for o in kernel.walk() if isinstance(o, GemmOp) and _is_held_otherwise(o)]:
                _share_left(kernel, product)
