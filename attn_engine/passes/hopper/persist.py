"""What a role needs to run tile after tile: where its steps are counted, and which barriers end a phase with each tile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Block, BlockArgument, Operation, SSAValue, Use

from attn_engine.dialects.tile_async_copy import BarrierArriveOp, BarrierExpectOp, BarrierWaitOp
from attn_engine.dialects.tile_async_product import OpaqueZeroOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.hopper.edit import Before
from attn_engine.passes.hopper.role_steps import count_of
from attn_engine.passes.hopper.rows import walk

BarrierUse = BarrierArriveOp | BarrierExpectOp | BarrierWaitOp


@dataclass
class Steps:
    """How a role counts its steps."""

    role: Block
    start: SSAValue
    """The number of the first step, a constant."""
    end: SSAValue
    """How many steps there have been, behind the loops."""

    @classmethod
    def of(cls, role: Block) -> Steps:
        """Raises AsyncUnsupportedError unless all slots that go round are numbered by one count."""
        found = {_origin(role, count_of(op)) for op in walk(role) if isinstance(op, BarrierUse) and _in_loop(role, op)}
        if len(found) != 1:
            raise AsyncUnsupportedError("the steps of a role are not counted by one number")
        start, end = found.pop()
        return cls(role, start, end)

    def go_on_from(self, base: SSAValue) -> None:
        """Steps are numbered on from another number, instead of from the constant."""
        for use in list(self.start.uses):
            if self._counts(use):
                use.operation.operands[use.index] = base

    def _counts(self, use: Use) -> bool:
        op = use.operation
        if isinstance(op, scf.ForOp):
            return use.index >= _BOUNDS and _behind(self.role, op.results[use.index - _BOUNDS]) is self.end
        if isinstance(op, arith.AddiOp):
            return any(isinstance(u.operation, arith.RemSIOp | arith.DivSIOp) for u in op.result.uses)
        return isinstance(op, OpaqueZeroOp) or (isinstance(op, arith.RemSIOp | arith.DivSIOp) and use.index == 0)


_BOUNDS = 3
"""Operands of a loop in front of its carries."""


def _in_loop(role: Block, op: Operation) -> bool:
    return op.parent is not role


def _origin(role: Block, count: SSAValue) -> tuple[SSAValue, SSAValue]:
    """The constant from which a count in a loop starts, and what it is behind the last loop."""
    if isinstance(count.owner, arith.AddiOp):  # of a step before or behind
        count = count.owner.lhs
    end: SSAValue | None = None
    while True:
        loop = count.owner.parent_op() if isinstance(count, BlockArgument) else count.owner
        if not isinstance(loop, scf.ForOp):
            break
        number = count.index - 1 if isinstance(count, BlockArgument) else loop.results.index(count)
        if number < 0:
            break
        if loop.parent is role and end is None:
            end = loop.results[number]
        count = loop.iter_args[number]
    if end is None or not is_constant(count, 0):
        raise AsyncUnsupportedError("steps are not counted from 0 through all loops")
    return count, _behind(role, end)


def _behind(role: Block, end: SSAValue) -> SSAValue:
    """What loops further on make of a count."""
    for use in end.uses:
        if isinstance(use.operation, scf.ForOp) and use.operation.parent is role and use.index >= _BOUNDS:
            return _behind(role, use.operation.results[use.index - _BOUNDS])
    return end


def is_constant(value: SSAValue, number: int) -> bool:
    owner = value.owner
    if not isinstance(owner, arith.ConstantOp) or not isinstance(owner.value, IntegerAttr):
        return False
    return owner.value.value.data == number


def once_a_tile(role: Block) -> list[BarrierWaitOp]:
    """Waits for the one phase that a barrier has in a program. Raises AsyncUnsupportedError if a step waits like that."""
    waits = [op for op in walk(role) if isinstance(op, BarrierWaitOp) and is_constant(op.parity, 0)]
    if any(_in_loop(role, op) for op in waits):
        raise AsyncUnsupportedError("a step waits for the same phase as others")
    return waits


def in_steps(
    role: Block, kind: type[BarrierArriveOp] | type[BarrierExpectOp]
) -> Iterator[BarrierArriveOp | BarrierExpectOp]:
    """What a step does to barriers, once for each of them."""
    seen = set[SSAValue]()
    for op in walk(role):
        if isinstance(op, kind) and _in_loop(role, op) and op.barriers not in seen:
            seen.add(op.barriers)
            yield op


def arrive_again(scope: Before, op: BarrierArriveOp | BarrierExpectOp, count: SSAValue) -> None:
    """Arrives as another step would."""
    stage = op.index.owner
    assert isinstance(stage, arith.RemSIOp) and isinstance(stage.rhs.owner, arith.ConstantOp)
    stages = scope.add(stage.rhs.owner.clone()).result
    scope.add(BarrierArriveOp(op.barriers, scope.add(arith.RemSIOp(count, stages), "stage").result))
