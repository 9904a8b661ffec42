"""Whether a row function is a softmax: a structural proof on its region."""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import FloatAttr
from xdsl.ir import Block, SSAValue

from attn_engine.ir.axes import ROW, SCORE, SCORE_INDICES, Axes, axes_of_region

LOG2_E = 1.4426950408889634


class _Shape:
    """Questions about the values of one row region."""

    def __init__(self, block: Block):
        self.score = block.args[0]
        rest: list[Axes] = [frozenset()] * (len(block.args) - 5)
        self.axes = axes_of_region(block, [SCORE, *SCORE_INDICES, *rest])
        self._known: dict[tuple[SSAValue, float | None], bool] = {}

    def of_row(self, value: SSAValue) -> bool:
        return self.axes[value] <= ROW

    def is_weight(self, value: SSAValue) -> bool:
        """exp(s - row) times values of the row, or 0 where a condition of the row says so."""
        return self._once(value, None, self._is_weight)

    def _once(self, value: SSAValue, factor: float | None, test: Callable[[SSAValue], bool]) -> bool:
        """The answer for a value, which many products may share, found once."""
        key = (value, factor)
        if key not in self._known:
            self._known[key] = test(value)
        return self._known[key]

    def _is_weight(self, value: SSAValue) -> bool:
        op = value.owner
        match op:
            case arith.MulfOp():
                return self._one_side(op.lhs, op.rhs, self.is_weight)
            case arith.DivfOp():
                return self.is_weight(op.lhs) and self.of_row(op.rhs)
            case arith.SelectOp() if self.of_row(op.cond):
                return self._one_side(op.lhs, op.rhs, self.is_weight)
            case math.ExpOp():
                return self.is_shifted_score(op.operand, 1.0)
            case math.Exp2Op():
                return self.is_shifted_score(op.operand, LOG2_E)
            case _:
                return False

    def is_shifted_score(self, value: SSAValue, factor: float) -> bool:
        """factor * s plus values of the row."""
        return self._once(value, factor, lambda v: self._is_shifted_score(v, factor))

    def _is_shifted_score(self, value: SSAValue, factor: float) -> bool:
        if value is self.score:
            return factor == 1.0
        op = value.owner
        match op:
            case arith.AddfOp():
                return self._one_side(op.lhs, op.rhs, lambda v: self.is_shifted_score(v, factor))
            case arith.SubfOp():
                return self.is_shifted_score(op.lhs, factor) and self.of_row(op.rhs)
            case arith.MulfOp():
                left, right = _constant(op.lhs), _constant(op.rhs)
                number, other = (left, op.rhs) if left is not None else (right, op.lhs)
                return number is not None and _near(number, factor) and self.is_shifted_score(other, 1.0)
            case _:
                return False

    def _one_side(self, a: SSAValue, b: SSAValue, test: Callable[[SSAValue], bool]) -> bool:
        return (self.of_row(b) and test(a)) or (self.of_row(a) and test(b))


def _constant(value: SSAValue) -> float | None:
    op = value.owner
    return op.value.value.data if isinstance(op, arith.ConstantOp) and isinstance(op.value, FloatAttr) else None


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * abs(b)


def is_softmax_like(row_region: Block, weight: SSAValue) -> bool:
    """Whether `weight` is exp(s - a) times b, with a and b the same for all keys of a row.

    True for softmax, softmax with a sink or an extra one, and for exp2 of scores times log2(e); the
    log-sum-exp of the scores means something for these only.
    """
    return _Shape(row_region).is_weight(weight)
