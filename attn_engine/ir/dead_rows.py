"""Which extrema tell that a row is dead: that it has no visible key, or none with a finite score."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xdsl.dialects import arith
from xdsl.dialects import math as xmath
from xdsl.dialects.builtin import FloatAttr
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects.attn import ReduceKind, RowReduceOp
from attn_engine.ir.walks import behind, operands_of

IDENTITY = {ReduceKind.MAX: -math.inf, ReduceKind.MIN: math.inf}
"""What an extremum gives of nothing."""


def tells_dead_rows(op: Operation | Block) -> bool:
    """Whether a row is dead where this reduction gives what it gives of nothing.

    An extremum of scores is. One of only some of them, the others being infinities that the row function puts in
    their place, may be over none in a row that has scores: unless it, or a log-sum-exp that is infinite with it, is
    subtracted from them, as in a softmax, which leaves nothing of such a row.
    """
    if not isinstance(op, RowReduceOp) or op.kind.data not in IDENTITY:
        return False
    if not has_infinities(op.value):
        return True
    subtracted = [use.operation.operands[1] for use in op.value.uses if isinstance(use.operation, arith.SubfOp)]
    known = _of_none(op) if any(value is not op.value for value in subtracted) else {}
    return any(known.get(value) == IDENTITY[op.kind.data] for value in subtracted if value is not op.value)


def _of_none(extremum: RowReduceOp) -> dict[SSAValue, float]:
    """What code around an extremum gives in a row where it is over nothing, as far as that follows."""
    identity = IDENTITY[extremum.kind.data]
    known: dict[SSAValue, float] = {extremum.value: identity, extremum.result: identity}
    assert extremum.parent is not None
    for op in extremum.parent.ops:
        if len(op.results) == 1 and op.results[0] not in known:
            number = _computed(op, [known.get(operand) for operand in op.operands])
            if number is not None:
                known[op.results[0]] = number
    return known


def _computed(op: Operation, given: Sequence[float | None]) -> float | None:
    if isinstance(op, arith.ConstantOp):
        return op.value.value.data if isinstance(op.value, FloatAttr) else None
    if isinstance(op, arith.SelectOp):
        return None if given[0] is None else given[1] if given[0] else given[2]
    numbers = [number for number in given if number is not None]
    if len(numbers) < len(given):
        return None
    match op, numbers:
        case arith.AddfOp(), [a, b]:
            return a + b
        case arith.SubfOp(), [a, b]:
            return a - b
        case xmath.ExpOp(), [x] if x <= 0:
            return math.exp(x)
        case xmath.LogOp(), [0.0]:
            return -math.inf
        case RowReduceOp(), [x] if op.kind.data in IDENTITY or (op.kind.data is ReduceKind.SUM and x == 0):
            return x
        case arith.CmpfOp(), [a, b] if arith.CMPF_COMPARISON_OPERATIONS[op.predicate.value.data] == "oeq":
            return float(a == b)
        case _:
            return None


def has_infinities(value: SSAValue) -> bool:
    """Whether code puts infinities in the place of some scores."""
    return any(_is_infinite(v) for v in behind([value], _of_elements))


def _of_elements(value: SSAValue) -> tuple[SSAValue, ...]:
    return () if isinstance(value.owner, RowReduceOp) else tuple(operands_of(value))


def _is_infinite(value: SSAValue) -> bool:
    number = value.owner.value if isinstance(value.owner, arith.ConstantOp) else None
    return isinstance(number, FloatAttr) and math.isinf(number.value.data)
