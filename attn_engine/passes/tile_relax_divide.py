"""`tile-relax-divide`: quotients that may be products with a reciprocal."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import ModuleOp, f32
from xdsl.dialects.utils import FastMathFlag
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.error_bounds import maps_of
from attn_engine.passes.logistic import logistic_of
from attn_engine.passes.scalar_code import Code
from attn_engine.passes.simplify_constants import constant_of

_SMALLEST, _LARGEST = 1e-30, 1e6


def _at_least_normal(value: SSAValue) -> bool:
    """Whether a divisor is a positive constant plus something that is not negative."""
    op = value.owner
    if not isinstance(op, arith.AddfOp):
        return False
    for number, rest in ((constant_of(op.lhs), op.rhs), (constant_of(op.rhs), op.lhs)):
        if number is not None and number >= _SMALLEST and _not_negative(rest):
            return True
    return False


def _not_negative(value: SSAValue) -> bool:
    op = value.owner
    if isinstance(op, arith.MulfOp):
        return op.lhs is op.rhs
    return isinstance(op, math.ExpOp | math.Exp2Op | math.AbsFOp | math.SqrtOp)


def _shorten(op: arith.DivfOp, x: SSAValue, factor: float) -> arith.DivfOp:
    """Both sides in one: where exp2 overflows, the weight is below what 16 bits hold."""
    code = Code()
    divisor = (code.of(x) * -factor).exp2() + 1.0
    one = divisor.lift(1.0)
    new = arith.DivfOp(one.value, divisor.value)
    Rewriter.insert_op([*code.ops, new], InsertPoint.before(op))
    new.result.name_hint = op.result.name_hint
    op.result.replace_all_uses_with(new.result)
    Rewriter.erase_op(op)
    return new


@dataclass(frozen=True)
class TileRelaxDividePass(ModulePass):
    """Marks divisions of a constant by 1 + exp(x) and its like, for which a device's reciprocal is as good.

    The divisor is a positive constant plus something not negative, so it is no denormal number, and where it is so
    large that its reciprocal is flushed to zero, the quotient is below 1e-30. For the same reason a logistic function
    needs no case for negative arguments.

    ```
    %d = arith.addf %e, %c1 : f32
    %r = arith.divf %c2, %d : f32
    ```
    becomes
    ```
    %r = arith.divf %c2, %d fastmath<arcp> : f32
    ```
    """

    name = "tile-relax-divide"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in op.ops:
            if not isinstance(kernel, tile.KernelOp):
                continue
            for inside in maps_of(kernel):
                for divide in [o for o in inside.body.block.ops if isinstance(o, arith.DivfOp)]:
                    logistic = logistic_of(divide)
                    divide = _shorten(divide, *logistic) if logistic else divide
                    number = constant_of(divide.lhs)
                    small = number is not None and abs(number) <= _LARGEST
                    if small and divide.result.type == f32 and _at_least_normal(divide.rhs):
                        divide.properties["fastmath"] = arith.FastMathFlagsAttr([FastMathFlag.ALLOW_RECIP])
