"""The gradients of all chunks of the delta rule, side by side, once the states around them are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xdsl.ir import SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.kernel import close, loop
from attn_engine.passes.lowering.recurrence.chunks import each_chunk, slot_of
from attn_engine.passes.lowering.recurrence.decay import kept_gradient
from attn_engine.passes.lowering.recurrence.delta import Results
from attn_engine.passes.lowering.recurrence.delta_chunks import faded, parted
from attn_engine.passes.lowering.recurrence.fade import Fade
from attn_engine.passes.lowering.recurrence.setting import Setting, View
from attn_engine.passes.lowering.recurrence.sweep import Sweep
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.scope import Index, Scope

if TYPE_CHECKING:
    from attn_engine.passes.lowering.recurrence.delta_adjoint import Kept

WIDE_WARPS, NARROW_WARPS = 8, 4
WIDE_CHUNK = 64
"""Tokens of a chunk from which on a tile of weights is shared by more warps."""


class Gradients:
    """What both kernels have: the place in the plan and, once a kernel is open, tiles that all of it reads."""

    def __init__(self, setting: Setting, op: attn.DeltaBackwardOp, results: Results, sweep: Sweep, kept: Kept):
        self.setting, self.op, self.results, self.sweep, self.kept = setting, op, results, sweep, kept
        self.chunk, self.key, self.value = setting.form.chunk, sweep.key, sweep.value
        self.element, self.precision, self.rows = sweep.element, sweep.precision, sweep.rows_read

    def open(self, view: View, scope: Scope, t0: SSAValue) -> Tiles:
        tiles = Tiles(scope, self.precision)
        self.view, self.t0, self.place = view, t0, tiles.range(self.chunk)
        self.k = self._keys(scope)
        self.fade = Fade.load(view, scope, self.rows, t0, self.chunk)
        return tiles

    def _keys(self, scope: Scope) -> SSAValue:
        """Keys of the chunk as the state before it meets them, but for a decay of all channels alike."""
        return self.view.rows(scope, self.op.k, self.t0, self.chunk, self.key, scope.value(0))

    def strengths(self, scope: Scope) -> SSAValue:
        assert self.rows.weight is not None
        return self.view.own_vector(scope, self.rows.weight, self.t0, self.chunk, "row")

    def from_start(self, t: Terms, value: SSAValue) -> SSAValue:
        """Of each token what the state before the chunk gives it, decayed."""
        return value if self.fade is None else t.mul(value, self.fade.from_start(t, 0))

    def below(self, t: Terms, product: SSAValue) -> SSAValue:
        """A product of tokens times E, below the diagonal."""
        return t.where(t.after(t.take(self.place, 0), t.take(self.place, 1)), faded(t, self.fade, product))

    def state(self, scope: Scope, source: SSAValue, v0: SSAValue) -> SSAValue:
        view = self.view
        index = [view.b, view.h, slot_of(view, scope, self.t0, self.chunk), scope.value(0), v0]
        return view.load_block(scope, source, index, (self.key.tile, self.value.tile), dict[int, SSAValue], "state")

    def own(self, scope: Scope, source: SSAValue, columns: int, c0: SSAValue, hint: str) -> SSAValue:
        return self.view.own_rows(scope, source, self.t0, self.chunk, columns, c0, hint)

    def store(self, scope: Scope, value: SSAValue, target: SSAValue) -> None:
        view = self.view
        index = [view.b, view.h, self.t0]
        scope.add(tile.StoreOp(value, view.kernel.take(target), index, [2], {0: view.end}))


class WrittenGradients(Gradients):
    """dV, dbeta and A [B, H, T, C], which `below` is."""

    def run(self) -> None:
        setting, sizes, op = self.setting, self.sweep.sizes, self.op
        leading: list[Index] = [sizes.batch, sizes.heads, setting.whole(sizes)]
        self._allocate(leading)
        each_chunk(setting, sizes, "written", 4, [op.k, op.v, op.d_o], self._body)

    def _allocate(self, leading: list[Index]) -> None:
        self.made = self.setting.temporary([*leading, self.chunk], self.element, "below")

    def _body(self, view: View, scope: Scope, t0: SSAValue, split: SSAValue) -> None:
        tiles, chunk, zero = self.open(view, scope, t0), self.chunk, scope.value(0)
        solved, square = self.sweep.solved, [chunk, chunk]
        assert solved is not None and solved.inverse is not None
        self.beta = self.strengths(scope)
        self.inverse = tiles.turned(self.own(scope, solved.inverse, chunk, zero, "inverse"))
        self.system = self._system(tiles)
        start = [scope.splat(square, 0.0, "sum"), scope.splat([chunk], 0.0, "sum"), *self._more(scope)]
        op, body, part, sums = loop(scope, 0, self.sweep.state.splits, 1, start, "part")
        close(body, self._part(body, body.value(body.times(part, self.value.tile, "v0")), sums))
        d_system, d_beta, *more = op.results

        def made(t: Terms) -> SSAValue:
            lost = t.sub(t.real(0.0), t.take(d_system, 0, 1))
            return t.mul(self.below(t, lost), t.take(self.beta, 0))

        below = parted(tiles, self.fade, tiles.map(square, made, self.element))
        view.store_own(scope, self._stored(tiles, below), self.made, t0, zero)
        self.store(scope, d_beta, self.results.d_beta)
        self._store_more(tiles, more)

    def _system(self, tiles: Tiles) -> SSAValue:
        """The weights of keys for each other below the diagonal."""
        products = tiles.dot(self.k, tiles.turned(self.k), hint="kk")
        square = [self.chunk, self.chunk]
        system = tiles.map(square, lambda t: self.below(t, t.take(products, 0, 1)), self.element)
        return parted(tiles, self.fade, system)

    def _stored(self, tiles: Tiles, below: SSAValue) -> SSAValue:
        return below

    def _more(self, scope: Scope) -> list[SSAValue]:
        """The start of further sums over the value channels."""
        return []

    def _more_of_part(self, tiles: Tiles, u: SSAValue, v0: SSAValue, sums: list[SSAValue]) -> list[SSAValue]:
        """These with some value channels more."""
        return []

    def _store_more(self, tiles: Tiles, sums: Sequence[SSAValue]) -> None:
        """Writes them."""

    def _part(self, scope: Scope, v0: SSAValue, sums: list[SSAValue]) -> list[SSAValue]:
        tiles, view, chunk, columns = Tiles(scope, self.precision), self.view, self.chunk, self.value.tile
        shape = [chunk, columns]
        v = view.rows(scope, self.op.v, self.t0, chunk, self.value, v0)
        u, d_u = (self.own(scope, x, columns, v0, "u") for x in (self.kept.u, self.kept.d_u))
        d_r = tiles.dot(self.inverse, d_u, hint="d_r")
        d_v = tiles.map(shape, lambda t: t.mul(t.take(d_r, 0, 1), t.take(self.beta, 0)), self.element)
        view.store_rows(scope, d_v, self.results.dv, self.t0, self.value, v0)
        read = tiles.dot(self.k, self.state(scope, self.kept.before, v0), hint="read")
        inside = tiles.dot(self.system, u, hint="inside")

        def strength(t: Terms) -> SSAValue:
            """dR times what the token would write at strength 1."""
            left = t.sub(t.take(v, 0, 1), self.from_start(t, t.take(read, 0, 1)))
            return t.mul(t.take(d_r, 0, 1), t.sub(left, t.take(inside, 0, 1)))

        d_beta = tiles.sum(tiles.map(shape, strength), 1)
        return [
            tiles.dot(tiles.rounded(d_r, self.element), tiles.turned(u), sums[0]),
            tiles.map([chunk], lambda t: t.add(t.take(sums[1], 0), t.take(d_beta, 0))),
            *self._more_of_part(tiles, u, v0, sums[2:]),
        ]


class TokenGradients(Gradients):
    """dQ, dK and the gradient of decays."""

    def __init__(
        self,
        setting: Setting,
        op: attn.DeltaBackwardOp,
        results: Results,
        sweep: Sweep,
        kept: Kept,
        made: SSAValue,
    ):
        super().__init__(setting, op, results, sweep, kept)
        self.made = made

    def run(self) -> None:
        op = self.op
        operands = [op.q, op.k, op.d_o, op.decay]
        warps = WIDE_WARPS if self.setting.form.chunk >= WIDE_CHUNK else NARROW_WARPS
        each_chunk(self.setting, self.sweep.sizes, "read", warps, operands, self._body)

    def _body(self, view: View, scope: Scope, t0: SSAValue, split: SSAValue) -> None:
        tiles, chunk = self.open(view, scope, t0), self.chunk
        wide, square = [chunk, self.key.tile], [chunk, chunk]
        start = [*(scope.splat(s, 0.0, "sum") for s in (wide, wide, wide, square)), scope.real(0.0)]
        op, body, part, sums = loop(scope, 0, self.sweep.state.splits, 1, start, "part")
        close(body, self._part(body, body.value(body.times(part, self.value.tile, "v0")), sums))
        self._tokens(tiles, *op.results)

    def _part(self, scope: Scope, v0: SSAValue, sums: list[SSAValue]) -> list[SSAValue]:
        """dO S^T, U D^T, dV S^T [C, K], dO U^T [C, C] and the sum of S * D."""
        tiles, view, columns = Tiles(scope, self.precision), self.view, self.value.tile
        d_o = view.rows(scope, self.op.d_o, self.t0, self.chunk, self.value, v0)
        d_v = view.placed_rows(scope, self.results.dv, self.t0, self.chunk, self.value, v0)
        u = self.own(scope, self.kept.u, columns, v0, "u")
        before, after = (self.state(scope, x, v0) for x in (self.kept.before, self.kept.after))
        turned = tiles.turned(before)
        return [
            tiles.dot(d_o, turned, sums[0]),
            tiles.dot(u, tiles.turned(after), sums[1]),
            tiles.dot(d_v, turned, sums[2]),
            tiles.dot(d_o, tiles.turned(u), sums[3]),
            self._with_states(tiles, before, after, sums[4]),
        ]

    def _with_states(self, tiles: Tiles, before: SSAValue, after: SSAValue, total: SSAValue) -> SSAValue:
        if self.results.d_decay is None:
            return total
        shape = tile.shape_of(before)
        products = tiles.map(shape, lambda t: t.mul(t.take(before, 0, 1), t.take(after, 0, 1)))
        part = tiles.sum(tiles.sum(products, 1), 0)
        return tiles.map([], lambda t: t.add(t.take(total), t.take(part)))

    def _tokens(
        self, tiles: Tiles, reading: SSAValue, kept: SSAValue, lost: SSAValue, d_p: SSAValue, states: SSAValue
    ) -> None:
        view, scope, chunk, zero, op = self.view, tiles.scope, self.chunk, tiles.scope.value(0), self.op
        wide, scale = [chunk, self.key.tile], view.kernel.take(self.setting.of(op.scale))
        q = view.rows(scope, op.q, self.t0, chunk, self.key, zero)
        below = self.own(scope, self.made, chunk, zero, "below")

        def seen(t: Terms) -> SSAValue:
            value = t.mul(faded(t, self.fade, t.take(d_p, 0, 1)), t.take(scale))
            return t.where(t.not_before(t.take(self.place, 0), t.take(self.place, 1)), value)

        weights = parted(tiles, self.fade, tiles.map([chunk, chunk], seen, self.element))
        of_state = tiles.map(wide, lambda t: t.mul(self.from_start(t, t.take(reading, 0, 1)), t.take(scale)))
        d_q = tiles.dot(weights, self.k, of_state, "d_q")
        view.store_rows(scope, d_q, self.results.dq, self.t0, self.key, zero)
        kept = self._to_end(tiles, kept)
        minus = tiles.dot(tiles.turned(weights), q, kept, "minus")
        minus = tiles.dot(tiles.turned(below), self.k, minus, "minus")
        plus = tiles.map(wide, lambda t: t.sub(t.real(0.0), self.from_start(t, t.take(lost, 0, 1))))
        plus = tiles.dot(below, self.k, plus, "plus")
        d_k = tiles.map(wide, lambda t: t.add(t.take(plus, 0, 1), t.take(minus, 0, 1)))
        view.store_rows(scope, d_k, self.results.dk, self.t0, self.key, zero)
        if self.results.d_decay is not None:
            self._decays(tiles, [q, d_q, plus, minus, kept], states, self.results.d_decay)

    def _to_end(self, tiles: Tiles, value: SSAValue) -> SSAValue:
        fade = self.fade
        if fade is None:
            return value
        wide = [self.chunk, self.key.tile]
        return tiles.map(wide, lambda t: t.mul(t.take(value, 0, 1), fade.to_end(t, 0)))

    def _decays(self, tiles: Tiles, parts: list[SSAValue], states: SSAValue, target: SSAValue) -> None:
        """A decay counts for all tokens of its chunk from its own on, and for the state after them."""
        view, scope, wide, fade = self.view, tiles.scope, [self.chunk, self.key.tile], self.fade
        assert fade is not None
        q, d_q, plus, minus, kept = parts

        def change(t: Terms) -> SSAValue:
            on_keys = t.mul(t.take(self.k, 0, 1), t.sub(t.take(plus, 0, 1), t.take(minus, 0, 1)))
            return t.add(t.mul(t.take(q, 0, 1), t.take(d_q, 0, 1)), on_keys)

        sums = tiles.running(tiles.sum(tiles.map(wide, change), 1), reverse=True)
        ends = tiles.sum(tiles.map(wide, lambda t: t.mul(t.take(self.k, 0, 1), t.take(kept, 0, 1))), 1)
        end = tiles.sum(ends, 0)
        assert self.op.decay is not None
        decay = view.vector(scope, view.take(self.op.decay), self.t0, self.chunk, "decay")

        def code(t: Terms) -> SSAValue:
            after = t.add(t.take(end), t.mul(t.take(states), t.exp2(t.take(fade.total))))
            return kept_gradient(t, t.take(decay, 0), t.add(t.take(sums, 0), after))

        self.store(scope, tiles.map([self.chunk], code), target)
