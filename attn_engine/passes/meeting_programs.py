"""Which programs of a launch add to the same place of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith, scf
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.simplify_constants import constant_of

Runner = int | Block
"""What runs while a kernel does: an axis of the grid, or a loop, by its body."""


@dataclass(frozen=True, eq=False)
class Add:
    """An addition to memory by the programs of a kernel."""

    op: tile.AtomicAddOp | tile.ScatterAddOp
    kernel: tile.KernelOp


def meetings(add: Add) -> tuple[int, ...] | None:
    """The axes of the grid along which contributions meet in one place; None if others may, in a loop or in a tile."""
    op = add.op
    axes = tile.axes_of(op.axes) if isinstance(op, tile.ScatterAddOp) else [()] * len(op.indices)
    runners, tiles = set[Runner](), set[int]()
    for index, own in zip(op.indices, axes, strict=False):
        found = _walked(index)
        if found is not None:
            runners |= found
            tiles |= set(own)
    loops = _loops(op)
    if not loops <= runners or set(range(len(tile.shape_of(op.value)))) - tiles:
        return None
    grid = {o.axis.value.data for o in add.kernel.walk() if isinstance(o, tile.ProgramIdOp)}
    return tuple(sorted(grid - runners))


def _loops(op: Operation) -> set[Block]:
    found, parent = set[Block](), op.parent_op()
    while parent is not None and not isinstance(parent, tile.KernelOp):
        if isinstance(parent, scf.ForOp):
            found.add(parent.body.block)
        parent = parent.parent_op()
    return found


def _walked(index: SSAValue) -> set[Runner] | None:
    """What tells the values of an index apart: different iterations, and different elements of a tile, have different
    ones. None where that is not known."""
    owner = index.owner
    if isinstance(owner, arith.ExtSIOp | arith.IndexCastOp):
        return _walked(owner.operands[0])
    if isinstance(owner, tile.ProgramIdOp):
        return {owner.axis.value.data}
    if isinstance(owner, tile.RangeOp):
        return _started(owner.start, tile.shape_of(owner.result)[0])
    if isinstance(owner, tile.MapOp):
        return _mapped(owner, index)
    return None


def _mapped(op: tile.MapOp, result: SSAValue) -> set[Runner] | None:
    """A map that only widens one of its operands."""
    last = op.body.block.last_op
    assert last is not None
    value = last.operands[list(op.outputs).index(result)]  # type: ignore[arg-type]
    while isinstance(value.owner, arith.ExtSIOp):
        value = value.owner.input
    if not isinstance(value, BlockArgument) or value.block is not op.body.block:
        return None
    same = len(tile.axes_of(op.axes)[value.index]) == len(tile.shape_of(op.outputs[0]))
    return _walked(op.inputs[value.index]) if same else None


def _started(start: SSAValue, size: int) -> set[Runner] | None:
    """By what the starts of blocks of `size` differ."""
    owner = start.owner
    if isinstance(start, BlockArgument):
        loop = start.block.parent_op()
        if isinstance(loop, scf.ForOp) and start.index == 0:
            step = constant_of(loop.step)
            return {start.block} if step is not None and step >= size else None
        return None
    if isinstance(owner, arith.MuliOp):
        for number, factor in ((owner.lhs, owner.rhs), (owner.rhs, owner.lhs)):
            times = constant_of(factor)
            if times is not None and times >= size:
                return _program(number)
    return None


def _program(number: SSAValue) -> set[Runner] | None:
    """A program id, or how far it is from a last one."""
    owner = number.owner
    if isinstance(owner, arith.SubiOp):
        return _program(owner.rhs)
    return {owner.axis.value.data} if isinstance(owner, tile.ProgramIdOp) else None
