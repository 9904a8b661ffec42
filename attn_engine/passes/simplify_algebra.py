"""Algebra on one scalar operation: rules that hold for every input, infinities, NaN and -0.0 included.

A rule gives None (no change), a value that is there already, or new operations whose last result replaces the old
one. Each makes the code shorter or moves a constant to the right, so that applying them ends.
"""

from __future__ import annotations

import math as pymath
from collections.abc import Callable, Sequence
from typing import TypeAlias

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import IntegerType
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.passes.simplify_constants import INF, constant, constant_of, is_constant

Change: TypeAlias = "SSAValue | Sequence[Operation] | None"
Rule: TypeAlias = "Callable[[Operation], Change]"

I1 = IntegerType(1)
BINARY_COMMUTATIVE = (
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
)
SWAPPED = {"eq": "eq", "ne": "ne", "slt": "sgt", "sle": "sge", "sgt": "slt", "sge": "sle"}
INVERTED = {"eq": "ne", "ne": "eq", "slt": "sge", "sle": "sgt", "sgt": "sle", "sge": "slt"}
_ORDERED_TO_UNORDERED = {
    "oeq": "une",
    "one": "ueq",
    "olt": "uge",
    "ole": "ugt",
    "ogt": "ule",
    "oge": "ult",
    "ord": "uno",
}
INVERTED_FLOATS = _ORDERED_TO_UNORDERED | {u: o for o, u in _ORDERED_TO_UNORDERED.items()}


def predicate_of(op: arith.CmpiOp | arith.CmpfOp) -> str:
    """The predicate of a comparison as its keyword."""
    names = arith.CMPI_COMPARISON_OPERATIONS if isinstance(op, arith.CmpiOp) else arith.CMPF_COMPARISON_OPERATIONS
    return names[op.predicate.value.data]


def _defined_by(value: SSAValue, *kinds: type[Operation]) -> Operation | None:
    return value.owner if isinstance(value.owner, kinds) else None


def never_negative_zero(value: SSAValue, depth: int = 8) -> bool:
    """Whether no input makes this value -0.0."""
    number, op = constant_of(value), value.owner
    if number is not None:
        return number != 0 or pymath.copysign(1, number) > 0
    if not depth or not isinstance(op, Operation):
        return False
    if isinstance(op, math.ExpOp | math.Exp2Op | math.AbsFOp | arith.SIToFPOp | arith.UIToFPOp):
        return True
    if isinstance(op, arith.AddfOp):
        # A sum is -0.0 only where both terms are.
        return any(never_negative_zero(v, depth - 1) for v in op.operands)
    if isinstance(op, arith.SelectOp):
        return all(never_negative_zero(v, depth - 1) for v in (op.lhs, op.rhs))
    return False


# --- floats --------------------------------------------------------------------------------------


def _constant_right(op: Operation) -> Change:
    a, b = op.operands
    if constant_of(a) is None or constant_of(b) is not None:
        return None
    return [type(op).create(operands=[b, a], result_types=[op.results[0].type], properties=dict(op.properties))]


def _addf(op: Operation) -> Change:
    a, b = op.operands
    if is_constant(b, -0.0) or (is_constant(b, 0.0) and never_negative_zero(a)):
        return a
    if negated := _defined_by(b, arith.NegfOp):
        return [arith.SubfOp(a, negated.operands[0])]
    if negated := _defined_by(a, arith.NegfOp):
        return [arith.SubfOp(b, negated.operands[0])]
    return None


def _subf(op: Operation) -> Change:
    a, b = op.operands
    if is_constant(b, 0.0):
        return a
    if is_constant(a, -0.0):
        return [arith.NegfOp(b)]
    if negated := _defined_by(b, arith.NegfOp):
        return [arith.AddfOp(a, negated.operands[0])]
    return None


def _mulf(op: Operation) -> Change:
    a, b = op.operands
    if is_constant(b, 1.0):
        return a
    if is_constant(b, -1.0):
        return [arith.NegfOp(a)]
    left, right = _defined_by(a, arith.NegfOp), _defined_by(b, arith.NegfOp)
    if left and right:
        return [arith.MulfOp(left.operands[0], right.operands[0])]
    number = constant_of(b)
    if left and number is not None:
        return [minus := constant(-number, b.type), arith.MulfOp(left.operands[0], minus)]
    return None


def _reciprocal(number: float) -> float | None:
    """1 / number where number is a power of two and the reciprocal a normal f32: then the product is exact."""
    if number == 0 or not pymath.isfinite(number) or abs(pymath.frexp(number)[0]) != 0.5:
        return None
    return 1 / number if 2.0**-126 <= abs(1 / number) < 2.0**128 else None


def _divf(op: Operation) -> Change:
    a, b = op.operands
    number = constant_of(b)
    if is_constant(b, 1.0):
        return a
    if number is None or (inverse := _reciprocal(number)) is None:
        return None
    return [factor := constant(inverse, b.type), arith.MulfOp(a, factor)]


def _negf(op: Operation) -> Change:
    if inner := _defined_by(op.operands[0], arith.NegfOp):
        return inner.operands[0]
    if (inner := _defined_by(op.operands[0], arith.MulfOp)) and len(list(inner.results[0].uses)) == 1:
        number = constant_of(inner.operands[1])
        if number is not None:
            return [minus := constant(-number, inner.results[0].type), arith.MulfOp(inner.operands[0], minus)]
    return None


def _absf(op: Operation) -> Change:
    inner = _defined_by(op.operands[0], arith.NegfOp, math.AbsFOp)
    return [math.AbsFOp(inner.operands[0])] if inner else None


def _extremum_of_floats(neutral: float) -> Rule:
    """maximumf with -inf, minimumf with inf, or either of equal values: NaN stays NaN."""

    def rule(op: Operation) -> Change:
        a, b = op.operands
        return a if a is b or is_constant(b, neutral) else None

    return rule


def _powf(op: Operation) -> Change:
    a, b = op.operands
    if is_constant(b, 1.0):
        return a
    if is_constant(b, 2.0):
        return [arith.MulfOp(a, a)]
    if constant_of(b) == 0 or is_constant(a, 1.0):
        return [constant(1.0, a.type)]
    if is_constant(b, -1.0):
        return [one := constant(1.0, a.type), arith.DivfOp(one, a)]
    return None


def _truncf(op: Operation) -> Change:
    inner = _defined_by(op.operands[0], arith.ExtFOp)
    return inner.operands[0] if inner and inner.operands[0].type == op.results[0].type else None


# --- integers ------------------------------------------------------------------------------------


def _with_constant(op: Operation, kind: type[Operation]) -> tuple[SSAValue, int] | None:
    """(x, c) where the first operand of op is `kind`(x, constant c)."""
    inner = _defined_by(op.operands[0], kind)
    number = constant_of(inner.operands[1]) if inner else None
    return (inner.operands[0], int(number)) if inner and number is not None else None


def _addi(op: Operation) -> Change:
    a, b = op.operands
    if is_constant(b, 0):
        return a
    number, inner = constant_of(b), _with_constant(op, arith.AddiOp)
    if number is not None and inner:
        return [total := constant(inner[1] + number, b.type), arith.AddiOp(inner[0], total)]
    for x, y in ((a, b), (b, a)):
        if (difference := _defined_by(x, arith.SubiOp)) and difference.operands[1] is y:
            return difference.operands[0]
    return None


def _subi(op: Operation) -> Change:
    a, b = op.operands
    if a is b:
        return [constant(0, a.type)]
    number = constant_of(b)
    if number is not None:
        return [minus := constant(-number, b.type), arith.AddiOp(a, minus)]
    if (total := _defined_by(a, arith.AddiOp)) and b in total.operands:
        return total.operands[1] if total.operands[0] is b else total.operands[0]
    return None


def _muli(op: Operation) -> Change:
    a, b = op.operands
    if is_constant(b, 1):
        return a
    if is_constant(b, 0):
        return b
    number, inner = constant_of(b), _with_constant(op, arith.MuliOp)
    if number is not None and inner:
        return [product := constant(inner[1] * number, b.type), arith.MuliOp(inner[0], product)]
    return None


def _divide(op: Operation) -> Change:
    return op.operands[0] if is_constant(op.operands[1], 1) else None


def _remainder(op: Operation) -> Change:
    return [constant(0, op.results[0].type)] if constant_of(op.operands[1]) in (1, -1) else None


def _extremum_of_integers(op: Operation) -> Change:
    a, b = op.operands
    if a is b:
        return a
    number, inner = constant_of(b), _with_constant(op, type(op))
    if number is not None and inner:
        pick = max if isinstance(op, arith.MaxSIOp) else min
        return [limit := constant(pick(inner[1], number), b.type), type(op)(inner[0], limit)]  # type: ignore[call-arg]
    return None


def _cmpi(op: Operation) -> Change:
    assert isinstance(op, arith.CmpiOp)
    a, b, name = op.lhs, op.rhs, predicate_of(op)
    if name not in SWAPPED:
        return None
    if a is b:
        return [constant(name in ("eq", "sle", "sge"), I1)]
    if a.type == I1 and name in ("eq", "ne") and (number := constant_of(b)) is not None:
        return a if number == (name == "eq") else [true := constant(1, I1), arith.XOrIOp(a, true)]
    if constant_of(a) is not None:
        return [arith.CmpiOp(b, a, SWAPPED[name])]
    if (wide := _defined_by(a, arith.ExtUIOp)) and wide.operands[0].type == I1 and is_constant(b, 0):
        return _flag_compare(wide.operands[0], name)
    return None


def _flag_compare(flag: SSAValue, name: str) -> Change:
    """A compare of 0 or 1 with 0."""
    if name in ("ne", "sgt"):
        return flag
    return [true := constant(1, I1), arith.XOrIOp(flag, true)] if name in ("eq", "sle") else None


# --- logic and selection -------------------------------------------------------------------------


def _negates(value: SSAValue) -> SSAValue | None:
    inner = _defined_by(value, arith.XOrIOp)
    return inner.operands[0] if inner and value.type == I1 and is_constant(inner.operands[1], 1) else None


def _and_or(absorbing: int) -> Rule:
    """`and` (absorbing false) and `or` (absorbing true) of i1; of wider integers only x op x."""

    def rule(op: Operation) -> Change:
        a, b = op.operands
        if a is b:
            return a
        if a.type != I1:
            return None
        if (number := constant_of(b)) is not None:
            return b if number == absorbing else a
        return [constant(absorbing, I1)] if _negates(a) is b or _negates(b) is a else None

    return rule


def _xori(op: Operation) -> Change:
    a, b = op.operands
    if a is b:
        return [constant(0, a.type)]
    if is_constant(b, 0):
        return a
    if a.type != I1 or not is_constant(b, 1):
        return None
    return _negates(a) or _inverted_compare(a)


def _inverted_compare(value: SSAValue) -> Change:
    """not (a < b) as a >= b, and for floats as the unordered opposite; where the compare has no other use."""
    compare = _defined_by(value, arith.CmpiOp, arith.CmpfOp)
    if not isinstance(compare, arith.CmpiOp | arith.CmpfOp) or len(list(value.uses)) != 1:
        return None
    table = INVERTED if isinstance(compare, arith.CmpiOp) else INVERTED_FLOATS
    opposite = table.get(predicate_of(compare))
    return [type(compare)(compare.lhs, compare.rhs, opposite)] if opposite else None


def _select(op: Operation) -> Change:
    cond, a, b = op.operands
    if a is b:
        return a
    if (number := constant_of(cond)) is not None:
        return a if number else b
    if (opposite := _negates(cond)) is not None:
        return [arith.SelectOp(opposite, b, a)]
    if (inner := _defined_by(a, arith.SelectOp)) and inner.operands[0] is cond:
        return [arith.SelectOp(cond, inner.operands[1], b)]
    if (inner := _defined_by(b, arith.SelectOp)) and inner.operands[0] is cond:
        return [arith.SelectOp(cond, a, inner.operands[2])]
    return _select_of_flags(cond, a, b) if a.type == I1 else None


def _select_of_flags(cond: SSAValue, a: SSAValue, b: SSAValue) -> Change:
    left, right = constant_of(a), constant_of(b)
    if left == 1 and right == 0:
        return cond
    if left == 0 and right == 1:
        return [true := constant(1, I1), arith.XOrIOp(cond, true)]
    if left == 1:
        return [arith.OrIOp(cond, b)]
    if right == 0:
        return [arith.AndIOp(cond, a)]
    return None


def _narrowed(op: Operation) -> Change:
    inner = _defined_by(op.operands[0], arith.ExtSIOp, arith.ExtUIOp)
    return inner.operands[0] if inner and inner.operands[0].type == op.results[0].type else None


def _count(op: Operation) -> Change:
    """A count does not look at its value: all counts of a region become the same."""
    assert isinstance(op, attn.RowReduceOp)
    if op.kind.data != attn.ReduceKind.COUNT or constant_of(op.value) is not None:
        return None
    return [one := constant(1.0, op.value.type), attn.RowReduceOp(attn.ReduceKind.COUNT, one)]


RULES: dict[type[Operation], tuple[Rule, ...]] = {
    arith.AddfOp: (_addf,),
    arith.SubfOp: (_subf,),
    arith.MulfOp: (_mulf,),
    arith.DivfOp: (_divf,),
    arith.NegfOp: (_negf,),
    math.AbsFOp: (_absf,),
    arith.MaximumfOp: (_extremum_of_floats(-INF),),
    arith.MinimumfOp: (_extremum_of_floats(INF),),
    math.PowFOp: (_powf,),
    arith.TruncFOp: (_truncf,),
    arith.AddiOp: (_addi,),
    arith.SubiOp: (_subi,),
    arith.MuliOp: (_muli,),
    arith.DivSIOp: (_divide,),
    arith.FloorDivSIOp: (_divide,),
    arith.CeilDivSIOp: (_divide,),
    arith.RemSIOp: (_remainder,),
    arith.MaxSIOp: (_extremum_of_integers,),
    arith.MinSIOp: (_extremum_of_integers,),
    arith.CmpiOp: (_cmpi,),
    arith.AndIOp: (_and_or(0),),
    arith.OrIOp: (_and_or(1),),
    arith.XOrIOp: (_xori,),
    arith.SelectOp: (_select,),
    arith.TruncIOp: (_narrowed,),
    attn.RowReduceOp: (_count,),
}
for _kind in BINARY_COMMUTATIVE:
    RULES[_kind] = (_constant_right, *RULES.get(_kind, ()))


def rewrite(op: Operation) -> Change:
    """The first rule that changes this operation, if any."""
    for rule in RULES.get(type(op), ()):
        if (change := rule(op)) is not None:
            return change
    return None
