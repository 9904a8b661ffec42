"""What torch has no single function for, in terms of what it has."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import FloatAttr, ModuleOp
from xdsl.passes import ModulePass
from xdsl.pattern_rewriter import (
    GreedyRewritePatternApplier,
    PatternRewriter,
    PatternRewriteWalker,
    RewritePattern,
    op_type_rewrite_pattern,
)


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
        third = arith.ConstantOp(FloatAttr(1 / 3, op.result.type))
        power = math.PowFOp(magnitude, third)
        rewriter.replace(op, [magnitude, third, power, math.CopySignOp(power, op.operand)])


class RoundAwayToFloor(RewritePattern):
    """Halves go away from zero: copysign(floor(|x| + 0.5), x)."""

    @op_type_rewrite_pattern
    def match_and_rewrite(self, op: math.RoundOp, rewriter: PatternRewriter) -> None:
        magnitude = math.AbsFOp(op.operand)
        half = arith.ConstantOp(FloatAttr(0.5, op.result.type))
        shifted = arith.AddfOp(magnitude, half)
        floor = math.FloorOp(shifted)
        rewriter.replace(op, [magnitude, half, shifted, floor, math.CopySignOp(floor, op.operand)])


@dataclass(frozen=True)
class CpuLegalizePass(ModulePass):
    """Rewrites scalar ops without a torch function.

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
        patterns = GreedyRewritePatternApplier([SplitFma(), CubeRootToPower(), RoundAwayToFloor()], dce_enabled=False)
        PatternRewriteWalker(patterns).rewrite_module(op)
