"""The delta rule in chunks.

What the tokens of a chunk write, u_i = beta_i (v_i - exp(G_i) k_i S - sum_{j<i} exp(G_i - G_j) (k_i k_j) u_j) with S the
state before the chunk, solves a triangular system: with L_ij = beta_i exp(G_i - G_j) k_i k_j for j < i and
T = (I + L)^-1,

```
U = fixed - reads S,   fixed = T beta V,   reads = T beta exp(G) K,   o_i = exp(G_i) q_i S + sum_{j<=i} exp(G_i - G_j) (q_i k_j) u_j
```
T is made of the inverses of its diagonal blocks: of blocks of 2^l tokens those of twice the size, for
(A 0; B C)^-1 = (A' 0; -C' B A' C'). No power of L is formed: those grow, and cancel, where keys are alike.
"""

from __future__ import annotations

from typing import ClassVar

from xdsl.dialects.builtin import bf16, f32
from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.kernel import Head
from attn_engine.passes.lowering.recurrence.chunks import each_chunk
from attn_engine.passes.lowering.recurrence.decay import Rows, rows_of
from attn_engine.passes.lowering.recurrence.fade import Fade
from attn_engine.passes.lowering.recurrence.levels import differ_at, over_levels
from attn_engine.passes.lowering.recurrence.setting import Setting, Sizes, State, View
from attn_engine.passes.lowering.recurrence.sweep import Chunk, Sweep
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.scope import Index, Scope

COLUMNS = 64


class Solved:
    """Of all chunks: `reads` [B, H, T, K], `fixed` [B, H, T, V] and, if `keep`, `inverse` [B, H, T, C]."""

    def __init__(
        self, setting: Setting, sizes: Sizes, state: State, k: SSAValue, v: SSAValue, rows: Rows, keep: bool = False
    ):
        self.setting, self.sizes, self.state, self.k, self.v, self.rows = setting, sizes, state, k, v, rows
        self.element, self.chunk = tile.element_of(v), setting.form.chunk
        self.precision = setting.precision(self.element)
        leading: list[Index] = [sizes.batch, sizes.heads, setting.whole(sizes)]
        self.columns = state.splits * state.value.tile
        self._allocate(leading, keep)
        each_chunk(setting, sizes, "solve", 4, [k, v], self._body)

    def _allocate(self, leading: list[Index], keep: bool) -> None:
        temporary = self.setting.temporary
        self.reads = temporary([*leading, self.state.key.tile], self.element, "reads")
        self.fixed = temporary([*leading, self.columns], f32, "fixed")
        self.inverse = temporary([*leading, self.chunk], self.element, "inverse") if keep else None

    def _body(self, view: View, scope: Scope, t0: SSAValue, split: SSAValue) -> None:
        tiles, zero, chunk = Tiles(scope, self.precision), scope.value(0), self.chunk
        assert self.rows.weight is not None
        self._open(view, scope, t0)
        beta = view.own_vector(scope, self.rows.weight, t0, chunk, "beta")
        inverse = self._inverse(scope, self._system(tiles, beta))
        if self.inverse is not None:
            view.store_own(scope, tiles.rounded(inverse, self.element), self.inverse, t0, zero)
        scaled = tiles.map([chunk, chunk], lambda t: t.mul(t.take(inverse, 0, 1), t.take(beta, 1)))
        self._read(tiles, scaled)
        on_values, values = tiles.parts(scaled, self.element), self._values()
        for v0 in (scope.value(start) for start in range(0, self.columns, values.tile)):
            v = view.rows(scope, self.v, t0, chunk, values, v0)
            view.store_own(scope, tiles.dot_parts(on_values, [v]), self.fixed, t0, v0)

    def _open(self, view: View, scope: Scope, t0: SSAValue) -> None:
        self.view, self.t0 = view, t0
        self.keys = view.rows(scope, self.k, t0, self.chunk, self.state.key, scope.value(0))
        self.fade = Fade.load(view, scope, self.rows, t0, self.chunk)

    def _read(self, tiles: Tiles, scaled: SSAValue) -> None:
        """Writes `reads`; `scaled` is T beta."""
        fade, on_keys = self.fade, scaled
        if fade is not None:
            on_keys = tiles.map([self.chunk, self.chunk], lambda t: t.mul(t.take(scaled, 0, 1), fade.from_start(t, 1)))
        reads = tiles.dot_parts(tiles.parts(on_keys, self.element), [self.keys])
        self.view.store_own(tiles.scope, tiles.rounded(reads, self.element), self.reads, self.t0, tiles.scope.value(0))

    def _values(self) -> Head:
        """Value channels at a time: as many as a product of matrices is good with, whatever sweeps take."""
        tile_, wide = self.state.value.tile, COLUMNS
        return Head(self.state.value.size, wide if tile_ < wide and self.columns % wide == 0 else tile_)

    def _system(self, tiles: Tiles, beta: SSAValue) -> SSAValue:
        """L."""
        k, fade = self.keys, self.fade
        products, place = tiles.dot(k, tiles.turned(k)), tiles.range(self.chunk)

        def code(t: Terms) -> SSAValue:
            return t.where(
                t.after(t.take(place, 0), t.take(place, 1)),
                t.mul(faded(t, fade, t.take(products, 0, 1)), t.take(beta, 0)),
            )

        return parted(tiles, fade, tiles.map([self.chunk, self.chunk], code))

    def _inverse(self, scope: Scope, system: SSAValue) -> SSAValue:
        """T = (I + L)^-1 in f32; after the level l its blocks of 2^(l+1) tokens are inverses."""
        shape, start = [self.chunk, self.chunk], Tiles(scope, self.precision)
        place, level = start.range(self.chunk), scope.value(0)

        def first(t: Terms) -> SSAValue:
            one = differ_at(t, t.take(place, 0), t.take(place, 1), None)
            next_to_it = differ_at(t, t.take(place, 0), t.take(place, 1), level)
            left = t.where(next_to_it, t.sub(t.real(0.0), t.take(system, 0, 1)))
            return t.choose(one, t.real(1.0), left)

        def step(inner: Scope, level: SSAValue, inverse: SSAValue) -> SSAValue:
            tiles = Tiles(inner, self.precision)

            def block(t: Terms) -> SSAValue:
                inside = differ_at(t, t.take(place, 0), t.take(place, 1), level)
                return t.where(inside, t.sub(t.real(0.0), t.take(system, 0, 1)))

            right = self._parts(tiles, inverse)
            middle = self._product(tiles, right, self._parts(tiles, tiles.map(shape, block)), None)
            return self._product(tiles, self._parts(tiles, middle), right, inverse)

        return over_levels(scope, self.chunk, start.map(shape, first), step, first=1)

    def _parts(self, tiles: Tiles, x: SSAValue) -> list[SSAValue]:
        """x itself in f32, or two parts of 8 bits each whose sum it nearly is: the inverse may be ill conditioned."""
        if self.element == f32:
            return [x]
        shape = tile.shape_of(x)
        high = tiles.map(shape, lambda t: t.leading(t.take(x, 0, 1)), bf16)
        return [high, tiles.map(shape, lambda t: t.sub(t.take(x, 0, 1), t.leading(t.take(x, 0, 1))), bf16)]

    def _product(self, tiles: Tiles, a: list[SSAValue], b: list[SSAValue], acc: SSAValue | None) -> SSAValue:
        """acc + a b, of the parts of both but for the product of the small ones."""
        for x, y in ((0, 1), (1, 0)) if len(a) > 1 else ():
            acc = tiles.dot(a[x], b[y], acc)
        return tiles.dot(a[0], b[0], acc, "inverse")


def faded(t: Terms, fade: Fade | None, product: SSAValue, turned: bool = False) -> SSAValue:
    """A product of tokens i and j times exp(G_i - G_j), to be `parted`; i are the rows, or with `turned` the columns."""
    if fade is None:
        return product
    return t.mul(product, fade.between(t, 1, 0) if turned else fade.between(t, 0, 1))


def parted(tiles: Tiles, fade: Fade | None, products: SSAValue) -> SSAValue:
    return products if fade is None else fade.parted(tiles.scope, products)


class Written(Chunk):
    """A chunk whose values are what the delta rule writes."""

    def run(self, inside: list[SSAValue]) -> list[SSAValue]:
        self.before = inside[0]
        return super().run(inside)

    def _values_written(self) -> SSAValue:
        sweep = self.sweep
        assert sweep.solved is not None
        return written(sweep, self.view, self.scope, sweep.solved, self.t0, self.before)


class DeltaChunk(Written):
    """The same where the state decays as a whole, or not at all."""

    turns: ClassVar[bool] = False

    @classmethod
    def prepare(cls, sweep: Sweep) -> Rows:
        setting, walk = sweep.setting, sweep.walk
        rows = rows_of(setting, sweep.sizes, walk.decay, walk.weight)
        sweep.solved = Solved(setting, sweep.sizes, sweep.state, walk.k, walk.v, rows)
        return Rows(rows.sums, None, rows.resets)


def written(sweep: Sweep, view: View, scope: Scope, solved: Solved, t0: SSAValue, state: SSAValue) -> SSAValue:
    """U of a chunk, [C, columns of this program]."""
    tiles, size, columns = Tiles(scope, sweep.precision), sweep.setting.form.chunk, sweep.value.tile
    reads = view.own_rows(scope, solved.reads, t0, size, sweep.key.tile, scope.value(0), "reads")
    fixed = view.own_rows(scope, solved.fixed, t0, size, columns, sweep.v0, "fixed")
    read = tiles.dot_parts([reads], tiles.parts(state, sweep.element), hint="read")
    return tiles.map([size, columns], lambda t: t.sub(t.take(fixed, 0, 1), t.take(read, 0, 1)), sweep.element)
