"""Which values are proved positive, or at least not negative, in every live row."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from xdsl.dialects import arith, math
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.ir.autodiff.exponents import Exponents
from attn_engine.ir.autodiff.graph import Graph
from attn_engine.ir.dead_rows import tells_dead_rows
from attn_engine.ir.walks import bottom_up, operands_of

INF = float("inf")


class Sign(IntEnum):
    """What is known about a sign; NaN aside."""

    UNKNOWN = 0
    NONNEGATIVE = 1
    POSITIVE = 2


def _of_product(a: Sign, b: Sign) -> Sign:
    return min(a, b)


def _of_sum(a: Sign, b: Sign) -> Sign:
    return max(a, b) if min(a, b) else Sign.UNKNOWN


class Signs:
    """Signs of the values of a graph, found once each."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.exponents = Exponents(graph)
        self._found: dict[SSAValue, Sign] = {}
        self._above_zero: dict[SSAValue, bool] = {}

    def positive(self, value: SSAValue) -> bool:
        return self.of(value) == Sign.POSITIVE

    def of(self, value: SSAValue) -> Sign:
        return bottom_up(value, operands_of, self._find, self._found)

    def _find(self, value: SSAValue) -> Sign:
        if (number := self.graph.number(value)) is not None:
            return Sign.POSITIVE if number > 0 else Sign.NONNEGATIVE if number == 0 else Sign.UNKNOWN
        rule = _RULES.get(type(value.owner)) if isinstance(value.owner, Operation) else None
        return Sign.UNKNOWN if rule is None else rule(self, value.owner)  # type: ignore[arg-type]

    def of_product(self, op: Operation) -> Sign:
        if isinstance(op, arith.MulfOp) and op.lhs is op.rhs:
            return max(Sign.NONNEGATIVE, self.of(op.lhs))
        return _of_product(self.of(op.operands[0]), self.of(op.operands[1]))

    def of_sum(self, op: Operation) -> Sign:
        return _of_sum(self.of(op.operands[0]), self.of(op.operands[1]))

    def of_larger(self, op: Operation) -> Sign:
        return max(self.of(op.operands[0]), self.of(op.operands[1]))

    def of_either(self, op: Operation) -> Sign:
        return min(self.of(op.operands[-2]), self.of(op.operands[-1]))

    def of_reduction(self, op: Operation) -> Sign:
        assert isinstance(op, attn.RowReduceOp)
        return Sign.POSITIVE if op.kind.data == attn.ReduceKind.COUNT else self.of(op.value)

    def above_zero(self, value: SSAValue) -> bool:
        """Positive in floating point too, where an exponential can be 0: counts and stabilised sums, for example."""
        return bottom_up(value, _addends, self._is_above_zero, self._above_zero)

    def _is_above_zero(self, value: SSAValue) -> bool:
        if (number := self.graph.number(value)) is not None:
            return number > 0
        match value.owner:
            case attn.RowReduceOp(kind=attn.ReduceKindAttr(data=attn.ReduceKind.COUNT)):
                return True
            case attn.RowReduceOp(kind=attn.ReduceKindAttr(data=attn.ReduceKind.SUM)) as op:
                # The largest of the summands is exp(max - max) = 1.
                return self.exponents.is_stabilised(op.value)
            case arith.AddfOp() as op:
                one, other = (op.lhs, op.rhs) if self.above_zero(op.lhs) else (op.rhs, op.lhs)
                return self.above_zero(one) and self.of(other) != Sign.UNKNOWN
            case arith.MaximumfOp() as op:
                return self.above_zero(op.lhs) or self.above_zero(op.rhs)
            case _:
                return False

    def decided(self, op: Operation) -> bool | None:
        """What a comparison with a constant gives in every live row: of a positive value with 0, of a max with -inf."""
        if not isinstance(op, arith.CmpfOp) or (number := self.graph.number(op.rhs)) is None:
            return None
        predicate = arith.CMPF_COMPARISON_OPERATIONS[op.predicate.value.data]
        if predicate not in ("oeq", "ole", "ogt", "one", "une", "oge", "olt", "ueq"):
            return None
        owner = op.lhs.owner
        reduced = owner if isinstance(owner, attn.RowReduceOp) and tells_dead_rows(owner) else None
        above = number <= 0 and self.above_zero(op.lhs)
        above |= reduced is not None and reduced.kind.data == attn.ReduceKind.MAX and number == -INF
        if above:
            return predicate in ("ogt", "oge", "one", "une")
        if reduced is not None and reduced.kind.data == attn.ReduceKind.MIN and number == INF:
            return predicate in ("olt", "ole", "one", "une")
        return None


def _addends(value: SSAValue) -> tuple[SSAValue, ...]:
    return tuple(operands_of(value)) if isinstance(value.owner, arith.AddfOp | arith.MaximumfOp) else ()


def _always(sign: Sign) -> Callable[[Signs, Operation], Sign]:
    return lambda signs, op: sign


_RULES: dict[type[Operation], Callable[[Signs, Operation], Sign]] = {
    math.ExpOp: _always(Sign.POSITIVE),
    math.Exp2Op: _always(Sign.POSITIVE),
    math.AbsFOp: _always(Sign.NONNEGATIVE),
    math.SqrtOp: lambda signs, op: signs.of(op.operands[0]),
    math.RsqrtOp: _always(Sign.POSITIVE),
    math.Log1pOp: lambda signs, op: signs.of(op.operands[0]),
    math.PowFOp: lambda signs, op: signs.of(op.operands[0]),
    arith.MulfOp: Signs.of_product,
    arith.DivfOp: Signs.of_product,
    arith.AddfOp: Signs.of_sum,
    arith.MaximumfOp: Signs.of_larger,
    arith.MinimumfOp: Signs.of_either,
    arith.SelectOp: Signs.of_either,
    attn.RowReduceOp: Signs.of_reduction,
}
