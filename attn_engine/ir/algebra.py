"""Arithmetic on normal-form expressions.

Every function returns an expression that equals the formula wherever that is defined over the
reals. Products of sums stay factored, except in exponents, where they are multiplied out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from xdsl.dialects import arith
from xdsl.dialects import math as math_dialect
from xdsl.dialects.builtin import f32
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects.attn import ReduceKind, RowReduceOp
from attn_engine.ir.expression import GROUP, ONE, ONE_PRODUCT, ZERO, Atom, Key, Product, Sum, indicator_condition
from attn_engine.ir.value_range import atom_range

MAX_TERMS = 64
LN2 = math.log(2.0)
# Operations without operands, for atoms that no operation of the user stands for.
ABS = math_dialect.AbsFOp.create(operands=[], result_types=[f32])
LOG = math_dialect.LogOp.create(operands=[], result_types=[f32])
_PLAIN = {"fastmath": arith.FastMathFlagsAttr("none")}
MAXIMUM = arith.MaximumfOp.create(operands=[], result_types=[f32], properties=_PLAIN)
MINIMUM = arith.MinimumfOp.create(operands=[], result_types=[f32], properties=_PLAIN)
SELECT = arith.SelectOp.create(operands=[], result_types=[f32])
# What may stand in the exponent of a row factor: in a live row it is finite, or the row is out of range anyway.
CLAMPS = ("arith.maximumf", "arith.maxnumf", "arith.minimumf", "arith.minnumf")


def constant(x: float) -> Sum:
    """A finite number."""
    return make_sum([(ONE_PRODUCT, x)])


def snap(x: float) -> float:
    """The simple fraction that `x` is up to the rounding of f32 constants, else `x`.

    A change of base multiplies a rounded log2(e) by ln(2): the result is meant to be 1.
    """
    near = float(Fraction(x).limit_denominator(64)) if math.isfinite(x) else x
    return near if near and abs(near - x) <= 4e-7 * abs(x) else x


def make_sum(terms: Iterable[tuple[Product, float]]) -> Sum:
    """Merges equal products, drops zeros and sorts."""
    total: dict[Product, float] = {}
    for product, c in terms:
        old = total.get(product, 0.0)
        new = old + c
        total[product] = 0.0 if product != ONE_PRODUCT and abs(new) <= 1e-12 * abs(c) else new
    kept = [(p, c) for p, c in total.items() if c != 0.0]
    return Sum(tuple(sorted(kept, key=lambda t: t[0].key)))


def make_product(factors: Iterable[tuple[Atom, Fraction]], exponent: Sum) -> Product:
    """Merges equal atoms, drops zero powers and sorts."""
    powers: dict[Atom, Fraction] = {}
    for atom, power in factors:
        powers[atom] = powers.get(atom, Fraction(0)) + power
    kept = [(a, p) for a, p in powers.items() if p != 0]
    return Product(tuple(sorted(kept, key=lambda t: t[0].number)), exponent)


def add(*values: Sum) -> Sum:
    return make_sum(t for v in values for t in v.terms)


def scale(value: Sum, factor: float) -> Sum:
    return make_sum((p, c * factor) for p, c in value.terms)


def sub(a: Sum, b: Sum) -> Sum:
    return add(a, scale(b, -1.0))


def as_sum(product: Product, coefficient: float = 1.0) -> Sum:
    """A product as a value; a group that stands alone is the sum that it groups."""
    if len(product.factors) == 1 and not product.exponent.terms:
        atom, power = product.factors[0]
        if atom.name == GROUP and power == 1:
            return scale(atom.args[0], coefficient)
    return make_sum([(product, coefficient)])


def multiply_products(a: Product, b: Product) -> Product:
    return make_product([*a.factors, *b.factors], add(a.exponent, b.exponent))


def _nearest(values: Sequence[float | Fraction]) -> float | Fraction:
    """The common part of powers: the one nearest to zero if all have one sign, else zero."""
    if all(v > 0 for v in values):
        return min(values)
    return max(values) if all(v < 0 for v in values) else 0


def content(value: Sum, split_exponents: bool = True) -> Product:
    """The largest product that divides every term; `split_exponents`: a part of their exponents too."""
    products = [p for p, _ in value.terms]
    factors: list[tuple[Atom, Fraction]] = []
    # Where an indicator is 0, the element beside it may be infinite: they stay together.
    guarded = any(indicator_condition(a) for p in products for a, _ in p.factors)
    for atom, _ in products[0].factors:
        if guarded and atom.on_kv:
            continue
        power = _nearest([dict(p.factors).get(atom, Fraction(0)) for p in products])
        factors.append((atom, Fraction(power)))
    if not split_exponents:
        same = all(p.exponent == products[0].exponent for p in products)
        return make_product(factors, products[0].exponent if same else ZERO)
    exponents: list[tuple[Product, float]] = []
    for term, _ in products[0].exponent.terms:
        exponents.append((term, float(_nearest([dict(p.exponent.terms).get(term, 0.0) for p in products]))))
    return make_product(factors, make_sum(exponents))


def inverse(product: Product) -> Product:
    return Product(tuple((a, -p) for a, p in product.factors), scale(product.exponent, -1.0))


class Algebra:
    """Interns the atoms of one analysis; all its expressions are comparable with each other.

    With `split_exponents`, exp(-m) + exp(s - m) is exp(-m) * (1 + exp(s)) where it is a factor: that
    proves more, but is not to be computed, exp(s) being out of range where exp(s - m) is not.
    """

    def __init__(self, split_exponents: bool = False) -> None:
        self.split_exponents = split_exponents
        self._atoms: dict[Key, Atom] = {}
        self.factored: dict[Sum, Sum] = {}
        """Exponents as they were before their products were multiplied out."""

    def _intern(self, key: Key, name: str, **fields: object) -> Atom:
        atom = self._atoms.get(key)
        if atom is None:
            atom = Atom(len(self._atoms), name, **fields)  # type: ignore[arg-type]
            self._atoms[key] = atom
        return atom

    def leaf(self, value: SSAValue, on_kv: bool) -> Sum:
        """An SSA value that nothing is known about."""
        atom = self._intern(("leaf", value), value.name_hint or "value", value=value, on_kv=on_kv)
        return as_sum(make_product([(atom, Fraction(1))], ZERO))

    def opaque(self, operation: Operation, args: Sequence[Sum]) -> Sum:
        """An operation as an atom: equal to every one of the same name, properties and operands."""
        properties = tuple(sorted((k, str(v)) for k, v in {**operation.properties, **operation.attributes}.items()))
        types = tuple(str(r.type) for r in operation.results)
        key: Key = ("op", operation.name, properties, types, tuple(args))
        on_kv = any(a.on_kv for a in args)
        states = frozenset[int]().union(*(a.states for a in args))
        atom = self._intern(key, operation.name, operation=operation, args=tuple(args), on_kv=on_kv, states=states)
        return as_sum(make_product([(atom, Fraction(1))], ZERO))

    def reduction(self, operation: Operation, element: Sum, tag: Key = ()) -> Sum:
        """A row reduction of `element`: a row-level atom that reads itself as a state.

        `tag` tells apart reductions of one element that are kept in different scales.
        """
        properties = tuple(sorted((k, str(v)) for k, v in operation.properties.items() if k != "ties"))
        key: Key = ("reduction", properties, element, tag)
        number = len(self._atoms)
        states = frozenset([number])
        stabilised = bool(tag)
        atom = self._intern(
            key, operation.name, operation=operation, args=(element,), states=states, stabilised=stabilised
        )
        return as_sum(make_product([(atom, Fraction(1))], ZERO))

    def group(self, value: Sum) -> Atom:
        """A whole sum as one factor."""
        return self._intern((GROUP, value), GROUP, args=(value,), on_kv=value.on_kv, states=value.states)

    def as_product(self, value: Sum) -> tuple[Product, float]:
        """A value as one product times a number, its common factors taken out."""
        if not value.terms:
            return ONE_PRODUCT, 0.0
        if len(value.terms) == 1:
            return value.terms[0]
        common = content(value, self.split_exponents)
        back = inverse(common)
        rest = make_sum((multiply_products(p, back), c) for p, c in value.terms)
        if len(rest.terms) < 2:
            return self.as_product(mul_monomial(rest, common))
        size = abs(rest.terms[0][1])
        number = size if all(abs(c) == size for _, c in rest.terms) else 1.0
        grouped = make_product([(self.group(scale(rest, 1 / number)), Fraction(1))], ZERO)
        return multiply_products(common, grouped), number

    def mul(self, a: Sum, b: Sum) -> Sum:
        for x, y in ((a, b), (b, a)):
            if x.constant is not None:
                return scale(y, x.constant)
        (pa, ca), (pb, cb) = self.as_product(a), self.as_product(b)
        return as_sum(multiply_products(pa, pb), ca * cb)

    def power(self, value: Sum, power: Fraction) -> Sum | None:
        """`value ** power`; None where a number has no such power."""
        product, number = self.as_product(value)
        if number == 0 and power <= 0:
            return None
        if power.denominator == 1:
            raised = tuple((a, p * power) for a, p in product.factors)
            return as_sum(make_product(raised, scale(product.exponent, float(power))), number ** int(power))
        factors: list[tuple[Atom, Fraction]] = []
        rest: list[tuple[Atom, Fraction]] = []
        for atom, p in self._with_absolute_evens(product.factors):
            (factors if atom_range(atom).nonnegative else rest).append((atom, p))
        if number < 0 or len(rest) > 1 or any(p != 1 for _, p in rest):
            rest = [(self.group(make_sum([(make_product(rest, ZERO), math.copysign(1.0, number))])), Fraction(1))]
        raised = [(a, p * power) for a, p in (*factors, *rest)]
        exponent = scale(product.exponent, float(power))
        return as_sum(make_product(raised, exponent), abs(number) ** float(power))

    def _with_absolute_evens(self, factors: Iterable[tuple[Atom, Fraction]]) -> list[tuple[Atom, Fraction]]:
        """x ** 2 as |x| ** 2, where the sign of x is unknown."""
        result: list[tuple[Atom, Fraction]] = []
        for atom, p in factors:
            even = p.denominator == 1 and p.numerator % 2 == 0
            absolute = self.absolute_atom(atom) if even and not atom_range(atom).nonnegative else atom
            result.append((absolute, p))
        return result

    def absolute_atom(self, atom: Atom) -> Atom:
        result = self.opaque(ABS, [as_sum(make_product([(atom, Fraction(1))], ZERO))]).atom
        assert result is not None
        return result

    def select(self, condition: Sum, chosen: Sum, other: Sum) -> Sum:
        """A select. With one branch zero it is the other branch times an indicator.

        Not where that branch has a row factor that may be infinite: where the select says 0, it must not be read.
        """
        if chosen == other:
            return chosen
        if other == ZERO and chosen != ONE and self._finite_rows(chosen, condition):
            return self.mul(self.select(condition, ONE, ZERO), chosen)
        if chosen == ZERO and other != ONE and self._finite_rows(other, condition):
            return self.mul(self.select(condition, ZERO, ONE), other)
        return self.opaque(SELECT, [condition, chosen, other])

    def _finite_rows(self, value: Sum, condition: Sum) -> bool:
        """Whether a condition on keys may be taken apart from the row factors of a value."""
        product, _ = self.as_product(value)
        rows = [a for a, _ in product.factors if a.states and not a.on_kv]
        moved = [a for term, _ in product.exponent.terms for a, _ in term.factors if a.states and not a.on_kv]
        return not condition.on_kv or (all(atom_range(a).positive for a in rows) and all(_bounding(a) for a in moved))

    def absolute(self, value: Sum) -> Sum:
        """|value|: absolute values of the factors."""
        product, number = self.as_product(value)
        factors = [(a if atom_range(a).nonnegative else self.absolute_atom(a), p) for a, p in product.factors]
        return as_sum(make_product(factors, product.exponent), abs(number))

    def exp(self, value: Sum) -> Sum:
        """exp(value): logarithms in it become factors, the rest the exponent."""
        factors = ONE
        exponent: list[tuple[Product, float]] = []
        for product, c in self.expand(value).terms:
            atom = as_sum(product).atom
            power = Fraction(snap(c)).limit_denominator(1 << 20) if atom and atom.name == "math.log" else None
            raised = self.power(atom.args[0], power) if atom and power is not None else None
            if raised is None:
                exponent.append((product, c))
            else:
                factors = self.mul(factors, raised)
        result = make_sum(exponent)
        if factors == ONE and result != value:
            self.factored.setdefault(result, value)
        return self.mul(factors, as_sum(Product((), result)))

    def log(self, value: Sum) -> Sum:
        """log(value): exponents and positive factors leave the logarithm."""
        product, number = self.as_product(value)
        if number <= 0:
            return self.opaque(LOG, [value])
        terms = [product.exponent]
        rest: list[tuple[Atom, Fraction]] = []
        for atom, p in self._with_absolute_evens(product.factors):
            if atom_range(atom).nonnegative:
                terms.append(scale(self.opaque(LOG, [as_sum(make_product([(atom, Fraction(1))], ZERO))]), float(p)))
            else:
                rest.append((atom, p))
        if rest:
            terms.append(self.opaque(LOG, [as_sum(make_product(rest, ZERO))]))
        if number != 1.0:
            terms.append(constant(math.log(number)))
        return add(*terms)

    def expand(self, value: Sum) -> Sum:
        """Multiplies out the grouped sums in each term, as long as that stays small.

        Products of several sums of the row alone stay: nothing in them varies along keys, and in parts they may be infinite.
        """
        return add(*(self._expand_term(p, c) for p, c in value.terms))

    def _expand_group(self, atom: Atom) -> Sum:
        return self.expand(atom.args[0])

    def _expand_term(self, product: Product, coefficient: float) -> Sum:
        plain = [(a, p) for a, p in product.factors if not _expandable(a, p)]
        if not product.on_kv and sum(p for a, p in product.factors if _expandable(a, p)) > 1:
            return make_sum([(product, coefficient)])
        result = make_sum([(make_product(plain, product.exponent), coefficient)])
        for atom, power in product.factors:
            if not _expandable(atom, power):
                continue
            inner = atom.once(self._expand_group)
            for _ in range(int(power)):
                result = distribute(result, inner)
                if len(result.terms) > MAX_TERMS:
                    return make_sum([(product, coefficient)])
        return result


def _bounding(atom: Atom) -> bool:
    """A maximum or minimum of the row, or a clamp."""
    operation = atom.operation
    if isinstance(operation, RowReduceOp):
        return operation.kind.data in (ReduceKind.MAX, ReduceKind.MIN)
    return atom.name in CLAMPS


def _expandable(atom: Atom, power: Fraction) -> bool:
    return atom.name == GROUP and power.denominator == 1 and 0 < power <= 4


def distribute(a: Sum, b: Sum) -> Sum:
    return make_sum((multiply_products(p, q), c * d) for p, c in a.terms for q, d in b.terms)


def mul_monomial(value: Sum, product: Product) -> Sum:
    return distribute(value, make_sum([(product, 1.0)]))
