"""Normal-form expressions: sums of products of atoms, each product with an exponential.

A value is `sum_i c_i * prod_j atom_ij ** power_ij * exp(exponent_i)`, where every exponent is
such a sum again. What the form does not look into (a block argument, a comparison, a clamp) is
an `Atom`; atoms are interned by `attn_engine.ir.algebra.Algebra`, so that equal ones are the
same one and equal expressions compare equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TypeVar, cast

from xdsl.ir import Operation, SSAValue

GROUP = "group"
"""Name of the atom that stands for a whole sum as one factor of a product."""

MOST_SHOWN = 400
"""Atoms in a text; the rest is dots. What is written out is a tree, which can be exponentially larger than the code."""

Key = tuple[object, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Atom:
    """One factor that the form does not look into; equal if and only if interned as one.

    - `value`: the SSA value, of a leaf;
    - `operation` and `args`: an operation of the same name and properties, and its operands;
    - `on_kv`: whether it varies along the keys of a row;
    - `stabilised`: of a reduction, whether its state is rescaled while the row runs;
    - `states`: numbers of the reductions (or reduction states) that it reads.
    """

    number: int
    name: str = field(compare=False)
    value: SSAValue | None = field(compare=False, default=None)
    operation: Operation | None = field(compare=False, default=None)
    args: tuple[Sum, ...] = field(compare=False, default=())
    on_kv: bool = field(compare=False, default=False)
    states: frozenset[int] = field(compare=False, default=frozenset())
    stabilised: bool = field(compare=False, default=False)
    _answers: dict[object, object] = field(compare=False, repr=False, default_factory=dict[object, object])

    def once(self, question: Callable[[Atom], T]) -> T:
        """What a function says of this atom, asked once: many expressions share it, and so do those that it is made of."""
        if question not in self._answers:
            self._answers[question] = question(self)
        return cast(T, self._answers[question])


@dataclass(frozen=True)
class Product:
    """`prod atom ** power * exp(exponent)`, factors sorted by atom number."""

    factors: tuple[tuple[Atom, Fraction], ...]
    exponent: Sum

    @cached_property
    def key(self) -> Key:
        return (tuple((a.number, p) for a, p in self.factors), self.exponent.key)

    @cached_property
    def on_kv(self) -> bool:
        return any(a.on_kv for a, _ in self.factors) or self.exponent.on_kv

    @cached_property
    def states(self) -> frozenset[int]:
        return self.exponent.states.union(*(a.states for a, _ in self.factors))

    @cached_property
    def hashed(self) -> int:
        return hash((self.factors, self.exponent))

    def __hash__(self) -> int:
        return self.hashed


@dataclass(frozen=True)
class Sum:
    """`sum coefficient * product`, terms sorted by the key of their product."""

    terms: tuple[tuple[Product, float], ...]

    @cached_property
    def key(self) -> Key:
        return tuple((p.key, c) for p, c in self.terms)

    @cached_property
    def on_kv(self) -> bool:
        return any(p.on_kv for p, _ in self.terms)

    @cached_property
    def states(self) -> frozenset[int]:
        return frozenset[int]().union(*(p.states for p, _ in self.terms))

    @cached_property
    def hashed(self) -> int:
        return hash(self.terms)

    def __hash__(self) -> int:
        return self.hashed

    @property
    def constant(self) -> float | None:
        """The number that this is, or None."""
        if not self.terms:
            return 0.0
        product, coefficient = self.terms[0]
        return coefficient if len(self.terms) == 1 and product == ONE_PRODUCT else None

    @property
    def atom(self) -> Atom | None:
        """The atom that this is, or None."""
        if len(self.terms) != 1:
            return None
        product, coefficient = self.terms[0]
        if coefficient != 1.0 or product.exponent.terms or len(product.factors) != 1:
            return None
        atom, power = product.factors[0]
        return atom if power == 1 else None


ZERO = Sum(())
ONE_PRODUCT = Product((), ZERO)
ONE = Sum(((ONE_PRODUCT, 1.0),))


def indicator_condition(atom: Atom) -> tuple[Sum, bool] | None:
    """Of an atom that is 1 where a condition has a value and else 0: the condition and that value."""
    if atom.name != "arith.select" or atom.args[1:] not in ((ONE, ZERO), (ZERO, ONE)):
        return None
    return atom.args[0], atom.args[1] == ONE


def atoms_of(value: Sum) -> Iterator[Atom]:
    """Every atom in a value once, those in exponents and in arguments of atoms too."""
    seen, pending = set[Atom](), [value]
    while pending:
        for product, _ in pending.pop().terms:
            pending.append(product.exponent)
            for atom in [a for a, _ in product.factors if a not in seen]:
                seen.add(atom)
                yield atom
                pending += atom.args


def show(value: Sum) -> str:
    """A value as text, for diagnostics."""
    return _Text().sum(value)


def show_atom(atom: Atom) -> str:
    """An atom as text, for diagnostics."""
    return _Text().atom(atom)


@dataclass
class _Text:
    """Writes one text of limited length."""

    left: int = MOST_SHOWN

    def sum(self, value: Sum) -> str:
        return " + ".join(self._term(p, c) for p, c in value.terms) or "0"

    def _term(self, product: Product, coefficient: float) -> str:
        parts = [f"{coefficient:g}"] if coefficient != 1 or product == ONE_PRODUCT else []
        for atom, power in product.factors:
            parts.append(self.atom(atom) + (f"^{power}" if power != 1 else ""))
        if product.exponent.terms:
            parts.append(f"exp({self.sum(product.exponent)})")
        return " * ".join(parts)

    def atom(self, atom: Atom) -> str:
        self.left -= 1
        if self.left < 0:
            return "..."
        if atom.name == GROUP:
            return f"({self.sum(atom.args[0])})"
        if atom.value is not None:
            return atom.value.name_hint or atom.name
        if atom.name == "attn.row_reduce" and atom.operation is not None:
            name = atom.operation.results[0].name_hint
            if name is not None:
                return name
        name = atom.name.rpartition(".")[2]
        return f"{name}({', '.join(self.sum(a) for a in atom.args)})" if atom.args else name
