"""All algebraic rules on scalar code, by operation."""

from __future__ import annotations

from xdsl.dialects import arith
from xdsl.dialects.builtin import BFloat16Type, Float16Type, Float32Type, Float64Type, IntegerType
from xdsl.ir import Attribute, Operation

from attn_engine.dialects import attn
from attn_engine.passes.simplify_constants import constant, constant_of
from attn_engine.passes.simplify_floats import FLOAT_RULES
from attn_engine.passes.simplify_integers import INTEGER_RULES
from attn_engine.passes.simplify_rule import Change, Rule

# Not tensors, not `index`: rules make constants of the result's type.
SCALARS: frozenset[type[Attribute]] = frozenset((IntegerType, Float16Type, BFloat16Type, Float32Type, Float64Type))
COMMUTATIVE: frozenset[type[Operation]] = frozenset(
    {
        arith.AddfOp,
        arith.AddiOp,
        arith.AndIOp,
        arith.MaximumfOp,
        arith.MaxSIOp,
        arith.MinimumfOp,
        arith.MinSIOp,
        arith.MulfOp,
        arith.MuliOp,
        arith.OrIOp,
        arith.XOrIOp,
    }
)


def _constant_right(op: Operation) -> Change:
    if type(op) not in COMMUTATIVE:
        return None
    a, b = op.operands
    if constant_of(a) is None or constant_of(b) is not None:
        return None
    return [type(op).create(operands=[b, a], result_types=[op.results[0].type], properties=dict(op.properties))]


def _count(op: Operation) -> Change:
    """A count does not look at its value: all counts of a region become the same."""
    assert isinstance(op, attn.RowReduceOp)
    if op.kind.data != attn.ReduceKind.COUNT or constant_of(op.value) is not None:
        return None
    return [one := constant(1.0, op.value.type), attn.RowReduceOp(attn.ReduceKind.COUNT, one)]


RULES: dict[type[Operation], Rule] = {**FLOAT_RULES, **INTEGER_RULES, attn.RowReduceOp: _count}


def rewrite(op: Operation) -> Change:
    """The change that some rule makes to this scalar operation, if any."""
    if len(op.results) != 1 or type(op.results[0].type) not in SCALARS:
        return None
    if (change := _constant_right(op)) is not None:
        return change
    rule = RULES.get(type(op))
    return None if rule is None else rule(op)
