"""attn-exp-to-exp2: exponentials in base 2, with the factor folded into one multiply-add per element."""

from __future__ import annotations

import math as pymath
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from xdsl.context import Context
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import ModuleOp, f32
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import attn
from attn_engine.ir.axes import AnyAttention, Axes, axes_of
from attn_engine.passes.attn_simplify import simplify
from attn_engine.passes.simplify_constants import constant, constant_of
from attn_engine.passes.simplify_rule import predicate_of

LOG2E = float(np.float32(1 / pymath.log(2)))
LN2 = float(np.float32(pymath.log(2)))
# Above this a product with log2(e) may overflow where the number itself does not.
HUGE = float(np.float32(2e38))
ELEMENTWISE = ("query_mod", "key_mod", "value_mod", "score_mod", "query_vjp", "key_vjp", "value_vjp")


@dataclass
class BaseTwo:
    """Rewrites one region; `axes` says which values are per element and which are per row.

    `distribute` scales rows that elements subtract once per row. It needs a factor per row beside the row
    value, which pays where a program keeps its rows (forward), not where rows stream past (backward).
    """

    block: Block
    axes: Mapping[SSAValue, Axes]
    distribute: bool
    factors: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue], init=False)

    def apply(self) -> None:
        self._compare_exponents()
        exponentials = [op for op in self.block.ops if isinstance(op, math.ExpOp)]
        rows = (
            {row for op in exponentials if (row := self._subtracted_row(op)) is not None}
            if self.distribute
            else set[SSAValue]()
        )
        for op in exponentials:
            self._replace(op, [math.Exp2Op(self._scaled(op, rows))])
        for op in list(self.block.ops):
            if isinstance(op, math.LogOp):
                log = math.Log2Op(op.operand)
                ln2 = constant(LN2, f32)
                self._replace(op, [log, ln2, arith.MulfOp(log.result, ln2)])
            elif isinstance(op, math.PowFOp) and constant_of(op.lhs) == 2:
                self._replace(op, [math.Exp2Op(op.rhs)])

    def _compare_exponents(self) -> None:
        """Exponentials are to 1 as exponents are to 0: in base 2, exp(s - m) may be off 1 where s is m."""
        for op in [op for op in self.block.ops if isinstance(op, arith.CmpfOp)]:
            for exponential, number in ((op.lhs, op.rhs), (op.rhs, op.lhs)):
                if isinstance(exponential.owner, math.ExpOp) and constant_of(number) == 1:
                    exponent, zero = exponential.owner.operand, self._insert(op, constant(0.0, f32))
                    lhs, rhs = (exponent, zero) if exponential is op.lhs else (zero, exponent)
                    self._replace(op, [arith.CmpfOp(lhs, rhs, predicate_of(op))])
                    break

    def _per_element(self, value: SSAValue) -> bool:
        return "kv" in self.axes.get(value, ())

    def _replace(self, op: Operation, new: list[Operation]) -> None:
        Rewriter.insert_op(new, InsertPoint.before(op))
        new[-1].results[0].name_hint = op.results[0].name_hint
        op.results[0].replace_all_uses_with(new[-1].results[0])
        Rewriter.erase_op(op)

    def _insert(self, before: Operation, *new: Operation) -> SSAValue:
        Rewriter.insert_op(new, InsertPoint.before(before))
        return new[-1].results[0]

    def _subtracted_row(self, op: math.ExpOp) -> SSAValue | None:
        """The row value in exp(element - row)."""
        inner = op.operand.owner
        if not isinstance(inner, arith.SubfOp) or constant_of(inner.rhs) is not None:
            return None
        return inner.rhs if self._per_element(inner.lhs) and not self._per_element(inner.rhs) else None

    def _scaled(self, op: math.ExpOp, rows: set[SSAValue]) -> SSAValue:
        """The exponent times log2(e); a row value that elements subtract is scaled in the same way everywhere."""
        exponent = op.operand
        inner = exponent.owner
        if isinstance(inner, arith.SubfOp) and inner.rhs in rows:
            return self._distributed(op, inner.lhs, inner.rhs)
        if isinstance(inner, arith.MulfOp):
            number = constant_of(inner.rhs)
            if number is not None and pymath.isfinite(np.float32(number * LOG2E)):
                return self._times(op, inner.lhs, number * LOG2E)
        if isinstance(inner, arith.NegfOp):
            return self._times(op, inner.operand, -LOG2E)
        return self._times(op, exponent, LOG2E)

    def _times(self, op: Operation, value: SSAValue, number: float) -> SSAValue:
        factor = constant(number, f32)
        return self._insert(op, factor, arith.MulfOp(value, factor.result))

    def _distributed(self, op: math.ExpOp, element: SSAValue, row: SSAValue) -> SSAValue:
        """(element - row) * factor as element * factor - row * factor: one multiply-add per element.

        The factor is 1 where the row value is huge: there the products would overflow to inf - inf, and a
        difference is either 0 or so far below that its exponential vanishes in any base.
        """
        factor = self.factors.get(row) or self._factor(op, row)
        self.factors[row] = factor
        product = self._element_product(op, element, factor)
        scaled_row = self._insert(op, arith.MulfOp(row, factor))
        return self._insert(op, arith.SubfOp(product, scaled_row))

    def _factor(self, op: Operation, row: SSAValue) -> SSAValue:
        size, limit = math.AbsFOp(row), constant(HUGE, f32)
        is_huge = arith.CmpfOp(size.result, limit.result, "ogt")
        one, log2e = constant(1.0, f32), constant(LOG2E, f32)
        return self._insert(
            op, size, limit, is_huge, one, log2e, arith.SelectOp(is_huge.result, one.result, log2e.result)
        )

    def _element_product(self, op: math.ExpOp, element: SSAValue, factor: SSAValue) -> SSAValue:
        """element * factor; where the element is x * k with k per row, and of no other use, x * (k * factor)."""
        inner = element.owner
        if isinstance(inner, arith.MulfOp) and len(list(element.uses)) == 1:
            for x, k in ((inner.lhs, inner.rhs), (inner.rhs, inner.lhs)):
                if self._per_element(x) and not self._per_element(k):
                    return self._insert(op, scale := arith.MulfOp(k, factor), arith.MulfOp(x, scale.result))
        return self._insert(op, arith.MulfOp(element, factor))


def _regions(op: AnyAttention) -> list[tuple[str, int]]:
    if isinstance(op, attn.OnlineOp):
        rowwise = [*[("steps", i) for i in range(len(op.steps))], ("epilogue", 0)]
    elif isinstance(op, attn.BackwardOp):
        rowwise = [*[("row_steps", i) for i in range(len(op.row_steps))], ("rows", 0), ("element", 0)]
    else:
        return []
    return [*[(name, 0) for name in ELEMENTWISE if getattr(op, name, None) is not None], *rowwise]


def exp_to_exp2(op: AnyAttention) -> None:
    """Rewrites all regions of one online or backward operation."""
    for name, index in _regions(op):
        region = getattr(op, name)
        block: Block = (region[index] if name in ("steps", "row_steps") else region).block
        BaseTwo(block, axes_of(op, name, index), distribute=name == "steps").apply()
    if isinstance(op, attn.OnlineOp):
        for region in op.combine:
            # All of it is per row.
            BaseTwo(region.block, {}, distribute=False).apply()
    simplify(op)


@dataclass(frozen=True)
class AttnExpToExp2Pass(ModulePass):
    """Turns exp, log and 2 ** x of `attn.online` and `attn.backward` into exp2 and log2.

    In the steps of a forward, a per-row value that is subtracted from every element is scaled once per row.

    ```
    %x = arith.subf %s, %m : f32    ->   %c = arith.select %m_is_huge, %one, %log2e : f32   (per row)
    %e = math.exp %x : f32               %r = arith.mulf %m, %c : f32                       (per row)
                                         %t = arith.mulf %s, %c : f32
                                         %x = arith.subf %t, %r : f32
                                         %e = math.exp2 %x : f32
    ```
    """

    name = "attn-exp-to-exp2"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for inner in list(op.walk()):
            if isinstance(inner, attn.OnlineOp | attn.BackwardOp):
                exp_to_exp2(inner)
