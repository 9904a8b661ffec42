"""Which extrema tell that a row is dead: that it has no visible key, or none with a finite score."""

from __future__ import annotations

import math

from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects.attn import ReduceKind, RowReduceOp
from attn_engine.ir.walks import behind, operands_of


def tells_dead_rows(op: Operation | Block) -> bool:
    """Whether a row is dead where this reduction gives what it gives of nothing.

    An extremum of scores is. One of only some of them, the others being infinities that the row function puts in
    their place, may be over none in a row that has scores: unless it is subtracted from them, as in a softmax, which
    leaves nothing of such a row.
    """
    if not isinstance(op, RowReduceOp) or op.kind.data not in (ReduceKind.MAX, ReduceKind.MIN):
        return False
    if not any(_is_infinite(v) for v in behind([op.value], _of_elements)):
        return True
    differences = [use.operation for use in op.result.uses if isinstance(use.operation, arith.SubfOp)]
    return any(d.lhs is op.value and d.rhs is op.result for d in differences)


def _of_elements(value: SSAValue) -> tuple[SSAValue, ...]:
    return () if isinstance(value.owner, RowReduceOp) else tuple(operands_of(value))


def _is_infinite(value: SSAValue) -> bool:
    number = value.owner.value if isinstance(value.owner, arith.ConstantOp) else None
    return isinstance(number, FloatAttr) and math.isinf(number.value.data)
