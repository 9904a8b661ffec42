"""Ranges of normal-form expressions: signs, and upper bounds.

Numbers are reals here: what overflows or is NaN at run time has no range, and neither has it in
the formula that the user wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr, i1

from attn_engine.dialects.attn import ReduceKind, RowReduceOp
from attn_engine.ir.expression import GROUP, Atom, Product, Sum

INF = math.inf


@dataclass(frozen=True)
class Range:
    """All values between `low` and `high`; `positive` excludes zero from a nonnegative range."""

    low: float = -INF
    high: float = INF
    positive: bool = False

    @property
    def nonnegative(self) -> bool:
        return self.low >= 0


ANY = Range()
POSITIVE = Range(0.0, INF, True)
NONNEGATIVE = Range(0.0, INF)


def _point(x: float) -> Range:
    return Range(x, x, x > 0)


def _times(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def _add(a: Range, b: Range) -> Range:
    low, high = a.low + b.low, a.high + b.high
    positive = low > 0 or (low == 0 and (a.positive or b.positive))
    return Range(low, high, positive)


def _mul(a: Range, b: Range) -> Range:
    ends = [_times(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Range(min(ends), max(ends), a.positive and b.positive)


def _hull(a: Range, b: Range) -> Range:
    return Range(min(a.low, b.low), max(a.high, b.high), a.positive and b.positive)


def _power(base: Range, power: Fraction) -> Range:
    if power == 1:
        return base
    if not base.nonnegative:
        even = power.denominator == 1 and power.numerator % 2 == 0
        return NONNEGATIVE if even else ANY
    if power < 0:
        return POSITIVE
    return Range(base.low ** float(power), base.high ** float(power), base.positive)


def product_range(product: Product) -> Range:
    """The range of one product."""
    result = _point(1.0)
    for atom, power in product.factors:
        result = _mul(result, _power(atom_range(atom), power))
    exponent = product.exponent
    if exponent.terms:
        result = _mul(result, _exp(value_range(exponent)))
    return result


def _exp(x: Range) -> Range:
    high = math.exp(x.high) if x.high < 700 else INF
    low = math.exp(min(x.low, 700.0)) if x.low > -700 else 0.0
    return Range(low, high, True)


def value_range(value: Sum) -> Range:
    """The range of a value."""
    result = Range(0.0, 0.0)
    for product, coefficient in value.terms:
        result = _add(result, _mul(product_range(product), _point(coefficient)))
    return result


def _maximum(args: list[Range]) -> Range:
    a, b = args
    return Range(max(a.low, b.low), max(a.high, b.high), a.positive or b.positive)


def _minimum(args: list[Range]) -> Range:
    a, b = args
    return Range(min(a.low, b.low), min(a.high, b.high), a.positive and b.positive)


_ATOMS: dict[str, Callable[[list[Range]], Range]] = {
    GROUP: lambda a: a[0],
    "math.absf": lambda a: Range(max(a[0].low, 0.0), max(abs(a[0].low), abs(a[0].high)), a[0].positive),
    "math.tanh": lambda a: Range(0.0 if a[0].nonnegative else -1.0, 1.0, a[0].positive),
    "math.erf": lambda a: Range(0.0 if a[0].nonnegative else -1.0, 1.0, a[0].positive),
    "math.sin": lambda a: Range(-1.0, 1.0),
    "math.cos": lambda a: Range(-1.0, 1.0),
    "math.log1p": lambda a: Range(0.0, INF, a[0].positive) if a[0].nonnegative else ANY,
    "math.cosh": lambda a: Range(1.0, INF, True),
    "arith.maximumf": _maximum,
    "arith.maxnumf": _maximum,
    "arith.minimumf": _minimum,
    "arith.minnumf": _minimum,
    "arith.select": lambda a: _hull(a[1], a[2]),
}


def atom_range(atom: Atom) -> Range:
    """The range of an atom."""
    return atom.once(_range_of)


def _range_of(atom: Atom) -> Range:
    operation = atom.operation
    if isinstance(operation, RowReduceOp):
        return reduction_range(ReduceKind(operation.kind.data), value_range(atom.args[0]))
    if isinstance(operation, arith.UIToFPOp) and operation.input.type == i1:
        return Range(0.0, 1.0)
    if isinstance(operation, arith.ConstantOp) and isinstance(operation.value, FloatAttr):
        return _point(operation.value.value.data)
    rule = _ATOMS.get(atom.name)
    return rule([value_range(a) for a in atom.args]) if rule else ANY


def reduction_range(kind: ReduceKind, element: Range) -> Range:
    """The range of a reduction over a row with a visible key."""
    if kind is ReduceKind.COUNT:
        return Range(1.0, INF, True)
    if kind in (ReduceKind.MAX, ReduceKind.MIN):
        return element
    low = element.low if element.low >= 0 else -INF
    high = element.high if element.high <= 0 else INF
    return Range(low, high, element.positive)
