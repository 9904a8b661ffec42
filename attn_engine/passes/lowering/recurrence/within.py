"""What the tokens of a chunk give each other in a sweep whose columns decay: added to its results chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.recurrence.chunks import each_chunk
from attn_engine.passes.lowering.recurrence.levels import differ_at, nearness, over_levels, some_of
from attn_engine.passes.lowering.recurrence.setting import View
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.scope import Scope

if TYPE_CHECKING:
    from attn_engine.passes.lowering.recurrence.sweep import Sweep


class Within:
    """One kernel: o_i += sum_j s_ij v_j exp(G_i - G_j), level by level (see `levels`)."""

    def __init__(self, sweep: Sweep):
        assert sweep.gates is not None
        self.sweep, self.gates, self.rows = sweep, sweep.gates, sweep.rows_read
        self.chunk, self.columns = sweep.setting.form.chunk, sweep.value.tile
        self.shape = [self.chunk, self.columns]

    def run(self) -> None:
        sweep, walk = self.sweep, self.sweep.walk
        name = f"{walk.o.name_hint or 'o'}_within"
        operands = [walk.q, walk.k, walk.v]
        each_chunk(sweep.setting, sweep.sizes, name, 4, operands, self._body, sweep.state.splits)

    def _body(self, view: View, scope: Scope, t0: SSAValue, split: SSAValue) -> None:
        sweep, walk, tiles, zero = self.sweep, self.sweep.walk, Tiles(scope, self.sweep.precision), scope.value(0)
        v0 = scope.value(scope.times(split, self.columns, "v0"))
        q, k = (view.rows(scope, x, t0, self.chunk, sweep.key, zero) for x in (walk.q, walk.k))
        v = view.rows(scope, walk.v, t0, self.chunk, sweep.value, v0)
        own = view.own_rows(scope, self.gates.sums, t0, self.chunk, self.columns, v0, "own")
        some = some_of(view, scope, self.gates, t0)
        element = sweep.element
        s = self._scores(view, tiles, tiles.dot(q, tiles.turned(k), hint="s"), t0)

        def step(inner: Scope, level: SSAValue, o: SSAValue) -> SSAValue:
            inside = Tiles(inner, sweep.precision)
            near = nearness(view, inside, self.gates, own, level, t0, v0, some)
            faded = inside.parts(inside.map(self.shape, lambda t: t.mul(t.take(v, 0, 1), t.take(near, 0, 1))), element)
            part = inside.dot_parts(inside.parts(self._at(inside, s, level), element), faded, hint="part")
            return inside.map(
                self.shape, lambda t: t.add(t.take(o, 0, 1), t.mul(t.take(part, 0, 1), t.take(near, 0, 1)))
            )

        start = tiles.dot_parts(tiles.parts(self._at(tiles, s, None), element), [v], hint="o")
        o = over_levels(scope, self.chunk, start, step)
        self._add(view, tiles, o, t0, v0)

    def _scores(self, view: View, tiles: Tiles, s: SSAValue, t0: SSAValue) -> SSAValue:
        """With the scale, and forward with the weight of the token that is read."""
        walk, weight = self.sweep.walk, None
        scale = view.kernel.take(self.sweep.setting.of(walk.scale))
        if self.rows.weight is not None and not walk.reverse:
            weight = view.own_vector(tiles.scope, self.rows.weight, t0, self.chunk, "w")

        def code(t: Terms) -> SSAValue:
            value = t.mul(t.take(s, 0, 1), t.take(scale))
            return value if weight is None else t.mul(value, t.take(weight, 1))

        return tiles.map([self.chunk, self.chunk], code)

    def _at(self, tiles: Tiles, s: SSAValue, level: SSAValue | None) -> SSAValue:
        """The scores of tokens whose places differ at a level."""
        place, reverse = tiles.range(self.chunk), self.sweep.walk.reverse

        def code(t: Terms) -> SSAValue:
            own, other = t.take(place, 0), t.take(place, 1)
            return t.where(differ_at(t, *((other, own) if reverse else (own, other)), level), t.take(s, 0, 1))

        return tiles.map([self.chunk, self.chunk], code)

    def _add(self, view: View, tiles: Tiles, o: SSAValue, t0: SSAValue, v0: SSAValue) -> None:
        sweep, scope, walk = self.sweep, tiles.scope, self.sweep.walk
        before = view.placed_rows(scope, walk.o, t0, self.chunk, sweep.value, v0)
        weight = None
        if self.rows.weight is not None and walk.reverse:
            weight = view.own_vector(scope, self.rows.weight, t0, self.chunk, "w")

        def code(t: Terms) -> SSAValue:
            added = t.take(o, 0, 1)
            if weight is not None:
                added = t.mul(added, t.take(weight, 0))
            return t.add(t.take(before, 0, 1), added)

        view.store_rows(scope, tiles.map(self.shape, code, tile.element_of(walk.o)), walk.o, t0, sweep.value, v0)
