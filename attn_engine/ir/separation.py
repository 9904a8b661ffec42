"""Whether a value is one-pass: an element factor times a row factor, rescalable while the row runs.

`separate` splits a value into `element * exp(-sum c * mu) * row`:

- `element` reads no running reduction;
- every *stabiliser* mu is a running maximum or minimum (or a clamp of one in its own direction)
  that bounds the exponent of `element`, so that what is accumulated stays in range at every
  moment, and changing from an old mu to a new one multiplies by a finite factor;
- `row` is free of keys and is applied once, after the loop.

Everything else is a `Refusal`: the value then needs the final reductions, in a later loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product as combinations

from xdsl.ir import SSAValue

from attn_engine.dialects.attn import ReduceKind, RowReduceOp
from attn_engine.ir.algebra import Algebra, add, as_sum, make_product, make_sum, sub
from attn_engine.ir.expression import GROUP, ONE, ZERO, Atom, Product, Sum, show, show_atom
from attn_engine.ir.value_range import value_range

MAX_DEGREE = 4
CLAMPS = {
    "arith.maximumf": ReduceKind.MAX,
    "arith.maxnumf": ReduceKind.MAX,
    "arith.minimumf": ReduceKind.MIN,
    "arith.minnumf": ReduceKind.MIN,
}


@dataclass(frozen=True)
class Refusal:
    """Why a value is not one-pass, and the value at fault."""

    reason: str
    culprit: Sum


@dataclass(frozen=True)
class Stabiliser:
    """`exp(-coefficient * atom)` is carried through the loop; `driver` is what `atom` is the maximum of."""

    atom: Atom
    kind: ReduceKind
    coefficient: Sum
    driver: Sum

    @property
    def monotone(self) -> bool:
        """Whether the rescale factor is at most one, whatever the row."""
        number = self.coefficient.constant
        return number is not None and (number > 0) == (self.kind is ReduceKind.MAX)


@dataclass(frozen=True)
class Separation:
    """A value as `element * exp(-sum coefficient * stabiliser) * row`, or `element + row` if `additive`.

    `residue` is the exponent of `element` less the drivers: free of keys, or (not `tight`) bounded above.
    """

    element: Sum
    row: Sum = ONE
    stabilisers: tuple[Stabiliser, ...] = ()
    residue: Sum = ZERO
    additive: bool = False
    source: SSAValue | None = None
    """The user's own value, to be computed as written: nothing in it is still running."""

    @property
    def tight(self) -> bool:
        return not self.residue.on_kv


def separate(algebra: Algebra, value: Sum, running: frozenset[int]) -> Separation | Refusal:
    """Splits a weight, or the argument of a sum; `running` are the reductions of the same loop."""
    product, number = algebra.as_product(value)
    refusal = _mixed(product, running)
    if refusal is not None:
        return refusal
    row_factors = tuple(f for f in product.factors if not f[0].on_kv and f[0].states)
    element_factors = tuple(f for f in product.factors if f not in row_factors)
    moving = make_sum((p, c) for p, c in product.exponent.terms if p.states & running)
    exponent = sub(product.exponent, moving)
    row = as_sum(Product(row_factors, ZERO))
    if (moving.terms or exponent.states) and any(a.on_kv and _grows(a) for a, _ in element_factors):
        return Refusal("an exponential hides in a sum or function beside a running row exponent", moving)
    if not exponent.on_kv or not moving.terms:
        if not exponent.on_kv and product.exponent.states:
            # Together: exp(a - b) may be in range where exp(a) is not.
            moving, exponent = product.exponent, ZERO
        whole = as_sum(Product(element_factors, exponent), number)
        return _checked(Separation(whole, algebra.mul(row, algebra.exp(moving))), running)
    return _stabilised(algebra, Product(element_factors, exponent), number, row, moving, running)


def _mixed(product: Product, running: frozenset[int]) -> Refusal | None:
    """A factor or exponent term that varies along the keys and reads a running reduction."""
    for atom, _ in product.factors:
        if atom.on_kv and atom.states & running:
            what = "a sum of both" if atom.name == GROUP else f"{atom.name.rpartition('.')[2]} of both"
            return Refusal(
                f"keys and a running reduction meet in {what}", as_sum(make_product([(atom, Fraction(1))], ZERO))
            )
    for term, c in product.exponent.terms:
        if term.on_kv and term.states & running:
            return Refusal(
                "a factor that varies along the keys multiplies a running reduction in an exponent", as_sum(term, c)
            )
    return None


def _checked(separation: Separation, running: frozenset[int]) -> Separation | Refusal:
    """Refuses powers whose range the row factor was meant to keep; lower ones if the row may be had first."""
    limit = MAX_DEGREE if separation.row.states & running else 1
    for product, _ in separation.element.terms:
        degree = max((abs(p) for a, p in product.factors if a.on_kv), default=0)
        if degree > limit and separation.row.states:
            return Refusal(
                f"power {degree} of an element would leave its range before the row factor is applied", separation.row
            )
    return separation


def _stabilised(
    algebra: Algebra, element: Product, number: float, row: Sum, moving: Sum, running: frozenset[int]
) -> Separation | Refusal:
    candidates, rest = _stabilisers_in(moving, running)
    if not candidates:
        return Refusal("an exponent is kept in range by a reduction that is no running maximum or minimum", moving)
    for chosen in combinations(*candidates):
        drivers = add(*(algebra.expand(algebra.mul(s.coefficient, s.driver)) for s in chosen))
        residue = _without_noise(sub(element.exponent, drivers), element.exponent)
        separation = Separation(as_sum(element, number), algebra.mul(row, algebra.exp(rest)), chosen, residue)
        if _bounded(separation, rest):
            return _checked(separation, running)
    return Refusal("the exponent is not bounded by the running maximum or minimum in it", moving)


def _without_noise(residue: Sum, exponent: Sum) -> Sum:
    """A residue without the terms that are only the rounding of constants."""
    sizes = {p: abs(c) for p, c in exponent.terms}
    return make_sum((p, c) for p, c in residue.terms if abs(c) > 4e-7 * sizes.get(p, 0.0))


def _bounded(separation: Separation, rest: Sum) -> bool:
    """Whether what is accumulated stays in range for every running stabiliser.

    A weight `exp(c * (driver - max driver))` is at most 1, or at most its final value if c < 0. With a
    residue or a clamp that holds for the right sign of c only.
    """
    monotone = all(s.monotone for s in separation.stabilisers)
    plain = all(isinstance(s.atom.operation, RowReduceOp) for s in separation.stabilisers)
    if separation.tight:
        return (monotone or plain) and not (rest.terms and separation.residue.terms)
    return monotone and not rest.terms and _upper_bound(separation.residue) < 700


def _upper_bound(value: Sum) -> float:
    """An upper bound; x - |x| counts as at most zero."""
    terms = dict(value.terms)
    for product, c in value.terms:
        atom = as_sum(product).atom
        if atom is None or atom.name != "math.absf" or c >= 0:
            continue
        for inner, d in atom.args[0].terms:
            if len(atom.args[0].terms) == 1 and inner in terms and abs(terms[inner]) <= -c * abs(d):
                terms.pop(inner)
                terms.pop(product)
                return _upper_bound(make_sum(terms.items()))
    return value_range(value).high


def _stabilisers_in(moving: Sum, running: frozenset[int]) -> tuple[list[list[Stabiliser]], Sum]:
    """For every stabiliser among the exponent's terms its possible drivers; and the remaining terms."""
    coefficients: dict[Atom, list[tuple[Product, float]]] = {}
    rest: list[tuple[Product, float]] = []
    for term, c in moving.terms:
        atoms = [a for a, p in term.factors if a.states & running and p == 1]
        others = make_product([f for f in term.factors if f[0] not in atoms], term.exponent)
        if len(atoms) == 1 and not others.states & running and list(_drivers(atoms[0], running)):
            coefficients.setdefault(atoms[0], []).append((others, -c))
        else:
            rest.append((term, c))
    found = [
        [Stabiliser(atom, kind, make_sum(terms), driver) for kind, driver in _drivers(atom, running)]
        for atom, terms in coefficients.items()
    ]
    return found, make_sum(rest)


def _drivers(atom: Atom, running: frozenset[int]) -> Iterator[tuple[ReduceKind, Sum]]:
    """What `atom` bounds: the argument of a running maximum, or those in a clamp of maxima."""
    operation = atom.operation
    if isinstance(operation, RowReduceOp):
        kind = ReduceKind(operation.kind.data)
        if kind in (ReduceKind.MAX, ReduceKind.MIN) and not atom.stabilised:
            yield kind, atom.args[0]
        return
    kind = CLAMPS.get(atom.name)
    if kind is None:
        return
    found: list[tuple[ReduceKind, Sum]] = []
    for arg in atom.args:
        if not arg.states & running and not arg.on_kv:
            continue
        inner = list(_drivers(arg.atom, running)) if arg.atom else []
        if not inner or any(k is not kind for k, _ in inner):
            return
        found += inner
    yield from found


def _grows(atom: Atom) -> bool:
    """Whether an exponential without upper bound stands somewhere in an atom."""
    return atom.once(_grows_itself)


def _grows_itself(atom: Atom) -> bool:
    if value_range(as_sum(make_product([(atom, Fraction(1))], ZERO))).high < 1e30:
        return False
    return any(_grows_in(arg) for arg in atom.args)


def _grows_in(value: Sum) -> bool:
    for product, _ in value.terms:
        if product.exponent.terms and value_range(product.exponent).high > 80:
            return True
        if any(_grows(a) for a, _ in product.factors):
            return True
    return False


def separate_extremum(algebra: Algebra, value: Sum, running: frozenset[int]) -> Separation | Refusal:
    """Splits the argument of a maximum or minimum: an added row term, or a positive row factor."""
    mixed = [(p, c) for p, c in value.terms if p.on_kv and p.states & running]
    row = make_sum((p, c) for p, c in value.terms if not p.on_kv and p.states)
    element = sub(value, row)
    if not mixed and element.on_kv:
        return Separation(element, row, additive=True)
    result = separate(algebra, value, running)
    if isinstance(result, Separation) and not value_range(result.row).positive:
        return Refusal("the row factor of an extremum is not proved positive", result.row)
    return result


def describe(separation: Separation) -> str:
    """A separation as text, for reports."""
    scales = [f"exp(-({show(s.coefficient)}) * {show_atom(s.atom)})" for s in separation.stabilisers]
    operator = " + " if separation.additive else " * "
    row = [show(separation.row)] if separation.row not in (ONE, ZERO) else []
    return operator.join([show(separation.element), *scales, *row])
