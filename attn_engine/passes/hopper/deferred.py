"""Weights in two halves, of which a later step makes the second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType
from xdsl.ir import BlockArgument, SSAValue
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_product import DotOperandOp, JoinColumnsOp, PinOp, ReducePartialOp, SplitColumnsOp
from attn_engine.passes.hopper.edit import Before, drop_unread, erase_unused
from attn_engine.passes.hopper.pin import GROUPS, WIDTH, is_rounding

_BOTH = (0, 1)


@dataclass
class Weights:
    """How a step makes the operand of a product: weights, perhaps sums of them to pin, rounding, and the move into registers."""

    weights: tile.MapOp
    rounds: tile.MapOp
    move: DotOperandOp
    sums: ReducePartialOp | None = None

    @classmethod
    def of(cls, operand: SSAValue) -> Weights | None:
        """None for an operand that is made in any other way."""
        move = operand.owner
        if not isinstance(move, DotOperandOp):
            return None
        rounds = move.value.owner
        if not isinstance(rounds, tile.MapOp) or not is_rounding(rounds):
            return None
        weights, rest = rounds.inputs[0].owner, [use.operation for use in rounds.inputs[0].uses]
        if not isinstance(weights, tile.MapOp) or len(weights.outputs) != 1 or not _can_be_halved(weights):
            return None
        rest.remove(rounds)
        if not rest:
            return cls(weights, rounds, move)
        sums = rest[0]
        if len(rest) > 1 or not isinstance(sums, ReducePartialOp) or sums.kind.data is not tile.Reduction.SUM:
            return None
        users = [use.operation for use in sums.result.uses]
        pins = all(isinstance(user, PinOp) and not user.result.uses for user in users)
        return cls(weights, rounds, move, sums) if pins else None

    def late(self) -> list[SSAValue]:
        """What the second half of the weights reads, in front of them."""
        scope, axes = Before(self.weights), tile.axes_of(self.weights.axes)
        return [
            scope.add(SplitColumnsOp(value), "low", "late").high if a == _BOTH else value
            for value, a in zip(self.weights.inputs, axes, strict=True)
        ]

    def keep_first(self) -> SSAValue:
        """Leaves the first half of the weights, and their sums, behind `late`; the rounded ones are returned."""
        low = [self._low(v, axes) for v, axes in zip(self.weights.inputs, tile.axes_of(self.weights.axes), strict=True)]
        first = Before(self.weights).add(_like(self.weights, low), "low").outputs[0]
        if self.sums is not None:
            self.sums.result.replace_all_uses_with(Before(self.sums).add(_sums(self.sums, first), "sums").result)
        return Before(self.rounds).add(_like(self.rounds, [first]), "low").outputs[0]

    @staticmethod
    def _low(value: SSAValue, axes: tuple[int, ...]) -> SSAValue:
        splits = [use.operation for use in value.uses if isinstance(use.operation, SplitColumnsOp)]
        return splits[-1].low if axes == _BOTH else value

    def second(self, scope: Before, low: SSAValue, late: Sequence[SSAValue]) -> SSAValue:
        """The operand from its first half and what the second reads."""
        second = scope.add(_like(self.weights, late), "high").outputs[0]
        rounded = scope.add(_like(self.rounds, [second]), "high").outputs[0]
        joined = scope.add(JoinColumnsOp(low, rounded), "p").result
        return scope.add(self.move.clone({self.move.value: joined}), "operand").result

    def erase(self) -> None:
        for op in (self.move, self.rounds, self.sums, self.weights):
            if op is not None:
                Rewriter.erase_op(op)


def _can_be_halved(op: tile.MapOp) -> bool:
    """Whether its inputs are scores, or numbers of no axis."""
    axes, columns = tile.axes_of(op.axes), tile.shape_of(op.outputs[0])[1]
    return _BOTH in axes and all(a in ((), _BOTH) for a in axes) and columns % (2 * GROUPS * WIDTH) == 0


def _like(op: tile.MapOp, inputs: Sequence[SSAValue]) -> tile.MapOp:
    """The map on half of the columns."""
    rows, columns = tile.shape_of(op.outputs[0])
    half = TensorType(tile.element_of(op.outputs[0]), [rows, columns // 2])
    return tile.MapOp(list(inputs), tile.axes_of(op.axes), [half], op.body.clone())


def _sums(op: ReducePartialOp, value: SSAValue) -> ReducePartialOp:
    return ReducePartialOp(op.kind, value, op.groups.value.data, op.width.value.data)


def mask_apart(operand: SSAValue) -> None:
    """Hides scores in a map of its own, in front of the one that makes weights of them."""
    move = operand.owner
    rounds = move.value.owner if isinstance(move, DotOperandOp) else None
    weights = rounds.inputs[0].owner if isinstance(rounds, tile.MapOp) and is_rounding(rounds) else None
    if not isinstance(weights, tile.MapOp):
        return
    axes = tile.axes_of(weights.axes)
    for op in [o for o in weights.body.block.ops if isinstance(o, arith.SelectOp)]:
        score = op.lhs
        if isinstance(score, BlockArgument) and axes[score.index] == _BOTH and len(list(score.uses)) == 1:
            _hide(weights, op, score)
            return


def _hide(weights: tile.MapOp, select: arith.SelectOp, score: BlockArgument) -> None:
    body = weights.body.clone()
    block, place = body.block, list(weights.body.block.ops).index(select)
    hidden, *rest = list(block.ops)[place:]
    for op in reversed(rest):
        Rewriter.erase_op(op)
    block.add_op(tile.MapYieldOp(hidden))
    type_ = weights.inputs[score.index].type
    new = Before(weights).add(tile.MapOp(list(weights.inputs), tile.axes_of(weights.axes), [type_], body), "hidden")
    erase_unused(block)
    drop_unread(new)
    weights.operands[score.index] = new.outputs[0]
    select.result.replace_all_uses_with(score)
    Rewriter.erase_op(select)
    erase_unused(weights.body.block)
    drop_unread(weights)
