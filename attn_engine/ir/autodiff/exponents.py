"""Exponents as sums of products, and the classes of exponentials that differ by a row factor only."""

from __future__ import annotations

import math as pymath
from collections.abc import Mapping
from dataclasses import dataclass, field

from xdsl.dialects import arith, math
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.ir.autodiff.graph import Graph, Needs
from attn_engine.ir.walks import bottom_up

Monomial = tuple[SSAValue, ...]
Linear = dict[Monomial, float]

EXPANSION_LIMIT = 6


def scaled(linear: Linear, factor: float) -> Linear:
    return {monomial: c * factor for monomial, c in linear.items()}


def added(a: Linear, b: Linear, factor: float = 1.0) -> Linear:
    result = dict(a)
    for monomial, c in b.items():
        result[monomial] = result.get(monomial, 0.0) + factor * c
    return {monomial: c for monomial, c in result.items() if c}


class Exponents:
    """Reads values as sums of products and writes such sums back."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._known: dict[SSAValue, Linear] = {}

    def linear(self, value: SSAValue) -> Linear:
        """A value as a sum of products; products are multiplied out where a row's statistic is in them."""
        return bottom_up(value, self._opened, self._linear, self._known)

    def _opened(self, value: SSAValue) -> tuple[SSAValue, ...]:
        """The operands that a value is a sum or a product of."""
        match value.owner:
            case _ if self.graph.number(value) is not None:
                return ()
            case arith.AddfOp() | arith.SubfOp() as op if self._reads_row(value):
                return op.lhs, op.rhs
            case arith.NegfOp() as op:
                return (op.operand,)
            case arith.MulfOp() as op if not self._is_closed(value, op.lhs, op.rhs):
                return op.lhs, op.rhs
            case _:
                return ()

    def _linear(self, value: SSAValue) -> Linear:
        if (number := self.graph.number(value)) is not None:
            return {(): number} if number else {}
        match value.owner:
            case arith.AddfOp() as op if self._reads_row(value):
                return added(self.linear(op.lhs), self.linear(op.rhs))
            case arith.SubfOp() as op if self._reads_row(value):
                return added(self.linear(op.lhs), self.linear(op.rhs), -1.0)
            case arith.NegfOp() as op:
                return scaled(self.linear(op.operand), -1.0)
            case arith.MulfOp() as op:
                return self._product(value, op.lhs, op.rhs)
            case arith.DivfOp() as op if self.graph.is_element(op.lhs) and not self.graph.is_element(op.rhs):
                return self._product(value, op.lhs, self.graph.div(self.graph.constant(1.0), op.rhs))
            case _:
                return {(value,): 1.0}

    def _reads_row(self, value: SSAValue) -> bool:
        return bool(self.graph.needs[value] & Needs.FORWARD)

    def _is_closed(self, value: SSAValue, a: SSAValue, b: SSAValue) -> bool:
        """Whether a product of a and b is not multiplied out."""
        return not self._reads_row(value) and self.graph.number(a) is None and self.graph.number(b) is None

    def _product(self, value: SSAValue, a: SSAValue, b: SSAValue) -> Linear:
        if self._is_closed(value, a, b):
            return {(value,): 1.0}
        left, right = self.linear(a), self.linear(b)
        if min(len(left), len(right)) > 1 or len(left) * len(right) > EXPANSION_LIMIT:
            return {(value,): 1.0}  # of (s - m) * (s - m) in parts little is left where s is large
        result: Linear = {}
        for m, c in left.items():
            for n, d in right.items():
                key = tuple(sorted((*m, *n), key=self.graph.order.__getitem__))
                result = added(result, {key: c * d})
        return result

    def split(self, linear: Linear) -> tuple[Linear, Linear]:
        """What differs from key to key, and what is the row's."""
        element = {m: c for m, c in linear.items() if any(map(self.graph.is_element, m))}
        return element, {m: c for m, c in linear.items() if m not in element}

    def write(self, linear: Linear) -> SSAValue:
        """The value of a sum of products, terms with a positive coefficient first."""
        ordered = sorted(linear.items(), key=lambda item: (item[1] < 0, [self.graph.order[v] for v in item[0]]))
        total: SSAValue | None = None
        for monomial, c in ordered:
            if total is None:
                total = self._write_product(monomial, c)
            elif c < 0:
                total = self.graph.sub(total, self._write_product(monomial, -c))
            else:
                total = self.graph.add(total, self._write_product(monomial, c))
        return self.graph.constant(0.0) if total is None else total

    def _write_product(self, monomial: Monomial, coefficient: float) -> SSAValue:
        if not monomial:
            return self.graph.constant(coefficient)
        value = monomial[0]
        for factor in monomial[1:]:
            value = self.graph.mul(value, factor)
        return value if coefficient == 1.0 else self.graph.mul(value, self.graph.constant(coefficient))

    def is_stabilised(self, exponential: SSAValue) -> bool:
        """Whether the exponent is something minus its own maximum over the row, constants aside."""
        if base_of(exponential) is None or not isinstance(exponential.owner, Operation):
            return False
        element, row = self.split(self.linear(exponential.owner.operands[0]))
        parts = [(m, c) for m, c in row.items() if m]
        if len(parts) != 1 or len(parts[0][0]) != 1:
            return False
        (value,), c = parts[0]
        op = value.owner
        if not isinstance(op, attn.RowReduceOp) or op.kind.data != attn.ReduceKind.MAX or c >= 0:
            return False
        return nearly_equal(scaled(self.linear(op.value), -c), element)


@dataclass
class ExpClass:
    """Exponentials base ** (element + row) of one base and one element part; `chosen` stands for all of them."""

    base: float
    element: Linear
    members: list[tuple[SSAValue, Linear]] = field(default_factory=list[tuple[SSAValue, Linear]])
    chosen: SSAValue | None = None
    chosen_row: Linear = field(default_factory=dict[Monomial, float])
    bounded: bool = False
    """Whether `chosen` is at most some constant."""


def nearly_equal(a: Mapping[Monomial, float], b: Mapping[Monomial, float]) -> bool:
    """Equal up to the rounding of constants to f32."""
    return a.keys() == b.keys() and all(pymath.isclose(a[m], b[m], rel_tol=2.0**-21) for m in a)


def base_of(value: SSAValue) -> float | None:
    """The base of an exponential."""
    match value.owner:
        case math.ExpOp():
            return pymath.e
        case math.Exp2Op():
            return 2.0
        case _:
            return None


def log_base_of(value: SSAValue) -> float | None:
    """The base of a logarithm."""
    match value.owner:
        case math.LogOp():
            return pymath.e
        case math.Log2Op():
            return 2.0
        case _:
            return None
