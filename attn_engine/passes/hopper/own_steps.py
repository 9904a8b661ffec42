"""Which block of rows a program owns, and whether the steps of its loops depend on that."""

from __future__ import annotations

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import i32
from xdsl.ir import Block, BlockArgument, SSAValue

from attn_engine.dialects.tile_async_copy import AsyncStoreOp
from attn_engine.passes.hopper.slicing import depends_on
from attn_engine.passes.simplify_constants import constant_of


def number_of(consumer: Block) -> SSAValue | None:
    """Which block of rows a program owns, from where its results are stored; None if that does not say so."""
    store = next((op for op in consumer.ops if isinstance(op, AsyncStoreOp)), None)
    if store is None:
        return None
    work = [store.coordinates[2]]
    while work:
        owner = work.pop().owner
        if isinstance(owner, arith.MuliOp) and isinstance(constant_of(owner.rhs), int) and owner.lhs.type == i32:
            if not isinstance(owner.lhs, BlockArgument):
                return owner.lhs
        elif isinstance(owner, arith.AddiOp):
            work += owner.operands
    return None


def has_own_steps(consumer: Block) -> bool:
    """Whether programs may go through other blocks than their neighbours: bounds of loops depend on the block that they own."""
    number = number_of(consumer)
    if number is None or any(isinstance(op, scf.IfOp | scf.WhileOp) for op in consumer.walk()):
        return True
    own = depends_on(consumer, number)
    return any(bound in own for bound in _ends(consumer))


def _ends(consumer: Block) -> list[SSAValue]:
    """Where the loops of a role begin and end; one that begins where another one ends is one with it."""
    loops = [op for op in consumer.walk() if isinstance(op, scf.ForOp)]
    starts, stops = [op.lb for op in loops], [op.ub for op in loops]
    for value in list(stops):
        if value in starts:
            starts.remove(value)
            stops.remove(value)
    return [*starts, *stops]
