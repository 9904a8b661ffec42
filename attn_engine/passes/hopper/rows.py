"""Which axis of a tile runs along the queries, found from where tiles come from and how ops combine them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp, PinOp, ReducePartialOp, WaitOp
from attn_engine.dialects.tile_types import PendingType
from attn_engine.passes.hopper.edit import Before, yields

Pair = tuple[SSAValue, SSAValue, dict[int, int]]
"""Two values, and which axis of the first is which of the second."""


def walk(block: Block) -> Iterator[Operation]:
    """The ops of a block and of its loops; maps are scalar inside."""
    for op in block.ops:
        yield op
        if isinstance(op, scf.ForOp):
            yield from walk(op.body.block)


def own_constants(block: Block) -> None:
    """Gives every use of a constant tile a constant of its own, in front of the user."""
    for op in list(walk(block)):
        for place, operand in enumerate(op.operands):
            owner = operand.owner
            if isinstance(owner, arith.ConstantOp) and isinstance(operand.type, TensorType):
                clone = Before(op).add(owner.clone())
                op.operands[place] = clone.result
    for op in list(walk(block)):
        if isinstance(op, arith.ConstantOp) and isinstance(op.result.type, TensorType) and not op.result.uses:
            op.detach()
            op.erase()


def row_axes(block: Block, seeds: dict[SSAValue, int]) -> dict[SSAValue, int]:
    """The axis of the queries of every tile that has one; `seeds` are known."""
    pairs = [pair for op in walk(block) for pair in _pairs(op)]
    axes = dict(seeds)
    changed = True
    while changed:
        changed = False
        for a, b, forth in pairs:
            changed |= _spread(axes, a, b, forth)
            changed |= _spread(axes, b, a, {there: here for here, there in forth.items()})
    return axes


def _spread(axes: dict[SSAValue, int], source: SSAValue, target: SSAValue, forth: dict[int, int]) -> bool:
    if source not in axes or target in axes or axes[source] not in forth or not _is_tile(target):
        return False
    axes[target] = forth[axes[source]]
    return True


def _is_tile(value: SSAValue) -> bool:
    return isinstance(value.type, TensorType | PendingType)


def _pairs(op: Operation) -> Iterator[Pair]:
    rule = _RULES.get(type(op))
    if rule is not None:
        yield from rule(op)


def _map(op: tile.MapOp) -> Iterator[Pair]:
    first = op.outputs[0]
    for other in op.outputs[1:]:
        yield first, other, _same(first)
    for value, axes in zip(op.inputs, tile.axes_of(op.axes), strict=True):
        yield value, first, dict(enumerate(axes))


def _same(value: SSAValue) -> dict[int, int]:
    type_ = value.type.value if isinstance(value.type, PendingType) else value.type
    return {n: n for n in range(len(tile.shape_of(type_)))}


def _reduce(op: tile.ReduceOp) -> Iterator[Pair]:
    axis, rank = op.axis.value.data, len(tile.shape_of(op.value))
    yield op.value, op.result, {n: n - (n > axis) for n in range(rank) if n != axis}


def _first_axis(op: ReducePartialOp) -> Iterator[Pair]:
    yield op.value, op.result, {0: 0}


def _transpose(op: tile.TransposeOp) -> Iterator[Pair]:
    yield op.value, op.result, {0: 1, 1: 0}


def _one_to_one(op: DotOperandOp | PinOp | tile.ScanOp) -> Iterator[Pair]:
    yield op.value, op.result, _same(op.value)


def _async_dot(op: AsyncDotOp) -> Iterator[Pair]:
    yield op.a, op.result, {0: 0}
    if op.acc is not None:
        yield op.acc, op.result, _same(op.acc)


def _wait(op: WaitOp) -> Iterator[Pair]:
    for pending, value in zip(op.pending, op.values, strict=True):
        yield pending, value, _same(value)


def _scatter_add(op: tile.ScatterAddOp) -> Iterator[Pair]:
    operands = [*op.indices, *([op.guard] if op.guard is not None else [])]
    for operand, axes in zip(operands, tile.axes_of(op.axes), strict=True):
        yield operand, op.value, dict(enumerate(axes))


def _for(op: scf.ForOp) -> Iterator[Pair]:
    inside, ends = op.body.block.args[1:], yields(op.body.block).operands
    for group in zip(op.iter_args, inside, ends, op.results, strict=True):
        for a, b in pairwise(group):
            yield a, b, _same(a)


_RULES: dict[type[Operation], Callable[..., Iterator[Pair]]] = {
    tile.MapOp: _map,
    tile.ReduceOp: _reduce,
    tile.TransposeOp: _transpose,
    tile.ScanOp: _one_to_one,
    DotOperandOp: _one_to_one,
    PinOp: _one_to_one,
    ReducePartialOp: _first_axis,
    AsyncDotOp: _async_dot,
    WaitOp: _wait,
    scf.ForOp: _for,
    tile.ScatterAddOp: _scatter_add,
}
