"""Algebra on integers and truth values; integers wrap at their width."""

from __future__ import annotations

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerType
from xdsl.ir import Operation, SSAValue

from attn_engine.passes.simplify_constants import constant, constant_of, is_constant
from attn_engine.passes.simplify_rule import I1, Change, Rule, defined_by, predicate_of

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


def _with_constant(op: Operation, kind: type[Operation]) -> tuple[SSAValue, int] | None:
    """(x, c) where the first operand of op is `kind`(x, constant c)."""
    inner = defined_by(op.operands[0], kind)
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
        if (difference := defined_by(x, arith.SubiOp)) and difference.operands[1] is y:
            return difference.operands[0]
    return None


def _subi(op: Operation) -> Change:
    a, b = op.operands
    if a is b:
        return [constant(0, a.type)]
    number = constant_of(b)
    if number is not None:
        return [minus := constant(-number, b.type), arith.AddiOp(a, minus)]
    if (total := defined_by(a, arith.AddiOp)) and b in total.operands:
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


def _shifted(kind: type[Operation]) -> Rule:
    """x << c as x * 2^c and x >> c as floor(x / 2^c), which the analysis of masks looks through."""

    def rule(op: Operation) -> Change:
        x, number = op.operands[0], constant_of(op.operands[1])
        if not isinstance(x.type, IntegerType) or number is None or not 0 <= number < x.type.width.data - 1:
            return None
        return [factor := constant(1 << int(number), x.type), kind(x, factor)]  # type: ignore[call-arg]

    return rule


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
    if (wide := defined_by(a, arith.ExtUIOp)) and wide.operands[0].type == I1 and is_constant(b, 0):
        return _flag_compare(wide.operands[0], name)
    return None


def _flag_compare(flag: SSAValue, name: str) -> Change:
    """A compare of 0 or 1 with 0."""
    if name in ("ne", "sgt"):
        return flag
    return [true := constant(1, I1), arith.XOrIOp(flag, true)] if name in ("eq", "sle") else None


# --- logic and selection -------------------------------------------------------------------------


def _negates(value: SSAValue) -> SSAValue | None:
    inner = defined_by(value, arith.XOrIOp)
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
    compare = defined_by(value, arith.CmpiOp, arith.CmpfOp)
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
    if (inner := defined_by(a, arith.SelectOp)) and inner.operands[0] is cond:
        return [arith.SelectOp(cond, inner.operands[1], b)]
    if (inner := defined_by(b, arith.SelectOp)) and inner.operands[0] is cond:
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
    inner = defined_by(op.operands[0], arith.ExtSIOp, arith.ExtUIOp)
    return inner.operands[0] if inner and inner.operands[0].type == op.results[0].type else None


INTEGER_RULES: dict[type[Operation], Rule] = {
    arith.AddiOp: _addi,
    arith.SubiOp: _subi,
    arith.MuliOp: _muli,
    arith.DivSIOp: _divide,
    arith.FloorDivSIOp: _divide,
    arith.CeilDivSIOp: _divide,
    arith.RemSIOp: _remainder,
    arith.ShLIOp: _shifted(arith.MuliOp),
    arith.ShRSIOp: _shifted(arith.FloorDivSIOp),
    arith.MaxSIOp: _extremum_of_integers,
    arith.MinSIOp: _extremum_of_integers,
    arith.CmpiOp: _cmpi,
    arith.AndIOp: _and_or(0),
    arith.OrIOp: _and_or(1),
    arith.XOrIOp: _xori,
    arith.SelectOp: _select,
    arith.TruncIOp: _narrowed,
}
