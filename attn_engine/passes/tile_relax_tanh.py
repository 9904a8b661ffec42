"""`tile-relax-tanh`: hyperbolic tangents of which only the absolute error counts, by one exponential."""

from __future__ import annotations

import math as m
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import ModuleOp, f32
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.error_bounds import ErrorBounds, maps_of
from attn_engine.passes.scalar_code import Code, Scalar
from attn_engine.passes.simplify_constants import constant_of

ABSOLUTE = 1.5e-7
"""The error of 1 - 2 / (1 + exp2(x)) in f32, with a device's exp2 and reciprocal."""


def _error(op: Operation) -> float | None:
    return ABSOLUTE if isinstance(op, math.TanhOp) and op.results[0].type == f32 else None


def _factors(op: tile.MapOp, value: SSAValue) -> tuple[SSAValue, list[SSAValue], float]:
    """A value as what varies, times scalars of the map, times a number; products of another use stay whole."""
    scalars, number = list[SSAValue](), 1.0
    alone = {a for a, axes in zip(op.body.block.args, tile.axes_of(op.axes), strict=True) if not axes}
    while isinstance(value.owner, arith.MulfOp | arith.DivfOp) and len(list(value.uses)) == 1:
        product = value.owner
        known = constant_of(product.rhs)
        if known is not None and (known or isinstance(product, arith.MulfOp)):
            number = number * known if isinstance(product, arith.MulfOp) else number / known
        elif isinstance(product, arith.MulfOp) and product.rhs in alone:
            scalars.append(product.rhs)
        else:
            break
        value = product.lhs
    return value, scalars, number


def _relax(inside: tile.MapOp, op: math.TanhOp) -> None:
    value, scalars, number = _factors(inside, op.operand)
    number *= 2 * m.log2(m.e)
    if not 1e-30 < abs(number) < 1e30:
        value, scalars, number = op.operand, [], 2 * m.log2(m.e)
    code = Code()
    factor: Scalar | float = number
    for scalar in scalars:
        factor = code.of(scalar) * factor
    result = code.of(value).lift(1.0) - code.of(value).lift(2.0) / ((code.of(value) * factor).exp2() + 1.0)
    Rewriter.insert_op(code.ops, InsertPoint.before(op))
    result.value.name_hint = op.result.name_hint
    op.result.replace_all_uses_with(result.value)
    Rewriter.erase_op(op)


@dataclass(frozen=True)
class TileRelaxTanhPass(ModulePass):
    """Replaces the `math.tanh` of a kernel by 1 - 2 / (1 + exp2(2 log2(e) x)), where its absolute error is enough.

    The short form is exact to a unit of 1, not of its result. That is enough for scores: they end in an exponent, or
    in a row's statistic, where the error must stay below `limit`; weights are then rounded to 16 bits. A tangent that
    reaches anything else keeps its op. Constant factors of the argument, and scalars, become one factor.

    ```
    %a = arith.divf %s, %c20
    %t = math.tanh %a
    ```
    becomes
    ```
    %u = arith.mulf %s, %c0.144
    %e = math.exp2 %u
    %d = arith.addf %e, %c1
    %r = arith.divf %c2, %d
    %t = arith.subf %c1, %r
    ```
    """

    name = "tile-relax-tanh"

    limit: float = 2.0**-15
    """The largest absolute error that an exponent (in base 2) or a stored number may get."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in op.ops:
            if isinstance(kernel, tile.KernelOp) and ErrorBounds(_error).run(kernel.body.block) <= self.limit:
                for inside in list(maps_of(kernel)):
                    for tanh in [o for o in inside.body.block.ops if isinstance(o, math.TanhOp)]:
                        _relax(inside, tanh)
