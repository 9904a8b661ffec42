"""tilelang-copies: which copies are whole blocks, which of these may be bulk copies, and how threads share registers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import scf
from xdsl.dialects.builtin import ModuleOp, UnitAttr
from xdsl.ir import BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass

from attn_engine.backends.tilelang.legalize import reach_of, tensor_of
from attn_engine.backends.tilelang.printer import integer_attribute
from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.passes.simplify_constants import constant_of

Copy = memory.CopyInOp | memory.CopyOutOp
BLOCK, BULK, REGISTERS = "block", "bulk", "registers"

SHARES = {256: (40, 232), 384: (32, 160)}
"""By threads that compute: registers of one of the 128 threads that copy, and of one of them; fewer threads have enough."""


def _is_end(kernel: tile.KernelOp, tensor: SSAValue, axis: int, limit: SSAValue) -> bool:
    """Whether a limit is where the tensor, as it is passed, ends."""
    if isinstance(limit, BlockArgument):
        return reach_of(kernel, tensor, "cuts")[axis] == limit.index
    if isinstance(limit.owner, tile.DimOp):
        return limit.owner.source is tensor and limit.owner.axis.value.data == axis
    return constant_of(limit) == reach_of(kernel, tensor, "extents")[axis]


def _is_block(kernel: tile.KernelOp, op: Copy) -> bool:
    """Whether its limits are the sizes of its tensor, and its axes in the tensor's order."""
    dims, tensor = tile.ints_of(op.dims), tensor_of(op)
    bounded = zip(tile.ints_of(op.bounded), op.limits, strict=True)
    return list(dims) == sorted(dims) and all(_is_end(kernel, tensor, dims[t], limit) for t, limit in bounded)


def _is_ahead(op: Operation) -> bool:
    """Whether it stands in a loop with stages: for others TileLang waits in that loop, which may run not even once."""
    parent = op.parent_op()
    return isinstance(parent, scf.ForOp) and "stages" in parent.attributes


def _mark(kernel: tile.KernelOp, copies: Iterable[Copy]) -> None:
    for op in copies:
        if _is_block(kernel, op):
            op.attributes[BLOCK] = UnitAttr()
            if _is_ahead(op):
                op.attributes[BULK] = UnitAttr()


@dataclass(frozen=True)
class TilelangCopiesPass(ModulePass):
    """Marks copies whose limits are the sizes of their tensor, which are TileLang's own; others copy element by element.

    ```
    scf.for %n0 = %lo to %hi step %c64 : i32 {
      tile.copy_in %k[%n0, %c0] dims [0, 1] bounded [0] limits(%skv) into %ks : ...
    } {stages = 2 : i64}
    ```
    becomes
    ```
      tile.copy_in %k[%n0, %c0] dims [0, 1] bounded [0] limits(%skv) into %ks {block, bulk} : ...
    ```
    and the kernel gets `registers = array<i64: 40, 232>`. `block` may be copied by the device's engine if it is `bulk`
    and the tensor lies so. `registers` are those of threads that copy ahead and of those that compute; not for a loop
    within a loop, where TileLang would change them in each iteration.
    """

    name = "tilelang-copies"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in [k for k in op.ops if isinstance(k, tile.KernelOp)]:
            _mark(kernel, [o for o in kernel.walk() if isinstance(o, Copy)])
            share = SHARES.get(integer_attribute(kernel, "threads", 128))
            if share is not None and any("stages" in o.attributes for o in kernel.body.block.ops):
                kernel.attributes[REGISTERS] = tile.ints(share)
