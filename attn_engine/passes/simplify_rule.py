"""What an algebraic rule on scalar code is, and what all of them use.

A rule gives None (no change), a value that is there already, or new operations whose last result replaces the old
one. Each makes the code shorter or moves a constant to the right, so that applying them ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerType
from xdsl.ir import Operation, SSAValue

Change: TypeAlias = "SSAValue | Sequence[Operation] | None"
Rule: TypeAlias = "Callable[[Operation], Change]"

I1 = IntegerType(1)


def predicate_of(op: arith.CmpiOp | arith.CmpfOp) -> str:
    """The predicate of a comparison as its keyword."""
    names = arith.CMPI_COMPARISON_OPERATIONS if isinstance(op, arith.CmpiOp) else arith.CMPF_COMPARISON_OPERATIONS
    return names[op.predicate.value.data]


def defined_by(value: SSAValue, *kinds: type[Operation]) -> Operation | None:
    """The operation that makes a value, if it is one of these."""
    return value.owner if isinstance(value.owner, kinds) else None
