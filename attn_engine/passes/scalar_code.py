"""Writes scalar code (arith, math) as Python expressions: `Code` collects ops, `Scalar` has Python's operators."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import AnyFloat, FloatAttr, IntegerAttr, IntegerType, i32
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.utils.hints import isa


class Code:
    """Ops in the order in which they were asked for."""

    def __init__(self) -> None:
        self.ops: list[Operation] = []

    def add(self, op: Operation) -> Scalar:
        self.ops.append(op)
        return Scalar(self, op.results[0])

    def of(self, value: SSAValue) -> Scalar:
        return Scalar(self, value)

    def constant(self, number: float, type_: Attribute) -> Scalar:
        if isa(type_, IntegerType):
            return self.add(arith.ConstantOp(IntegerAttr(int(number), type_)))
        assert isinstance(type_, AnyFloat)
        return self.add(arith.ConstantOp(FloatAttr(number, type_)))


class Scalar:
    """A scalar value. A Python number beside it becomes a constant of its type; comparisons are ordered."""

    def __init__(self, code: Code, value: SSAValue):
        self.code = code
        self.value = value

    @property
    def is_integer(self) -> bool:
        return isinstance(self.value.type, IntegerType)

    def lift(self, other: Scalar | float) -> Scalar:
        return other if isinstance(other, Scalar) else self.code.constant(other, self.value.type)

    def _binary(self, other: Scalar | float, on_floats: type[Operation], on_integers: type[Operation]) -> Scalar:
        op = on_integers if self.is_integer else on_floats
        return self.code.add(op(self.value, self.lift(other).value))  # type: ignore[call-arg]

    def __add__(self, other: Scalar | float) -> Scalar:
        return self._binary(other, arith.AddfOp, arith.AddiOp)

    def __sub__(self, other: Scalar | float) -> Scalar:
        return self._binary(other, arith.SubfOp, arith.SubiOp)

    def __mul__(self, other: Scalar | float) -> Scalar:
        return self._binary(other, arith.MulfOp, arith.MuliOp)

    def __truediv__(self, other: Scalar | float) -> Scalar:
        """Of integers: truncated."""
        return self._binary(other, arith.DivfOp, arith.DivSIOp)

    def __mod__(self, other: Scalar | float) -> Scalar:
        """Of integers: the remainder has the sign of the dividend."""
        return self.code.add(arith.RemSIOp(self.value, self.lift(other).value))

    def __and__(self, other: Scalar | float) -> Scalar:
        return self.code.add(arith.AndIOp(self.value, self.lift(other).value))

    def __or__(self, other: Scalar | float) -> Scalar:
        return self.code.add(arith.OrIOp(self.value, self.lift(other).value))

    def __xor__(self, other: Scalar | float) -> Scalar:
        return self.code.add(arith.XOrIOp(self.value, self.lift(other).value))

    def __neg__(self) -> Scalar:
        return self.lift(0) - self if self.is_integer else self.code.add(arith.NegfOp(self.value))

    def _compare(self, other: Scalar | float, on_floats: str, on_integers: str) -> Scalar:
        right = self.lift(other).value
        if self.is_integer:
            return self.code.add(arith.CmpiOp(self.value, right, on_integers))
        return self.code.add(arith.CmpfOp(self.value, right, on_floats))

    def __lt__(self, other: Scalar | float) -> Scalar:
        return self._compare(other, "olt", "slt")

    def __le__(self, other: Scalar | float) -> Scalar:
        return self._compare(other, "ole", "sle")

    def __gt__(self, other: Scalar | float) -> Scalar:
        return self._compare(other, "ogt", "sgt")

    def __ge__(self, other: Scalar | float) -> Scalar:
        return self._compare(other, "oge", "sge")

    def equals(self, other: Scalar | float) -> Scalar:
        return self._compare(other, "oeq", "eq")

    def differs(self, other: Scalar | float) -> Scalar:
        """Of floats: true where either is NaN."""
        return self._compare(other, "une", "ne")

    def below(self, other: Scalar | float) -> Scalar:
        """Of integers: unsigned less than."""
        return self.code.add(arith.CmpiOp(self.value, self.lift(other).value, "ult"))

    def choose(self, yes: Scalar | float, no: Scalar | float) -> Scalar:
        """`yes` where this i1 is true. One of the two is a scalar."""
        known = yes if isinstance(yes, Scalar) else no
        assert isinstance(known, Scalar)
        return self.code.add(arith.SelectOp(self.value, known.lift(yes).value, known.lift(no).value))

    def apply(self, op: type[Operation]) -> Scalar:
        return self.code.add(op(self.value))  # type: ignore[call-arg]

    def abs(self) -> Scalar:
        return self.apply(math.AbsFOp)

    def exp(self) -> Scalar:
        return self.apply(math.ExpOp)

    def exp2(self) -> Scalar:
        return self.apply(math.Exp2Op)

    def log(self) -> Scalar:
        return self.apply(math.LogOp)

    def log2(self) -> Scalar:
        return self.apply(math.Log2Op)

    def sqrt(self) -> Scalar:
        return self.apply(math.SqrtOp)

    def floor(self) -> Scalar:
        return self.apply(math.FloorOp)

    def min(self, other: Scalar | float) -> Scalar:
        return self._binary(other, arith.MinimumfOp, arith.MinSIOp)

    def max(self, other: Scalar | float) -> Scalar:
        return self._binary(other, arith.MaximumfOp, arith.MaxSIOp)

    def polynomial(self, coefficients: Sequence[float]) -> Scalar:
        """Horner's rule, highest power first."""
        total = self.lift(coefficients[0])
        for coefficient in coefficients[1:]:
            total = total * self + coefficient
        return total

    def bits(self) -> Scalar:
        """Of an f32: its bits as an i32."""
        return self.code.add(arith.BitcastOp(self.value, i32))

    def as_type(self, type_: Attribute) -> Scalar:
        """The same bits as another type of that width."""
        return self.code.add(arith.BitcastOp(self.value, type_))

    def with_sign_of(self, other: Scalar) -> Scalar:
        """The magnitude of an f32, with the sign of another, zeros and NaN included."""
        sign = other.bits() & -(2**31)
        return ((self.bits() & (2**31 - 1)) | sign).as_type(self.value.type)
