"""Elementwise code over a tile, written value by value."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import f32, i32
from xdsl.ir import Attribute, SSAValue

from attn_engine.passes.lowering.frame import cast, spread
from attn_engine.passes.lowering.partition import Partition
from attn_engine.passes.lowering.program import Bound, Program
from attn_engine.passes.lowering.scope import Scope


class Terms:
    """One elementwise program over a tile: take kernel values, combine them, ask for the result.

    ```
    t = Terms(scope, (64, 32))
    x = t.result(t.mul(t.take(tile, 0, 1), t.exp2(t.take(vector, 0))))
    ```
    """

    def __init__(self, scope: Scope, shape: Sequence[int]):
        self.scope, self.shape, self.program = scope, tuple(shape), Program()

    def take(self, value: SSAValue, *axes: int) -> SSAValue:
        """One element of a value that has these axes of the tile; floats as f32."""
        bound = self.program.argument(Bound(value, axes), value.name_hint or "x")
        is_float = str(bound.type).startswith(("f", "bf"))
        return cast(self.program, bound, f32) if is_float else bound

    def real(self, number: float) -> SSAValue:
        return self.program.real(number)

    def whole(self, number: int) -> SSAValue:
        """An i32."""
        return self.program.add(arith.ConstantOp.from_int_and_width(number, 32), "n")

    def mul(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.program.add(arith.MulfOp(a, b), a.name_hint)

    def add(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.program.add(arith.AddfOp(a, b), a.name_hint)

    def sub(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.program.add(arith.SubfOp(a, b), a.name_hint)

    def div(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.program.add(arith.DivfOp(a, b), a.name_hint)

    def size(self, value: SSAValue) -> SSAValue:
        """|value|."""
        return self.program.add(math.AbsFOp(value), value.name_hint)

    def exp2(self, exponent: SSAValue) -> SSAValue:
        return self.program.add(math.Exp2Op(exponent), "e")

    def smaller(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.program.add(arith.MinimumfOp(a, b), a.name_hint)

    def at_most_zero(self, exponent: SSAValue) -> SSAValue:
        """A difference of two sums is at most 0 but for their rounding, which is different."""
        return self.program.add(arith.MinimumfOp(exponent, self.real(0.0)), exponent.name_hint)

    def at_least(self, value: SSAValue, floor: float) -> SSAValue:
        return self.program.add(arith.MaximumfOp(value, self.real(floor)), value.name_hint)

    def not_before(self, a: SSAValue, b: SSAValue) -> SSAValue:
        """a >= b of two indices."""
        return self.program.add(arith.CmpiOp(a, b, "sge"), "inside")

    def after(self, a: SSAValue, b: SSAValue) -> SSAValue:
        """a > b of two indices."""
        return self.program.add(arith.CmpiOp(a, b, "sgt"), "inside")

    def leading(self, value: SSAValue) -> SSAValue:
        """An f32 without its last 16 bits: a bf16 exactly, cut off and not rounded."""
        bits = self.program.add(arith.BitcastOp(value, i32))
        kept = self.program.add(arith.AndIOp(bits, self.whole(-(1 << 16))))
        return self.program.add(arith.BitcastOp(kept, f32), value.name_hint)

    def at_or_below(self, value: SSAValue, ceiling: float) -> SSAValue:
        return self.program.add(arith.CmpfOp(value, self.real(ceiling), "ole"), "below")

    def equal(self, a: SSAValue, b: SSAValue) -> SSAValue:
        """a == b of two floats."""
        return self.program.add(arith.CmpfOp(a, b, "oeq"), "equal")

    def where(self, condition: SSAValue, yes: SSAValue) -> SSAValue:
        """`yes` where the condition holds, else 0."""
        return self.program.add(arith.SelectOp(condition, yes, self.real(0.0)), yes.name_hint)

    def choose(self, condition: SSAValue, yes: SSAValue, no: SSAValue) -> SSAValue:
        return self.program.add(arith.SelectOp(condition, yes, no), yes.name_hint)

    def result(self, value: SSAValue, to: Attribute = f32) -> SSAValue:
        """The whole tile of a value, its elements of type `to`."""
        found = Partition(self.program, self.scope, self.shape, -1).run([cast(self.program, value, to)])[0]
        return spread(self.scope, found, self.shape)
