"""Sweeps whose log decays are one per channel, of keys (rows of a state) or of values (columns)."""

from __future__ import annotations

from typing import ClassVar

from xdsl.dialects import arith
from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.kernel import Head, close, loop
from attn_engine.passes.lowering.recurrence.chunks import each_chunk
from attn_engine.passes.lowering.recurrence.decay import Rows, rows_of
from attn_engine.passes.lowering.recurrence.levels import (
    Gates,
    cut,
    differ_at,
    faded_to_end,
    gates_of,
    nearness,
    over_levels,
    row_of,
    some_of,
    total_of,
)
from attn_engine.passes.lowering.recurrence.setting import Setting, Sizes, View, channels_of, padded
from attn_engine.passes.lowering.recurrence.sweep import Chunk, Sweep, Walk
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.recurrence.within import Within
from attn_engine.passes.lowering.scope import Index, Scope

CHANNELS = 64
"""Channels at a time where tokens weigh each other."""


class Prepared:
    """Of all chunks: inner_i = q_i exp(G_i), outer_j = k_j exp(T - G_j), weights [B, H, T, C] of tokens for each other."""

    def __init__(self, setting: Setting, sizes: Sizes, q: SSAValue, k: SSAValue, decay: SSAValue, gates: Gates):
        self.setting, self.sizes, self.q, self.k, self.gates = setting, sizes, q, k, gates
        self.element, self.chunk = tile.element_of(q), setting.form.chunk
        key = channels_of(q)
        self.key = Head(key, padded(key, setting.form.pad))
        wide: list[Index] = [sizes.batch, sizes.heads, setting.whole(sizes)]
        self.inner, self.outer = (
            setting.temporary([*wide, self.key.tile], self.element, name) for name in ("inner", "outer")
        )
        self.weights = setting.temporary([*wide, self.chunk], self.element, "weights")
        self.precision = setting.precision(self.element)
        self.part = Head(key, min(CHANNELS, self.key.tile) if setting.form.pad else self.key.tile)
        each_chunk(setting, sizes, "prepare", 4, [q, k, decay], self._body)

    def _body(self, view: View, scope: Scope, t0: SSAValue, c: SSAValue) -> None:
        parts, chunk = self.key.tile // self.part.tile, self.chunk
        some = some_of(view, scope, self.gates, t0)
        weights = scope.splat([chunk, chunk], 0.0, "weights")
        op, body, part, (before,) = loop(scope, 0, parts, 1, [weights], "part")
        c0 = body.value(body.times(part, self.part.tile, "c0"))
        close(body, [self._part(view, body, before, t0, c0, some)])
        rounded = Tiles(scope, self.precision).rounded(op.results[0], self.element)
        view.store_own(scope, rounded, self.weights, t0, scope.value(0))

    def _part(
        self, view: View, scope: Scope, weights: SSAValue, t0: SSAValue, c0: SSAValue, some: SSAValue
    ) -> SSAValue:
        """The weights with some channels more; few at a time, so that registers are left for several programs."""
        tiles, chunk, gates, place = Tiles(scope, self.precision), self.chunk, self.gates, (t0, c0)
        shape = [chunk, self.part.tile]
        q, k = (view.rows(scope, x, t0, chunk, self.part, c0) for x in (self.q, self.k))
        own = view.own_rows(scope, gates.sums, t0, chunk, self.part.tile, c0, "own")
        total = row_of(view, scope, gates.sums, t0, chunk, self.part.tile, c0)
        inner = tiles.map(shape, lambda t: t.mul(t.take(q, 0, 1), t.exp2(t.take(own, 0, 1))), self.element)
        view.store_own(scope, cut(view, scope, gates, some, inner, place, False), self.inner, t0, c0)
        outer = tiles.map(shape, lambda t: t.mul(t.take(k, 0, 1), faded_to_end(t, own, total)), self.element)
        view.store_own(scope, cut(view, scope, gates, some, outer, place, True), self.outer, t0, c0)

        def step(at: Scope, level: SSAValue, weights: SSAValue) -> SSAValue:
            inside = Tiles(at, self.precision)
            near = nearness(view, inside, gates, own, level, t0, c0, some)
            faded = self._faded(inside, q, k, near, level)
            return self._added(inside, inside.dot(faded, inside.turned(faded)), weights, level)

        same = self._added(tiles, tiles.dot(q, tiles.turned(k)), weights, None)
        return over_levels(scope, chunk, same, step)

    def _faded(self, tiles: Tiles, q: SSAValue, k: SSAValue, near: SSAValue, level: SSAValue) -> SSAValue:
        """Queries of tokens that come second in a pair of blocks, and keys of those that come first, in one tile."""
        shape, place = tile.shape_of(q), tiles.range(self.chunk)

        def code(t: Terms) -> SSAValue:
            program = t.program
            bit = program.add(arith.AndIOp(program.add(arith.ShRSIOp(t.take(place, 0), t.take(level))), t.whole(1)))
            second = program.add(arith.CmpiOp(bit, t.whole(1), "eq"), "second")
            return t.mul(t.choose(second, t.take(q, 0, 1), t.take(k, 0, 1)), t.take(near, 0, 1))

        return tiles.map(shape, code, self.element)

    def _added(self, tiles: Tiles, s: SSAValue, weights: SSAValue, level: SSAValue | None) -> SSAValue:
        """The weights, with `s` added where places differ at a level."""
        place, shape = tiles.range(self.chunk), [self.chunk, self.chunk]

        def code(t: Terms) -> SSAValue:
            inside = differ_at(t, t.take(place, 0), t.take(place, 1), level)
            return t.add(t.take(weights, 0, 1), t.where(inside, t.take(s, 0, 1)))

        return tiles.map(shape, code)


class RowsChunk(Chunk):
    """A chunk where each row of the state has its decay: all of it is in what has been prepared."""

    decayed: ClassVar[int | None] = 0
    fades_values: ClassVar[bool] = False
    turns: ClassVar[bool] = False

    @classmethod
    def prepare(cls, sweep: Sweep) -> Rows:
        walk, setting = sweep.walk, sweep.setting
        assert walk.decay is not None
        sweep.gates = gates_of(setting, sweep.sizes, walk.decay)
        q, k = (walk.k, walk.q) if walk.reverse else (walk.q, walk.k)
        sweep.prepared = Prepared(setting, sweep.sizes, q, k, walk.decay, sweep.gates)
        return rows_of(setting, sweep.sizes, None, walk.weight)

    def _operands(self) -> None:
        sweep, size, zero = self.sweep, self.size, self.scope.value(0)
        made, gates, key = sweep.prepared, sweep.gates, sweep.key.tile
        assert made is not None and gates is not None
        reads, writes = (made.outer, made.inner) if self.walk.reverse else (made.inner, made.outer)
        if self.outputs is not None:
            self.q = self.view.own_rows(self.scope, reads, self.t0, size, key, zero, "q_tile")
        self.k = self.view.own_rows(self.scope, writes, self.t0, size, key, zero, "k_tile")
        self.v = self.view.rows(self.scope, self.walk.v, self.t0, size, sweep.value, sweep.v0)
        some = some_of(self.view, self.scope, gates, self.t0)
        total = row_of(self.view, self.scope, gates.sums, self.t0, size, key, zero)
        self.total = total_of(self.view, self.scope, gates, some, total, self.t0, size, zero)

    def _outputs(self, state: SSAValue, walk: Walk) -> SSAValue:
        sweep, tiles = self.sweep, Tiles(self.scope, self.sweep.precision)
        o = tiles.dot(self.q, tiles.rounded(state, sweep.element), hint="o")
        o = tiles.dot(self._prepared_weights(tiles), self.v, o, "o")
        return self._scaled(o)

    def _prepared_weights(self, tiles: Tiles) -> SSAValue:
        size, zero, prepared = self.size, self.scope.value(0), self.sweep.prepared
        assert prepared is not None
        made = self.view.own_rows(self.scope, prepared.weights, self.t0, size, size, zero, "weights")
        scale = None if self.walk.scale_results else self._scale()
        weight = None if self.walk.reverse else self.weight
        if scale is not None or weight is not None:

            def code(t: Terms) -> SSAValue:
                value = t.take(made, 0, 1)
                value = value if weight is None else t.mul(value, t.take(weight, 1))
                return value if scale is None else t.mul(value, t.take(scale))

            made = tiles.map([size, size], code, self.sweep.element)
        return tiles.turned(made) if self.walk.reverse else made


class ColumnsChunk(Chunk):
    """A chunk where each column of the state has its decay."""

    decayed: ClassVar[int | None] = 1
    fades_values: ClassVar[bool] = True
    turns: ClassVar[bool] = False

    @classmethod
    def prepare(cls, sweep: Sweep) -> Rows:
        assert sweep.walk.decay is not None
        sweep.gates = gates_of(sweep.setting, sweep.sizes, sweep.walk.decay)
        return rows_of(sweep.setting, sweep.sizes, None, sweep.walk.weight)

    @classmethod
    def finish(cls, sweep: Sweep) -> None:
        Within(sweep).run()

    def _operands(self) -> None:
        super()._operands()
        sweep, size, columns, gates = self.sweep, self.size, self.sweep.value.tile, self.sweep.gates
        assert gates is not None
        self.gates, self.some = gates, some_of(self.view, self.scope, gates, self.t0)
        self.own = self.view.own_rows(self.scope, gates.sums, self.t0, size, columns, sweep.v0, "own")
        self.sums = row_of(self.view, self.scope, gates.sums, self.t0, size, columns, sweep.v0)
        self.total = total_of(self.view, self.scope, gates, self.some, self.sums, self.t0, size, sweep.v0)

    def _outputs(self, state: SSAValue, walk: Walk) -> SSAValue:
        """The part that comes from before the chunk; `Within` adds the rest."""
        sweep, tiles = self.sweep, Tiles(self.scope, self.sweep.precision)
        q = self.view.rows(self.scope, walk.q, self.t0, self.size, sweep.key, self.scope.value(0))
        o = tiles.dot(q, tiles.rounded(state, sweep.element), hint="o")
        o = tiles.map(self._values(), lambda t: t.mul(t.take(o, 0, 1), self._decayed(t, walk.reverse)))
        return self._scaled(self._cut(o, walk.reverse))

    def _written(self, v: SSAValue) -> SSAValue:
        return self._cut(super()._written(v), not self.walk.reverse)

    def _cut(self, values: SSAValue, to_end: bool) -> SSAValue:
        place = self.t0, self.sweep.v0
        return cut(self.view, self.scope, self.gates, self.some, values, place, to_end)

    def _decayed(self, terms: Terms, to_end: bool) -> SSAValue:
        return faded_to_end(terms, self.own, self.sums) if to_end else terms.exp2(terms.take(self.own, 0, 1))
