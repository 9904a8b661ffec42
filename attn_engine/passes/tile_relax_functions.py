"""`tile-relax-functions`: sines and logarithms of which only the absolute error counts, by the hardware's own."""

from __future__ import annotations

import math as m
from collections.abc import Callable
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import ModuleOp, f32
from xdsl.dialects.utils import FastMathFlag
from xdsl.ir import Operation
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.error_bounds import ErrorBounds, maps_of
from attn_engine.passes.scalar_code import Code, Scalar

ABSOLUTE = 1e-6
"""The error of a sine of an angle of up to half a turn, and of a logarithm up to 4; larger ones are as exact as an f32 but for two bits."""
_APPROXIMATE = arith.FastMathFlagsAttr([FastMathFlag.APPROX_FUNC])
_TURN = 6.28125
"""A turn in 24 bits and what is left of it: the number of whole turns times the former is exact up to 2**15 turns."""
_REST = 2 * m.pi - _TURN


def _turned(x: Scalar) -> Scalar:
    """An angle less its whole turns. What is left of more than 2**22 turns in 24 bits is no angle."""
    turns = _approximate(x * (0.5 / m.pi), math.RoundEvenOp)
    for part in (_TURN, _REST):
        x = x.code.add(math.FmaOp(turns.value, x.lift(-part).value, x.value))
    return x


def _approximate(x: Scalar, op: type[Operation]) -> Scalar:
    result = x.apply(op)
    result.value.owner.properties["fastmath"] = _APPROXIMATE  # type: ignore[union-attr]
    return result


def _natural(x: Scalar) -> Scalar:
    return _approximate(x, math.Log2Op) * m.log(2)


_RELAXED: dict[type[Operation], Callable[[Scalar], Scalar]] = {
    math.SinOp: lambda x: _approximate(_turned(x), math.SinOp),
    math.CosOp: lambda x: _approximate(_turned(x), math.CosOp),
    math.Log2Op: lambda x: _approximate(x, math.Log2Op),
    math.LogOp: _natural,
    math.Log1pOp: lambda x: _natural(x + 1.0),
}


def _error(op: Operation) -> float | None:
    return ABSOLUTE if type(op) in _RELAXED and op.results[0].type == f32 else None


def _small(op: Operation) -> bool:
    """Cosines and logarithms are small near a quarter turn, or near 1, where their arguments' rounding gives them such an error."""
    return not isinstance(op, math.CosOp | math.LogOp | math.Log2Op)


def _relax(op: Operation) -> None:
    code = Code()
    result = _RELAXED[type(op)](code.of(op.operands[0]))
    Rewriter.insert_op(code.ops, InsertPoint.before(op))
    result.value.name_hint = op.results[0].name_hint
    op.results[0].replace_all_uses_with(result.value)
    Rewriter.erase_op(op)


@dataclass(frozen=True)
class TileRelaxFunctionsPass(ModulePass):
    """Lets sines, cosines and logarithms in the maps of a kernel be approximate, where their absolute error is enough.

    As for `tile-relax-tanh`: what ends in an exponent, or in a row's statistic, is as exact as weights of 16 bits need
    it, and what multiplies gradients is as exact as these are once they are rounded, where it is not small itself. Angles lose their whole turns first, which the hardware's sine does not take away.

    ```
    %e = math.log1p %x
    ```
    becomes
    ```
    %y = arith.addf %x, %c1
    %l = math.log2 %y fastmath<afn>
    %e = arith.mulf %l, %c0.693
    ```
    """

    name = "tile-relax-functions"

    limit: float = 2.0**-15
    """The largest absolute error that an exponent (in base 2) or a stored number may get."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in op.ops:
            if isinstance(kernel, tile.KernelOp) and ErrorBounds(_error, _small).run(kernel.body.block) <= self.limit:
                for inside in list(maps_of(kernel)):
                    for inner in [o for o in inside.body.block.ops if type(o) in _RELAXED and o.results[0].type == f32]:
                        _relax(inner)
