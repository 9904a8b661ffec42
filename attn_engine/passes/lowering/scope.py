"""Appends kernel and plan ops to a block; index arithmetic is folded as it is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from xdsl.dialects import arith
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, IntegerAttr, TensorType, f32, i32, i64
from xdsl.ir import Block, Operation, SSAValue

OpT = TypeVar("OpT", bound=Operation)
Index = SSAValue | int


class Scope:
    """A block under construction.

    Index values are i32; a Python int stands for a constant until an op needs it, so that
    loops over statically empty ranges are seen and not built.
    """

    def __init__(self, block: Block):
        self.block = block

    def add(self, op: OpT, *hints: str) -> OpT:
        self.block.add_op(op)
        for result, hint in zip(op.results, hints, strict=False):
            result.name_hint = hint
        return op

    def value(self, index: Index) -> SSAValue:
        if isinstance(index, SSAValue):
            return index
        return self.add(arith.ConstantOp.from_int_and_width(index, 32), f"c{index}" if index >= 0 else "c").result

    def real(self, number: float) -> SSAValue:
        from xdsl.dialects.builtin import FloatAttr

        return self.add(arith.ConstantOp(FloatAttr(number, f32)), "c").result

    def splat(self, shape: Sequence[int], number: float, hint: str) -> SSAValue:
        """A tile of one number; the number itself for an empty shape."""
        if not shape:
            return self.real(number)
        type_ = TensorType(f32, shape)
        return self.add(arith.ConstantOp(DenseIntOrFPElementsAttr.from_list(type_, [number]), type_), hint).result

    def _binary(self, op: type, a: Index, b: Index, hint: str) -> SSAValue:
        return self.add(op(self.value(a), self.value(b)), hint).results[0]

    def plus(self, a: Index, b: Index, hint: str = "i") -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if a == 0 or b == 0:
            return b if a == 0 else a
        return self._binary(arith.AddiOp, a, b, hint)

    def minus(self, a: Index, b: Index, hint: str = "i") -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return a if b == 0 else self._binary(arith.SubiOp, a, b, hint)

    def times(self, a: Index, b: int, hint: str = "i") -> Index:
        if isinstance(a, int):
            return a * b
        return a if b == 1 else self._binary(arith.MuliOp, a, b, hint)

    def smaller(self, a: Index, b: Index, hint: str = "i") -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b)
        return a if a is b else self._binary(arith.MinSIOp, a, b, hint)

    def larger(self, a: Index, b: Index, hint: str = "i") -> Index:
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b)
        return a if a is b else self._binary(arith.MaxSIOp, a, b, hint)

    def round_down(self, a: Index, size: int, hint: str = "i") -> Index:
        """The largest multiple of size at most a, for a >= 0."""
        if isinstance(a, int):
            return a // size * size
        return self.times(self._binary(arith.DivSIOp, a, size, hint), size, hint)

    def round_up(self, a: Index, size: int, hint: str = "i") -> Index:
        """The smallest multiple of size at least a, for a >= 0."""
        return self.round_down(self.plus(a, size - 1, hint), size, hint)

    def choose_less(self, a: Index, b: Index, yes: Index, no: Index, hint: str = "i") -> Index:
        """yes where a < b, else no."""
        if isinstance(a, int) and isinstance(b, int):
            return yes if a < b else no
        if (isinstance(yes, int) and yes == no) or yes is no:
            return yes
        less = self.add(arith.CmpiOp(self.value(a), self.value(b), "slt")).result
        return self.add(arith.SelectOp(less, self.value(yes), self.value(no)), hint).result

    def narrow(self, wide: SSAValue, hint: str = "i") -> Index:
        """An i64 index as i32; constants become Python ints."""
        owner = wide.owner
        if isinstance(owner, arith.ConstantOp) and isinstance(owner.value, IntegerAttr):
            return owner.value.value.data
        if isinstance(owner, arith.ExtSIOp) and owner.input.type == i32:
            return owner.input
        return self.add(arith.TruncIOp(wide, i32), hint).result

    def widen(self, index: Index, hint: str = "i") -> SSAValue:
        if isinstance(index, int):
            return self.add(arith.ConstantOp.from_int_and_width(index, 64), hint).result
        return self.add(arith.ExtSIOp(index, i64), hint).result
