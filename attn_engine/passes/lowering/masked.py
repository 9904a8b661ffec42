"""Masked elements at less cost: one comparison where two bounds meet, no select where a weight vanishes by itself."""

from __future__ import annotations

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import FloatAttr, IntegerAttr
from xdsl.ir import Operation, SSAValue

from attn_engine.ir.walks import behind
from attn_engine.passes.lowering.program import Program
from attn_engine.passes.lowering.vanish import scores_behind, vanishing

_MINUS_INFINITY = float("-inf")
_PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge")
_MIRRORED = {"sgt": "slt", "sge": "sle"}


def simplify_masked(program: Program) -> None:
    """Rewrites a program whose visibility is set."""
    if program.visible is None:
        return
    _merge_bounds(program)
    for op in list(program.block.ops):
        if isinstance(op, arith.SelectOp) and op.cond is program.visible and _number(op.rhs) == 0.0:
            _drop_select(program, op)
    for op in list(program.block.ops):
        if isinstance(op, arith.SelectOp) and op.cond is program.visible and _number(op.rhs) == 0.0:
            _hide_score(program, op)


def _number(value: SSAValue) -> float | None:
    owner = value.owner
    if isinstance(owner, arith.ConstantOp) and isinstance(owner.value, FloatAttr):
        return owner.value.value.data
    return None


# --- bounds ------------------------------------------------------------------------------------


def _leaves(value: SSAValue) -> list[SSAValue]:
    """The conditions that a condition is the conjunction of, in the order of their definition."""
    found = [v for v in behind([value], _parts) if not _parts(v)]
    return found[::-1]


def _parts(value: SSAValue) -> tuple[SSAValue, ...]:
    return (value.owner.lhs, value.owner.rhs) if isinstance(value.owner, arith.AndIOp) else ()


def _below(op: arith.CmpiOp) -> tuple[SSAValue, SSAValue, bool] | None:
    """A comparison as (value, bound, whether the value may equal the bound) if it bounds a value from above."""
    predicate = op.predicate.value.data
    name = _PREDICATES[predicate] if predicate < len(_PREDICATES) else ""
    if name in _MIRRORED:
        return op.rhs, op.lhs, _MIRRORED[name] == "sle"
    return (op.lhs, op.rhs, name == "sle") if name in ("slt", "sle") else None


def _merge_bounds(program: Program) -> None:
    """kv <= q and kv < limit, for limit >= 0, to kv <= min(q, limit - 1), with the minimum once per row."""
    assert program.visible is not None
    comparisons = [leaf.owner for leaf in _leaves(program.visible) if isinstance(leaf.owner, arith.CmpiOp)]
    for limit in [op for op in comparisons if op.result in program.limits]:
        for op in comparisons:
            found = _below(op)
            if op is limit or found is None or found[0] is not limit.lhs or op.result in program.limits:
                continue
            value, bound, equal = found
            if program.axes(bound) & program.axes(value):
                continue
            _replace_bound(program, op, limit, (value, bound, equal))
            _drop_leaf(program, limit.result)
            break


def _replace_bound(
    program: Program, op: arith.CmpiOp, limit: arith.CmpiOp, found: tuple[SSAValue, SSAValue, bool]
) -> None:
    value, bound, equal = found
    last: SSAValue = limit.rhs
    ops: list[Operation] = []
    if equal:
        one = arith.ConstantOp(IntegerAttr(1, limit.rhs.type))  # type: ignore[arg-type]
        before = arith.SubiOp(limit.rhs, one)
        ops, last = [one, before], before.result
    smaller = arith.MinSIOp(bound, last)
    smaller.result.name_hint = "last"
    new = arith.CmpiOp(value, smaller, "sle" if equal else "slt")
    new.result.name_hint = "visible"
    for each in (*ops, smaller, new):
        program.block.insert_op_before(each, op)
    if program.visible is op.result:
        program.visible = new.result
    op.result.replace_all_uses_with(new.result)


def _drop_leaf(program: Program, leaf: SSAValue) -> None:
    """Takes a condition out of the conjunction; the other half stands for both."""
    for use in list(leaf.uses):
        both = use.operation
        if isinstance(both, arith.AndIOp):
            other = both.lhs if both.rhs is leaf else both.rhs
            if program.visible is both.result:
                program.visible = other
            both.result.replace_all_uses_with(other)


# --- weights -----------------------------------------------------------------------------------


def _drop_select(program: Program, op: arith.SelectOp) -> None:
    """select(visible, exp2(s * f - t), 0) to exp2(select(visible, s, -inf) * f - t), for f > 0 and t > -inf.

    The inner select is there already where the maximum of the row is taken. A t that is NaN makes all weights
    of the row NaN in either form.
    """
    weight = op.lhs.owner
    if not isinstance(weight, math.Exp2Op | math.ExpOp) or not isinstance(weight.operand.owner, arith.SubfOp):
        return
    difference = weight.operand.owner
    scaled = difference.lhs.owner
    if not isinstance(scaled, arith.MulfOp) or not _above_minus_infinity(program, difference.rhs):
        return
    for score, factor in ((scaled.lhs, scaled.rhs), (scaled.rhs, scaled.lhs)):
        if _is_positive(program, factor) and program.axes(factor) < program.axes(score):
            masked = _masked(program, score, scaled)
            new: list[Operation] = [arith.MulfOp(masked, factor)]
            new.append(arith.SubfOp(new[0].results[0], difference.rhs))
            new.append(type(weight)(new[1].results[0]))
            for each, old in zip(new, (scaled, difference, weight), strict=True):
                each.results[0].name_hint = old.results[0].name_hint
                program.block.insert_op_before(each, op)
            op.result.replace_all_uses_with(new[2].results[0])
            return


def _hide_score(program: Program, op: arith.SelectOp) -> None:
    """select(visible, weight(s), 0) to weight(select(visible, s, c)), for an infinity c whose weight is 0.

    Blocks that are masked make weights as those that are not.
    """
    ops, score = scores_behind(op.lhs, len(program.axes(op.lhs)), program)
    users = [use.operation for use in op.lhs.uses if use.operation.parent is program.block]
    lowest = vanishing(op.lhs, score, program) if score is not None and users == [op] else None
    if score is None or lowest is None:
        return
    inner = [each for each in program.block.ops if each in ops]
    masked = _masked(program, score, inner[0], lowest)
    for each in inner:
        each.operands = [masked if value is score else value for value in each.operands]
    op.result.replace_all_uses_with(op.lhs)


def _masked(program: Program, score: SSAValue, anchor: Operation, lowest: float = _MINUS_INFINITY) -> SSAValue:
    """select(visible, score, lowest)."""
    for op in program.block.ops:
        if op is anchor:
            break
        if not isinstance(op, arith.SelectOp) or op.cond is not program.visible or op.lhs is not score:
            continue
        if _number(op.rhs) == lowest:
            return op.result
    assert program.visible is not None
    hidden = arith.ConstantOp(FloatAttr(lowest, score.type))  # type: ignore[arg-type]
    masked = arith.SelectOp(program.visible, score, hidden)
    for each in (hidden, masked):
        program.block.insert_op_before(each, anchor)
    return masked.result


def _is_positive(program: Program, value: SSAValue) -> bool:
    """Whether a factor is known to be greater than 0."""
    factors = [v for v in behind([value], _factors) if not _factors(v)]
    return all(v in program.positive if (number := _number(v)) is None else number > 0 for v in factors)


def _factors(value: SSAValue) -> tuple[SSAValue, ...]:
    return (value.owner.lhs, value.owner.rhs) if isinstance(value.owner, arith.MulfOp | arith.SelectOp) else ()


def _above_minus_infinity(program: Program, value: SSAValue) -> bool:
    """Whether a value is known not to be -inf."""
    number, owner = _number(value), value.owner
    if number is not None:
        return number > _MINUS_INFINITY
    if isinstance(owner, arith.MulfOp):
        pairs = ((owner.lhs, owner.rhs), (owner.rhs, owner.lhs))
        return any(_keeps_range(x, f) and _above_minus_infinity(program, x) for x, f in pairs)
    return isinstance(owner, arith.SelectOp) and _is_guarded(owner)


def _keeps_range(value: SSAValue, factor: SSAValue) -> bool:
    """Whether a positive factor cannot take a finite value to infinity: it is 1 where the value is large."""
    number, owner = _number(factor), factor.owner
    if number is not None:
        return 0.0 < number <= 1.0
    if not isinstance(owner, arith.SelectOp) or not isinstance(owner.cond.owner, arith.CmpfOp):
        return False
    compare, large, small = owner.cond.owner, _number(owner.lhs), _number(owner.rhs)
    limit, magnitude = _number(compare.rhs), compare.lhs.owner
    greater = compare.predicate.value.data in _GREATER
    of_value = isinstance(magnitude, math.AbsFOp) and magnitude.operand is value
    known = large is not None and small is not None and limit is not None
    return greater and of_value and known and 0.0 < large <= 1.0 and small > 0.0 and small * limit < _LARGEST  # type: ignore[operator]


_GREATER = (2, 3)
"""Of `arith.cmpf`: ogt, oge."""
_EQUAL = 1
_LARGEST = 3.4e38


def _is_guarded(op: arith.SelectOp) -> bool:
    """select(x == -inf, c, x) with a number c."""
    compare, number = op.cond.owner, _number(op.lhs)
    if not isinstance(compare, arith.CmpfOp) or compare.predicate.value.data != _EQUAL:
        return False
    sides = (compare.lhs, compare.rhs)
    lowest = any(_number(s) == _MINUS_INFINITY for s in sides)
    return lowest and op.rhs in sides and number is not None and number > _MINUS_INFINITY
