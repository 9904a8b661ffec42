"""Scalar SSA code of a row function in normal form, and what can be proved with it.

    forms = NormalForms(block)                  # block of the `row` region of an attn.attention
    forms[value]                                # Sum (see attn_engine.ir.expression) of an SSA value
    raw = raw_form(block)                       # NormalForms with every reduction in raw form
    is_invariant(block, values, reduction)      # no value in `values` depends on this reduction
    value_range(forms[value])                   # attn_engine.ir.value_range: .nonnegative, .positive, .low, .high

Forms are made of sums, products, constant powers and exponentials, so that `exp2(s * log2e - m)`,
`exp(s - lse)` and `e / l` are seen through; clamps, comparisons, selects and other functions are
atoms of normalised operands. `form.on_kv` tells whether a value varies along the keys, and
`form.states` which reductions it reads.

*Raw form*: a reduction of `a * b`, with `a` free of other reductions and `b` free of keys, is
`b` times the raw reduction of `a`: the sum of exp(s - m) is exp(-m) times the sum of exp(s). In raw
forms a maximum that only stabilises cancels, which is the proof behind `is_invariant`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import inf, log

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, f32
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attn_engine.dialects.attn import ReduceKind, RowReduceOp, YieldOp
from attn_engine.ir.algebra import LN2, MAXIMUM, MINIMUM, Algebra, add, as_sum, constant, make_sum, scale, snap, sub
from attn_engine.ir.dead_rows import tells_dead_rows
from attn_engine.ir.expression import ONE, ZERO, Product, Sum
from attn_engine.ir.value_range import value_range

Reduce = Callable[[RowReduceOp, Sum], Sum]
Rule = Callable[[Algebra, list[Sum]], Sum | None]


def _constant_power(algebra: Algebra, args: list[Sum]) -> Sum | None:
    base, exponent = args
    if exponent.constant is not None:
        return algebra.power(base, Fraction(exponent.constant).limit_denominator(1000))
    if base.constant is not None and base.constant > 0:
        return algebra.exp(scale(exponent, snap(log(base.constant))))
    return None


def _div(algebra: Algebra, args: list[Sum]) -> Sum | None:
    inverse = algebra.power(args[1], Fraction(-1))
    return None if inverse is None else algebra.mul(args[0], inverse)


def _rebased(value: Sum, factor: float) -> Sum:
    return make_sum((p, snap(c * factor)) for p, c in value.terms)


_RULES: dict[type[Operation], Rule] = {
    arith.AddfOp: lambda _, a: add(*a),
    arith.SubfOp: lambda _, a: sub(*a),
    arith.NegfOp: lambda _, a: scale(a[0], -1.0),
    arith.MulfOp: lambda g, a: g.mul(*a),
    arith.DivfOp: _div,
    math.FmaOp: lambda g, a: add(g.mul(a[0], a[1]), a[2]),
    math.ExpOp: lambda g, a: g.exp(a[0]),
    math.Exp2Op: lambda g, a: g.exp(_rebased(g.expand(a[0]), LN2)),
    math.LogOp: lambda g, a: g.log(a[0]),
    math.Log2Op: lambda g, a: scale(g.log(a[0]), 1 / LN2),
    math.SqrtOp: lambda g, a: g.power(a[0], Fraction(1, 2)),
    math.RsqrtOp: lambda g, a: g.power(a[0], Fraction(-1, 2)),
    math.PowFOp: _constant_power,
    math.AbsFOp: lambda g, a: g.absolute(a[0]),
}


class NormalForms:
    """The normal forms of every value of a scalar block.

    Block arguments after the score and the indices are captures. `reduce` says what a reduction of
    a form is; by default an atom.
    """

    def __init__(self, block: Block, algebra: Algebra | None = None, reduce: Reduce | None = None):
        self.algebra = algebra or Algebra()
        self._reduce = reduce or self.algebra.reduction
        self._forms: dict[SSAValue, Sum] = {}
        for argument in block.args:
            self._forms[argument] = self.algebra.leaf(argument, _argument_on_kv(argument))
        for operation in block.ops:
            if not isinstance(operation, YieldOp):
                self._add(operation)

    def __getitem__(self, value: SSAValue) -> Sum:
        return self._forms[value]

    def _add(self, operation: Operation) -> None:
        args = [self._forms[v] for v in operation.operands]
        if isinstance(operation, RowReduceOp):
            self._forms[operation.result] = self._reduce(operation, args[0])
        elif len(operation.results) == 1:
            self._forms[operation.results[0]] = self._apply(operation, args)
        else:
            for result in operation.results:
                self._forms[result] = self.algebra.leaf(result, any(a.on_kv for a in args))

    def _apply(self, operation: Operation, args: list[Sum]) -> Sum:
        if isinstance(operation, arith.SelectOp) and operation.result.type == f32:
            return self._select(*args)
        if isinstance(operation, arith.ConstantOp) and isinstance(operation.value, FloatAttr):
            number = operation.value.value.data
            return constant(number) if abs(number) < inf else self.algebra.opaque(operation, [])
        rule = _RULES.get(type(operation))
        form = rule(self.algebra, args) if rule else None
        return self._clamp(operation, args) if form is None else form

    def _select(self, condition: Sum, chosen: Sum, other: Sum) -> Sum:
        """A clamp written as a select is the clamp; a select that only asks whether the row is dead is one branch."""
        live = _in_live_rows(condition, chosen, other)
        if live is not None:
            return live
        clamp = _clamp_in(condition, chosen, other)
        return self.algebra.select(condition, chosen, other) if clamp is None else self._clamp(clamp, [other, chosen])

    def _clamp(self, operation: Operation, args: list[Sum]) -> Sum:
        """max(x * c, 0) is max(x, 0) * c for a positive c; other operations are atoms."""
        clamps = (arith.MaximumfOp, arith.MinimumfOp, arith.MaxnumfOp, arith.MinnumfOp)
        if not isinstance(operation, clamps) or ZERO not in args:
            return self.algebra.opaque(operation, args)
        product, number = self.algebra.as_product(args[0] if args[1] == ZERO else args[1])
        row = [f for f in product.factors if not f[0].on_kv and value_range(as_sum(Product((f,), ZERO))).positive]
        exponent = ZERO if product.exponent.on_kv else product.exponent
        kept = Product(tuple(f for f in product.factors if f not in row), sub(product.exponent, exponent))
        clamped = self.algebra.opaque(operation, [as_sum(kept, number), ZERO])
        return self.algebra.mul(clamped, as_sum(Product(tuple(row), exponent)))


def _argument_on_kv(argument: BlockArgument) -> bool:
    return argument.index in (0, 4)


def _clamp_in(condition: Sum, chosen: Sum, other: Sum) -> Operation | None:
    """Which extremum of both a select is: x < c ? c : x is the larger one, NaN staying NaN."""
    atom = condition.atom
    operation = atom.operation if atom else None
    if atom is None or not isinstance(operation, arith.CmpfOp) or atom.args != (other, chosen):
        return None
    predicate = operation.predicate
    assert isinstance(predicate, IntegerAttr)
    number = predicate.value.data
    return MAXIMUM if number in _ORDERED_LESS else MINIMUM if number in _ORDERED_GREATER else None


_ORDERED_GREATER, _ORDERED_LESS = (2, 3), (4, 5)
_EQUAL = {1: True, 8: True, 6: False, 13: False}
_GREATER = {2: False, 9: False}
_LESS = {4: False, 11: False}


def _in_live_rows(condition: Sum, chosen: Sum, other: Sum) -> Sum | None:
    """`select(m == -inf, anything, x)` is x for a maximum m: where m is -inf the row is dead, its result fixed.

    The same for inequality, `m > -inf`, and a minimum with +inf.
    """
    atom = condition.atom
    operation = atom.operation if atom else None
    if atom is None or not isinstance(operation, arith.CmpfOp):
        return None
    (left, right), predicate = atom.args, operation.predicate
    assert isinstance(predicate, IntegerAttr)
    number = predicate.value.data
    for value, bound, strict in ((left, right, _GREATER), (right, left, _LESS)):
        kind = _reduction_kind(value)
        if kind is ReduceKind.MIN:
            strict = _LESS if strict is _GREATER else _GREATER
        is_dead = (_EQUAL | strict).get(number)
        if kind is not None and is_dead is not None and _is_infinite(bound, negative=kind is ReduceKind.MAX):
            return other if is_dead else chosen
    return None


def _reduction_kind(value: Sum) -> ReduceKind | None:
    operation = value.atom.operation if value.atom else None
    if not isinstance(operation, RowReduceOp) or not tells_dead_rows(operation):
        return None
    return ReduceKind(operation.kind.data)


def _is_infinite(value: Sum, negative: bool) -> bool:
    operation = value.atom.operation if value.atom else None
    if not isinstance(operation, arith.ConstantOp) or not isinstance(operation.value, FloatAttr):
        return False
    return operation.value.value.data == (-inf if negative else inf)


def split_product(product: Product) -> tuple[Product, Product] | None:
    """A product as (free of reductions, free of keys), or None."""
    if any(a.on_kv and a.states for a, _ in product.factors):
        return None
    if any(p.on_kv and p.states for p, _ in product.exponent.terms):
        return None
    row_factors = tuple(f for f in product.factors if f[0].states)
    element_factors = tuple(f for f in product.factors if not f[0].states)
    row_exponent = make_sum((p, c) for p, c in product.exponent.terms if p.states)
    return Product(element_factors, sub(product.exponent, row_exponent)), Product(row_factors, row_exponent)


def split_sum(value: Sum) -> tuple[Sum, Sum] | None:
    """A sum as (terms free of reductions, terms free of keys), or None."""
    if any(p.on_kv and p.states for p, _ in value.terms):
        return None
    row = make_sum((p, c) for p, c in value.terms if p.states)
    return sub(value, row), row


def raw_form(block: Block, algebra: Algebra | None = None) -> NormalForms:
    """Normal forms in which every separable reduction is its row factor times a raw reduction."""
    algebra = algebra or Algebra(split_exponents=True)
    return NormalForms(block, algebra, lambda op, element: raw_reduction(algebra, op, element))


def raw_reduction(algebra: Algebra, op: RowReduceOp, element: Sum) -> Sum:
    """The reduction of `element`, its row part taken out where that is exact."""
    if op.kind.data is ReduceKind.COUNT:
        return algebra.reduction(op, ONE)
    additive = split_sum(element) if op.kind.data is not ReduceKind.SUM else None
    if additive is not None and additive[0].terms:
        return add(algebra.reduction(op, additive[0]), additive[1])
    product, number = algebra.as_product(element)
    parts = split_product(product)
    if parts is None or (op.kind.data is not ReduceKind.SUM and not value_range(as_sum(parts[1])).positive):
        return algebra.reduction(op, element)
    return algebra.mul(algebra.reduction(op, as_sum(parts[0], number)), as_sum(parts[1]))


def is_invariant(block: Block, values: Sequence[SSAValue], reduction: SSAValue) -> bool:
    """Whether no value in `values` changes with `reduction`, all else (the scores too) kept.

    So for the maximum of a softmax and p, lse; not for the maximum in `e / (1 + sum(e))`.
    """
    forms = raw_form(block)
    own = forms[reduction].states
    return all(not (forms[v].states & own) for v in values)
