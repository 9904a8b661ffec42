"""The gradients of all chunks of the delta rule, side by side, once the states around them are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.kernel import close, loop
from attn_engine.passes.lowering.recurrence.chunks import each_chunk
from attn_engine.passes.lowering.recurrence.decay import FORGOTTEN, LOG2_E
from attn_engine.passes.lowering.recurrence.delta import Results
from attn_engine.passes.lowering.recurrence.delta_chunks import fading
from attn_engine.passes.lowering.recurrence.setting import Setting, View
from attn_engine.passes.lowering.recurrence.sweep import Sweep
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.scope import Scope

if TYPE_CHECKING:
    from attn_engine.passes.lowering.recurrence.delta_adjoint import Kept

WARPS = 8


class ChunkGradients:
    """One kernel (see `delta_adjoint` for what it computes): the value channels in blocks, then the tokens' products."""

    def __init__(self, setting: Setting, op: attn.DeltaBackwardOp, results: Results, sweep: Sweep, kept: Kept):
        self.setting, self.op, self.results, self.sweep, self.kept = setting, op, results, sweep, kept
        self.chunk, self.key, self.value = setting.form.chunk, sweep.key, sweep.value
        self.element, self.precision = sweep.element, sweep.precision
        self.rows = sweep.rows_read

    def run(self) -> None:
        op = self.op
        operands = [op.q, op.k, op.v, op.d_o, op.decay]
        each_chunk(self.setting, self.sweep.sizes, "chunks", WARPS, operands, self._body)

    def _body(self, view: View, scope: Scope, t0: SSAValue, split: SSAValue) -> None:
        chunk, zero = self.chunk, scope.value(0)
        self.view, self.t0 = view, t0
        self.tiles = tiles = Tiles(scope, self.precision)
        self.k = view.rows(scope, self.op.k, t0, chunk, self.key, zero)
        self.sums, self.beta = (
            None if x is None else view.vector(scope, view.kernel.take(x), t0, chunk, "row", view.sizes.bounds is None)
            for x in (self.rows.sums, self.rows.weight)
        )
        self.place = tiles.range(chunk)
        self.inverse = self._inverse(scope)
        products = tiles.dot(self.k, tiles.turned(self.k), hint="kk")
        self.system = tiles.map([chunk, chunk], lambda t: self._below(t, t.take(products, 0, 1)), self.element)
        parts = self._values(scope)
        self._tokens(tiles, *parts)

    def _inverse(self, scope: Scope) -> SSAValue:
        solved = self.sweep.solved
        assert solved is not None and solved.inverse is not None
        return self.view.own_rows(scope, solved.inverse, self.t0, self.chunk, self.chunk, scope.value(0), "inverse")

    def _below(self, t: Terms, product: SSAValue) -> SSAValue:
        """A product of tokens times E, below the diagonal."""
        return t.where(t.after(t.take(self.place, 0), t.take(self.place, 1)), fading(t, self.sums, product))

    def _values(self, scope: Scope) -> list[SSAValue]:
        """dO S^T, U D^T, dV S^T [C, K], dO U^T, dR U^T [C, C], dbeta [C] and the sum of S * D."""
        wide, square = [self.chunk, self.key.tile], [self.chunk, self.chunk]
        shapes = [wide, wide, wide, square, square, [self.chunk]]
        start = [*(scope.splat(s, 0.0, "sum") for s in shapes), scope.real(0.0)]
        op, body, part, sums = loop(scope, 0, self.sweep.state.splits, 1, start, "part")
        v0 = body.value(body.times(part, self.value.tile, "v0"))
        close(body, self._block(body, v0, sums))
        return list(op.results)

    def _block(self, scope: Scope, v0: SSAValue, sums: list[SSAValue]) -> list[SSAValue]:
        tiles, view, op, chunk, columns = Tiles(scope, self.precision), self.view, self.op, self.chunk, self.value.tile
        v, d_o = (view.rows(scope, x, self.t0, chunk, self.value, v0) for x in (op.v, op.d_o))
        u, d_u = (view.own_rows(scope, x, self.t0, chunk, columns, v0, "u") for x in (self.kept.u, self.kept.d_u))
        before, after = (self._state(scope, x, v0) for x in (self.kept.before, self.kept.after))
        d_r = tiles.rounded(tiles.dot(tiles.turned(self.inverse), d_u, hint="d_r"), self.element)
        shape = [chunk, columns]
        d_v = tiles.map(shape, lambda t: t.mul(t.take(d_r, 0, 1), t.take(self._beta(), 0)), self.element)
        view.store_rows(scope, d_v, self.results.dv, self.t0, self.value, v0)
        read = tiles.dot(self.k, before, hint="read")
        inside = tiles.dot(self.system, u, hint="inside")

        def strength(t: Terms) -> SSAValue:
            """dR times what the token would write at strength 1."""
            seen = t.take(read, 0, 1)
            if self.sums is not None:
                seen = t.mul(seen, t.exp2(t.take(self.sums, 0)))
            left = t.sub(t.sub(t.take(v, 0, 1), seen), t.take(inside, 0, 1))
            return t.mul(t.take(d_r, 0, 1), left)

        d_beta = tiles.sum(tiles.map(shape, strength), 1)
        ut = tiles.turned(u)
        return [
            tiles.dot(d_o, tiles.turned(before), sums[0]),
            tiles.dot(u, tiles.turned(after), sums[1]),
            tiles.dot(d_v, tiles.turned(before), sums[2]),
            tiles.dot(d_o, ut, sums[3]),
            tiles.dot(d_r, ut, sums[4]),
            tiles.map([chunk], lambda t: t.add(t.take(sums[5], 0), t.take(d_beta, 0))),
            self._with_states(tiles, before, after, sums[6]),
        ]

    def _with_states(self, tiles: Tiles, before: SSAValue, after: SSAValue, total: SSAValue) -> SSAValue:
        if self.results.d_decay is None:
            return total
        shape = tile.shape_of(before)
        products = tiles.map(shape, lambda t: t.mul(t.take(before, 0, 1), t.take(after, 0, 1)))
        part = tiles.sum(tiles.sum(products, 1), 0)
        return tiles.map([], lambda t: t.add(t.take(total), t.take(part)))

    def _state(self, scope: Scope, source: SSAValue, v0: SSAValue) -> SSAValue:
        from attn_engine.passes.lowering.recurrence.delta_adjoint import slot_of

        view = self.view
        index = [view.b, view.h, slot_of(view, scope, self.t0, self.chunk), scope.value(0), v0]
        type_ = TensorType(tile.element_of(source), [self.key.tile, self.value.tile])
        return scope.add(tile.LoadOp(view.kernel.take(source), index, [3, 4], type_), "state").result

    def _beta(self) -> SSAValue:
        assert self.beta is not None
        return self.beta

    def _tokens(
        self,
        tiles: Tiles,
        reading: SSAValue,
        kept: SSAValue,
        lost: SSAValue,
        d_p: SSAValue,
        d_system: SSAValue,
        d_beta: SSAValue,
        states: SSAValue,
    ) -> None:
        """Stores the gradients of queries, keys, strengths and decays."""
        view, scope, chunk, zero, op = self.view, tiles.scope, self.chunk, tiles.scope.value(0), self.op
        wide, square, scale = [chunk, self.key.tile], [chunk, chunk], view.kernel.take(self.setting.of(op.scale))
        q = view.rows(scope, op.q, self.t0, chunk, self.key, zero)

        def seen(t: Terms) -> SSAValue:
            value = t.mul(fading(t, self.sums, t.take(d_p, 0, 1)), t.take(scale))
            return t.where(t.not_before(t.take(self.place, 0), t.take(self.place, 1)), value)

        weights = tiles.map(square, seen, self.element)
        below = tiles.map(
            square,
            lambda t: t.mul(self._below(t, t.sub(t.real(0.0), t.take(d_system, 0, 1))), t.take(self._beta(), 0)),
            self.element,
        )
        of_state = tiles.map(wide, lambda t: t.mul(self._from_start(t, reading), t.take(scale)))
        d_q = tiles.dot(weights, self.k, of_state, "d_q")
        view.store_rows(scope, d_q, self.results.dq, self.t0, self.key, zero)
        kept = self._to_end(tiles, kept)
        minus = tiles.dot(tiles.turned(weights), q, kept, "minus")
        minus = tiles.dot(tiles.turned(below), self.k, minus, "minus")
        plus = tiles.map(wide, lambda t: t.sub(t.real(0.0), self._from_start(t, lost)))
        plus = tiles.dot(below, self.k, plus, "plus")
        d_k = tiles.map(wide, lambda t: t.add(t.take(plus, 0, 1), t.take(minus, 0, 1)))
        view.store_rows(scope, d_k, self.results.dk, self.t0, self.key, zero)
        self._store(scope, d_beta, self.results.d_beta)
        if self.results.d_decay is not None:
            self._decays(tiles, q, d_q, plus, minus, kept, states, self.results.d_decay)

    def _from_start(self, t: Terms, value: SSAValue) -> SSAValue:
        x = t.take(value, 0, 1)
        return x if self.sums is None else t.mul(x, t.exp2(t.take(self.sums, 0)))

    def _to_end(self, tiles: Tiles, value: SSAValue) -> SSAValue:
        if self.sums is None:
            return value
        total = self._total(tiles.scope)

        def code(t: Terms) -> SSAValue:
            rest = t.at_most_zero(t.sub(t.take(total), t.take(self._sums(), 0)))
            return t.mul(t.take(value, 0, 1), t.exp2(rest))

        return tiles.map([self.chunk, self.key.tile], code)

    def _sums(self) -> SSAValue:
        assert self.sums is not None
        return self.sums

    def _total(self, scope: Scope) -> SSAValue:
        """The decay of the whole chunk."""
        view = self.view
        assert self.rows.sums is not None
        end = scope.plus(self.t0, self.chunk, "end")
        if view.sizes.bounds is not None:
            end = scope.smaller(end, view.end, "end")
        last = scope.value(scope.minus(end, 1, "last"))
        return view.number(scope, view.kernel.take(self.rows.sums), last, "total")

    def _decays(
        self,
        tiles: Tiles,
        q: SSAValue,
        d_q: SSAValue,
        plus: SSAValue,
        minus: SSAValue,
        kept: SSAValue,
        states: SSAValue,
        target: SSAValue,
    ) -> None:
        """A decay counts for all tokens of its chunk from its own on, and for the state after them."""
        view, scope, wide = self.view, tiles.scope, [self.chunk, self.key.tile]

        def change(t: Terms) -> SSAValue:
            on_keys = t.mul(t.take(self.k, 0, 1), t.sub(t.take(plus, 0, 1), t.take(minus, 0, 1)))
            return t.add(t.mul(t.take(q, 0, 1), t.take(d_q, 0, 1)), on_keys)

        sums = tiles.running(tiles.sum(tiles.map(wide, change), 1), reverse=True)
        ends = tiles.sum(tiles.map(wide, lambda t: t.mul(t.take(self.k, 0, 1), t.take(kept, 0, 1))), 1)
        end, total = tiles.sum(ends, 0), self._total(scope)
        assert self.op.decay is not None
        decay = view.vector(scope, view.take(self.op.decay), self.t0, self.chunk, "decay")

        def code(t: Terms) -> SSAValue:
            after = t.add(t.take(end), t.mul(t.take(states), t.exp2(t.take(total))))
            return t.where(t.above(t.take(decay, 0), FORGOTTEN / LOG2_E), t.add(t.take(sums, 0), after))

        self._store(scope, tiles.map([self.chunk], code), target)

    def _store(self, scope: Scope, value: SSAValue, target: SSAValue) -> None:
        view = self.view
        index = [view.b, view.h, self.t0]
        scope.add(tile.StoreOp(value, view.kernel.take(target), index, [2], {0: view.end}))
