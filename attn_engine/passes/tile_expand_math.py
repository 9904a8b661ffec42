"""tile-expand-math: functions that not every target has, as arithmetic that every target has."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith
from xdsl.dialects.builtin import ModuleOp, f32
from xdsl.dialects.utils import FastMathFlag
from xdsl.ir import Operation
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.expand_functions import FLOAT_FUNCTIONS, INTEGER_FUNCTIONS
from attn_engine.passes.scalar_code import Code


def _expand(op: Operation) -> None:
    function = FLOAT_FUNCTIONS.get(type(op)) if op.results[0].type == f32 else INTEGER_FUNCTIONS.get(type(op))
    if function is None:
        return
    code = Code()
    result = function(*(code.of(operand) for operand in op.operands))
    Rewriter.insert_op(code.ops, InsertPoint.before(op))
    result.value.name_hint = result.value.name_hint or op.results[0].name_hint
    op.results[0].replace_all_uses_with(result.value)
    Rewriter.erase_op(op)


def may_be_approximate(op: Operation) -> bool:
    flags = op.properties.get("fastmath")
    return isinstance(flags, arith.FastMathFlagsAttr) and FastMathFlag.APPROX_FUNC in flags.data


@dataclass(frozen=True)
class TileExpandMathPass(ModulePass):
    """Expands functions inside kernels, in their bodies and in their maps; plans are left as they are.

    ```
    %q = arith.floordivsi %a, %b : i64
    ```
    becomes
    ```
    %t = arith.divsi %a, %b : i64
    %r = arith.remsi %a, %b : i64
    %z = arith.constant 0 : i64
    %n = arith.cmpi ne, %r, %z : i64
    %x = arith.xori %r, %b : i64
    ...
    %q = arith.select %m, %u, %t : i64
    ```
    What is left: exp, exp2, log, log2, sqrt, rsqrt, sin, cos, floor, ceil, absolute values, and arith.
    """

    name = "tile-expand-math"

    keep: tuple[str, ...] = ()
    """Names of ops that the target has, such as `math.erf`."""
    approximate: bool = False
    """Whether the target has what may be approximate."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for kernel in op.walk():
            if isinstance(kernel, tile.KernelOp):
                for inner in [o for o in kernel.walk() if len(o.results) == 1 and o.name not in self.keep]:
                    if not (self.approximate and may_be_approximate(inner)):
                        _expand(inner)
