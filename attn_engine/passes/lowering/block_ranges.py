"""The kernel that looks which blocks are empty and which are full, and keeps ranges of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xdsl.dialects import arith
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, IntegerAttr, IntegerType, TensorType, i32, i64
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.frame import present, spread
from attn_engine.passes.lowering.kernel import Blocks, Kernel, close, loop
from attn_engine.passes.lowering.partition import Partition
from attn_engine.passes.lowering.program import Bound, Program
from attn_engine.passes.lowering.scope import Index, Scope
from attn_engine.passes.mask_intervals import LARGEST, SMALLEST

if TYPE_CHECKING:
    from attn_engine.passes.lowering.tables import Tables

NOWHERE = 1 << 30
"""The number of no block."""
OWN = 8
"""Own blocks of a program, at least: what it finds out about other blocks serves all of them."""
ELEMENTS = 4096
"""Positions of other blocks that a program looks at in one step, at least."""
OWN_SHARE, SHARE = 16, 4
"""Where a schedule has large tiles of scores, these are larger: such a part of its rows, and of all its scores."""
ENDS = 4
ONE_RUN = ("lo", "last", "full_lo", "full_hi")
"""First and last block that is not empty, first full one, and the first behind it that is not full."""
TWO_RUNS = ("gap", "lo2", "full_lo2", "full_hi2")
"""First empty block behind the first one; behind that the first not empty, first full, and first not full again."""
OTHERS, OWNS = (0,), (1,)
"""The axes of a tile of pairs of blocks."""


@dataclass
class RangesKernel:
    """A program for some own blocks; it walks over the other blocks, many at a time.

    Of every block it finds the smallest and the largest value of each term, and asks `kinds` about each pair.
    """

    tables: Tables
    queries: bool
    own: int
    other: int

    def build(self) -> SSAValue:
        """Launches the kernel; the table that it fills."""
        tables, side = self.tables, "q" if self.queries else "kv"
        blocks = tables.operands.blocks(tables.length(self.queries), self.own, f"{side}_blocks")
        others = tables.operands.blocks(tables.length(not self.queries), self.other, "other_blocks")
        target = tables.alloc([blocks, ENDS * tables.runs], i32, f"{side}_ranges")
        name = f"{tables.name}_{side}_ranges_{self.own}_{self.other}"
        kernel = self.kernel = Kernel(name, tables.plan, Blocks(self.own, self.other, 4, 1))
        scope = kernel.scope
        i, self.frame = tables.frame(kernel)
        self.others = kernel.take(others)
        self.step = max(tables.smallest, max(ELEMENTS, self.own * self.other // SHARE) // self.other)
        self.count = max(tables.smallest, OWN, self.own // OWN_SHARE)
        self.shape = (self.step, self.count)
        first = scope.value(scope.times(i, self.count, "first"))
        self.numbers = Bound(scope.add(tile.RangeOp(first, self.count), "own").result, OWNS)
        self.own_terms = self._terms(scope, self.numbers.value, self.count, self.queries)
        place = [*tables.place(scope, self.frame), first]
        for n, value in enumerate(self._positions(scope, self._walk(scope))):
            places, limits = [*place, scope.value(n)], {0: kernel.take(blocks)}
            scope.add(tile.StoreOp(value, kernel.take(target), places, [2], limits))
        tables.launch(kernel, tables.operands.blocks(blocks, self.count, f"{side}_programs"))
        return target

    def _terms(self, scope: Scope, numbers: SSAValue, count: int, queries: bool) -> list[SSAValue]:
        """The smallest and the largest value of each term in blocks of these numbers."""
        hint, size = "q" if queries else "kv", self._size(queries)
        rows = scope.add(tile.RangeOp(scope.value(0), size), "rows").result
        program, inside = self.frame.program(), Bound(self.kernel.take(self.tables.length(queries)))
        start = self._scaled(program, program.argument(Bound(numbers, (0,)), "number"), size)
        index = program.add(arith.AddiOp(start, program.argument(Bound(rows, (1,)), "row")), hint)
        index = program.widened(index, hint, inside)
        end = program.inline(self.tables.terms(queries), [*self.frame.heads(program), index])
        exists = program.below(index, inside)
        wanted = [
            program.add(arith.SelectOp(exists, value, _integer(program, beyond, i64)), value.name_hint or "term")
            for value in end.operands
            for beyond in (LARGEST, SMALLEST)
        ]
        shape, kinds = (count, size), (tile.Reduction.MIN, tile.Reduction.MAX)
        found = Partition(program, scope, shape, -1).run(wanted)
        return [
            scope.add(tile.ReduceOp(kinds[n % 2], spread(scope, value, shape), 1), "bound").result
            for n, value in enumerate(found)
        ]

    def _size(self, queries: bool) -> int:
        return self.own if queries == self.queries else self.other

    @staticmethod
    def _scaled(program: Program, number: SSAValue, size: int) -> SSAValue:
        return program.add(arith.MuliOp(number, _integer(program, size, i32)), "lo")

    def _walk(self, scope: Scope) -> list[SSAValue]:
        """Numbers of blocks, by the names of `ONE_RUN` and `TWO_RUNS`."""
        names = [*ONE_RUN, *(TWO_RUNS if self.tables.runs > 1 else ())]
        start = [_splat(scope, self.count, -1 if name == "last" else NOWHERE, name) for name in names]
        op, inner, n0, carried = loop(scope, 0, self.others, self.step, start, "n0")
        step = self._step(inner, n0, dict(zip(names, carried, strict=True)))
        step.first("lo", step.some)
        step.last("last", step.some)
        step.first("full_lo", step.every)
        step.first("full_hi", step.hole, step.found["full_lo"])
        if self.tables.runs > 1:
            step.first("gap", step.empty, step.found["lo"])
            step.first("lo2", step.some, step.found["gap"])
            # The block at which the second run starts may be the first full one itself.
            step.first("full_lo2", step.every, step.found["lo2"], "sge")
            step.first("full_hi2", step.hole, step.found["full_lo2"])
        close(inner, [step.found[name] for name in names])
        return list(op.results)

    def _step(self, scope: Scope, n0: SSAValue, carried: dict[str, SSAValue]) -> _Step:
        """Of a run of blocks: which exist and are not empty, full, empty, not full."""
        numbers = scope.add(tile.RangeOp(n0, self.step), "numbers").result
        program = self.frame.program()
        number = program.argument(Bound(numbers, OTHERS), "number")
        exists = program.add(arith.CmpiOp(number, program.argument(Bound(self.others), "limit"), "slt"), "exists")
        true = program.add(arith.ConstantOp.from_int_and_width(1, 1), "true")
        wanted: list[SSAValue] = []
        for kind in self._kinds(program, number, self._terms(scope, numbers, self.step, not self.queries)):
            opposite = program.add(arith.XOrIOp(kind, true), "not")
            wanted += [program.add(arith.AndIOp(value, exists), "kind") for value in (kind, opposite)]
        some, empty, every, hole = Partition(program, scope, self.shape, -1).run(wanted)
        return _Step(scope, self.shape, Bound(numbers, OTHERS), some, empty, every, hole, carried)

    def _kinds(self, program: Program, number: SSAValue, terms: Sequence[SSAValue]) -> tuple[SSAValue, SSAValue]:
        """The `kinds` region on this program's blocks and a run of other ones."""
        kinds = present(self.tables.operands.op.kinds)
        assert kinds is not None
        own = program.argument(self.numbers, "own")
        owns, others = self._ends(program, own, self.queries), self._ends(program, number, not self.queries)
        own_terms = [program.argument(Bound(x, OWNS), "bound") for x in self.own_terms]
        other_terms = [program.argument(Bound(x, OTHERS), "bound") for x in terms]
        if not self.queries:
            owns, others, own_terms, other_terms = others, owns, other_terms, own_terms
        arguments = [*owns, *others, *self.frame.heads(program), *own_terms, *other_terms]
        some, every = program.inline(kinds, arguments).operands
        return some, every

    def _ends(self, program: Program, number: SSAValue, queries: bool) -> list[SSAValue]:
        """The first position of blocks, and the one behind their last."""
        size = self._size(queries)
        low = self._scaled(program, number, size)
        high = program.add(arith.AddiOp(low, _integer(program, size, i32)), "hi")
        limit = program.argument(Bound(self.kernel.take(self.tables.length(queries))), "limit")
        high = program.add(arith.MinSIOp(high, limit), "hi")
        return [program.add(arith.ExtSIOp(x, i64), "i") for x in (low, high)]

    def _positions(self, scope: Scope, ends: Sequence[SSAValue]) -> list[SSAValue]:
        """Numbers of blocks as positions; nothing visible is [0, 0), nothing full is empty at the front."""
        program = Program()
        limit = program.argument(Bound(self.kernel.take(self.tables.length(not self.queries))), "limit")
        inner, numbers = Scope(program.block), [program.argument(Bound(x, OWNS), "number") for x in ends]
        found = [inner.smaller(inner.times(n, self.other, "i"), limit, "i") for n in self._ranges(inner, numbers)]
        values = Partition(program, scope, self.shape, -1).run([inner.value(n) for n in found])
        return [spread(scope, value, self.shape, OWNS) for value in values]

    def _ranges(self, scope: Scope, ends: Sequence[SSAValue]) -> list[Index]:
        """The runs of blocks of one own block."""
        lo, last, full, hole, *second = ends
        stop = scope.plus(last, 1, "stop")
        lo = scope.choose_less(lo, stop, lo, 0, "lo")
        stop = scope.choose_less(lo, stop, stop, 0, "hi")
        if not second:
            return self._run(scope, lo, full, hole, stop)
        gap, lo2, full2, hole2 = second
        first = self._run(scope, lo, full, hole, scope.smaller(gap, stop, "hi"))
        return [*first, *self._run(scope, scope.smaller(lo2, stop, "lo"), full2, hole2, stop)]

    def _run(self, scope: Scope, lo: Index, full: Index, hole: Index, stop: Index) -> list[Index]:
        hole = scope.smaller(hole, stop, "full_hi")
        some = scope.choose_less(full, hole, full, lo, "full_lo")
        return [lo, some, scope.choose_less(full, hole, hole, lo, "full_hi"), stop]


@dataclass
class _Step:
    """A run of other blocks, and what has been found among the blocks up to its end, for each own block."""

    scope: Scope
    shape: tuple[int, int]
    numbers: Bound
    some: Bound
    empty: Bound
    every: Bound
    hole: Bound
    found: dict[str, SSAValue]

    def first(self, name: str, chosen: Bound, behind: SSAValue | None = None, predicate: str = "sgt") -> None:
        """The first of the chosen blocks, behind another one."""
        least = self._reduced(chosen, behind, predicate, NOWHERE, tile.Reduction.MIN)
        self._join(name, arith.MinSIOp, least)

    def last(self, name: str, chosen: Bound) -> None:
        most = self._reduced(chosen, None, "", -1, tile.Reduction.MAX)
        self._join(name, arith.MaxSIOp, most)

    def _join(self, name: str, kind: type[Operation], found: SSAValue) -> None:
        program = Program()
        both = [program.argument(Bound(x, OWNS), name) for x in (self.found[name], found)]
        (value,) = Partition(program, self.scope, self.shape, -1).run([program.add(kind(*both), name)])
        self.found[name] = value.value

    def _reduced(
        self, chosen: Bound, behind: SSAValue | None, predicate: str, otherwise: int, kind: tile.Reduction
    ) -> SSAValue:
        program = Program()
        number, picked = program.argument(self.numbers, "number"), program.argument(chosen, "chosen")
        if behind is not None:
            limit = program.argument(Bound(behind, OWNS), "behind")
            later = program.add(arith.CmpiOp(number, limit, predicate), "later")
            picked = program.add(arith.AndIOp(picked, later), "chosen")
        value = program.add(arith.SelectOp(picked, number, _integer(program, otherwise, i32)), "picked")
        (found,) = Partition(program, self.scope, self.shape, -1).run([value])
        return self.scope.add(tile.ReduceOp(kind, spread(self.scope, found, self.shape), 0), "found").result


def _integer(program: Program, number: int, type_: IntegerType) -> SSAValue:
    return program.add(arith.ConstantOp(IntegerAttr(number, type_)), "c")


def _splat(scope: Scope, size: int, number: int, hint: str) -> SSAValue:
    type_ = TensorType(i32, [size])
    return scope.add(arith.ConstantOp(DenseIntOrFPElementsAttr.from_list(type_, [number]), type_), hint).result
