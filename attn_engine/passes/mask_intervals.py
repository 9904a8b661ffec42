"""Writes interval arithmetic: an integer over two blocks as its ends, a condition as whether it may and must hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xdsl.dialects import arith
from xdsl.dialects.builtin import i1, i64
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.passes.simplify_constants import constant, constant_of

SMALLEST, LARGEST = -(1 << 63), (1 << 63) - 1
EASY = 31
"""Bits of the numbers that arithmetic takes: sums and products of two of them stay far inside of 64 bits."""
WIDE = 64


class Interval(NamedTuple):
    """lo <= x <= hi; |x| <= 2 ** bits is known."""

    lo: SSAValue
    hi: SSAValue
    bits: int = WIDE

    @property
    def is_point(self) -> bool:
        return self.lo is self.hi


class Truth(NamedTuple):
    """Whether a condition holds somewhere, and whether it holds everywhere; `some` may be too true, `every` too false."""

    some: SSAValue
    every: SSAValue


@dataclass
class IntervalWriter:
    """Scalar code at the end of a block, on intervals."""

    block: Block
    known: dict[tuple[int, object], SSAValue] = field(default_factory=dict[tuple[int, object], SSAValue])

    def add(self, op: Operation) -> SSAValue:
        self.block.add_op(op)
        return op.results[0]

    def number(self, value: int) -> SSAValue:
        key = (value, i64)
        if key not in self.known:
            self.known[key] = self.add(constant(value, i64))
        return self.known[key]

    def flag(self, value: bool) -> SSAValue:
        key = (int(value), i1)
        if key not in self.known:
            self.known[key] = self.add(constant(int(value), i1))
        return self.known[key]

    @property
    def anything(self) -> Interval:
        return Interval(self.number(SMALLEST), self.number(LARGEST))

    @property
    def unknown(self) -> Truth:
        return Truth(self.flag(True), self.flag(False))

    # --- conditions

    def both(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return a if a is b else self.add(arith.AndIOp(a, b))

    def either(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return a if a is b else self.add(arith.OrIOp(a, b))

    def opposite(self, a: SSAValue) -> SSAValue:
        number = constant_of(a)
        return self.add(arith.XOrIOp(a, self.flag(True))) if number is None else self.flag(not number)

    def negated(self, x: Truth) -> Truth:
        return Truth(self.opposite(x.every), self.opposite(x.some))

    def conjunction(self, a: Truth, b: Truth) -> Truth:
        return Truth(self.both(a.some, b.some), self.both(a.every, b.every))

    def disjunction(self, a: Truth, b: Truth) -> Truth:
        return Truth(self.either(a.some, b.some), self.either(a.every, b.every))

    def difference(self, a: Truth, b: Truth) -> Truth:
        """Exclusive or."""
        return self.disjunction(self.conjunction(a, self.negated(b)), self.conjunction(self.negated(a), b))

    def compare(self, predicate: str, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.add(arith.CmpiOp(a, b, predicate))

    def compared(self, predicate: str, a: Interval, b: Interval) -> Truth | None:
        """A comparison of integers; None for one that is not signed."""
        match predicate:
            case "sle" | "slt":
                return Truth(self.compare(predicate, a.lo, b.hi), self.compare(predicate, a.hi, b.lo))
            case "sge":
                return self.compared("sle", b, a)
            case "sgt":
                return self.compared("slt", b, a)
            case "eq":
                some = self.both(self.compare("sle", a.lo, b.hi), self.compare("sle", b.lo, a.hi))
                # lo <= hi on both sides, so that these two make all four ends equal.
                return Truth(some, self.both(self.compare("eq", a.lo, b.hi), self.compare("eq", a.hi, b.lo)))
            case "ne":
                return self.negated(self.compared("eq", a, b) or self.unknown)
            case _:
                return None

    # --- integers

    def choose(self, condition: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue:
        return a if a is b else self.add(arith.SelectOp(condition, a, b))

    def least(self, values: Sequence[SSAValue]) -> SSAValue:
        total = values[0]
        for value in values[1:]:
            total = total if value is total else self.add(arith.MinSIOp(total, value))
        return total

    def most(self, values: Sequence[SSAValue]) -> SSAValue:
        total = values[0]
        for value in values[1:]:
            total = total if value is total else self.add(arith.MaxSIOp(total, value))
        return total

    def checked(self, operands: Sequence[Interval], found: Interval) -> Interval:
        """What arithmetic found, if its operands are small enough not to wrap; else anything."""
        large = [x for x in operands if x.bits > EASY]
        if not large:
            return found if found.bits <= EASY else Interval(found.lo, found.hi)
        fits: SSAValue | None = None
        for x in large:
            low = self.compare("sge", x.lo, self.number(-(1 << EASY)))
            inside = self.both(low, self.compare("sle", x.hi, self.number(1 << EASY)))
            fits = inside if fits is None else self.both(fits, inside)
        assert fits is not None
        free = self.anything
        return Interval(self.choose(fits, found.lo, free.lo), self.choose(fits, found.hi, free.hi))

    def plus(self, a: Interval, b: Interval) -> Interval:
        lo, hi = self.add(arith.AddiOp(a.lo, b.lo)), self.add(arith.AddiOp(a.hi, b.hi))
        return self.checked([a, b], Interval(lo, hi, max(a.bits, b.bits) + 1))

    def minus(self, a: Interval, b: Interval) -> Interval:
        lo, hi = self.add(arith.SubiOp(a.lo, b.hi)), self.add(arith.SubiOp(a.hi, b.lo))
        return self.checked([a, b], Interval(lo, hi, max(a.bits, b.bits) + 1))

    def times(self, a: Interval, b: Interval) -> Interval:
        ends = [self.add(arith.MuliOp(x, y)) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
        return self.checked([a, b], Interval(self.least(ends), self.most(ends), a.bits + b.bits))

    def divided(self, a: Interval, by: int) -> Interval:
        """floor(a / by), by > 0, which never wraps."""
        divisor = self.number(by)
        lo, hi = (self.add(arith.FloorDivSIOp(end, divisor)) for end in (a.lo, a.hi))
        return Interval(lo, hi, a.bits)

    def smaller(self, a: Interval, b: Interval) -> Interval:
        return Interval(self.least([a.lo, b.lo]), self.least([a.hi, b.hi]), max(a.bits, b.bits))

    def larger(self, a: Interval, b: Interval) -> Interval:
        return Interval(self.most([a.lo, b.lo]), self.most([a.hi, b.hi]), max(a.bits, b.bits))

    def selected(self, condition: Truth, a: Interval, b: Interval) -> Interval:
        """a where the condition holds everywhere, b where it holds nowhere, else both."""
        lo, hi = self.least([a.lo, b.lo]), self.most([a.hi, b.hi])
        lo = self.choose(condition.some, self.choose(condition.every, a.lo, lo), b.lo)
        hi = self.choose(condition.some, self.choose(condition.every, a.hi, hi), b.hi)
        return Interval(lo, hi, max(a.bits, b.bits))

    def as_integer(self, x: Truth) -> Interval:
        return Interval(self.add(arith.ExtUIOp(x.every, i64)), self.add(arith.ExtUIOp(x.some, i64)), 1)
