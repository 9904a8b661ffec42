"""Values of a graph as products of powers, with exponentials brought to one representative per class."""

from __future__ import annotations

import math as pymath
from collections.abc import Iterator, Mapping

from xdsl.dialects import arith, math
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.ir.autodiff.exponents import (
    ExpClass,
    Linear,
    added,
    base_of,
    log_base_of,
    nearly_equal,
    scaled,
)
from attn_engine.ir.autodiff.graph import Graph, Needs
from attn_engine.ir.autodiff.signs import Signs
from attn_engine.ir.autodiff.terms import Term, power
from attn_engine.ir.walks import behind


def _parts(value: SSAValue) -> tuple[SSAValue, ...]:
    """What a value is the sum, a multiple, a root or the larger of."""
    op = value.owner
    if isinstance(op, arith.AddfOp | arith.MaximumfOp | arith.MulfOp | arith.SelectOp | math.SqrtOp):
        return tuple(op.operands)
    return ()


class Products(Mapping[SSAValue, Term]):
    """`products[value]` is the product that a value stands for.

    exp(s - m) / l is one exponential, exp(s - (m + log l)), where l is proved positive; any other exp(s - r) is
    then that one times a row factor. So gradients of a softmax, however it is spelled, have one exponential.
    """

    def __init__(self, graph: Graph, signs: Signs, weight: SSAValue):
        """`graph` holds the forward code; the spelling of `weight` decides how exponentials are written."""
        self.graph = graph
        self.signs = signs
        self.exponents = signs.exponents
        self.classes: list[ExpClass] = []
        self._class_of: dict[SSAValue, tuple[ExpClass, Linear]] = {}
        self._raw: dict[SSAValue, Term] = {}
        self._final: dict[SSAValue, Term] = {}
        forward = [op.results[0] for op in list(graph.block.ops)]
        for value in forward:
            self._classify(value)
        for value in (weight, *forward):
            self._absorb(value, alone=value is weight)
        for found in self.classes:
            if found.chosen is None:
                self._choose(found, found.members[0][1])

    # --- the mapping -----------------------------------------------------------------------------

    def __getitem__(self, value: SSAValue) -> Term:
        if value not in self._final:
            raw = self._raw_term(value)
            result = Term(raw.coefficient, guards=raw.guards)
            for factor, exponent in raw.powers.items():
                result = result * self._in_class(factor, exponent)
            self._final[value] = result
        return self._final[value]

    def __iter__(self) -> Iterator[SSAValue]:
        return iter(self._final)

    def __len__(self) -> int:
        return len(self._final)

    def inverse(self, value: SSAValue) -> Term:
        term = self[value]
        return power(value, -1.0) if term.guards or not term.coefficient else term.inverse()

    def split(self, term: Term) -> tuple[Term, Term]:
        """(what differs from key to key, what is the row's); the coefficient goes with the row."""
        is_element = self.graph.is_element
        element = Term(
            1.0,
            {v: p for v, p in term.powers.items() if is_element(v)},
            frozenset(g for g in term.guards if is_element(g[0])),
        )
        row = Term(
            term.coefficient, {v: p for v, p in term.powers.items() if not is_element(v)}, term.guards - element.guards
        )
        return element, row

    def never_zero(self, term: Term) -> bool:
        """Whether a product is proved not to vanish: its numerators are positive."""
        return bool(term.coefficient) and all(p < 0 or self.signs.positive(v) for v, p in term.powers.items())

    # --- products as they are written ------------------------------------------------------------

    def _raw_term(self, value: SSAValue) -> Term:
        if value not in self._raw:
            self._raw[value] = self._read(value)
        return self._raw[value]

    def _read(self, value: SSAValue) -> Term:
        if (number := self.graph.number(value)) is not None:
            return Term(number) if pymath.isfinite(number) else power(value)
        match value.owner:
            case arith.NegfOp() as op:
                return self._raw_term(op.operand).scaled(-1.0)
            case arith.MulfOp() as op:
                return self._kept(value, self._raw_term(op.lhs) * self._raw_term(op.rhs))
            case arith.DivfOp() as op:
                below = self._raw_term(op.rhs)
                if below.guards or not below.coefficient:
                    below = power(op.rhs)
                return self._kept(value, self._raw_term(op.lhs) * below.inverse())
            case arith.SelectOp() as op:
                return self._read_select(value, op)
            case _:
                return power(value)

    def _read_select(self, value: SSAValue, op: arith.SelectOp) -> Term:
        for wanted, kept, dropped in ((True, op.lhs, op.rhs), (False, op.rhs, op.lhs)):
            if self.graph.number(dropped) == 0:
                term = self._raw_term(kept)
                return Term(term.coefficient, term.powers, term.guards | {(op.cond, wanted)})
        return power(value)

    def _kept(self, value: SSAValue, term: Term) -> Term:
        """A product stays multiplied out only where a row's statistic, an exponential or a guard is in it."""
        telling = term.guards or self.graph.needs[value] & Needs.FORWARD or any(base_of(v) for v in term.powers)
        return term if telling or not term.powers else power(value)

    # --- exponentials ----------------------------------------------------------------------------

    def _classify(self, value: SSAValue) -> None:
        base = base_of(value)
        if base is None or not self.graph.is_element(value):
            return
        assert isinstance(value.owner, Operation)
        element, row = self.exponents.split(self.exponents.linear(value.owner.operands[0]))
        for found in self.classes:
            if found.base == base and nearly_equal(found.element, element):
                break
        else:
            self.classes.append(found := ExpClass(base, element))
        found.members.append((value, row))
        found.bounded |= self.exponents.is_stabilised(value)
        self._class_of[value] = (found, row)

    def _absorb(self, value: SSAValue, alone: bool) -> None:
        """Chooses the representative of a class by the first product that it is in; `alone`, by itself too."""
        if not self.graph.is_element(value):
            return
        powers = self._raw_term(value).powers
        for factor, exponent in powers.items():
            if factor not in self._class_of or exponent != 1 or (factor is value and not alone):
                continue
            found, row = self._class_of[factor]
            if found.chosen is not None:
                continue
            for other, k in powers.items():
                if self.graph.is_element(other) or not self.signs.positive(other):
                    continue
                if self._is_total(other, found) or self._meets(other, row, found.base):
                    row = added(row, self._log(other, found.base), k)
                    found.bounded |= k == -1 and self._is_sum_of(other, factor)
            self._choose(found, row)
            return

    def _meets(self, value: SSAValue, row: Linear, base: float) -> bool:
        """Whether a factor is an exponential of a statistic that the row has, as exp(m - lse) beside exp(s - m)."""
        return base_of(value) == base and any(m and m in row for m in self._log(value, base))

    def _is_total(self, value: SSAValue, class_: ExpClass) -> bool:
        """Whether a sum of the exponentials over the row is in a value, beside what is added to it.

        Such a value is as large as they are. Others may be as small as they like: beside a gate that is nearly 0 the
        representative would be 0, and what it stands for that times infinity.
        """
        return any(self._is_reduction_of(v, class_) for v in behind([value], _parts))

    def _is_reduction_of(self, value: SSAValue, class_: ExpClass) -> bool:
        op = value.owner
        if not isinstance(op, attn.RowReduceOp) or op.kind.data != attn.ReduceKind.SUM:
            return False
        members = {member for member, _ in class_.members}
        return any(v in members for v in behind([op.value]))

    def _is_sum_of(self, total: SSAValue, value: SSAValue) -> bool:
        op = total.owner
        return isinstance(op, attn.RowReduceOp) and op.kind.data == attn.ReduceKind.SUM and op.value is value

    def _log(self, value: SSAValue, base: float) -> Linear:
        if base_of(value) == base:
            assert isinstance(value.owner, Operation)
            return self.exponents.linear(value.owner.operands[0])
        kind = math.LogOp if base == pymath.e else math.Log2Op
        return {(self.graph.emit(kind(value)),): 1.0}

    def _choose(self, found: ExpClass, row: Linear) -> None:
        found.chosen_row = row
        for member, its_row in found.members:
            if nearly_equal(row, its_row):
                found.chosen = member
        if found.chosen is None:
            kind = math.ExpOp if found.base == pymath.e else math.Exp2Op
            exponent = self.exponents.write(found.element)
            if row:
                exponent = self.graph.sub(exponent, self.exponents.write(scaled(row, -1.0)))
            found.chosen = self.graph.emit(kind(exponent))
        self._raw[found.chosen] = power(found.chosen)
        self._class_of[found.chosen] = (found, row)

    def _in_class(self, value: SSAValue, exponent: float) -> Term:
        if value not in self._class_of:
            return power(value, exponent)
        found, row = self._class_of[value]
        if found.chosen is None:
            return power(value, exponent)
        return power(found.chosen, exponent) * self._quotient(found.base, row, found.chosen_row, exponent)

    def _quotient(self, base: float, above: Linear, below: Linear, exponent: float) -> Term:
        """(base ** above / base ** below) ** exponent; logarithms give back what they were taken of."""
        result, rest = Term(), Linear()
        for monomial, c in self._difference(above, below).items():
            log_base = log_base_of(monomial[0]) if len(monomial) == 1 else None
            if log_base is None:
                rest[monomial] = c
                continue
            assert isinstance(monomial[0].owner, Operation)
            k = c * pymath.log(base) / pymath.log(log_base) * exponent
            result = result * power(monomial[0].owner.operands[0], round(k) if abs(k - round(k)) < 1e-6 else k)
        if rest:
            kind = math.ExpOp if base == pymath.e else math.Exp2Op
            result = result * power(self.graph.emit(kind(self.exponents.write(rest))), exponent)
        return result

    def fused(self, term: Term) -> Term:
        """exp(c - m) / l as exp(c - (m + log l)) in a row's product too, where elements have exp(s - (m + log l))."""
        for value in term.powers:
            base = base_of(value)
            if base is None or self.graph.is_element(value) or term.powers[value] != 1:
                continue
            assert isinstance(value.owner, Operation)
            linear = self.exponents.linear(value.owner.operands[0])
            row = {m: c for m, c in linear.items() if any(self.graph.needs[v] & Needs.FORWARD for v in m)}
            for found in self.classes:
                if found.base != base or not any(nearly_equal(row, its_row) for _, its_row in found.members):
                    continue
                fused = term.without(value) * self._quotient(found.base, row, found.chosen_row, 1.0)
                if len(fused.powers) < len(term.powers):
                    kind = math.ExpOp if base == pymath.e else math.Exp2Op
                    own = self.exponents.write(added(linear, row, -1.0))
                    exponent = self.graph.sub(own, self.exponents.write(scaled(found.chosen_row, -1.0)))
                    return fused * power(self.graph.emit(kind(exponent)))
        return term

    def class_of(self, value: SSAValue) -> ExpClass | None:
        """The class that a value represents."""
        return next((found for found in self.classes if found.chosen is value), None)

    def _difference(self, a: Linear, b: Linear) -> Linear:
        size = {m: abs(a.get(m, 0.0)) + abs(b.get(m, 0.0)) for m in (*a, *b)}
        return {m: c for m, c in added(a, b, -1.0).items() if abs(c) > 2.0**-21 * size[m]}
