"""Scalar code from normal forms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from xdsl.builder import Builder
from xdsl.dialects import arith
from xdsl.dialects import math as math_dialect
from xdsl.dialects.builtin import FloatAttr, f32
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects.attn import ReduceKind, RowReduceOp
from attn_engine.ir.algebra import scale, sub
from attn_engine.ir.expression import GROUP, ONE_PRODUCT, Atom, Product, Sum, indicator_condition
from attn_engine.ir.normal_form import NormalForms
from attn_engine.ir.separation import Separation, Stabiliser

DEAD = {ReduceKind.MAX: -math.inf, ReduceKind.MIN: math.inf}


class Scalars:
    """Emits scalar operations, each expression once.

    `leaves` maps block arguments of the row function to those of the new region, and atoms of
    reductions to the values that they have there.
    """

    def __init__(self, builder: Builder, forms: NormalForms, leaves: Mapping[SSAValue | Atom, SSAValue]):
        self.builder = builder
        self.forms = forms
        self.algebra = forms.algebra
        self.leaves = dict(leaves)
        self._sums: dict[Sum, SSAValue] = {}
        self._atoms: dict[Atom, SSAValue] = {}
        self._constants: dict[float, SSAValue] = {}
        self._weights: dict[tuple[Sum, tuple[Stabiliser, ...]], SSAValue] = {}

    def define(self, atom: Atom, value: SSAValue) -> None:
        self.leaves[atom] = value

    def insert(self, op: Operation) -> SSAValue:
        self.builder.insert(op)
        return op.results[0]

    def constant(self, x: float) -> SSAValue:
        if x not in self._constants:
            self._constants[x] = self.insert(arith.ConstantOp(FloatAttr(x, f32)))
        return self._constants[x]

    def add(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.insert(arith.AddfOp(a, b))

    def sub(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.insert(arith.SubfOp(a, b))

    def mul(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.insert(arith.MulfOp(a, b))

    def exp(self, a: SSAValue) -> SSAValue:
        return self.insert(math_dialect.ExpOp(a))

    def equals(self, a: SSAValue, number: float) -> SSAValue:
        return self.insert(arith.CmpfOp(a, self.constant(number), "oeq"))

    def select(self, condition: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.insert(arith.SelectOp(condition, a, b))

    def unless(self, value: SSAValue, number: float, a: SSAValue, b: SSAValue) -> SSAValue:
        """`a`, but `b` where `value` is `number`."""
        return self.select(self.equals(value, number), b, a)

    def sum(self, value: Sum) -> SSAValue:
        """The SSA value of an expression."""
        if value not in self._sums:
            self._sums[value] = self._emit_sum(value)
        return self._sums[value]

    def _emit_sum(self, value: Sum) -> SSAValue:
        if value.constant is not None:
            return self.constant(value.constant)
        sizes = {abs(c) for _, c in value.terms}
        if len(value.terms) > 1 and len(sizes) == 1 and sizes != {1.0}:
            size = sizes.pop()
            return self.mul(self.sum(scale(value, 1 / size)), self.constant(size))
        terms = sorted(value.terms, key=lambda t: (t[1] < 0, not t[0].on_kv))
        (product, c), *rest = terms
        result = self._term(product, c)
        for product, c in rest:
            term = self._term(product, abs(c))
            result = self.sub(result, term) if c < 0 else self.add(result, term)
        return result

    def _term(self, product: Product, coefficient: float) -> SSAValue:
        if product == ONE_PRODUCT:
            return self.constant(coefficient)
        guards = [g for a, p in product.factors if p > 0 and (g := indicator_condition(a)) is not None]
        result = self._fraction(product, coefficient)
        for condition, chosen in guards:
            branches = (result, self.constant(0.0))
            result = self.select(self.sum(condition), *(branches if chosen else branches[::-1]))
        return result

    def _fraction(self, product: Product, coefficient: float) -> SSAValue:
        """A product without its indicators: everything of negative power is divided by."""
        plain = [(a, p) for a, p in product.factors if p < 0 or indicator_condition(a) is None]
        above = [self._power(a, p) for a, p in plain if p > 0]
        below = [self._power(a, -p) for a, p in plain if p < 0]
        if product.exponent.terms:
            above.append(self.exp(self._exponent(product.exponent)))
        negative = coefficient == -1.0 and bool(above)
        if not above or abs(coefficient) != 1.0:
            above.append(self.constant(coefficient))
        result = self._product_of(above)
        if below:
            result = self.insert(arith.DivfOp(result, self._product_of(below)))
        return self.insert(arith.NegfOp(result)) if negative else result

    def _product_of(self, values: list[SSAValue]) -> SSAValue:
        result, *rest = values
        for value in rest:
            result = self.mul(result, value)
        return result

    def _exponent(self, exponent: Sum) -> SSAValue:
        return self.sum(self.algebra.factored.get(exponent, exponent))

    def _power(self, atom: Atom, power: Fraction) -> SSAValue:
        base = self.atom(atom)
        if power.denominator == 1 and power <= 4:
            return self._product_of([base] * int(power))
        if power == Fraction(1, 2):
            return self.insert(math_dialect.SqrtOp(base))
        return self.insert(math_dialect.PowFOp(base, self.constant(float(power))))

    def atom(self, atom: Atom) -> SSAValue:
        """The SSA value of an atom."""
        key = atom if atom.value is None else atom.value
        if key in self.leaves:
            return self.leaves[key]
        if atom not in self._atoms:
            self._atoms[atom] = self._emit_atom(atom)
        return self._atoms[atom]

    def _emit_atom(self, atom: Atom) -> SSAValue:
        args = [self.sum(a) for a in atom.args]
        if atom.name == GROUP:
            return args[0]
        template = atom.operation
        assert template is not None
        return self.insert(
            type(template).create(
                operands=args,
                result_types=[r.type for r in template.results],
                properties=template.properties,
                attributes=template.attributes,
            )
        )

    def written(self, value: SSAValue) -> SSAValue:
        """A value of the row function as its user wrote it, reductions being what they are here."""
        if value in self.leaves:
            return self.leaves[value]
        owner = value.owner
        assert isinstance(owner, Operation)
        if isinstance(owner, RowReduceOp):
            self.leaves[value] = self.sum(self.forms[value])
        else:
            copy = owner.clone({v: self.written(v) for v in owner.operands})
            self.insert(copy)
            self.leaves |= dict(zip(owner.results, copy.results, strict=True))
        return self.leaves[value]

    def safe(self, value: SSAValue, kind: ReduceKind) -> SSAValue:
        """A maximum or minimum that may be subtracted: 0 while no key has been seen."""
        return self.unless(value, DEAD[kind], value, self.constant(0.0))

    def weight(self, separation: Separation, safe: Mapping[Atom, SSAValue]) -> SSAValue:
        """`element * exp(-sum coefficient * stabiliser)` with these values of the stabilisers."""
        key = (separation.element, separation.stabilisers)
        if key not in self._weights:
            self._weights[key] = self._emit_weight(separation, safe)
        return self._weights[key]

    def _emit_weight(self, separation: Separation, safe: Mapping[Atom, SSAValue]) -> SSAValue:
        if separation.source is not None:
            return self.written(separation.source)
        if not separation.stabilisers:
            return self.sum(separation.element)
        (product, number), *_ = separation.element.terms
        exponential = self.exp(self._stabilised_exponent(separation, product, safe))
        rest = Product(product.factors, sub(product.exponent, product.exponent))
        if rest == ONE_PRODUCT and number == 1.0:
            return exponential
        guards = [g for a, p in rest.factors if p > 0 and (g := indicator_condition(a)) is not None]
        plain = Product(tuple(f for f in rest.factors if indicator_condition(f[0]) is None), rest.exponent)
        result = (
            exponential if plain == ONE_PRODUCT and number == 1.0 else self.mul(self._term(plain, number), exponential)
        )
        for condition, chosen in guards:
            branches = (result, self.constant(0.0))
            result = self.select(self.sum(condition), *(branches if chosen else branches[::-1]))
        return result

    def _stabilised_exponent(self, separation: Separation, product: Product, safe: Mapping[Atom, SSAValue]) -> SSAValue:
        """`sum coefficient * (driver - stabiliser) + residue`; without drivers where the residue is an element."""
        parts: list[SSAValue] = []
        result = None if separation.tight else self._exponent(product.exponent)
        for s in separation.stabilisers:
            if result is not None:
                result = self.sub(result, self.times(s.coefficient, safe[s.atom]))
            else:
                parts.append(self.times(s.coefficient, self.sub(self.sum(s.driver), safe[s.atom])))
        if result is not None:
            return result
        if separation.residue.terms:
            parts.append(self.sum(separation.residue))
        result, *rest = parts
        for part in rest:
            result = self.add(result, part)
        return result

    def times(self, coefficient: Sum, value: SSAValue) -> SSAValue:
        return value if coefficient.constant == 1.0 else self.mul(value, self.sum(coefficient))
