"""Where a step's weights are all known: a pin on a value that depends on each of them."""

from __future__ import annotations

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import Block, Operation, SSAValue
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp, PinOp, ReducePartialOp
from attn_engine.passes.hopper.edit import After, Before, yields

GROUPS, WIDTH = 4, 2
"""Columns that one thread holds: neighbours in pairs, shared by the four threads of a row."""


def behind(ops: list[Operation], roots: list[SSAValue]) -> set[Operation]:
    """The ops that depend on some values."""
    known, found = set(roots), set[Operation]()
    for op in ops:
        if any(o in known for o in op.operands):
            found.add(op)
            known.update(op.results)
    return found


def is_rounding(op: tile.MapOp) -> bool:
    """Whether a map rounds and does nothing else."""
    return [type(o) for o in op.body.block.ops] == [arith.TruncFOp, tile.MapYieldOp]


def round_alone(body: Block) -> None:
    """Rounds the weights of the last product of a block in a map of its own, which can then be moved."""
    move = _move(body)
    if move is None:
        return
    weights = move.value
    source = weights.owner
    if not isinstance(source, tile.MapOp) or is_rounding(source):
        return
    end = source.body.block.last_op
    assert isinstance(end, tile.MapYieldOp)
    number = source.outputs.index(weights)
    rounded = end.values[number].owner
    if not isinstance(rounded, arith.TruncFOp):
        return
    kept = [n for n in range(len(source.outputs)) if n != number]
    wide = rounded.input
    values = [end.values[n] for n in kept]
    values += [] if wide in values else [wide]
    end.operands = values
    if not rounded.result.uses:
        Rewriter.erase_op(rounded)
    types = [TensorType(v.type, tile.shape_of(weights)) for v in values]
    new = tile.MapOp(list(source.inputs), tile.axes_of(source.axes), types, source.detach_region(source.body))
    scope = After(source)
    scope.add(new)
    for n, now in zip(kept, new.outputs, strict=False):
        now.name_hint = source.outputs[n].name_hint
        source.outputs[n].replace_all_uses_with(now)
    weights.replace_all_uses_with(_round(scope, new.outputs[values.index(wide)], weights))
    Rewriter.erase_op(source)


def _round(scope: After, wide: SSAValue, like: SSAValue) -> SSAValue:
    body = Block(arg_types=[f32])
    narrow = arith.TruncFOp(body.args[0], tile.element_of(like))
    body.add_ops([narrow, tile.MapYieldOp(narrow)])
    return scope.add(tile.MapOp([wide], [[0, 1]], [like.type], body), like.name_hint or "p").outputs[0]


def _move(body: Block) -> DotOperandOp | None:
    """The move of the weights into an operand of the block's last product."""
    dots = [o for o in body.ops if isinstance(o, AsyncDotOp)]
    move = dots[-1].a.owner if dots else None
    return move if isinstance(move, DotOperandOp) and isinstance(move.value.owner, tile.MapOp) else None


def pin_weights(body: Block) -> None:
    """Pins, in front of the second product of a loop's body, a state that depends on all weights, else their sums."""
    move = _move(body)
    if move is None:
        return
    rounds = move.value.owner
    assert isinstance(rounds, tile.MapOp)
    weights, ends = rounds.inputs[0], yields(body)
    source = weights.owner
    assert isinstance(source, Operation)
    before = [op for op in body.ops if op.is_before_in_block(move)]
    after = behind(before, list(source.results))
    states = [n for n, end in enumerate(ends.operands) if end.owner in after and _is_real(end)]
    scope = Before(move)
    if states:
        end = ends.operands[states[-1]]
        ends.operands[states[-1]] = scope.add(PinOp(end), end.name_hint or "pinned").result
    elif _is_real(weights):
        sums = ReducePartialOp(tile.ReductionAttr(tile.Reduction.SUM), weights, GROUPS, WIDTH)
        scope.add(PinOp(scope.add(sums, "sums")), "pinned")


def _is_real(value: SSAValue) -> bool:
    return isinstance(value.type, TensorType) and tile.element_of(value) == f32
