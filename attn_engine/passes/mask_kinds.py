"""Kinds of blocks of a mask that reads captures at positions: its terms, and interval arithmetic over them.

A *term* is an integer or condition of the mask that depends on one position only and reads a capture there, such as
`doc[q]`. Its smallest and largest value over a block is found at run time; what a mask makes of terms and positions
is then interval arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import i1, i64
from xdsl.ir import Block, Operation, Region, SSAValue

from attn_engine.dialects import attn
from attn_engine.passes.mask_condition import uniform_values
from attn_engine.passes.mask_intervals import EASY, Interval, IntervalWriter, Truth
from attn_engine.passes.simplify_constants import constant_of
from attn_engine.passes.simplify_rule import predicate_of

POSITIONS = {"q": 2, "kv": 3}
"""Arguments of a mask."""
SMALLEST_TILE = 16
"""A table that is read once per so many positions, or more, is a table of blocks."""
ARGUMENTS = ("q_lo", "q_hi", "kv_lo", "kv_hi", "b", "h")
Positions = frozenset[str]


@dataclass
class _Reads:
    """On which positions each value of a mask depends, and through which of them it reads a capture."""

    mask: Block
    positions: dict[SSAValue, Positions] = field(default_factory=dict[SSAValue, Positions])
    loads: set[SSAValue] = field(default_factory=set[SSAValue])

    def __post_init__(self) -> None:
        for arg in self.mask.args:
            self.positions[arg] = frozenset(n for n, i in POSITIONS.items() if arg.index == i)
        for op in self.mask.ops:
            found = frozenset[str]().union(*(self.positions[v] for v in op.operands))
            reads = isinstance(op, attn.LoadOp) and bool(found)
            for result in op.results:
                self.positions[result] = found
                if reads or any(v in self.loads for v in op.operands):
                    self.loads.add(result)

    def is_term(self, value: SSAValue) -> bool:
        return len(self.positions[value]) == 1 and value in self.loads and value.type in (i1, i64)

    def tells(self) -> bool:
        """Whether terms, or tables of blocks, may tell more than the positions alone."""
        for op in self.mask.ops:
            if any(self.is_term(result) for result in op.results):
                return True
            if isinstance(op, attn.LoadOp) and self.positions[op.result]:
                moving = [i for i in op.indices if self.positions[i]]
                if all(_is_coarse(i) for i in moving):
                    return True
        return False


def _is_coarse(index: SSAValue) -> bool:
    """floor(x / n), for a large n."""
    owner = index.owner
    return isinstance(owner, arith.FloorDivSIOp) and (constant_of(owner.rhs) or 0) >= SMALLEST_TILE


class _Terms:
    """The region that computes the terms of one position."""

    def __init__(self, mask: Block, position: str):
        self.mask = mask
        indices = [mask.args[0], mask.args[1], mask.args[POSITIONS[position]]]
        captures = list(mask.args)[4:]
        self.block = Block(arg_types=[v.type for v in (*indices, *captures)])
        self.known: dict[SSAValue, SSAValue] = dict(zip((*indices, *captures), self.block.args, strict=True))
        for old, new in self.known.items():
            new.name_hint = old.name_hint
        self.terms: list[SSAValue] = []

    def place(self, value: SSAValue) -> int:
        if value not in self.terms:
            self.terms.append(value)
        return self.terms.index(value)

    def _moved(self, value: SSAValue) -> SSAValue:
        if value not in self.known:
            assert isinstance(value.owner, Operation)
            for operand in value.owner.operands:
                self._moved(operand)
            copy = value.owner.clone(value_mapper=self.known)
            self.block.add_op(copy)
            for old, new in zip(value.owner.results, copy.results, strict=True):
                new.name_hint = old.name_hint
                self.known[old] = new
        return self.known[value]

    def finish(self) -> Region:
        values = [self._moved(term) for term in self.terms]
        for n, value in enumerate(values):
            if value.type == i1:
                wide = arith.ExtUIOp(value, i64)
                self.block.add_op(wide)
                values[n] = wide.result
        self.block.add_op(attn.YieldOp(*values))
        return Region(self.block)


class KindsWriter:
    """Writes the three regions of one mask."""

    def __init__(self, mask: Block):
        self.mask, self.reads = mask, _Reads(mask)
        self.uniform = uniform_values(mask)
        captures = list(mask.args)[4:]
        self.block = Block(arg_types=[*[i64] * 6, *(c.type for c in captures)])
        names = [*ARGUMENTS, *(c.name_hint for c in captures)]
        for arg, name in zip(self.block.args, names, strict=True):
            arg.name_hint = name
        self.write = IntervalWriter(self.block)
        self.moved: dict[SSAValue, SSAValue] = dict(zip(captures, list(self.block.args)[6:], strict=True))
        self.moved |= dict(zip(mask.args[:2], self.block.args[4:6], strict=True))
        self.terms = {position: _Terms(mask, position) for position in POSITIONS}
        self.ends: dict[SSAValue, Interval] = {}
        self.integers: dict[SSAValue, Interval] = {}
        self.conditions: dict[SSAValue, Truth] = {}

    def run(self) -> dict[str, Region]:
        """`query_terms`, `key_terms` and `kinds`."""
        last = self.mask.last_op
        assert isinstance(last, attn.YieldOp)
        self._positions()
        self._collect(last.values[0], set())
        self._arguments()
        found = self.condition(last.values[0])
        self.block.add_op(attn.YieldOp(*found))
        regions = [self.terms["q"].finish(), self.terms["kv"].finish(), Region(self.block)]
        return dict(zip(attn.KIND_REGIONS, regions, strict=True))

    def _positions(self) -> None:
        one = self.write.number(1)
        for n, index in enumerate(POSITIONS.values()):
            lo, hi = self.block.args[2 * n], self.block.args[2 * n + 1]
            last = self.write.add(arith.SubiOp(hi, one))
            self.integers[self.mask.args[index]] = Interval(lo, last, EASY)

    def _collect(self, value: SSAValue, seen: set[SSAValue]) -> None:
        """Finds the terms: the largest expressions of one position that read a capture."""
        if value in seen or value in self.uniform:
            return
        seen.add(value)
        if self.reads.is_term(value):
            (position,) = self.reads.positions[value]
            self.terms[position].place(value)
        elif isinstance(value.owner, Operation):
            for operand in value.owner.operands:
                self._collect(operand, seen)

    def _arguments(self) -> None:
        """The ends of terms as further arguments, in front of the captures."""
        place = 6
        for position, region in self.terms.items():
            for n, term in enumerate(region.terms):
                ends: list[SSAValue] = []
                for name in ("min", "max"):
                    arg = self.block.insert_arg(i64, place)
                    arg.name_hint = f"{position}_{name}{n}"
                    ends.append(arg)
                    place += 1
                self.ends[term] = Interval(ends[0], ends[1])

    # --- values

    def _uniform(self, value: SSAValue) -> SSAValue:
        """A value that no position reaches, computed here."""
        if value not in self.moved:
            assert isinstance(value.owner, Operation)
            for operand in value.owner.operands:
                self._uniform(operand)
            copy = value.owner.clone(value_mapper=self.moved)
            self.block.add_op(copy)
            self.moved |= dict(zip(value.owner.results, copy.results, strict=True))
        return self.moved[value]

    def condition(self, value: SSAValue) -> Truth:
        if value not in self.conditions:
            self.conditions[value] = self._condition(value) or self.write.unknown
        return self.conditions[value]

    def _condition(self, value: SSAValue) -> Truth | None:
        w, op = self.write, value.owner
        if value in self.uniform:
            known = self._uniform(value)
            return Truth(known, known)
        if value in self.ends:
            ends, zero = self.ends[value], w.number(0)
            return Truth(w.compare("ne", ends.hi, zero), w.compare("ne", ends.lo, zero))
        match op:
            case arith.AndIOp():
                return w.conjunction(self.condition(op.lhs), self.condition(op.rhs))
            case arith.OrIOp():
                return w.disjunction(self.condition(op.lhs), self.condition(op.rhs))
            case arith.XOrIOp():
                return w.difference(self.condition(op.lhs), self.condition(op.rhs))
            case arith.SelectOp():
                test = self.condition(op.cond)
                then = w.conjunction(test, self.condition(op.lhs))
                other = w.conjunction(w.negated(test), self.condition(op.rhs))
                return w.disjunction(then, other)
            case arith.CmpiOp():
                return self._compared(op)
            case attn.LoadOp():
                return self._looked_up_condition(op)
            case _:
                return None

    def _compared(self, op: arith.CmpiOp) -> Truth | None:
        name = predicate_of(op)
        if op.lhs.type == i1:
            differ = self.write.difference(self.condition(op.lhs), self.condition(op.rhs))
            return {"ne": differ, "eq": self.write.negated(differ)}.get(name)
        if op.lhs.type != i64:
            return None
        return self.write.compared(name, self.integer(op.lhs), self.integer(op.rhs))

    def integer(self, value: SSAValue) -> Interval:
        if value not in self.integers:
            self.integers[value] = self._integer(value) or self.write.anything
        return self.integers[value]

    def _integer(self, value: SSAValue) -> Interval | None:
        if value.type != i64:
            return None
        if value in self.uniform:
            known = self._uniform(value)
            number = constant_of(value)
            return Interval(known, known) if number is None else Interval(known, known, int(number).bit_length())
        if value in self.ends:
            return self.ends[value]
        return self._arithmetic(value.owner) if isinstance(value.owner, Operation) else None

    def _arithmetic(self, op: Operation) -> Interval | None:
        w = self.write
        match op:
            case arith.AddiOp():
                return w.plus(self.integer(op.lhs), self.integer(op.rhs))
            case arith.SubiOp():
                return w.minus(self.integer(op.lhs), self.integer(op.rhs))
            case arith.MuliOp():
                return w.times(self.integer(op.lhs), self.integer(op.rhs))
            case arith.MaxSIOp():
                return w.larger(self.integer(op.lhs), self.integer(op.rhs))
            case arith.MinSIOp():
                return w.smaller(self.integer(op.lhs), self.integer(op.rhs))
            case arith.FloorDivSIOp() if (by := constant_of(op.rhs) or 0) > 0:
                return w.divided(self.integer(op.lhs), int(by))
            case arith.SelectOp():
                return w.selected(self.condition(op.cond), self.integer(op.lhs), self.integer(op.rhs))
            case arith.ExtUIOp() if op.input.type == i1:
                return w.as_integer(self.condition(op.input))
            case math.AbsIOp():
                x = self.integer(op.operands[0])
                zero = Interval(w.number(0), w.number(0), 1)
                negative = w.minus(zero, x)
                return w.larger(w.larger(x, negative), zero) if x.bits <= EASY else None
            case attn.LoadOp():
                return self._looked_up(op)
            case _:
                return None

    # --- tables of blocks

    def _read(self, op: attn.LoadOp) -> tuple[SSAValue, SSAValue]:
        """The element at the lower ends of the indices, and whether there is but one element."""
        indices = [self.integer(i) for i in op.indices]
        single = self.write.flag(True)
        for x in indices:
            if not x.is_point:
                single = self.write.both(single, self.write.compare("eq", x.lo, x.hi))
        source = self._uniform(op.source)
        return self.write.add(attn.LoadOp(source, [x.lo for x in indices], op.result.type)), single

    def _looked_up(self, op: attn.LoadOp) -> Interval:
        found, single = self._read(op)
        free = self.write.anything
        return Interval(self.write.choose(single, found, free.lo), self.write.choose(single, found, free.hi))

    def _looked_up_condition(self, op: attn.LoadOp) -> Truth:
        found, single = self._read(op)
        several = self.write.opposite(single)
        return Truth(self.write.either(found, several), self.write.both(found, single))


def has_kinds(mask: Block) -> bool:
    """Whether kinds of blocks depend on captures that a mask reads at positions."""
    return _Reads(mask).tells()


def block_kinds(mask: Block) -> dict[str, Region | None]:
    """The regions of a mask that reads captures at positions; nothing for any other."""
    if not has_kinds(mask):
        return {}
    return dict(KindsWriter(mask).run())
