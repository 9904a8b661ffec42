"""Loops over blocks of keys (or queries): which blocks, and which of them need the mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from xdsl.ir import SSAValue

from attn_engine.passes.lowering.frame import Frame, present
from attn_engine.passes.lowering.kernel import close, loop
from attn_engine.passes.lowering.program import Bound
from attn_engine.passes.lowering.scope import Index, Scope
from attn_engine.passes.lowering.tables import met, table_ranges


@dataclass(frozen=True)
class Span:
    """A run of blocks [lo, hi), all multiples of the block size; `masked` if the mask must be evaluated there.

    With a `hole`, positions from hole[0] on stand for blocks hole[1] further: the blocks on both sides of the full
    ones are one run, because a third copy of the loop body costs registers, code and compile time.
    """

    lo: Index
    hi: Index
    masked: bool
    hole: tuple[Index, Index] | None = None

    @property
    def is_empty(self) -> bool:
        return self.lo is self.hi or (isinstance(self.lo, int) and self.lo == self.hi)

    def start(self, scope: Scope, position: SSAValue) -> SSAValue:
        """The first row of the block at a loop position."""
        if self.hole is None:
            return position
        further = scope.plus(position, self.hole[1], position.name_hint or "n0")
        return scope.value(scope.choose_less(position, self.hole[0], position, further, position.name_hint or "n0"))

    def within(self, scope: Scope, first: Index, after: Index) -> Span:
        """The blocks of the run in [first, after), of which both are multiples of the block size."""
        lo = scope.larger(self.lo, self._position(scope, first), "lo")
        return replace(self, lo=lo, hi=scope.smaller(self.hi, self._position(scope, after), "hi"))

    def _position(self, scope: Scope, row: Index) -> Index:
        """The first loop position that stands for this row or for one after it."""
        if self.hole is None:
            return row
        behind = scope.larger(self.hole[0], scope.minus(row, self.hole[1], "behind"), "behind")
        return scope.smaller(row, behind, "position")


def spans(
    frame: Frame, scope: Scope, window: tuple[SSAValue, int], size: int, transposed: bool, ends_masked: bool = False
) -> Iterator[Span]:
    """The blocks that a block of rows meets.

    `window` is the first row and the number of rows of this program's block. With `transposed` the rows are
    keys and the blocks are of queries. Ranges come from the op's `blocks` (`blocks_t`) region, and from a table where
    the mask has kinds of blocks; without a mask, all. With `ends_masked`, a block of rows that reaches beyond the last
    one meets none without a mask.
    """
    op = frame.operands.op
    start, count = window
    own, other = (frame.skv, frame.sq) if transposed else (frame.sq, frame.skv)
    region = present(op.blocks_t if transposed else op.blocks)
    if region is None:
        masked = present(op.mask) is not None
        if frame.operands.whole and not masked:
            yield Span(0, other, masked=False)
            return
        ranges: list[tuple[Index, Index, Index, Index]] = [(0, 0, 0 if masked else other, other)]
    else:
        after = scope.plus(start, count, "end")
        end = after if frame.operands.whole else scope.smaller(after, own, "end")
        program = frame.program()
        index = [program.index(Bound(scope.value(i)), n) for i, n in ((start, "lo"), (end, "hi"))]
        index += [*frame.heads(program), program.index(Bound(frame.sq), "sq"), program.index(Bound(frame.skv), "skv")]
        found = frame.run(program, scope, program.inline(region, index).operands)
        values = [scope.narrow(f.value, f.value.name_hint or "i") for f in found]
        ranges = [tuple(values[i : i + 4]) for i in range(0, len(values), 4)]  # type: ignore[misc]
        tables = frame.operands.tables
        if tables is not None and tables.wanted:
            table = tables.ranges(transposed, count, size)
            ranges = met(scope, ranges, table_ranges(tables, frame, scope, start, table))
    done: Index = 0
    for visible_lo, full_lo, full_hi, visible_hi in ranges:
        lo = scope.larger(scope.round_down(visible_lo, size, "lo"), done, "lo")
        hi = scope.larger(scope.round_up(visible_hi, size, "hi"), lo, "hi")
        if frame.operands.one_loop:
            yield Span(lo, hi, masked=True)
            done = hi
            continue
        full_from = scope.larger(scope.round_up(full_lo, size, "full_lo"), lo, "full_lo")
        full_to = scope.smaller(scope.round_down(full_hi, size, "full_hi"), hi, "full_hi")
        # Without a full block the full run is empty and the masked one is everything.
        first = scope.choose_less(full_from, full_to, full_from, lo, "full_lo")
        second = scope.choose_less(full_from, full_to, full_to, lo, "full_hi")
        if isinstance(full_lo, int) and isinstance(full_hi, int) and full_hi <= full_lo:
            first = second = lo  # known before anything runs: no loop over full blocks
        if ends_masked and not frame.operands.whole:
            last = scope.plus(start, count - 1, "last")
            first, second = (scope.choose_less(last, own, i, lo, "full") for i in (first, second))
        yield from (span for span in _both(scope, lo, first, second, hi) if not span.is_empty)
        done = hi


def _both(scope: Scope, lo: Index, first: Index, second: Index, hi: Index) -> tuple[Span, Span]:
    """[lo, first) and [second, hi) masked, [first, second) full."""
    full = Span(first, second, masked=False)
    if lo is first or (isinstance(lo, int) and lo == first):
        return Span(second, hi, masked=True), full
    skipped = scope.minus(second, first, "full")
    return Span(lo, scope.minus(hi, skipped, "hi"), masked=True, hole=(first, skipped)), full


Body = Callable[[Scope, SSAValue, bool, list[SSAValue]], Sequence[SSAValue]]


def over(
    scope: Scope, runs: Sequence[Span], size: int, carried: Sequence[SSAValue], hint: str, body: Body
) -> list[SSAValue]:
    """One scf.for per span, the carried values passed from each to the next; `body` returns their new values."""
    values: list[SSAValue] = list(carried)
    for span in runs:
        op, inner, start, inside = loop(scope, span.lo, span.hi, size, values, hint)
        close(inner, body(inner, span.start(inner, start), span.masked, inside))
        values = [*op.results]
    return values
