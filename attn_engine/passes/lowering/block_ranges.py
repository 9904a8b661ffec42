"""The kernel that looks which blocks are empty and which are full, and keeps ranges of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerAttr, TensorType, i32, i64
from xdsl.ir import SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.frame import present, spread
from attn_engine.passes.lowering.kernel import Blocks, Kernel, close, loop
from attn_engine.passes.lowering.partition import Partition
from attn_engine.passes.lowering.program import Bound, Program
from attn_engine.passes.lowering.scope import Index, Scope

if TYPE_CHECKING:
    from attn_engine.passes.lowering.tables import Tables

NOWHERE = 1 << 30
"""The number of no block."""
CHUNK = 1024
"""Blocks that a program of a ranges kernel looks at in one step."""
ENDS = 4
ONE_RUN = ("lo", "last", "full_lo", "full_hi")
"""First and last block that is not empty, first full one, and the first behind it that is not full."""
TWO_RUNS = ("gap", "lo2", "full_lo2", "full_hi2")
"""First empty block behind the first one; behind that the first not empty, first full, and first not full again."""


@dataclass
class RangesKernel:
    """A program for each own block; it walks over the other blocks, many at a time."""

    tables: Tables
    queries: bool
    own: int
    other: int

    def build(self, own_bounds: SSAValue, other_bounds: SSAValue) -> SSAValue:
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
        self.first = scope.times(i, self.own, "first")
        length = kernel.take(tables.length(self.queries))
        self.end = scope.smaller(scope.plus(self.first, self.own), length, "end")
        place = tables.place(scope, self.frame)
        self.place = place
        self.own_ends = self._loads(scope, own_bounds, self.queries, i, None)
        self.other_bounds = other_bounds
        ends = self._walk(scope)
        for n, value in enumerate(self._positions(scope, ends)):
            places = [*place, i, scope.value(n)]
            scope.add(tile.StoreOp(scope.value(value), kernel.take(target), places, []))
        tables.launch(kernel, blocks)
        return target

    def _loads(self, scope: Scope, bounds: SSAValue, queries: bool, at: SSAValue, size: int | None) -> list[Bound]:
        """The ends of all terms of one block, or of a run of blocks."""
        last = self.tables.terms(queries).last_op
        assert isinstance(last, attn.YieldOp)
        found: list[Bound] = []
        for n in range(2 * len(last.values)):
            source, places = self.kernel.take(bounds), [*self.place, scope.value(n), at]
            if size is None:
                found.append(Bound(scope.add(tile.LoadOp(source, places, [], i64), "bound").result))
            else:
                load = tile.LoadOp(source, places, [3], TensorType(i64, [size]), {0: self.others})
                found.append(Bound(scope.add(load, "bounds").result, (0,)))
        return found

    def _walk(self, scope: Scope) -> list[SSAValue]:
        """Numbers of blocks, by the names of `ONE_RUN` and `TWO_RUNS`."""
        names = [*ONE_RUN, *(TWO_RUNS if self.tables.runs > 1 else ())]
        start = [scope.value(-1 if name == "last" else NOWHERE) for name in names]
        for value, hint in zip(start, names, strict=True):
            value.name_hint = hint
        op, inner, n0, carried = loop(scope, 0, self.others, CHUNK, start, "n0")
        step = self._step(inner, n0, dict(zip(names, carried, strict=True)))
        step.first("lo", step.some)
        step.last("last", step.some)
        step.first("full_lo", step.every)
        step.first("full_hi", step.hole, step.found["full_lo"])
        if self.tables.runs > 1:
            step.first("gap", step.empty, step.found["lo"])
            step.first("lo2", step.some, step.found["gap"])
            # The block at which the second run starts may be the first full one itself.
            step.first("full_lo2", step.every, inner.minus(step.found["lo2"], 1, "before"))
            step.first("full_hi2", step.hole, step.found["full_lo2"])
        close(inner, [step.found[name] for name in names])
        return list(op.results)

    def _step(self, scope: Scope, n0: SSAValue, carried: dict[str, SSAValue]) -> _Step:
        """Of a run of blocks: which exist and are not empty, full, empty, not full."""
        numbers = scope.add(tile.RangeOp(n0, CHUNK), "numbers").result
        program = self.frame.program()
        number = program.argument(Bound(numbers, (0,)), "number")
        exists = program.add(arith.CmpiOp(number, program.argument(Bound(self.others), "limit"), "slt"), "exists")
        true = program.add(arith.ConstantOp.from_int_and_width(1, 1), "true")
        wanted: list[SSAValue] = []
        for kind in self._kinds(program, scope, number, n0):
            opposite = program.add(arith.XOrIOp(kind, true), "not")
            wanted += [program.add(arith.AndIOp(value, exists), "kind") for value in (kind, opposite)]
        found = Partition(program, scope, (CHUNK,), -1).run(wanted)
        some, empty, every, hole = (spread(scope, f, (CHUNK,)) for f in found)
        return _Step(scope, numbers, some, empty, every, hole, carried)

    def _kinds(self, program: Program, scope: Scope, number: SSAValue, n0: SSAValue) -> tuple[SSAValue, SSAValue]:
        """The `kinds` region on this program's block and a run of other ones."""
        kinds = present(self.tables.operands.op.kinds)
        assert kinds is not None
        size = program.add(arith.ConstantOp(IntegerAttr(self.other, i32)), "size")
        low = program.add(arith.MuliOp(number, size), "lo")
        high = program.add(arith.AddiOp(low, size), "hi")
        limit = program.argument(Bound(self.kernel.take(self.tables.length(not self.queries))), "limit")
        high = program.add(arith.MinSIOp(high, limit), "hi")
        others = [program.add(arith.ExtSIOp(x, i64), "i") for x in (low, high)]
        owns = [program.index(Bound(scope.value(x)), "i") for x in (self.first, self.end)]
        ends = [
            [program.argument(b, "bound") for b in bounds]
            for bounds in (self.own_ends, self._loads(scope, self.other_bounds, not self.queries, n0, CHUNK))
        ]
        if not self.queries:
            owns, others, ends = others, owns, ends[::-1]
        arguments = [*owns, *others, *self.frame.heads(program), *ends[0], *ends[1]]
        some, every = program.inline(kinds, arguments).operands
        return some, every

    def _positions(self, scope: Scope, ends: list[SSAValue]) -> list[Index]:
        """Numbers of blocks as positions; nothing visible is [0, 0), nothing full is empty at the front."""
        lo, last, full, hole, *second = ends
        stop = scope.plus(last, 1, "stop")
        lo = scope.choose_less(lo, stop, lo, 0, "lo")
        stop = scope.choose_less(lo, stop, stop, 0, "hi")
        if not second:
            found = self._run(scope, lo, full, hole, stop)
        else:
            gap, lo2, full2, hole2 = second
            first = self._run(scope, lo, full, hole, scope.smaller(gap, stop, "hi"))
            found = [*first, *self._run(scope, scope.smaller(lo2, stop, "lo"), full2, hole2, stop)]
        limit = self.kernel.take(self.tables.length(not self.queries))
        return [scope.smaller(scope.times(n, self.other, "i"), limit, "i") for n in found]

    def _run(self, scope: Scope, lo: Index, full: Index, hole: Index, stop: Index) -> list[Index]:
        hole = scope.smaller(hole, stop, "full_hi")
        some = scope.choose_less(full, hole, full, lo, "full_lo")
        return [lo, some, scope.choose_less(full, hole, hole, lo, "full_hi"), stop]


@dataclass
class _Step:
    """A run of other blocks, and what has been found among the blocks up to its end."""

    scope: Scope
    numbers: SSAValue
    some: SSAValue
    empty: SSAValue
    every: SSAValue
    hole: SSAValue
    found: dict[str, SSAValue]

    def first(self, name: str, chosen: SSAValue, behind: Index | None = None) -> None:
        """The first of the chosen blocks, behind another one."""
        least = self._reduced(chosen, behind, NOWHERE, tile.Reduction.MIN)
        self.found[name] = self.scope.value(self.scope.smaller(self.found[name], least, name))

    def last(self, name: str, chosen: SSAValue) -> None:
        most = self._reduced(chosen, None, -1, tile.Reduction.MAX)
        self.found[name] = self.scope.value(self.scope.larger(self.found[name], most, name))

    def _reduced(self, chosen: SSAValue, behind: Index | None, otherwise: int, kind: tile.Reduction) -> SSAValue:
        program = Program()
        number = program.argument(Bound(self.numbers, (0,)), "number")
        picked = program.argument(Bound(chosen, (0,)), "chosen")
        if behind is not None:
            limit = program.argument(Bound(self.scope.value(behind)), "behind")
            later = program.add(arith.CmpiOp(number, limit, "sgt"), "later")
            picked = program.add(arith.AndIOp(picked, later), "chosen")
        other = program.add(arith.ConstantOp(IntegerAttr(otherwise, i32)), "c")
        value = program.add(arith.SelectOp(picked, number, other), "picked")
        (found,) = Partition(program, self.scope, (CHUNK,), -1).run([value])
        return self.scope.add(tile.ReduceOp(kind, spread(self.scope, found, (CHUNK,)), 0), "found").result
