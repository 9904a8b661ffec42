"""Sweeps whose log decays are one per channel, of keys (rows of a state) or of values (columns)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import ClassVar

from xdsl.dialects.builtin import f32
from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.kernel import Head, close, loop
from attn_engine.passes.lowering.recurrence.chunks import each_chunk
from attn_engine.passes.lowering.recurrence.decay import Rows, rows_of
from attn_engine.passes.lowering.recurrence.levels import (
    Gates,
    Pairs,
    added_at,
    cut,
    faded_to_end,
    fine,
    gates_of,
    row_of,
    some_of,
    total_of,
)
from attn_engine.passes.lowering.recurrence.setting import Form, Setting, Sizes, View, channels_of, padded
from attn_engine.passes.lowering.recurrence.sweep import Chunk, Sweep
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.recurrence.walk import Walk
from attn_engine.passes.lowering.recurrence.within import Within
from attn_engine.passes.lowering.scope import Index, Scope

Factor = Callable[[Terms, SSAValue], SSAValue]


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
        names = ("weights",) if self.element == f32 else ("weights", "rests")
        self.weights = [setting.temporary([*wide, self.chunk], self.element, name) for name in names]
        self.precision = setting.precision(self.element)
        self.part = part_of(self.key, setting.form)
        each_chunk(setting, sizes, "prepare", 4, [q, k, decay], self._body)

    def _body(self, view: View, scope: Scope, t0: SSAValue, split: SSAValue) -> None:
        start = scope.splat([self.chunk, self.chunk], 0.0, "weights")

        def step(inner: Scope, c0: SSAValue, before: list[SSAValue]) -> list[SSAValue]:
            return [self._part(view, inner, before[0], t0, c0)]

        (weights,) = over_parts(scope, self.key, self.part, [start], step)
        parts = Tiles(scope, self.precision).parts(weights, self.element)
        for part, target in zip(parts, self.weights, strict=True):
            view.store_own(scope, part, target, t0, scope.value(0))

    def weights_of(self, view: View, tiles: Tiles, t0: SSAValue, factor: Factor | None) -> list[SSAValue]:
        """The weights of a chunk as operands of products, in parts: one of 16 bits would leave less than they are good for."""
        scope, shape = tiles.scope, [self.chunk, self.chunk]
        made = [view.own_rows(scope, x, t0, self.chunk, self.chunk, scope.value(0), "weights") for x in self.weights]
        if factor is None:
            return made

        def scaled(t: Terms) -> SSAValue:
            return factor(t, reduce(t.add, [t.take(part, 0, 1) for part in made]))

        return tiles.parts(tiles.map(shape, scaled), self.element)

    def _part(self, view: View, scope: Scope, weights: SSAValue, t0: SSAValue, c0: SSAValue) -> SSAValue:
        """The weights with some channels more; few at a time, so that registers are left for several programs."""
        tiles, chunk, element = Tiles(scope, self.precision), self.chunk, self.element
        q, k = (view.rows(scope, x, t0, chunk, self.part, c0) for x in (self.q, self.k))
        pairs = Pairs.load(view, scope, self.gates, t0, c0, (chunk, self.part.tile))
        view.store_own(scope, pairs.from_start(tiles, q, element), self.inner, t0, c0)
        view.store_own(scope, pairs.to_end(tiles, k, element), self.outer, t0, c0)
        same = added_at(tiles, tiles.dot(q, tiles.turned(k)), weights, None)
        exactly, wide = fine(tiles, element)
        return pairs.weights(exactly, q, k, same, wide)


def part_of(key: Head, form: Form) -> Head:
    """The channels that are done at a time."""
    return Head(key.size, min(form.part, key.tile) if form.pad else key.tile)


def over_parts(
    scope: Scope,
    key: Head,
    part: Head,
    start: Sequence[SSAValue],
    step: Callable[[Scope, SSAValue, list[SSAValue]], Sequence[SSAValue]],
) -> list[SSAValue]:
    """What `step` (scope, first channel, values so far) makes of `start`, part by part."""
    op, body, number, before = loop(scope, 0, key.tile // part.tile, 1, start, "part")
    close(body, step(body, body.value(body.times(number, part.tile, "c0")), before))
    return list(op.results)


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
        some = some_of(self.view, self.scope, gates, self.t0)
        total = row_of(self.view, self.scope, gates.sums, self.t0, size, key, zero)
        self.total = total_of(self.view, self.scope, gates, some, total, self.t0, size, zero)

    def _outputs(self, state: SSAValue, walk: Walk) -> SSAValue:
        sweep, tiles = self.sweep, Tiles(self.scope, self.sweep.precision)
        o = tiles.dot(self.q, tiles.rounded(state, sweep.element), hint="o")
        return self._scaled(tiles.dot_parts(self._prepared_weights(tiles), [self.v], o, "o"))

    def _prepared_weights(self, tiles: Tiles) -> list[SSAValue]:
        prepared = self.sweep.prepared
        assert prepared is not None
        scale = None if self.walk.scale_results else self.scale()
        weight = None if self.walk.reverse else self.weight

        def factor(t: Terms, value: SSAValue) -> SSAValue:
            value = value if weight is None else t.mul(value, t.take(weight, 1))
            return value if scale is None else t.mul(value, t.take(scale))

        some = scale is not None or weight is not None
        parts = prepared.weights_of(self.view, tiles, self.t0, factor if some else None)
        return [tiles.turned(part) if self.walk.reverse else part for part in parts]


class ColumnsChunk(Chunk):
    """A chunk where each column of the state has its decay."""

    decayed: ClassVar[int | None] = 1
    fades_values: ClassVar[bool] = True
    turns: ClassVar[bool] = False
    multiplies: ClassVar[bool] = False

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
        seen = tiles.dot_parts([q], tiles.parts(state, sweep.element), hint="o")
        o = tiles.map(self._values(), lambda t: t.mul(t.take(seen, 0, 1), self._decayed(t, walk.reverse)))
        return self._scaled(self._cut(o, walk.reverse))

    def _next(self, state: SSAValue) -> SSAValue:
        """What is written counts in full: sums of gradients of log decays cancel but for what it has lost."""
        tiles, state = Tiles(self.scope, self.sweep.precision), self._kept(state)
        keys, values = tiles.turned(self.k), self._cut(self._written(self.v, 0, f32), not self.walk.reverse)
        return tiles.dot_parts([keys], tiles.parts(values, self.sweep.element), state, "state")

    def _cut(self, values: SSAValue, to_end: bool) -> SSAValue:
        place = self.t0, self.sweep.v0
        return cut(self.view, self.scope, self.gates, self.some, values, place, to_end)

    def _decayed(self, terms: Terms, to_end: bool, tokens: int | None = None) -> SSAValue:
        return faded_to_end(terms, self.own, self.sums) if to_end else terms.exp2(terms.take(self.own, 0, 1))
