"""Intervals of integers: what a 64-bit expression can be, given what its inputs can be."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class IntRange:
    """lo <= value <= hi."""

    lo: int
    hi: int

    @staticmethod
    def of(*values: int) -> IntRange:
        return IntRange(min(values), max(values))

    def fits(self, bits: int) -> bool:
        """Whether every value is a signed integer of so many bits."""
        return -(1 << (bits - 1)) <= self.lo and self.hi < 1 << (bits - 1)

    def __contains__(self, value: int) -> bool:
        return self.lo <= value <= self.hi

    def __or__(self, other: IntRange) -> IntRange:
        return IntRange(min(self.lo, other.lo), max(self.hi, other.hi))

    def __add__(self, other: IntRange) -> IntRange:
        return IntRange(self.lo + other.lo, self.hi + other.hi)

    def __neg__(self) -> IntRange:
        return IntRange(-self.hi, -self.lo)

    def __sub__(self, other: IntRange) -> IntRange:
        return self + -other

    def __mul__(self, other: IntRange) -> IntRange:
        return IntRange.of(*(a * b for a, b in product((self.lo, self.hi), (other.lo, other.hi))))

    def __abs__(self) -> IntRange:
        ends = (abs(self.lo), abs(self.hi))
        return IntRange(0 if 0 in self else min(ends), max(ends))

    def maximum(self, other: IntRange) -> IntRange:
        return IntRange(max(self.lo, other.lo), max(self.hi, other.hi))

    def minimum(self, other: IntRange) -> IntRange:
        return IntRange(min(self.lo, other.lo), min(self.hi, other.hi))

    def _divisors(self) -> list[int]:
        """The divisors at which a quotient can be extreme: the ends, and those next to 0."""
        return [d for d in (self.lo, self.hi, -1, 1) if d in self and d != 0]

    def floor_divide(self, by: IntRange) -> IntRange | None:
        """The quotients rounded down; a division by 0 has no value. None where there is no divisor."""
        quotients = [n // d for n in (self.lo, self.hi) for d in by._divisors()]
        return IntRange.of(*quotients) if quotients else None

    def remainder(self, by: IntRange) -> IntRange | None:
        """The remainders with the sign of the dividend, as in C."""
        size = max((abs(d) for d in by._divisors()), default=0) - 1
        if size < 0:
            return None
        size = min(size, max(abs(self.lo), abs(self.hi)))
        return IntRange(-size if self.lo < 0 else 0, size if self.hi > 0 else 0)

    def _hull(self, other: IntRange) -> IntRange:
        """Of all integers of as many bits as either has."""
        bits = max(~n if n < 0 else n for n in (self.lo, self.hi, other.lo, other.hi)).bit_length()
        return IntRange(-(1 << bits) if min(self.lo, other.lo) < 0 else 0, (1 << bits) - 1)

    def bits_of_both(self, other: IntRange) -> IntRange:
        """x & y, which no factor that is not negative exceeds."""
        limits = [r.hi for r in (self, other) if r.lo >= 0]
        return IntRange(0, min(limits)) if limits else self._hull(other)

    def bits_of_any(self, other: IntRange) -> IntRange:
        """x | y and x ^ y."""
        return self._hull(other)

    def shift_left(self, by: IntRange) -> IntRange | None:
        """None where the distance may be none of an integer of 32 bits."""
        return self * IntRange(1 << by.lo, 1 << by.hi) if by.is_shift else None

    def shift_right(self, by: IntRange) -> IntRange | None:
        return self.floor_divide(IntRange(1 << by.lo, 1 << by.hi)) if by.is_shift else None

    @property
    def is_shift(self) -> bool:
        return self.lo >= 0 and self.hi < _NARROW


_NARROW = 32
INT64 = IntRange(-(1 << 63), (1 << 63) - 1)
# Batch, head, position, channel, and the number of each.
INDEX = IntRange(0, (1 << 30) - 1)
