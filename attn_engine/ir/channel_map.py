"""Which channel an index of `attn.channel_at` names for each channel, and the map back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Operation, SSAValue

Numbers: TypeAlias = Any
"""An array of integers or truth values, or one of them."""

_COMPUTE: dict[type[Operation], Callable[..., Numbers]] = {
    arith.AddiOp: np.add,
    arith.SubiOp: np.subtract,
    arith.MuliOp: np.multiply,
    arith.MaxSIOp: np.maximum,
    arith.MinSIOp: np.minimum,
    arith.FloorDivSIOp: np.floor_divide,
    arith.AndIOp: np.bitwise_and,
    arith.OrIOp: np.bitwise_or,
    arith.XOrIOp: np.bitwise_xor,
    arith.ShLIOp: np.left_shift,
    arith.ShRSIOp: np.right_shift,
    arith.SelectOp: np.where,
    arith.ExtUIOp: np.int64,
}
_COMPARE: dict[int, Callable[..., Numbers]] = dict(
    enumerate((np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal))
)


def channel_table(index: SSAValue, channel: SSAValue, channels: int) -> list[int] | None:
    """What an index is for each channel; None if it is made of more than the channel and integer arithmetic."""
    numbers = _evaluated(index, {channel: np.arange(channels)})
    return None if numbers is None else [int(n) for n in np.broadcast_to(numbers, (channels,))]


def _evaluated(value: SSAValue, known: dict[SSAValue, Numbers]) -> Numbers | None:
    if value not in known:
        known[value] = _computed(value.owner, known) if isinstance(value.owner, Operation) else None
    return known[value]


def _computed(op: Operation, known: dict[SSAValue, Numbers]) -> Numbers | None:
    if isinstance(op, arith.ConstantOp):
        return np.int64(op.value.value.data) if isinstance(op.value, IntegerAttr) else None
    operands: list[Numbers] = [_evaluated(operand, known) for operand in op.operands]
    if any(operand is None for operand in operands):
        return None
    compute = _COMPUTE.get(type(op))
    if isinstance(op, arith.CmpiOp):
        compute = _COMPARE.get(op.predicate.value.data)
    return None if compute is None else compute(*operands)


def is_permutation(table: Sequence[int]) -> bool:
    return sorted(table) == list(range(len(table)))


def is_involution(table: Sequence[int]) -> bool:
    """Whether going twice leads back."""
    return all(table[other] == channel for channel, other in enumerate(table))


def roll_of(table: Sequence[int]) -> int | None:
    """k where every channel c names (c + k) mod channels."""
    size = len(table)
    by = table[0] if size else 0
    return by if all(other == (channel + by) % size for channel, other in enumerate(table)) else None
