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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import Attribute, SSAValue

from attn_engine.dialects import tile
from attn_engine.errors import RecurrenceFormError
from attn_engine.passes.lowering.kernel import Head, close, loop
from attn_engine.passes.lowering.recurrence.chunks import each_chunk
from attn_engine.passes.lowering.recurrence.decay import LOG2_E, forgets
from attn_engine.passes.lowering.recurrence.fade import NOTHING, where_some
from attn_engine.passes.lowering.recurrence.setting import Setting, Sizes, View, channels_of, padded
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.scope import Index, Scope


@dataclass(frozen=True)
class Gates:
    """Temporaries [B, H, T, K] of sums of log decays within chunks, in the units of exp2. K is that of whole tiles.

    What forgets everything is left out of the sums, and counted (see `fade`): `counts` are written in chunks that have any
    such, and `some` [B, H, T] says at the first token of each chunk whether it has.
    """

    sums: SSAValue
    counts: SSAValue
    some: SSAValue


def gates_of(setting: Setting, sizes: Sizes, decay: SSAValue) -> Gates:
    """Made once for a decay."""
    if decay not in setting.gates:
        chunk = setting.form.chunk
        if chunk & (chunk - 1):
            raise RecurrenceFormError("a decay per channel", f"chunk={chunk}", "take a power of two")
        size = channels_of(decay)
        head = Head(size, padded(size, setting.form.pad))
        rows: list[Index] = [sizes.batch, sizes.heads, setting.whole(sizes)]
        wide = [setting.temporary([*rows, head.tile], f32, hint) for hint in ("gates", "counts")]
        made = setting.gates[decay] = Gates(wide[0], wide[1], setting.temporary(rows, f32, "some"))
        each_chunk(setting, sizes, "gates", 4, [decay], _Sums(decay, chunk, head, made).body)
    return setting.gates[decay]


@dataclass(frozen=True)
class _Sums:
    """The kernel that makes gates."""

    decay: SSAValue
    chunk: int
    head: Head
    made: Gates

    def body(self, view: View, scope: Scope, t0: SSAValue, c: SSAValue) -> None:
        tiles, zero, shape = Tiles(scope, tile.Precision.IEEE), scope.value(0), [self.chunk, self.head.tile]
        raw = view.rows(scope, self.decay, t0, self.chunk, self.head, zero)

        def log(t: Terms) -> SSAValue:
            return t.mul(t.take(raw, 0, 1), t.real(LOG2_E))

        kept = tiles.map(shape, lambda t: t.choose(forgets(t, log(t)), t.real(0.0), log(t)))
        lost = tiles.map(shape, lambda t: t.where(forgets(t, log(t)), t.real(1.0)))
        view.store_own(scope, tiles.running(kept), self.made.sums, t0, zero)
        some = tiles.sum(tiles.sum(lost, 1), 0, "some")
        scope.add(tile.StoreOp(some, view.kernel.take(self.made.some), [view.b, view.h, t0], []))

        def count(inner: Scope) -> list[SSAValue]:
            inside = Tiles(inner, tile.Precision.IEEE)
            view.store_own(inner, inside.running(lost), self.made.counts, t0, zero)
            return []

        where_some(scope, some, [], count)


def some_of(view: View, scope: Scope, gates: Gates, t0: SSAValue) -> SSAValue:
    """Whether a chunk forgets anything, as a number."""
    return view.number(scope, view.kernel.take(gates.some), t0, "some")


def nearness(
    view: View, tiles: Tiles, gates: Gates, own: SSAValue, level: SSAValue, t0: SSAValue, c0: SSAValue, some: SSAValue
) -> SSAValue:
    """What is left between each token and the token r of its level; `own` is the tile [C, channels] of gates."""
    scope, shape = tiles.scope, tile.shape_of(own)
    size = scope.add(arith.ShLIOp(scope.value(1), level), "size").result
    low = scope.value(scope.minus(size, 1, "low"))
    high = scope.add(arith.ShLIOp(scope.value(-2), level), "high").result

    def between(t: Terms, source: SSAValue) -> SSAValue:
        program, place, channel = t.program, tiles.range(shape[0]), tiles.range(shape[1])
        first = program.add(arith.AndIOp(t.take(place, 0), t.take(high)))
        row = program.add(arith.AddiOp(program.add(arith.OrIOp(first, t.take(low))), t.take(t0)))
        column = program.add(arith.AddiOp(t.take(channel, 1), t.take(c0)))
        guard = None
        if view.sizes.bounds is not None:
            guard = program.add(arith.CmpiOp(row, t.take(view.end), "slt"))
        index = [t.take(view.b), t.take(view.h), row, column]
        return program.add(tile.GatherOp(t.take(view.kernel.take(source)), index, guard), "between")

    def left(t: Terms) -> SSAValue:
        distance = t.sub(t.take(own, 0, 1), between(t, gates.sums))
        return t.exp2(t.smaller(distance, t.sub(t.real(0.0), distance)))

    near = tiles.map(shape, left)

    def cut(inner: Scope) -> list[SSAValue]:
        counts = view.own_rows(inner, gates.counts, t0, shape[0], shape[1], c0, "counts")
        t = Terms(inner, shape)
        alike = t.equal(t.take(counts, 0, 1), between(t, gates.counts))
        return [t.result(t.where(alike, t.take(near, 0, 1)))]

    return where_some(scope, some, [near], cut)[0]


def fine(tiles: Tiles, element: Attribute) -> tuple[Tiles, Attribute]:
    """Tiles and the type of operands for products level by level: a decay that is multiplied in leaves 16 bits too few."""
    return (tiles, element) if element == f32 else (Tiles(tiles.scope, tile.Precision.TF32), f32)


def differ_at(terms: Terms, row: SSAValue, column: SSAValue, level: SSAValue | None) -> SSAValue:
    """Whether the column's place is before the row's and `level` the highest bit in which they differ; None: the same."""
    program = terms.program
    if level is None:
        return program.add(arith.CmpiOp(row, column, "eq"), "same")
    highest = apart_at(terms, row, column, level)
    before = program.add(arith.CmpiOp(row, column, "sgt"))
    return program.add(arith.AndIOp(highest, before), "inside")


def apart_at(terms: Terms, row: SSAValue, column: SSAValue, level: SSAValue) -> SSAValue:
    """Whether `level` is the highest bit in which two places differ, whichever is before the other."""
    bits = terms.program.add(arith.XOrIOp(row, column))
    shifted = terms.program.add(arith.ShRSIOp(bits, terms.take(level)))
    return terms.program.add(arith.CmpiOp(shifted, terms.whole(1), "eq"))


def over_levels(
    scope: Scope, chunk: int, start: SSAValue, step: Callable[[Scope, SSAValue, SSAValue], SSAValue], first: int = 0
) -> SSAValue:
    """What `step` (scope, level, value so far) makes of `start`, level by level."""
    return all_over_levels(scope, chunk, [start], lambda inner, level, values: [step(inner, level, values[0])], first)[
        0
    ]


def all_over_levels(
    scope: Scope,
    chunk: int,
    start: Sequence[SSAValue],
    step: Callable[[Scope, SSAValue, list[SSAValue]], list[SSAValue]],
    first: int = 0,
) -> list[SSAValue]:
    """The same of several values."""
    op, inner, level, values = loop(scope, first, chunk.bit_length() - 1, 1, list(start), "level")
    close(inner, step(inner, level, values))
    return list(op.results)


@dataclass(frozen=True)
class Pairs:
    """What tokens of a chunk are to each other in some of the channels, from the token `t0` and the channel `c0` on."""

    view: View
    gates: Gates
    some: SSAValue
    t0: SSAValue
    c0: SSAValue
    own: SSAValue
    """The tile [C, channels] of sums of log decays."""

    @staticmethod
    def load(view: View, scope: Scope, gates: Gates, t0: SSAValue, c0: SSAValue, shape: tuple[int, int]) -> Pairs:
        own = view.own_rows(scope, gates.sums, t0, *shape, c0, "own")
        return Pairs(view, gates, some_of(view, scope, gates, t0), t0, c0, own)

    def near(self, tiles: Tiles, level: SSAValue) -> SSAValue:
        return nearness(self.view, tiles, self.gates, self.own, level, self.t0, self.c0, self.some)

    def from_start(self, tiles: Tiles, x: SSAValue, element: Attribute = f32) -> SSAValue:
        """A tile [C, channels] times the decay from the start of the chunk to each token."""
        shape = tile.shape_of(self.own)
        faded = tiles.map(shape, lambda t: t.mul(t.take(x, 0, 1), t.exp2(t.take(self.own, 0, 1))), element)
        return self._cut(tiles, faded, False)

    def to_end(self, tiles: Tiles, x: SSAValue, element: Attribute = f32) -> SSAValue:
        """The same with the decay from each token to the end."""
        chunk, channels = shape = tile.shape_of(self.own)
        total = row_of(self.view, tiles.scope, self.gates.sums, self.t0, chunk, channels, self.c0)
        faded = tiles.map(shape, lambda t: t.mul(t.take(x, 0, 1), faded_to_end(t, self.own, total)), element)
        return self._cut(tiles, faded, True)

    def _cut(self, tiles: Tiles, values: SSAValue, to_end: bool) -> SSAValue:
        return cut(self.view, tiles.scope, self.gates, self.some, values, (self.t0, self.c0), to_end)

    def weights(self, tiles: Tiles, q: SSAValue, k: SSAValue, weights: SSAValue, element: Attribute) -> SSAValue:
        """The weights below the diagonal with these channels more; with k as q, keys weigh each other."""

        def step(inner: Scope, level: SSAValue, before: SSAValue) -> SSAValue:
            inside = Tiles(inner, tiles.precision)
            faded = met(inside, q, k, self.near(inside, level), level, element)
            return added_at(inside, inside.dot(faded, inside.turned(faded)), before, level)

        return over_levels(tiles.scope, tile.shape_of(self.own)[0], weights, step)


def met(tiles: Tiles, q: SSAValue, k: SSAValue, near: SSAValue, level: SSAValue, element: Attribute) -> SSAValue:
    """Queries of tokens that come second in a pair of blocks, and keys of those that come first, in one tile."""
    (chunk, channels), place = tile.shape_of(q), tiles.range(tile.shape_of(q)[0])

    def code(t: Terms) -> SSAValue:
        value = t.take(k, 0, 1) if q is k else t.choose(second_at(t, place, level), t.take(q, 0, 1), t.take(k, 0, 1))
        return t.mul(value, t.take(near, 0, 1))

    return tiles.map([chunk, channels], code, element)


def second_at(t: Terms, place: SSAValue, level: SSAValue) -> SSAValue:
    """Whether a token is in the second block of a pair of a level."""
    shifted = t.program.add(arith.ShRSIOp(t.take(place, 0), t.take(level)))
    bit = t.program.add(arith.AndIOp(shifted, t.whole(1)))
    return t.program.add(arith.CmpiOp(bit, t.whole(1), "eq"), "second")


def added_at(tiles: Tiles, s: SSAValue, weights: SSAValue, level: SSAValue | None) -> SSAValue:
    """The weights [C, C], with `s` added where places differ at a level."""
    (chunk, _), place = tile.shape_of(s), tiles.range(tile.shape_of(s)[0])

    def code(t: Terms) -> SSAValue:
        inside = differ_at(t, t.take(place, 0), t.take(place, 1), level)
        return t.add(t.take(weights, 0, 1), t.where(inside, t.take(s, 0, 1)))

    return tiles.map([chunk, chunk], code)


def faded_to_end(t: Terms, own: SSAValue, total: SSAValue) -> SSAValue:
    """exp2 of the decay from each token to the end of the chunk."""
    return t.exp2(t.at_most_zero(t.sub(t.take(total, 1), t.take(own, 0, 1))))


def cut(
    view: View,
    scope: Scope,
    gates: Gates,
    some: SSAValue,
    values: SSAValue,
    place: tuple[SSAValue, SSAValue],
    to_end: bool,
) -> SSAValue:
    """A tile [C, channels] from a token and a channel on: 0 where something before a token, or after it, forgets all."""
    (count, channels), (t0, c0) = tile.shape_of(values), place

    def code(inner: Scope) -> list[SSAValue]:
        counts = view.own_rows(inner, gates.counts, t0, count, channels, c0, "counts")
        last = row_of(view, inner, gates.counts, t0, count, channels, c0) if to_end else None
        t = Terms(inner, [count, channels])
        alike = t.equal(t.take(counts, 0, 1), t.real(0.0) if last is None else t.take(last, 1))
        return [t.result(t.where(alike, t.take(values, 0, 1)), tile.element_of(values))]

    return where_some(scope, some, [values], code)[0]


def total_of(
    view: View, scope: Scope, gates: Gates, some: SSAValue, total: SSAValue, t0: SSAValue, chunk: int, c0: SSAValue
) -> SSAValue:
    """The totals of a chunk [channels], -inf where it forgets."""
    (channels,) = tile.shape_of(total)

    def code(inner: Scope) -> list[SSAValue]:
        counts = row_of(view, inner, gates.counts, t0, chunk, channels, c0)
        t = Terms(inner, [channels])
        none = t.equal(t.take(counts, 0), t.real(0.0))
        return [t.result(t.choose(none, t.take(total, 0), t.real(NOTHING)))]

    return where_some(scope, some, [total], code)[0]


def row_of(
    view: View, scope: Scope, source: SSAValue, t0: SSAValue, chunk: int, channels: int, c0: SSAValue
) -> SSAValue:
    """The last row of a chunk of sums or counts, [channels]."""
    last = view.last_of(scope, t0, chunk)
    type_ = TensorType(f32, [channels])
    return scope.add(tile.LoadOp(view.kernel.take(source), [view.b, view.h, last, c0], [3], type_), "total").result
