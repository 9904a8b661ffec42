"""The reverse sweep over a row function: gradients as sums of products, sums over a row recognised or made.

A row value r that code of single elements reads has the gradient sum_j c_j. Where r comes from captures alone the
sum stays open, as the terms c_j, down to the loads, whose gradients are accumulated element by element. Where r
needs a reduction of the forward pass the sum is closed. Closing a term a_j * r:

- a_j = dp_j * w_j where p_j = w_j * g and g is positive: the sum is delta * r / g, without a loop. Where g may be 0 in
  floating point, as an exponential may, it has to cancel;
- a_j is what a sum R of the forward pass adds up: R * r;
- otherwise a new reduction, for which the backward pass has one more loop over the keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.errors import UnsupportedGradientError
from attn_engine.ir.autodiff.graph import Graph, Needs
from attn_engine.ir.autodiff.partials import PARTIALS
from attn_engine.ir.autodiff.products import Products
from attn_engine.ir.autodiff.terms import ONE, Key, Term, Terms, addends, collect, power, product, vanishes
from attn_engine.ir.autodiff.writer import Writer
from attn_engine.passes.backward_attained import Attained
from attn_engine.passes.logistic import logistic_of

# More terms than this become one value: paths through the code can double at every operation.
TERM_LIMIT = 12


@dataclass(frozen=True)
class Arguments:
    """The values that the joint code of forward and backward starts from."""

    x: SSAValue
    dp: SSAValue
    indices: tuple[SSAValue, ...]
    delta: SSAValue
    d_outputs: tuple[SSAValue, ...]
    captures: tuple[SSAValue, ...]


@dataclass(frozen=True)
class Accumulation:
    """A contribution to the gradient of what `load` reads, per element or per row."""

    load: attn.LoadOp
    value: SSAValue
    per_row: bool


class RowSums:
    """Closed forms of sums over the visible keys of a row."""

    def __init__(
        self,
        graph: Graph,
        products: Products,
        writer: Writer,
        weight: SSAValue,
        arguments: Arguments,
        attained: Attained,
    ):
        self.graph = graph
        self.products = products
        self.writer = writer
        self.attained = attained
        self.known: dict[Key, tuple[SSAValue, Term]] = {}
        self.divisors = set(_divisors(graph, products))
        for op in [op for op in graph.block.ops if isinstance(op, attn.RowReduceOp)]:
            if op.kind.data == attn.ReduceKind.SUM:
                self._learn(products[op.value], op.result)
            elif op.kind.data == attn.ReduceKind.COUNT:
                self._learn(ONE, op.result)
        self._learn(products[weight] * power(arguments.dp), arguments.delta)

    def _learn(self, summand: Term, total: SSAValue) -> None:
        """total = sum of summand: total / (the row's factors) is the sum of its elements' factors."""
        element, row = self.products.split(summand)
        if self.products.never_zero(row):
            self.known[element.key] = (total, row)

    def close(self, terms: Terms, partial: Term) -> Terms:
        """The terms summed over the row; what comes of them is multiplied by `partial` next."""
        return collect(self._closed(term, partial) for term in terms)

    def _closed(self, term: Term, partial: Term) -> Term:
        element, row = self.products.split(term)
        if element.key in self.known:
            total, factors = self.known[element.key]
            closed = row * power(total) * Term(factors.coefficient, factors.powers).inverse()
            if factors.guards <= row.guards and self._is_safe(closed * partial, factors):
                return closed
        if element.key == ONE.key:
            return row * power(self.graph.reduce(attn.ReduceKind.COUNT, self.graph.constant(1.0)))
        return row * power(self._summed(element))

    def _summed(self, element: Term) -> SSAValue:
        for condition, wanted in element.guards:
            others = Term(element.coefficient, element.powers, element.guards - {(condition, wanted)})
            if not wanted and condition in self.attained.alone:
                return self.attained.sum_of_others(condition, self.writer.write([others]))
        return self.graph.reduce(attn.ReduceKind.SUM, self.writer.write([element]))

    def _is_safe(self, result: Term, factors: Term) -> bool:
        """Whether a result is divided by none of the factors that may be 0 in floating point: 0 / 0 would come of it.

        What the forward pass divides by itself, or takes the logarithm of, is not 0 where there is a weight.
        """
        return all(
            result.powers.get(v, 0.0) >= 0
            for v, p in factors.powers.items()
            if p > 0 and v not in self.divisors and not self.products.signs.above_zero(v)
        )


class Sweep:
    """Gradients of the scores and of the captures, from those of the weights and row outputs."""

    def __init__(
        self,
        graph: Graph,
        products: Products,
        weight: SSAValue,
        outputs: Sequence[SSAValue],
        arguments: Arguments,
        attained: Attained,
    ):
        self.graph = graph
        self.products = products
        self.writer = Writer(graph, products)
        self.arguments = arguments
        self.attained = attained
        self.sums = RowSums(graph, products, self.writer, weight, arguments, attained)
        self.accumulations: list[Accumulation] = []
        self.inverse: Callable[[attn.ChannelAtOp], SSAValue] | None = None
        """Of mods: the channel that reads this one."""
        self.element: defaultdict[SSAValue, Terms] = defaultdict(list)
        """Gradients per element; of a row value, the terms of an open sum."""
        self.row: defaultdict[SSAValue, Terms] = defaultdict(list)
        """Gradients per row."""
        self.element[weight].append(power(arguments.dp))
        for output, gradient in zip(outputs, arguments.d_outputs, strict=True):
            self.row[output].append(power(gradient))

    def run(self, operations: Sequence[Operation], wanted: set[SSAValue]) -> SSAValue:
        """Sweeps backwards over the operations of the forward pass; gives the gradient of x.

        `wanted` holds x and the captures whose gradients are asked for.
        """
        active = set(wanted)
        for op in operations:
            if any(operand in active for operand in op.operands) and op.results[0].type == f32:
                active.add(op.results[0])
        for op in reversed(operations):
            if op.results[0] in active:
                self._visit(op, active)
        return self.writer.write(self.element[self.arguments.x])

    def _visit(self, op: Operation, active: set[SSAValue]) -> None:
        value = op.results[0]
        element, row = collect(self.element.pop(value, [])), collect(self.row.pop(value, []))
        if not self.graph.is_element(value) and self.graph.needs[value] & Needs.FORWARD:
            element, row = [], collect([*row, *self.sums.close(element, self._own_factor(op))])
            if vanishes(row, self.products):
                return
        if not element and not row:
            return
        if isinstance(op, attn.RowReduceOp):
            self._reduction(op, row)
        elif isinstance(op, attn.LoadOp):
            self._load(op, element, row)
        elif isinstance(op, attn.ChannelAtOp):
            self._moved(op, element)
        else:
            self._operation(op, element, row, active)

    def _own_factor(self, op: Operation) -> Term:
        """The result itself, of a function whose derivative has it as a factor."""
        has_it = isinstance(op, math.ExpOp | math.Exp2Op) or logistic_of(op) is not None
        return self.products[op.results[0]] if has_it else ONE

    # --- elementwise code ------------------------------------------------------------------------

    def _operation(self, op: Operation, element: Terms, row: Terms, active: set[SSAValue]) -> None:
        if (logistic := logistic_of(op)) is not None:
            self._logistic(op.results[0], logistic[0], element, row)
            return
        if isinstance(op, arith.SelectOp) and (partial := self.attained.partial(op)) is not None:
            self.element[op.rhs] += product(element, [partial])
            self.row[op.rhs] += product(row, [partial])
            return
        rule = PARTIALS.get(type(op))
        if rule is None:
            raise UnsupportedGradientError(op.name)
        if isinstance(op, math.ExpOp | math.Exp2Op):
            element = self._without_overflow(op, element, active)
        several = sum(operand in active for operand in op.operands) > 1
        element, row = self._bundled(op.results[0], element, several), self._bundled(op.results[0], row, several)
        for operand, partial in zip(op.operands, rule(self.products, op), strict=True):
            if operand in active:
                self.element[operand] += product(element, partial)
                self.row[operand] += product(row, partial)

    def _logistic(self, p: SSAValue, x: SSAValue, element: Terms, row: Terms) -> None:
        """p (1 - p) of a result p: the two sides of its spelling need not be gone through. Small weights stay exact."""
        slope = power(self.graph.sub(p, self.graph.mul(p, p)))
        of_row = self.products[p] * power(self.graph.sub(self.graph.constant(1.0), p))
        self.element[x] += product(self._bundled(p, element, False), [slope])
        self.row[x] += product(self._bundled(p, row, False), [of_row])

    def _bundled(self, value: SSAValue, terms: Terms, several: bool) -> Terms:
        """One value instead of a sum, where no row sum will look into it, or the sum has become long."""
        opaque = not self.graph.needs[value] & Needs.FORWARD
        if opaque and not self.graph.is_element(value):
            terms = [self.products.fused(term) for term in terms]
        simple = not several or all(len(t.powers) <= 1 and not t.guards for t in terms)
        if (simple and len(terms) <= 1) or not (opaque or len(terms) > TERM_LIMIT):
            return terms
        return [power(self.writer.write(terms))]

    def _without_overflow(self, op: math.ExpOp | math.Exp2Op, terms: Terms, active: set[SSAValue]) -> Terms:
        """The terms that may be multiplied by an exponential; those that end in inf / inf go their own way.

        Of 1 / (1 + exp(-s)) the gradient has exp(-s) / (1 + exp(-s)), which is 1 - 1 / (1 + exp(-s)). What else
        is 0 stays 0 where the exponential is infinite.
        """
        class_ = next((c for c in self.products.classes for v, _ in c.members if v is op.result), None)
        if class_ is None or class_.bounded:
            return terms
        rest: Terms = []
        for term in terms:
            settled = self._over_one_plus(op.result, term)
            if settled is None:
                rest.append(term)
            elif op.operand in active:
                self.element[op.operand].append(settled.scaled(log(class_.base)))
        if not {v for t in rest for v in t.powers if self.graph.is_element(v)} - {self.arguments.dp}:
            return rest
        value = self.writer.write(rest)
        return [
            Term(1.0, {value: 1.0}, frozenset({(self.graph.compare(value, self.graph.constant(0.0), "une"), True)}))
        ]

    def _over_one_plus(self, exponential: SSAValue, term: Term) -> Term | None:
        """term * exponential where the term has a factor 1 / (exponential + constant)."""
        graph = self.graph
        for total, exponent in term.powers.items():
            for (_, a), (sign, b) in _both_ways(addends(total) or []):
                number = graph.number(b)
                if a is exponential and number is not None and exponent < 0:
                    inverse = graph.div(graph.constant(1.0), total)
                    share = graph.sub(graph.constant(1.0), graph.mul(inverse, graph.constant(sign * number)))
                    return term * power(total) * power(share)
        return None

    def _moved(self, op: attn.ChannelAtOp, element: Terms) -> None:
        """The gradient goes back to the channel that was read."""
        assert self.inverse is not None
        value = self.graph.emit(attn.ChannelAtOp(self.writer.write(element), self.inverse(op)))
        self.element[op.value].append(power(value))

    # --- captures --------------------------------------------------------------------------------

    def _load(self, op: attn.LoadOp, element: Terms, row: Terms) -> None:
        for terms, per_row in ((element, False), ([self.products.fused(t) for t in row], True)):
            if terms:
                self.accumulations.append(Accumulation(op, self.writer.write(terms), per_row))

    # --- reductions ------------------------------------------------------------------------------

    def _reduction(self, op: attn.RowReduceOp, terms: Terms) -> None:
        if op.kind.data == attn.ReduceKind.SUM:
            self.element[op.value] += terms
        elif op.kind.data in (attn.ReduceKind.MAX, attn.ReduceKind.MIN):
            self._extremum(op, terms)

    def _extremum(self, op: attn.RowReduceOp, terms: Terms) -> None:
        value, kind = op.value, op.kind.data
        if not self.graph.is_element(value):
            self.row[value] += terms
            return
        if op.ties is not None and op.ties.data == attn.TieRule.FIRST:
            share = Term(guards=frozenset({(self.attained.first(kind, value), True)}))
        else:
            hit, ties = self.attained.any(kind, value), self.attained.ties(kind, value)
            share = Term(1.0, {ties: -1.0}, frozenset({(hit, True)}))
        self.element[value] += product(terms, [share])


def _divisors(graph: Graph, products: Products) -> Iterator[SSAValue]:
    """What code divides by or takes the logarithm of, and the factors of that."""
    for op in list(graph.block.ops):
        if isinstance(op, arith.DivfOp | math.LogOp | math.Log2Op | math.RsqrtOp):
            divisor = op.operands[-1]
            yield divisor
            yield from (v for v, p in products[divisor].powers.items() if p > 0)


def _both_ways(pair: list[tuple[float, SSAValue]]) -> list[list[tuple[float, SSAValue]]]:
    """The two terms of a sum in either order; those that are subtracted never come first."""
    return [order for order in (pair, pair[::-1]) if order and order[0][0] > 0]
