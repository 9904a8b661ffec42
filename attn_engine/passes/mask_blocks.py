"""Writes symbolic key ranges as the scalar code of a `blocks` region.

The region must be right for all values that captures may have at run time: ranges are clamped to
the keys that exist, and several ranges are sorted and separated by code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from xdsl.dialects import arith
from xdsl.dialects.builtin import i64
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.ir.affine import (
    All,
    Any,
    Below,
    Choice,
    Condition,
    Extremum,
    Flag,
    Floor,
    Leaf,
    Linear,
    Position,
    Term,
)
from attn_engine.ir.visible_ranges import Range, hull
from attn_engine.passes.simplify_constants import constant, is_constant

MOST_RANGES = 4
# Sums of saturated values stay inside 64 bits.
SATURATED = 1 << 60
ARGUMENTS = ("lo", "hi", "b", "h", "sq", "skv")


@dataclass(frozen=True)
class Bounds:
    """One range as computed values: visible lo <= full lo <= full hi <= visible hi."""

    visible_lo: SSAValue
    full_lo: SSAValue
    full_hi: SSAValue
    visible_hi: SSAValue

    def values(self) -> tuple[SSAValue, SSAValue, SSAValue, SSAValue]:
        return (self.visible_lo, self.full_lo, self.full_hi, self.visible_hi)


@dataclass
class BlocksWriter:
    """The block under construction, and what has been computed in it.

    `nonnegative` and `within` are the values known to be at least 0 and at most `limit`.
    """

    block: Block
    mask: Block
    limit: SSAValue
    known: dict[object, SSAValue] = field(default_factory=dict[object, SSAValue])
    nonnegative: set[SSAValue] = field(default_factory=set[SSAValue])
    within: set[SSAValue] = field(default_factory=set[SSAValue])

    @staticmethod
    def begin(mask: Block, window: str, limit: int) -> BlocksWriter:
        """An empty region for the captures of this mask; `limit` is the argument with the number of keys."""
        captures = list(mask.args)[4:]
        block = Block(arg_types=[*[i64] * 6, *(c.type for c in captures)])
        names = [f"{window}_lo", f"{window}_hi", *ARGUMENTS[2:], *(c.name_hint for c in captures)]
        for arg, name in zip(block.args, names, strict=True):
            arg.name_hint = name
        writer = BlocksWriter(block, mask, block.args[limit])
        writer.known |= dict(zip((mask.args[0], mask.args[1]), block.args[2:4], strict=True))
        writer.known |= dict(zip(captures, list(block.args)[6:], strict=True))
        writer.known |= {Position("lo"): block.args[0], Position("hi"): block.args[1]}
        writer.nonnegative |= set(list(block.args)[:6])
        writer.within |= {writer.limit, writer.number(0)}
        return writer

    # --- scalar code ---

    def add(self, op: Operation) -> SSAValue:
        self.block.add_op(op)
        return op.results[0]

    def number(self, value: int) -> SSAValue:
        if value not in self.known:
            self.known[value] = self.add(constant(value, i64))
            if value >= 0:
                self.nonnegative.add(self.known[value])
        return self.known[value]

    def larger(self, a: SSAValue, b: SSAValue) -> SSAValue:
        for x, y in ((a, b), (b, a)):
            if x is y or (is_constant(y, 0) and x in self.nonnegative) or (x is self.limit and y in self.within):
                return x
        result = self.add(arith.MaxSIOp(a, b))
        if a in self.within and b in self.within:
            self.within.add(result)
        if a in self.nonnegative or b in self.nonnegative:
            self.nonnegative.add(result)
        return result

    def smaller(self, a: SSAValue, b: SSAValue) -> SSAValue:
        for x, y in ((a, b), (b, a)):
            if x is y or (is_constant(x, 0) and y in self.nonnegative):
                return x
        result = self.add(arith.MinSIOp(a, b))
        if a in self.within or b in self.within:
            self.within.add(result)
        if a in self.nonnegative and b in self.nonnegative:
            self.nonnegative.add(result)
        return result

    def select(self, condition: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue:
        if a is b:
            return a
        result = self.add(arith.SelectOp(condition, a, b))
        if a in self.nonnegative and b in self.nonnegative:
            self.nonnegative.add(result)
        return result

    def moved(self, value: SSAValue) -> SSAValue:
        """A value of the mask block that is free of positions, computed here."""
        if value not in self.known:
            assert isinstance(value.owner, Operation)
            for operand in value.owner.operands:
                self.moved(operand)
            mapping = {operand: self.known[operand] for operand in value.owner.operands}
            copy = value.owner.clone(value_mapper=mapping)
            self.block.add_op(copy)
            self.known |= dict(zip(value.owner.results, copy.results, strict=True))
        return self.known[value]

    # --- expressions ---

    def linear(self, x: Linear) -> SSAValue:
        """The value of an affine expression; captured integers saturate so that sums stay inside 64 bits."""
        if x in self.known:
            return self.known[x]
        weight = sum(abs(c) for t, c in x.terms if isinstance(t, Leaf)) or 1
        total: SSAValue | None = None
        for term, coefficient in sorted(x.terms, key=lambda item: item[1] < 0):
            total = self._plus(total, self.term(term, SATURATED // weight), coefficient)
        offset = max(-SATURATED, min(SATURATED, x.constant))
        if total is None:
            total = self.number(offset)
        elif offset:
            total = self._sum(total, self.number(offset))
        self.known[x] = total
        return total

    def _plus(self, total: SSAValue | None, value: SSAValue, coefficient: int) -> SSAValue:
        if coefficient < 0 and total is not None:
            size = value if coefficient == -1 else self.add(arith.MuliOp(value, self.number(-coefficient)))
            return self.add(arith.SubiOp(total, size))
        if coefficient != 1:
            scaled = self.add(arith.MuliOp(value, self.number(coefficient)))
            if value in self.nonnegative and coefficient > 0:
                self.nonnegative.add(scaled)
            value = scaled
        return value if total is None else self._sum(total, value)

    def _sum(self, a: SSAValue, b: SSAValue) -> SSAValue:
        result = self.add(arith.AddiOp(a, b))
        if a in self.nonnegative and b in self.nonnegative:
            self.nonnegative.add(result)
        return result

    def term(self, term: Term, bound: int) -> SSAValue:
        match term:
            case Position():
                return self.known[term]
            case Leaf(key):
                return self._saturated(self.moved(cast(SSAValue, key)), bound)
            case Floor(of, by):
                value = self.linear(of)
                quotient = self.add(arith.FloorDivSIOp(value, self.number(by)))
                if value in self.nonnegative:
                    self.nonnegative.add(quotient)
                return quotient
            case Extremum(larger, left, right):
                return (self.larger if larger else self.smaller)(self.linear(left), self.linear(right))
            case Choice(condition, then, other):
                return self.select(self.condition(condition), self.linear(then), self.linear(other))

    def _saturated(self, value: SSAValue, bound: int) -> SSAValue:
        if value in self.nonnegative:
            return value
        return self.larger(self.smaller(value, self.number(bound)), self.number(-bound))

    def condition(self, condition: Condition) -> SSAValue:
        match condition:
            case Below(x):
                # left <= right reads better than left - right <= 0 and costs no subtraction.
                left = Linear(max(x.constant, 0), tuple((t, c) for t, c in x.terms if c > 0))
                right = Linear(max(-x.constant, 0), tuple((t, -c) for t, c in x.terms if c < 0))
                return self.add(arith.CmpiOp(self.linear(left), self.linear(right), "sle"))
            case Flag(key, sign):
                value = self.moved(cast(SSAValue, key))
                return value if sign else self.add(arith.XOrIOp(value, self.add(constant(1, value.type))))
            case All(parts) | Any(parts):
                combine = arith.AndIOp if isinstance(condition, All) else arith.OrIOp
                values = [self.condition(part) for part in parts]
                total = values[0]
                for value in values[1:]:
                    total = self.add(combine(total, value))
                return total
            case _:
                raise AssertionError("an unknown condition never becomes a bound")

    # --- ranges ---

    def _clamped(self, value: SSAValue) -> SSAValue:
        return self.larger(self.smaller(value, self.limit), self.number(0))

    def _bound(self, bound: Linear | None, default: SSAValue) -> SSAValue:
        return default if bound is None else self._clamped(self.linear(bound))

    def bounds(self, found: Range) -> Bounds:
        """One range, clamped to the keys that exist, its full part inside the visible one."""
        zero = self.number(0)
        lo, hi = self._bound(found.visible.lo, zero), self._bound(found.visible.hi, self.limit)
        hi = self.larger(hi, lo)
        if found.full is None:
            return Bounds(lo, lo, lo, hi)
        if found.full == found.visible:
            return Bounds(lo, lo, hi, hi)
        full_lo = lo if found.full.lo is None else self.smaller(self.larger(self.linear(found.full.lo), lo), hi)
        if found.full.hi is None:
            return Bounds(lo, full_lo, hi, hi)
        return Bounds(lo, full_lo, self.larger(self.smaller(self.linear(found.full.hi), hi), full_lo), hi)

    def finish(self, ranges: Sequence[Range]) -> Block:
        """Ends the block with the ranges, sorted and disjoint."""
        members = _at_most(MOST_RANGES, list(ranges))
        # A range without a lower end starts at 0, so that it is never behind another one.
        members.sort(key=lambda r: r.visible.lo is not None)
        found = [self.bounds(member) for member in members]
        if not found:
            found = [Bounds(*[self.number(0)] * 4)]
        if len(found) > 1:
            first = sum(member.visible.lo is None for member in members)
            found = self.separated(self.sorted(found, first))
        self.block.add_op(attn.YieldOp(*[value for bounds in found for value in bounds.values()]))
        return self.block

    def sorted(self, found: list[Bounds], first: int) -> list[Bounds]:
        """The ranges by their lower ends; the first ones start at 0, and empty ones are moved there."""
        zero = self.number(0)
        for i in range(first, len(found)):
            some = self.add(arith.CmpiOp(found[i].visible_lo, found[i].visible_hi, "slt"))
            found[i] = Bounds(*[self.select(some, value, zero) for value in found[i].values()])
        for end in range(len(found) - 1, first, -1):
            for i in range(first, end):
                found[i], found[i + 1] = self._ordered(found[i], found[i + 1])
        return found

    def _ordered(self, a: Bounds, b: Bounds) -> tuple[Bounds, Bounds]:
        swap = self.add(arith.CmpiOp(b.visible_lo, a.visible_lo, "slt"))
        pairs = list(zip(a.values(), b.values(), strict=True))
        return (
            Bounds(*[self.select(swap, y, x) for x, y in pairs]),
            Bounds(*[self.select(swap, x, y) for x, y in pairs]),
        )

    def separated(self, found: list[Bounds]) -> list[Bounds]:
        """Sorted ranges made disjoint, from the front: what overlaps becomes one range, or two that share a cut."""
        result: list[Bounds] = []
        current = found[0]
        for following in found[1:]:
            if result:
                following = self._behind(following, result[-1].visible_hi)
            out, current = self._pair(current, following)
            result.append(out)
        return [*result, current]

    def _behind(self, found: Bounds, end: SSAValue) -> Bounds:
        """What of a range is not below `end`."""
        return Bounds(*[self.larger(value, end) for value in found.values()])

    def _pair(self, a: Bounds, b: Bounds) -> tuple[Bounds, Bounds]:
        """Two ranges, a not behind b, as disjoint ones: the union of the visible keys and that of the full keys."""
        touch = self.add(arith.CmpiOp(b.visible_lo, a.visible_hi, "sle"))
        a_lo, a_hi, b_lo, b_hi = self._nonempty_full(a, b)
        low, high = self.smaller(a_lo, b_lo), self.larger(a_hi, b_hi)
        cut, end = self.larger(a_lo, b_lo), self.smaller(a_hi, b_hi)
        joined = self.add(arith.CmpiOp(cut, end, "sle"))
        visible_hi = self.larger(a.visible_hi, b.visible_hi)
        start = a.visible_lo
        # Full parts that touch are one; else the visible keys are cut where the second of them begins.
        out = Bounds(start, *[self.select(joined, start, value) for value in (low, end, cut)])
        current = Bounds(self.select(joined, start, cut), self.select(joined, low, cut), high, visible_hi)
        return self._chosen(touch, out, a), self._chosen(touch, current, b)

    def _nonempty_full(self, a: Bounds, b: Bounds) -> tuple[SSAValue, SSAValue, SSAValue, SSAValue]:
        """The ends of both full parts; one that is empty stands where the other is."""
        if a.full_lo is a.full_hi:
            return (b.full_lo, b.full_hi, b.full_lo, b.full_hi)
        if b.full_lo is b.full_hi:
            return (a.full_lo, a.full_hi, a.full_lo, a.full_hi)
        some_a = self.add(arith.CmpiOp(a.full_lo, a.full_hi, "slt"))
        some_b = self.add(arith.CmpiOp(b.full_lo, b.full_hi, "slt"))
        a_lo, a_hi = self.select(some_a, a.full_lo, b.full_lo), self.select(some_a, a.full_hi, b.full_hi)
        return a_lo, a_hi, self.select(some_b, b.full_lo, a_lo), self.select(some_b, b.full_hi, a_hi)

    def _chosen(self, condition: SSAValue, a: Bounds, b: Bounds) -> Bounds:
        return Bounds(*[self.select(condition, x, y) for x, y in zip(a.values(), b.values(), strict=True)])


def _at_most(count: int, ranges: list[Range]) -> list[Range]:
    """The union in so many ranges; those that claim full keys are joined last."""
    ranges.sort(key=lambda r: r.full is None)
    while len(ranges) > count:
        *ranges, a, b = ranges
        ranges.append(hull(a, b))
    return ranges
