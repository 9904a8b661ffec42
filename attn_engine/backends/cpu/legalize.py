"""What torch has no single function for, or a slow one, in terms of what it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from xdsl.context import Context
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import AnyFloat, FloatAttr, ModuleOp
from xdsl.ir import Operation
from xdsl.passes import ModulePass
from xdsl.pattern_rewriter import (
    GreedyRewritePatternApplier,
    PatternRewriter,
    PatternRewriteWalker,
    RewritePattern,
    op_type_rewrite_pattern,
)

LOG2_E = 1.4426950408889634


def _constant(value: float, op: Operation) -> arith.ConstantOp:
    return arith.ConstantOp(FloatAttr(value, cast(AnyFloat, op.results[0].type)))


class ExpToExp2(RewritePattern):
    """exp2(x * log2(e)): torch's exp of f32 takes about four times as long as its exp2."""

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: math.ExpOp, rewriter: PatternRewriter) -> None:
        factor = _constant(LOG2_E, op)
        scaled = arith.MulfOp(op.operand, factor)
        rewriter.replace(op, [factor, scaled, math.Exp2Op(scaled)])


class SplitFma(RewritePattern):
    """a * b + c, in two roundings."""

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: math.FmaOp, rewriter: PatternRewriter) -> None:
        product = arith.MulfOp(op.a, op.b)
        rewriter.replace(op, [product, arith.AddfOp(product, op.c)])


class CubeRootToPower(RewritePattern):
    """copysign(|x| ** (1 / 3), x)."""

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: math.CbrtOp, rewriter: PatternRewriter) -> None:
        magnitude = math.AbsFOp(op.operand)
        third = _constant(1 / 3, op)
        power = math.PowFOp(magnitude, third)
        rewriter.replace(op, [magnitude, third, power, math.CopySignOp(power, op.operand)])


class RoundAwayToFloor(RewritePattern):
    """Halves go away from zero: copysign(floor(|x| + 0.5), x)."""

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: math.RoundOp, rewriter: PatternRewriter) -> None:
        magnitude = math.AbsFOp(op.operand)
        half = _constant(0.5, op)
        shifted = arith.AddfOp(magnitude, half)
        floor = math.FloorOp(shifted)
        rewriter.replace(op, [magnitude, half, shifted, floor, math.CopySignOp(floor, op.operand)])


@dataclass(frozen=True)
class CpuLegalizePass(ModulePass):
    """Rewrites scalar ops without a torch function, and exp, which is slow.

    ```
    %r = math.fma %a, %b, %c : f32
    ```
    becomes
    ```
    %p = arith.mulf %a, %b : f32
    %r = arith.addf %p, %c : f32
    ```
    """

    name = "cpu-legalize"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        patterns = GreedyRewritePatternApplier(
            [ExpToExp2(), SplitFma(), CubeRootToPower(), RoundAwayToFloor()], dce_enabled=False
        )
        PatternRewriteWalker(patterns).rewrite_module(op)
