"""`tile-hoist`: moves what a loop computes alike in every iteration in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.traits import IsTerminator, is_side_effect_free

from attn_engine.dialects import tile


def written_by(kernel: Operation) -> set[SSAValue]:
    """The globals that a kernel writes: a read of one of them stays where it is."""
    writes = (tile.StoreOp, tile.AtomicAddOp, tile.AtomicMaxOp, tile.ScatterAddOp, tile.AddDiagonalsOp)
    return {op.target for op in kernel.walk() if isinstance(op, writes)}


def _reads(op: Operation) -> Iterator[SSAValue]:
    """The globals that an op, or code inside it, may read."""
    for operand in op.operands:
        if isinstance(operand.type, tile.GlobalType):
            yield operand


_CASTS = (arith.ExtSIOp, arith.ExtUIOp, arith.TruncIOp, arith.SIToFPOp, arith.ExtFOp, arith.TruncFOp)
"""Of integers and floats: upstream says of some of them that they are pure, of others nothing."""


def movable(op: Operation, written: set[SSAValue]) -> bool:
    """Whether an op may run earlier, and more often: it computes, or reads globals that the kernel does not write."""
    if isinstance(op, tile.MapOp | tile.LoadOp | tile.GatherOp | tile.LoadDiagonalsOp):
        return not any(source in written for source in _reads(op))
    if isinstance(op, _CASTS):
        return True
    return not op.regions and not op.has_trait(IsTerminator) and is_side_effect_free(op)


def _inside(value: SSAValue, body: Block) -> bool:
    block = value.owner if isinstance(value, BlockArgument) else value.owner.parent
    while block is not None:
        if block is body:
            return True
        parent = block.parent_op()
        block = parent.parent if parent is not None else None
    return False


def hoist(loop: scf.ForOp, written: set[SSAValue]) -> None:
    """Moves the invariant ops of one loop in front of it, in order."""
    body = loop.body.block
    for op in list(body.ops):
        if movable(op, written) and not any(_inside(o, body) for o in op.operands):
            op.detach()
            parent = loop.parent
            assert parent is not None
            parent.insert_op_before(op, loop)


@dataclass(frozen=True)
class TileHoistPass(ModulePass):
    """Moves loop-invariant ops out of `scf.for`, innermost loops first.

    Reads of globals that the kernel writes stay. An invariant load runs even if the loop does not: all loads
    are bounded or guarded, so that is safe.

    ```
    scf.for %n0 = ... { %w = tile.gather %slopes[%h : i64] if %ok : ...; use(%w, %n0) }
    ```
    becomes
    ```
    %w = tile.gather %slopes[%h : i64] if %ok : ...
    scf.for %n0 = ... { use(%w, %n0) }
    ```
    """

    name = "tile-hoist"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for kernel in op.body.block.ops:
            if isinstance(kernel, tile.KernelOp):
                written = written_by(kernel)
                for loop in reversed([o for o in kernel.walk() if isinstance(o, scf.ForOp)]):
                    hoist(loop, written)
