"""Ranges of blocks that depend on captured values: small kernels in front of the kernels that loop over blocks.

A *bounds* kernel finds the smallest and the largest value of each term over every block of positions. A *ranges*
kernel asks `kinds` about each pair of blocks and keeps, for a block of queries, where the first and the last block of
keys lie that are not empty, and the first run of full ones between them. Memory is linear in the lengths; the host
waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerAttr, TensorType, i32, i64
from xdsl.ir import Attribute, Block, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.frame import Frame, Operands, present, spread
from attn_engine.passes.lowering.kernel import Blocks, Kernel, Plan, close, loop
from attn_engine.passes.lowering.partition import Partition
from attn_engine.passes.lowering.program import Bound, Program
from attn_engine.passes.lowering.scope import Index, Scope
from attn_engine.passes.mask_intervals import LARGEST, SMALLEST

NOWHERE = 1 << 30
"""The number of no block."""
CHUNK = 1024
"""Blocks that a program of a ranges kernel looks at in one step."""
ENDS = 4
Position = tuple[Index, Index, Index, Index]


@dataclass(frozen=True)
class Table:
    """[batch or 1, heads or 1, blocks, 4]: visible lo, full lo, full hi, visible hi, as positions."""

    values: SSAValue
    size: int


@dataclass
class Tables:
    """The tables of one plan, each made when a kernel first asks for it, in front of that kernel's launch."""

    name: str
    plan: Plan
    operands: Operands
    enabled: bool = True
    kernels: list[tile.KernelOp] = field(default_factory=list[tile.KernelOp])
    _ranges: dict[tuple[bool, int, int], Table] = field(default_factory=dict[tuple[bool, int, int], Table])
    _bounds: dict[tuple[bool, int], SSAValue] = field(default_factory=dict[tuple[bool, int], SSAValue])

    @property
    def wanted(self) -> bool:
        """Whether the mask has kinds of blocks."""
        return self.enabled and present(self.operands.op.kinds) is not None

    def terms(self, queries: bool) -> Block:
        """The region of terms of queries, or of keys."""
        block = present(self.operands.op.query_terms if queries else self.operands.op.key_terms)
        assert block is not None
        return block

    def _depends(self, place: int) -> bool:
        """Whether b (0) or h (1) matters to any of the regions."""
        kinds = present(self.operands.op.kinds)
        assert kinds is not None
        used = [self.terms(True).args[place], self.terms(False).args[place], kinds.args[4 + place]]
        return any(arg.first_use is not None for arg in used)

    def heads(self) -> list[Index]:
        """The sizes of the leading axes of bounds and tables."""
        sizes: list[Index] = [self.operands.batch, self.operands.heads]
        return [size if self._depends(n) else 1 for n, size in enumerate(sizes)]

    def place(self, scope: Scope, frame: Frame) -> list[SSAValue]:
        """Where on those axes a program reads."""
        return [value if self._depends(n) else scope.value(0) for n, value in enumerate((frame.b, frame.h))]

    def length(self, queries: bool) -> SSAValue:
        return self.operands.sq if queries else self.operands.skv

    def ranges(self, transposed: bool, own: int, other: int) -> Table:
        """For blocks of `own` queries (with `transposed` keys): ranges of keys (queries), found in blocks of `other`."""
        key = (transposed, own, other)
        if key not in self._ranges:
            own_bounds, other_bounds = self.bounds(not transposed, own), self.bounds(transposed, other)
            self._ranges[key] = _RangesKernel(self, not transposed, own, other).build(own_bounds, other_bounds)
        return self._ranges[key]

    def bounds(self, queries: bool, size: int) -> SSAValue:
        """[batch or 1, heads or 1, two per term, blocks]: the smallest and the largest value in each block."""
        key = (queries, size)
        if key not in self._bounds:
            self._bounds[key] = self._bounds_kernel(queries, size)
        return self._bounds[key]

    def launch(self, kernel: Kernel, blocks: SSAValue) -> None:
        batch, heads = (self.plan.scope.value(n) for n in self.heads())
        self.kernels.append(kernel.launch([blocks, heads, batch]))

    def alloc(self, sizes: Sequence[Index], element: Attribute, hint: str) -> SSAValue:
        scope = self.plan.scope
        values = [scope.value(n) for n in (*self.heads(), *sizes)]
        return scope.add(tile.AllocOp(values, tile.GlobalType(len(values), element)), hint).result

    def frame(self, kernel: Kernel) -> tuple[SSAValue, Frame]:
        i, h, b = (kernel.program_id(n, hint) for n, hint in enumerate(("i", "h", "b")))
        return i, Frame(self.operands, kernel, 0, b, h, h)

    def _bounds_kernel(self, queries: bool, size: int) -> SSAValue:
        hint = "q" if queries else "kv"
        code = self.terms(queries)
        assert isinstance(code.last_op, attn.YieldOp)
        count = len(code.last_op.values)
        blocks = self.operands.blocks(self.length(queries), size, f"{hint}_blocks")
        target = self.alloc([2 * max(count, 1), blocks], i64, f"{hint}_bounds")
        if not count:
            return target
        kernel = Kernel(f"{self.name}_{hint}_bounds_{size}", self.plan, Blocks(size, size, 1, 1))
        scope = kernel.scope
        i, frame = self.frame(kernel)
        limit = Bound(kernel.take(self.length(queries)))
        rows = scope.add(tile.RangeOp(scope.value(scope.times(i, size, "first")), size), "rows").result
        program = frame.program()
        index = program.index(Bound(rows, (0,)), hint, limit)
        end = program.inline(code, [*frame.heads(program), index])
        inside = program.below(index, limit)
        wanted = [
            program.add(arith.SelectOp(inside, value, _integer(program, beyond)), value.name_hint or "term")
            for value in end.operands
            for beyond in (LARGEST, SMALLEST)
        ]
        for n, found in enumerate(Partition(program, scope, (size,), -1).run(wanted)):
            kind = tile.Reduction.MAX if n % 2 else tile.Reduction.MIN
            bound = scope.add(tile.ReduceOp(kind, spread(scope, found, (size,)), 0), "bound").result
            places = [*self.place(scope, frame), scope.value(n), i]
            scope.add(tile.StoreOp(bound, kernel.take(target), places, []))
        self.launch(kernel, blocks)
        return target


def _integer(program: Program, number: int) -> SSAValue:
    return program.add(arith.ConstantOp(IntegerAttr(number, i64)), "c")


@dataclass
class _RangesKernel:
    """A program for each own block; it walks over the other blocks, many at a time."""

    tables: Tables
    queries: bool
    own: int
    other: int

    def build(self, own_bounds: SSAValue, other_bounds: SSAValue) -> Table:
        tables, side = self.tables, "q" if self.queries else "kv"
        blocks = tables.operands.blocks(tables.length(self.queries), self.own, f"{side}_blocks")
        others = tables.operands.blocks(tables.length(not self.queries), self.other, "other_blocks")
        target = tables.alloc([blocks, ENDS], i32, f"{side}_ranges")
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
        return Table(target, self.own)

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
        """First and last block that is not empty, first full one, and the first behind it that is not full."""
        start = [scope.value(n) for n in (NOWHERE, -1, NOWHERE, NOWHERE)]
        for value, hint in zip(start, ("lo", "last", "full_lo", "full_hi"), strict=True):
            value.name_hint = hint
        op, inner, n0, carried = loop(scope, 0, self.others, CHUNK, start, "n0")
        numbers = inner.add(tile.RangeOp(n0, CHUNK), "numbers").result
        lo, last, full, holes = self._asked(inner, numbers, n0)
        lo, last = inner.smaller(carried[0], lo, "lo"), inner.larger(carried[1], last, "last")
        full = inner.value(inner.smaller(carried[2], full, "full_lo"))
        program = Program()
        number = program.argument(Bound(numbers, (0,)), "number")
        behind = program.add(arith.CmpiOp(number, program.argument(Bound(full), "full_lo"), "sgt"), "behind")
        hole = program.add(arith.AndIOp(behind, program.argument(Bound(holes, (0,)), "hole")), "hole")
        hole = self._numbered(inner, program, hole, number, NOWHERE, tile.Reduction.MIN)
        end = inner.smaller(carried[3], hole, "full_hi")
        close(inner, [inner.value(v) for v in (lo, last, full, end)])
        return list(op.results)

    def _numbered(
        self, scope: Scope, program: Program, chosen: SSAValue, number: SSAValue, otherwise: int, kind: tile.Reduction
    ) -> SSAValue:
        """The first or last number of the chosen blocks."""
        other = program.add(arith.ConstantOp(IntegerAttr(otherwise, i32)), "c")
        picked = program.add(arith.SelectOp(chosen, number, other), "picked")
        (found,) = Partition(program, scope, (CHUNK,), -1).run([picked])
        return scope.add(tile.ReduceOp(kind, spread(scope, found, (CHUNK,)), 0), "found").result

    def _asked(self, scope: Scope, numbers: SSAValue, n0: SSAValue) -> tuple[SSAValue, SSAValue, SSAValue, SSAValue]:
        """Of a run of blocks: first and last one not empty, first full one; and which exist and are not full."""
        program = self.frame.program()
        number = program.argument(Bound(numbers, (0,)), "number")
        exists = program.add(arith.CmpiOp(number, program.argument(Bound(self.others), "limit"), "slt"), "exists")
        some, every = self._kinds(program, scope, number, n0)
        some = program.add(arith.AndIOp(some, exists), "some")
        every = program.add(arith.AndIOp(every, exists), "every")
        true = program.add(arith.ConstantOp.from_int_and_width(1, 1), "true")
        hole = program.add(arith.XOrIOp(every, true), "hole")
        wanted = [
            program.add(arith.SelectOp(chosen, number, program.add(arith.ConstantOp(IntegerAttr(no, i32)), "c")), "n")
            for chosen, no in ((some, NOWHERE), (some, -1), (every, NOWHERE))
        ]
        found = Partition(program, scope, (CHUNK,), -1).run([*wanted, hole])
        tiles = [spread(scope, f, (CHUNK,)) for f in found]
        kinds = (tile.Reduction.MIN, tile.Reduction.MAX, tile.Reduction.MIN)
        lo, last, full = (
            scope.add(tile.ReduceOp(kind, value, 0), "found").result for kind, value in zip(kinds, tiles, strict=False)
        )
        return lo, last, full, tiles[3]

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
        lo, last, full, hole = ends
        stop = scope.plus(last, 1, "stop")
        lo = scope.choose_less(lo, stop, lo, 0, "lo")
        stop = scope.choose_less(lo, stop, stop, 0, "hi")
        hole = scope.smaller(hole, self.others, "full_hi")
        some = scope.choose_less(full, hole, full, lo, "full_lo")
        hole = scope.choose_less(full, hole, hole, lo, "full_hi")
        limit = self.kernel.take(self.tables.length(not self.queries))
        found = [scope.times(n, self.other, "i") for n in (lo, some, hole, stop)]
        return [scope.smaller(n, limit, "i") for n in found]


def table_range(tables: Tables, frame: Frame, scope: Scope, start: SSAValue, table: Table) -> Position:
    """The range that a program reads, for its own block."""
    block = scope.add(arith.DivSIOp(start, scope.value(table.size)), "block").result
    source, place = frame.kernel.take(table.values), tables.place(scope, frame)
    hints = ("lo", "full_lo", "full_hi", "hi")
    lo, full_lo, full_hi, hi = (
        scope.add(tile.LoadOp(source, [*place, block, scope.value(n)], [], i32), hint).result
        for n, hint in enumerate(hints)
    )
    return lo, full_lo, full_hi, hi


def clipped(scope: Scope, found: Position, table: Position) -> Position:
    """A range of visible positions inside of the table's; of both full runs the longer one."""
    lo = scope.larger(found[0], table[0], "lo")
    hi = scope.larger(scope.smaller(found[3], table[3], "hi"), lo, "hi")
    runs: list[tuple[Index, Index]] = []
    for low, high in ((found[1], found[2]), (table[1], table[2])):
        if low is high or (isinstance(low, int) and low == high):
            continue
        begin = scope.smaller(scope.larger(low, lo, "full_lo"), hi, "full_lo")
        runs.append((begin, scope.larger(scope.smaller(high, hi, "full_hi"), begin, "full_hi")))
    if len(runs) == 1:
        return lo, *runs[0], hi
    (a, a_end), (b, b_end) = runs
    longer = (scope.minus(a_end, a, "length"), scope.minus(b_end, b, "length"))
    full_lo, full_hi = (
        scope.choose_less(*longer, y, x, hint) for x, y, hint in ((a, b, "full_lo"), (a_end, b_end, "full_hi"))
    )
    return lo, full_lo, full_hi, hi
