"""Log decays per channel in chunks.

With G the sums of a chunk's log decays from its start on and T its total, tokens weigh each other by

```
sum_c q_ic k_jc exp(G_ic - G_jc), j <= i
```
and exp(-G) is never formed. Tokens j < i of a chunk stand in neighbouring blocks of 2^l tokens for one l, the highest
bit in which their places differ. With r the last token of j's block, exp(G_i - G_j) = exp(G_i - G_r) exp(G_r - G_j), two
factors that are at most 1: one product of matrices for each l, and one for i = j.
"""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.errors import RecurrenceFormError
from attn_engine.passes.lowering.kernel import Head, close, loop
from attn_engine.passes.lowering.recurrence.chunks import each_chunk
from attn_engine.passes.lowering.recurrence.decay import FORGOTTEN, LOG2_E
from attn_engine.passes.lowering.recurrence.setting import Setting, Sizes, View, channels_of, padded
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.scope import Index, Scope


def gates_of(setting: Setting, sizes: Sizes, decay: SSAValue) -> SSAValue:
    """The sums of log decays within chunks, [B, H, T, K] in the units of exp2; made once. K is that of whole tiles."""
    if decay not in setting.gates:
        chunk = setting.form.chunk
        if chunk & (chunk - 1):
            raise RecurrenceFormError("a decay per channel", f"chunk={chunk}", "take a power of two")
        size = channels_of(decay)
        head = Head(size, padded(size, setting.form.pad))
        shape: list[Index] = [sizes.batch, sizes.heads, setting.whole(sizes), head.tile]
        target = setting.gates[decay] = setting.temporary(shape, f32, "gates")
        precision = tile.Precision.IEEE

        def sums(view: View, scope: Scope, t0: SSAValue, c: SSAValue) -> None:
            tiles, zero = Tiles(scope, precision), scope.value(0)
            raw = view.rows(scope, decay, t0, chunk, head, zero)
            floored = tiles.map(
                [chunk, head.tile],
                lambda t: t.at_least(t.mul(t.take(raw, 0, 1), t.real(LOG2_E)), FORGOTTEN),
            )
            view.store_own(scope, tiles.running(floored), target, t0, zero)

        each_chunk(setting, sizes, "gates", 4, [decay], sums)
    return setting.gates[decay]


def nearness(
    view: View, tiles: Tiles, gates: SSAValue, own: SSAValue, level: SSAValue, t0: SSAValue, c0: SSAValue
) -> SSAValue:
    """exp2 of the decay between each token and the token r of its level; `own` is the tile [C, channels] of gates."""
    scope, shape = tiles.scope, tile.shape_of(own)
    place, channel, source = tiles.range(shape[0]), tiles.range(shape[1]), view.kernel.take(gates)
    size = scope.add(arith.ShLIOp(scope.value(1), level), "size").result
    low = scope.value(scope.minus(size, 1, "low"))
    high = scope.add(arith.ShLIOp(scope.value(-2), level), "high").result

    def code(t: Terms) -> SSAValue:
        program = t.program
        first = program.add(arith.AndIOp(t.take(place, 0), t.take(high)))
        row = program.add(arith.AddiOp(program.add(arith.OrIOp(first, t.take(low))), t.take(t0)))
        column = program.add(arith.AddiOp(t.take(channel, 1), t.take(c0)))
        guard = None
        if view.sizes.bounds is not None:
            guard = program.add(arith.CmpiOp(row, t.take(view.end), "slt"))
        index = [t.take(view.b), t.take(view.h), row, column]
        between = program.add(tile.GatherOp(t.take(source), index, guard), "between")
        distance = t.sub(t.take(own, 0, 1), between)
        return t.exp2(t.smaller(distance, t.sub(t.real(0.0), distance)))

    return tiles.map(shape, code)


def differ_at(terms: Terms, row: SSAValue, column: SSAValue, level: SSAValue | None) -> SSAValue:
    """Whether the column's place is before the row's and `level` the highest bit in which they differ; None: the same."""
    program = terms.program
    if level is None:
        return program.add(arith.CmpiOp(row, column, "eq"), "same")
    bits = program.add(arith.XOrIOp(row, column))
    shifted = program.add(arith.ShRSIOp(bits, terms.take(level)))
    highest = program.add(arith.CmpiOp(shifted, terms.whole(1), "eq"))
    before = program.add(arith.CmpiOp(row, column, "sgt"))
    return program.add(arith.AndIOp(highest, before), "inside")


def over_levels(
    scope: Scope, chunk: int, start: SSAValue, step: Callable[[Scope, SSAValue, SSAValue], SSAValue], first: int = 0
) -> SSAValue:
    """What `step` (scope, level, value so far) makes of `start`, level by level."""
    op, inner, level, (value,) = loop(scope, first, chunk.bit_length() - 1, 1, [start], "level")
    close(inner, [step(inner, level, value)])
    return op.results[0]


def faded_to_end(t: Terms, own: SSAValue, total: SSAValue) -> SSAValue:
    """exp2 of the decay from each token to the end of the chunk."""
    return t.exp2(t.at_most_zero(t.sub(t.take(total, 1), t.take(own, 0, 1))))


def last_of(
    view: View, scope: Scope, gates: SSAValue, t0: SSAValue, chunk: int, channels: int, c0: SSAValue
) -> SSAValue:
    """The totals of a chunk, [channels]."""
    end = scope.plus(t0, chunk, "end")
    if view.sizes.bounds is not None:
        end = scope.smaller(end, view.end, "end")
    last = scope.value(scope.minus(end, 1, "last"))
    source = view.kernel.take(gates)
    type_ = TensorType(f32, [channels])
    return scope.add(tile.LoadOp(source, [view.b, view.h, last, c0], [3], type_), "total").result
