"""Ranges of blocks that depend on captured values: a small kernel in front of those that loop over blocks.

A *ranges* kernel finds the smallest and the largest value of each term over every block of positions, asks `kinds`
about each pair of blocks and keeps, for a block of queries, where the first and the last block of keys lie that are
not empty, and the first run of full ones between them; of a union of conditions the first run that has no empty
block, and what is behind it, each in this way. Memory is linear in the lengths; the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.dialects.builtin import i1, i32
from xdsl.ir import Attribute, Block, SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.block_ranges import ENDS, RangesKernel
from attn_engine.passes.lowering.frame import Frame, Operands, present
from attn_engine.passes.lowering.kernel import Kernel, Plan
from attn_engine.passes.lowering.scope import Index, Scope

Position = tuple[Index, Index, Index, Index]


@dataclass(frozen=True)
class Table:
    """[batch or 1, heads or 1, blocks, 4 per run]: visible lo, full lo, full hi, visible hi, as positions."""

    values: SSAValue
    size: int


@dataclass
class Tables:
    """The tables of one plan, each made when a kernel first asks for it, in front of that kernel's launch."""

    name: str
    plan: Plan
    operands: Operands
    smallest: int = 1
    """Rows and columns of tiles of pairs of blocks, at least; 0 for no tables."""
    kernels: list[tile.KernelOp] = field(default_factory=list[tile.KernelOp])
    _ranges: dict[tuple[bool, int, int], Table] = field(default_factory=dict[tuple[bool, int, int], Table])

    @property
    def wanted(self) -> bool:
        """Whether the mask has kinds of blocks."""
        return self.smallest > 0 and present(self.operands.op.kinds) is not None

    @property
    def runs(self) -> int:
        """How many ranges a table keeps: two where the mask is a union, such as first keys or the same document."""
        mask = present(self.operands.op.mask)
        assert mask is not None
        unions = (arith.OrIOp, arith.SelectOp)
        return 2 if any(isinstance(o, unions) and o.results[0].type == i1 for o in mask.ops) else 1

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
        """The sizes of the leading axes of tables."""
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
            values = RangesKernel(self, not transposed, own, other).build()
            self._ranges[key] = Table(values, own)
        return self._ranges[key]

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


def table_ranges(tables: Tables, frame: Frame, scope: Scope, start: SSAValue, table: Table) -> list[Position]:
    """The ranges that a program reads, for its own block."""
    block = scope.add(arith.DivSIOp(start, scope.value(table.size)), "block").result
    source, place = frame.kernel.take(table.values), tables.place(scope, frame)
    ranges: list[Position] = []
    for run in range(tables.runs):
        lo, full_lo, full_hi, hi = (
            scope.add(tile.LoadOp(source, [*place, block, scope.value(ENDS * run + n)], [], i32), hint).result
            for n, hint in enumerate(("lo", "full_lo", "full_hi", "hi"))
        )
        ranges.append((lo, full_lo, full_hi, hi))
    return ranges


def met(scope: Scope, closed: Sequence[Position], table: Sequence[Position]) -> list[Position]:
    """Ranges in closed form and those of a table, sorted both, as ranges that are inside of both."""
    if len(table) > 1 and len(closed) > 1:
        closed = [(closed[0][0], 0, 0, closed[-1][3])]
    return [clipped(scope, a, b) for a in closed for b in table]


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
