"""The steps of a role: which loops they are, and what an op of one needs."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TypeGuard

from xdsl.dialects import arith, scf
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attn_engine.dialects.tile_async_copy import BarrierArriveOp, BarrierExpectOp, BarrierWaitOp
from attn_engine.dialects.tile_async_product import AsyncDotOp
from attn_engine.dialects.tile_async_view import PartOp, SlotOp, TransposedSlotOp
from attn_engine.dialects.tile_types import BarriersType
from attn_engine.passes.hopper.edit import extend_for, yield_more


def chain(body: Block, ops: Sequence[Operation], known: Container[SSAValue] = ()) -> list[Operation]:
    """Ops of a body, and those that their operands, but for known ones, are from, in order."""
    needed, work = set[Operation](), list(ops)
    while work:
        op = work.pop()
        if op.parent is body and op not in needed:
            needed.add(op)
            work.extend(o.owner for o in op.operands if isinstance(o.owner, Operation) and o not in known)
    return [op for op in body.ops if op in needed]


def slot_of(value: SSAValue) -> SlotOp | None:
    """The slot that a view is of, turned, a part of it, or whole."""
    owner = value.owner
    while isinstance(owner, PartOp | TransposedSlotOp):
        owner = owner.source.owner
    return owner if isinstance(owner, SlotOp) else None


def count_of(op: BarrierArriveOp | BarrierWaitOp | BarrierExpectOp) -> SSAValue:
    """The number of the step, from which the stage of its slots follows."""
    stage = op.index.owner
    assert isinstance(stage, arith.RemSIOp)
    return stage.lhs


def is_role_step(op: Operation) -> bool:
    """A loop that starts products itself."""
    return isinstance(op, scf.ForOp) and any(isinstance(o, AsyncDotOp) for o in op.body.block.ops)


def holds_steps(op: Operation) -> TypeGuard[scf.ForOp]:
    """A loop that starts products, itself or in a loop inside of it."""
    return isinstance(op, scf.ForOp) and any(is_role_step(o) for o in op.walk())


def carry(loop: scf.ForOp, values: Sequence[SSAValue], step: Callable[[Block, list[SSAValue]], None]) -> list[SSAValue]:
    """Passes values through a loop of steps and those inside of it; `step` yields, in each, what the next step gets."""
    new, inner = extend_for(loop, values, [value.name_hint or "x" for value in values])
    body = new.body.block
    if is_role_step(new):
        step(body, inner)
    else:
        for op in list(body.ops):
            if holds_steps(op):
                inner = carry(op, inner, step)
        yield_more(body, inner)
    return list(new.res[-len(values) :])


def role_steps(role: Block) -> list[Block]:
    """The bodies of the loops that start products themselves."""
    return [op.body.block for op in role.walk() if isinstance(op, scf.ForOp) and is_role_step(op)]


def sums(body: Block) -> list[AsyncDotOp]:
    """The products of a step that are added to what steps before have left."""
    return [op for op in body.ops if isinstance(op, AsyncDotOp) and isinstance(op.acc, BlockArgument)]


def steps_meet(role: Block) -> bool:
    """Whether slots hold two steps at the same time: with one slot, a step that starts before another has released it waits forever."""
    waits = [next(op for op in body.ops if isinstance(op, BarrierWaitOp)) for body in role_steps(role)]
    return all(isinstance(wait.barriers.type, BarriersType) and wait.barriers.type.size.data > 1 for wait in waits)


def has_one_sum(role: Block) -> bool:
    """Whether all steps have one sum, in loops that stand in the role itself: one loop goes on where another ends."""
    bodies = role_steps(role)
    loops = list(role.ops)
    return all(len(sums(body)) == 1 and body.parent_op() in loops for body in bodies)
