"""Edits that the passes towards the async level have in common: insertion points, carries, arguments of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from xdsl.dialects import scf
from xdsl.ir import Block, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_base import axes_attr
from attn_engine.passes.lowering.scope import Scope

OpT = TypeVar("OpT", bound=Operation)


class Before(Scope):
    """Inserts in front of an op instead of at the end of a block."""

    def __init__(self, anchor: Operation):
        block = anchor.parent
        assert block is not None
        super().__init__(block)
        self.anchor = anchor

    def add(self, op: OpT, *hints: str) -> OpT:
        self.block.insert_op_before(op, self.anchor)
        for result, hint in zip(op.results, hints, strict=False):
            result.name_hint = hint
        return op


class After(Before):
    """Inserts behind an op, each insertion behind the one before it."""

    def __init__(self, anchor: Operation):
        following = anchor.next_op
        assert following is not None, "a block ends in a terminator"
        super().__init__(following)


def extend_for(loop: scf.ForOp, inits: Sequence[SSAValue], hints: Sequence[str]) -> tuple[scf.ForOp, list[SSAValue]]:
    """The loop with more carries behind its own, and their block arguments; the caller yields their next values."""
    body = loop.body.block
    arguments: list[SSAValue] = []
    for init, hint in zip(inits, hints, strict=True):
        argument = body.insert_arg(init.type, len(body.args))
        argument.name_hint = hint
        arguments.append(argument)
    new = scf.ForOp(loop.lb, loop.ub, loop.step, [*loop.iter_args, *inits], loop.detach_region(loop.body))
    Rewriter.insert_op(new, InsertPoint.before(loop))
    _take_results(loop, new, hints)
    return new, arguments


def extend_while(
    loop: scf.WhileOp, inits: Sequence[SSAValue], hints: Sequence[str]
) -> tuple[scf.WhileOp, list[SSAValue]]:
    """The same for an `scf.while` whose condition passes all carries on; the block arguments are those of its body."""
    before, after = loop.before_region.block, loop.after_region.block
    condition = before.last_op
    assert isinstance(condition, scf.ConditionOp)
    arguments: list[SSAValue] = []
    passed: list[SSAValue] = []
    for init, hint in zip(inits, hints, strict=True):
        for block, found in ((before, passed), (after, arguments)):
            argument = block.insert_arg(init.type, len(block.args))
            argument.name_hint = hint
            found.append(argument)
    condition.operands = [*condition.operands, *passed]
    types = [*(r.type for r in loop.res), *(i.type for i in inits)]
    regions = [loop.detach_region(region) for region in list(loop.regions)]
    new = scf.WhileOp([*loop.arguments, *inits], types, *regions)
    Rewriter.insert_op(new, InsertPoint.before(loop))
    _take_results(loop, new, hints)
    return new, arguments


def _take_results(old: Operation, new: Operation, hints: Sequence[str]) -> None:
    for was, now in zip(old.results, new.results, strict=False):
        now.name_hint = was.name_hint
        was.replace_all_uses_with(now)
    for result, hint in zip(new.results[len(old.results) :], hints, strict=True):
        result.name_hint = hint
    old.detach()
    old.erase()


def yields(block: Block) -> scf.YieldOp:
    end = block.last_op
    assert isinstance(end, scf.YieldOp)
    return end


def yield_more(block: Block, values: Sequence[SSAValue]) -> None:
    """Appends to what a block yields."""
    end = yields(block)
    end.operands = [*end.operands, *values]


def erase_unused(block: Block) -> None:
    """Erases scalar code whose results nothing uses, from the end on."""
    for op in reversed(list(block.ops)):
        if op.results and not any(result.uses for result in op.results):
            Rewriter.erase_op(op)


def drop_unread(op: tile.MapOp) -> None:
    """Drops the inputs of a map that its body does not read."""
    block, axes = op.body.block, tile.axes_of(op.axes)
    kept = [n for n, argument in enumerate(block.args) if argument.uses]
    for argument in [a for a in block.args if not a.uses]:
        block.erase_arg(argument)
    op.operands = [op.inputs[n] for n in kept]
    op.properties["axes"] = axes_attr([axes[n] for n in kept])


@dataclass
class Signature:
    """A kernel and its only launch, whose arguments change together."""

    kernel: tile.KernelOp
    launch: tile.LaunchOp

    def add(self, value: SSAValue, hint: str) -> SSAValue:
        """One more argument, from a value of the plan."""
        block = self.kernel.body.block
        argument = block.insert_arg(value.type, len(block.args))
        argument.name_hint = hint
        self._relaunch(list(self.launch.grid), [*self.launch.arguments, value])
        return argument

    def passed(self, argument: SSAValue) -> SSAValue:
        """The plan's value for an argument of the kernel."""
        return self.launch.arguments[self.kernel.body.block.args.index(argument)]

    def replace(self, argument: SSAValue, value: SSAValue) -> SSAValue:
        """An argument passed as another value of the plan, of another type."""
        block = self.kernel.body.block
        place = block.args.index(argument)
        arguments = list(self.launch.arguments)
        arguments[place] = value
        new = Rewriter.replace_value_with_new_type(argument, value.type)
        self._relaunch(list(self.launch.grid), arguments)
        return new

    def drop_unused(self) -> None:
        block = self.kernel.body.block
        kept = [value for value, a in zip(self.launch.arguments, block.args, strict=True) if a.uses]
        for argument in [a for a in block.args if not a.uses]:
            block.erase_arg(argument)
        self._relaunch(list(self.launch.grid), kept)

    def grid(self, grid: Sequence[SSAValue]) -> None:
        self._relaunch(grid, list(self.launch.arguments))

    def _relaunch(self, grid: Sequence[SSAValue], arguments: Sequence[SSAValue]) -> None:
        new = tile.LaunchOp(self.kernel.sym_name.data, grid, arguments)
        Rewriter.insert_op(new, InsertPoint.before(self.launch))
        self.launch.detach()
        self.launch.erase()
        self.launch = new
