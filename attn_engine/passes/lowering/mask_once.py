"""Gradients that vanish with the weight: the mask is applied to the weight, and to none of its multiples.

A product with a factor that is 0 is 0 if the other one is finite. Products of loaded operands are; what a mask hides may
make other things infinite or NaN, a logarithm of a distance for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from xdsl.dialects import arith, math
from xdsl.ir import Operation, SSAValue

from attn_engine.ir.walks import behind, bottom_up, operands_of
from attn_engine.passes.lowering.program import Program
from attn_engine.passes.simplify_constants import constant_of

_SUMS = (arith.AddfOp, arith.SubfOp)
_SAME = (arith.NegfOp, arith.ExtFOp, arith.TruncFOp)
_BOUNDED = (math.TanhOp, math.SinOp, math.CosOp)


@dataclass
class _Vanishing:
    """Which values are 0 where a masked weight is."""

    weight: SSAValue
    finite: set[SSAValue]
    _zero: dict[SSAValue, bool] = field(default_factory=dict[SSAValue, bool])
    _known: dict[SSAValue, bool] = field(default_factory=dict[SSAValue, bool])

    def holds(self, value: SSAValue) -> bool:
        return bottom_up(value, operands_of, self._is_zero, self._zero)

    def _is_zero(self, value: SSAValue) -> bool:
        owner = value.owner
        if value is self.weight or constant_of(value) == 0.0:
            return True
        if isinstance(owner, arith.MulfOp):
            a, b = owner.operands
            return (self._zero[a] and self._finite(b)) or (self._zero[b] and self._finite(a))
        if isinstance(owner, arith.SelectOp):
            return self._zero[owner.lhs] and self._zero[owner.rhs]
        return isinstance(owner, (*_SUMS, *_SAME)) and all(self._zero[o] for o in owner.operands)

    def _finite(self, value: SSAValue) -> bool:
        return bottom_up(value, operands_of, self._is_finite, self._known)

    def _is_finite(self, value: SSAValue) -> bool:
        owner, number = value.owner, constant_of(value)
        if value is self.weight or value in self.finite or isinstance(owner, arith.SIToFPOp):
            return True
        if number is not None:
            return abs(number) < float("inf")
        kinds = (*_SUMS, *_SAME, *_BOUNDED, arith.MulfOp)
        return isinstance(owner, kinds) and all(self._known[o] for o in owner.operands)


def mask_once(
    program: Program, weight: SSAValue, gradient: SSAValue, finite: Iterable[SSAValue], rows: Iterable[SSAValue]
) -> tuple[SSAValue, SSAValue]:
    """The weight and the gradient of its score, 0 where masked; contributions lose selects that they do not need.

    `finite` are values of the program that are so, as are those of `rows` of which the weight is not made: it is 0 where
    one of these is infinite.
    """
    visible = program.visible
    if visible is None or not isinstance(weight.owner, Operation):
        return program.where_visible(weight), program.where_visible(gradient)
    masked = program.where_visible(weight)
    assert isinstance(masked.owner, arith.SelectOp)
    zero = masked.owner.rhs.owner
    assert isinstance(zero, Operation)
    for op in (zero, masked.owner):
        op.detach()
    program.block.insert_ops_after([zero, masked.owner], weight.owner)
    weight.replace_uses_with_if(masked, lambda use: use.operation is not masked.owner)
    vanishing = _Vanishing(masked, {*finite, *(set(rows) - set(behind([weight])))})
    program.contributions[:] = [replace(c, value=_without(vanishing, visible, c.value)) for c in program.contributions]
    gradient = masked if gradient is weight else gradient
    return masked, gradient if vanishing.holds(gradient) else program.where_visible(gradient)


def _without(vanishing: _Vanishing, visible: SSAValue, value: SSAValue) -> SSAValue:
    """A contribution without its mask where it needs none."""
    owner = value.owner
    masked = isinstance(owner, arith.SelectOp) and owner.cond is visible and constant_of(owner.rhs) == 0.0
    return owner.lhs if masked and vanishing.holds(owner.lhs) else value  # type: ignore[union-attr]
