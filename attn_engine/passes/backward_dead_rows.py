"""Dead rows in the backward pass: row vectors that make the weight and the gradient of the score vanish.

Rows without a visible key need nothing here: all their elements are masked. A row in which a maximum is -inf
has visible elements, all with a score of -inf; its saved values are -inf and everything computed from them is noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import FloatAttr, f32
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.ir.autodiff.exponents import nearly_equal, scaled
from attn_engine.ir.autodiff.graph import Graph, Needs
from attn_engine.ir.autodiff.products import Products
from attn_engine.ir.walks import bottom_up, operands_of

INF = float("inf")


def element_code(graph: Graph, outputs: Iterable[SSAValue]) -> tuple[list[SSAValue], list[SSAValue]]:
    """(row vectors that the code of single elements reads, the values of that code), each in order."""
    vectors, code, pending = set[SSAValue](), set[SSAValue](), list(outputs)
    while pending:
        value = pending.pop()
        if value in vectors or value in code:
            continue
        needs = graph.needs[value]
        if value.type == f32 and not needs & Needs.ELEMENT and needs & (Needs.FORWARD | Needs.BACKWARD):
            vectors.add(value)
            continue
        code.add(value)
        if isinstance(value.owner, Operation):
            pending.extend(value.owner.operands)
    order = graph.order.__getitem__
    return sorted(vectors, key=order), sorted(code, key=order)


class DeadRows:
    """Finds, for given element code, what each row vector has to be in a dead row.

    `extrema` tell that a row is dead, `alone` if there are no others.
    """

    def __init__(self, graph: Graph, products: Products, extrema: Sequence[attn.RowReduceOp], alone: bool):
        self.graph = graph
        self.products = products
        self.extrema = extrema
        self.alone = alone
        self.scores = {op.value for op in extrema}

    def fills(self, outputs: Sequence[SSAValue]) -> dict[SSAValue, float] | None:
        """The value of each vector with which all outputs vanish by themselves; None where that is not proved."""
        vectors, code = element_code(self.graph, outputs)
        fills = dict.fromkeys(vectors, 0.0)
        exponentials = set[SSAValue]()
        for value in code:
            subtracted = self._subtracted(value)
            if subtracted is not None and subtracted in fills and self._only_read_by(subtracted, value, code):
                fills[subtracted] = INF
                exponentials.add(value)
        vanish = _Vanishing(self.graph, fills, exponentials, self.scores)
        return fills if all(vanish.is_zero(v) for v in outputs) else None

    def _subtracted(self, value: SSAValue) -> SSAValue | None:
        """r where the value is exp(e - r) and all extrema are the maximum of a positive multiple of e."""
        class_ = self.products.class_of(value)
        if class_ is None or not isinstance(value.owner, math.ExpOp | math.Exp2Op):
            return None
        exponent = value.owner.operand.owner
        if not isinstance(exponent, arith.SubfOp) or self.graph.is_element(exponent.rhs):
            return None
        return exponent.rhs if all(self._governs(op, class_.element) for op in self.extrema) else None

    def _governs(self, op: attn.RowReduceOp, element: dict[tuple[SSAValue, ...], float]) -> bool:
        if op.kind.data != attn.ReduceKind.MAX:
            return False
        linear = self.products.exponents.linear(op.value)
        if linear.keys() != element.keys():
            return False
        if not element:
            return True  # both are 0
        factor = next(iter(element.values())) / next(iter(linear.values()))
        return factor > 0 and nearly_equal(scaled(linear, factor), element)

    def _only_read_by(self, vector: SSAValue, exponential: SSAValue, code: Sequence[SSAValue]) -> bool:
        assert isinstance(exponential.owner, Operation)
        reader = exponential.owner.operands[0]
        return not any(v is not reader and isinstance(v.owner, Operation) and vector in v.owner.operands for v in code)

    def stopped(self, outputs: Sequence[SSAValue], dead: SSAValue) -> list[SSAValue]:
        """The outputs, selected to 0 where one more row vector says that the row is dead: always right, never free."""
        graph = self.graph
        zero, one = graph.constant(0.0), graph.constant(1.0)
        live = graph.compare(graph.select(dead, zero, one), zero, "ogt")
        return [graph.select(live, value, zero) for value in outputs]


class _Vanishing:
    """Whether element code gives 0 in a dead row, given what the row vectors are there."""

    def __init__(self, graph: Graph, fills: dict[SSAValue, float], exponentials: set[SSAValue], scores: set[SSAValue]):
        self.graph = graph
        self.fills = fills
        self.exponentials = exponentials
        self.scores = scores
        self._zero: dict[SSAValue, bool] = {}
        self._finite: dict[SSAValue, bool] = {}

    def is_zero(self, value: SSAValue) -> bool:
        return bottom_up(value, operands_of, self._is_zero, self._zero)

    def _is_zero(self, value: SSAValue) -> bool:
        if value in self.exponentials or self.graph.number(value) == 0:
            return True
        if value in self.fills:
            return self.fills[value] == 0
        match value.owner:
            case arith.MulfOp() as op:
                a, b = op.lhs, op.rhs
                return (self._zero[a] and self.is_finite(b)) or (self._zero[b] and self.is_finite(a))
            case arith.AddfOp() | arith.SubfOp() | arith.SelectOp() as op:
                return all(self._zero[v] for v in op.operands if v.type == f32)
            case arith.NegfOp() as op:
                return self._zero[op.operand]
            case _:
                return False

    def is_finite(self, value: SSAValue) -> bool:
        """Finite as long as x, dp and captures are: nothing that an infinite score reaches."""
        return bottom_up(value, operands_of, self._is_finite, self._finite)

    def _is_finite(self, value: SSAValue) -> bool:
        if value in self.fills:
            return self.fills[value] == 0
        if value in self.exponentials:
            return True
        if value in self.scores:
            return not isinstance(value.owner, Operation)
        match value.owner:
            case arith.AddfOp() | arith.SubfOp() | arith.MulfOp() | arith.NegfOp() | arith.SelectOp() as op:
                return all(self._finite[v] for v in op.operands if v.type == f32)
            case math.TanhOp() | math.SinOp() | math.CosOp() | math.ErfOp():
                return True
            case arith.ConstantOp(value=FloatAttr() as number):
                return abs(number.value.data) != INF
            case arith.SIToFPOp() | arith.UIToFPOp() | attn.LoadOp():
                return True
            case Operation():
                return False
            case _:
                return True
