"""Which tiles a CPU kernel may overwrite: a temporary at its last use lends its memory to the result.

A tile is *owned* when one name, and no view, stands for a buffer of its own: the result of a scalar op
that has all axes of its map, of a dot, or of a loop whose carry is owned in every iteration. A tile is
*local* when its buffer is free again at the end of the block that makes it.
"""

from __future__ import annotations

from collections.abc import Set

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, f32
from xdsl.ir import BlockArgument, Operation, OpResult, SSAValue

from attn_engine.backends.cpu.types import IN_PLACE
from attn_engine.dialects import tile
from attn_engine.ir.walks import behind


def axes_in_map(value: SSAValue, map_: tile.MapOp) -> frozenset[int]:
    """The axes of the result that a value inside a map certainly has."""
    axes = tile.axes_of(map_.axes)
    arguments = [v for v in behind([value]) if isinstance(v, BlockArgument)]
    return frozenset[int]().union(*(axes[argument.index] for argument in arguments))


def last_use(value: SSAValue, op: Operation) -> bool:
    """Whether `op` reads a value last, in the block that defines it, and no view of it was made before."""
    block = value.owner if isinstance(value, BlockArgument) else value.owner.parent
    if op.parent is not block or list(op.operands).count(value) != 1:
        return False
    users = {use.operation for use in value.uses} - {op}
    return all(user.parent is block and user.is_before_in_block(op) and _only_reads(user, value) for user in users)


_READERS = (
    tile.DotOp,
    tile.ReduceOp,
    tile.ScanOp,
    tile.ConcatOp,
    tile.StoreOp,
    tile.AtomicAddOp,
    tile.ScatterAddOp,
    tile.AddDiagonalsOp,
    arith.CmpfOp,
)


def _only_reads(user: Operation, value: SSAValue) -> bool:
    """Whether no result of the user can be a view of the value."""
    if isinstance(user, tile.MapOp):
        arguments = [a for a, operand in zip(user.body.block.args, user.inputs, strict=True) if operand is value]
        return all(_only_reads(use.operation, argument) for argument in arguments for use in argument.uses)
    if isinstance(user, arith.SelectOp):
        # With a plain bool as condition a choice is one of its operands.
        map_ = user.parent_op()
        return isinstance(map_, tile.MapOp) and bool(axes_in_map(user.cond, map_))
    return isinstance(user, _READERS) or type(user) in IN_PLACE


def owned(value: SSAValue, uniform: Set[SSAValue], assumed: frozenset[SSAValue] = frozenset()) -> bool:
    """Whether a tile of f32 has a buffer of its own; `uniform` are the scalars on which programs agree.

    `assumed` are carries under inspection: that they are owned is the induction hypothesis over iterations.
    """
    if value in assumed:
        return True
    if tile.element_of(value) != f32:
        return False
    if isinstance(value, BlockArgument):
        parent = value.block.parent_op()
        if isinstance(parent, tile.MapOp):
            return _owned_in_map(value, parent, uniform, assumed)
        return isinstance(parent, scf.ForOp) and _owned_carry(value, parent, uniform, assumed)
    assert isinstance(value, OpResult)
    match value.op:
        case tile.DotOp():
            return True
        case tile.MapOp() as map_:
            last = map_.body.block.last_op
            return last is not None and _fresh(last.operands[value.index], map_, last)
        case scf.ForOp() as loop:
            return _owned_carry(loop.body.block.args[value.index + 1], loop, uniform, assumed)
        case _:
            map_ = value.op.parent_op()
            return isinstance(map_, tile.MapOp) and _is_fresh(value, map_)


def _is_fresh(value: SSAValue, map_: tile.MapOp) -> bool:
    """The result of an op that makes a new tensor with all axes of the map."""
    if not isinstance(value, OpResult) or type(value.op) not in IN_PLACE:
        return False
    return len(axes_in_map(value, map_)) == len(tile.shape_of(map_.outputs[0]))


def _fresh(value: SSAValue, map_: tile.MapOp, last: Operation) -> bool:
    return _is_fresh(value, map_) and list(last.operands).count(value) == 1


def _owned_in_map(value: BlockArgument, map_: tile.MapOp, uniform: Set[SSAValue], assumed: frozenset[SSAValue]) -> bool:
    operand = map_.inputs[value.index]
    if len(tile.axes_of(map_.axes)[value.index]) != len(tile.shape_of(map_.outputs[0])):
        return False
    return last_use(operand, map_) and owned(operand, uniform, assumed)


def _owned_carry(value: BlockArgument, loop: scf.ForOp, uniform: Set[SSAValue], assumed: frozenset[SSAValue]) -> bool:
    """Never in a masked loop, which reads the old carry again after the new one is made."""
    if value.index == 0 or not all(bound in uniform for bound in (loop.lb, loop.ub, loop.step)):
        return False
    initial, last = loop.iter_args[value.index - 1], loop.body.block.last_op
    assert last is not None
    new = last.operands[value.index - 1]
    if isinstance(new, BlockArgument) or not last_use(new, last) or not owned(new, uniform, assumed | {value}):
        return False
    return _is_splat(initial) or (last_use(initial, loop) and owned(initial, uniform, assumed))


def _is_splat(value: SSAValue) -> bool:
    """A splat constant is an expanded number, which `Programs.own` never hands out."""
    op = value.owner
    return isinstance(op, arith.ConstantOp) and isinstance(op.value, DenseIntOrFPElementsAttr) and op.value.is_splat()


def local(value: SSAValue) -> bool:
    """Whether nothing that may share a value's buffer is read after the block that makes it, or its map."""
    map_ = value.owner.parent_op() if isinstance(value.owner, Operation) else None
    if isinstance(map_, tile.MapOp):
        return all(local(map_.outputs[n]) for n in _shared_outputs(value, map_))
    return all(_stays(use.operation, value) for use in value.uses)


def _stays(user: Operation, value: SSAValue) -> bool:
    """Whether a use, and all uses of results that may be in the same buffer, are in the value's own block."""
    owner = value.owner
    if not isinstance(owner, Operation) or user.parent is None or user.parent is not owner.parent:
        return False
    if user is user.parent.last_op:
        return False
    match user:
        case tile.MapOp():
            arguments = [a for a, operand in zip(user.body.block.args, user.inputs, strict=True) if operand is value]
            outputs = {n for argument in arguments for n in _shared_outputs(argument, user)}
            return all(local(user.outputs[n]) for n in outputs)
        case tile.DotOp():
            return value is not user.acc or local(user.result)
        case tile.ReduceOp() | tile.StoreOp() | tile.AtomicAddOp() | tile.ScatterAddOp():
            return True
        case tile.TransposeOp() | tile.SliceOp():
            return local(user.result)
        case _:
            return False


def _shared_outputs(value: SSAValue, map_: tile.MapOp) -> set[int]:
    """Outputs of a map that may be in the buffer of a value inside of it; comparisons make new ones."""
    last = map_.body.block.last_op

    def results(value: SSAValue) -> list[SSAValue]:
        users = [use.operation for use in value.uses]
        return [r for user in users if not isinstance(user, arith.CmpfOp) for r in user.results]

    return {use.index for v in behind([value], results) for use in v.uses if use.operation is last}
