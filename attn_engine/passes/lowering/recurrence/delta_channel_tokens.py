"""The gradients of all chunks of the delta rule with a decay per channel, once the states around them are known.

With A and Z the gradients of the weights of keys and of queries (see `delta_channels`) and, at each level of `levels`, x' for
x times what is left between its token and the token r of its level, a pair of tokens j < i gives

```
dQ_i += (Z_ij K'_j)',   dK_j += (Z_ij Q'_i)',   dK_i += (A_ij K'_j)',   dK_j += (A_ij K'_i)'
```
At a level a token is the later one of all its pairs, or the sooner one of all. So with A and Z mirrored at their diagonals, and
X' of queries for later tokens and of keys for sooner ones, two products are all of this: Z X' and A K'. What a token gets as
the later one counts for its log decay, as the sooner one against it: of products that round alike, so that pairs of
tokens after it leave nothing. From states come dQ = scale exp(G) dO S^T and dK = exp(G_n - G) U D^T - exp(G) dV S^T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import f32
from xdsl.ir import SSAValue

from attn_engine.passes.lowering.kernel import close, loop
from attn_engine.passes.lowering.recurrence.channels import part_of
from attn_engine.passes.lowering.recurrence.chunks import each_chunk, slot_of
from attn_engine.passes.lowering.recurrence.decay import kept_gradient
from attn_engine.passes.lowering.recurrence.delta_channels import SolvedByChannel
from attn_engine.passes.lowering.recurrence.delta_tokens import Gradients, WrittenGradients
from attn_engine.passes.lowering.recurrence.levels import (
    Pairs,
    all_over_levels,
    apart_at,
    differ_at,
    met,
    row_of,
    second_at,
    total_of,
)
from attn_engine.passes.lowering.recurrence.setting import View
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.scope import Index, Scope

WARPS = 8


class WrittenByChannel(WrittenGradients):
    """The same, from weights and decayed keys that have been kept. A and Z, which `seen` is, are mirrored."""

    def _allocate(self, leading: list[Index]) -> None:
        super()._allocate(leading)
        self.seen = self.setting.temporary([*leading, self.chunk], self.element, "seen")

    def _keys(self, scope: Scope) -> SSAValue:
        solved = self.sweep.solved
        assert isinstance(solved, SolvedByChannel) and solved.decayed is not None
        return self.own(scope, solved.decayed, self.key.tile, scope.value(0), "decayed")

    def _system(self, tiles: Tiles) -> SSAValue:
        solved = self.sweep.solved
        assert isinstance(solved, SolvedByChannel) and solved.weights is not None
        return self.own(tiles.scope, solved.weights, self.chunk, tiles.scope.value(0), "weights")

    def _more(self, scope: Scope) -> list[SSAValue]:
        return [scope.splat([self.chunk, self.chunk], 0.0, "sum")]

    def _more_of_part(self, tiles: Tiles, u: SSAValue, v0: SSAValue, sums: list[SSAValue]) -> list[SSAValue]:
        d_o = self.view.rows(tiles.scope, self.op.d_o, self.t0, self.chunk, self.value, v0)
        return [tiles.dot(d_o, tiles.turned(u), sums[0])]

    def _store_more(self, tiles: Tiles, sums: Sequence[SSAValue]) -> None:
        scale, place = self.view.kernel.take(self.setting.of(self.op.scale)), self.place

        def code(t: Terms) -> SSAValue:
            inside = t.not_before(t.take(place, 0), t.take(place, 1))
            return t.where(inside, t.mul(t.take(sums[0], 0, 1), t.take(scale)))

        seen = tiles.map([self.chunk, self.chunk], code, self.element)
        self.view.store_own(tiles.scope, self._stored(tiles, seen), self.seen, self.t0, tiles.scope.value(0))

    def _stored(self, tiles: Tiles, below: SSAValue) -> SSAValue:
        turned, place = tiles.turned(below), self.place

        def mirrored(t: Terms) -> SSAValue:
            own = t.not_before(t.take(place, 0), t.take(place, 1))
            return t.choose(own, t.take(below, 0, 1), t.take(turned, 0, 1))

        return tiles.map([self.chunk, self.chunk], mirrored, self.element)


@dataclass(frozen=True)
class Sums:
    """What a program finds: dQ, dK, and what counts for log decays, [C, channels]."""

    d_q: SSAValue
    d_k: SSAValue
    change: SSAValue | None

    def all(self) -> list[SSAValue]:
        return [self.d_q, self.d_k, *([] if self.change is None else [self.change])]

    @staticmethod
    def of(values: list[SSAValue]) -> Sums:
        return Sums(values[0], values[1], values[2] if len(values) > 2 else None)


class ChannelTokenGradients(Gradients):
    """dQ, dK and the gradient of log decays: one program for a part of the channels of a chunk."""

    def run_after(self, written: WrittenByChannel) -> None:
        self.made, self.seen = written.made, written.seen
        self.part = part_of(self.key, self.setting.form)
        operands, splits = [self.op.q, self.op.k, self.op.d_o, self.op.decay], self.key.tile // self.part.tile
        each_chunk(self.setting, self.sweep.sizes, "read", WARPS, operands, self._body, splits)

    def _body(self, view: View, scope: Scope, t0: SSAValue, split: SSAValue) -> None:
        self.view, self.t0, tiles = view, t0, Tiles(scope, self.precision)
        self.shape = shape = self.chunk, self.part.tile
        self.c0 = c0 = scope.value(scope.times(split, self.part.tile, "c0"))
        start = [*(scope.splat(shape, 0.0, "sum") for _ in range(3)), scope.splat([self.part.tile], 0.0, "sum")]
        op, body, part, sums = loop(scope, 0, self.sweep.state.splits, 1, start, "part")
        close(body, self._of_states(body, body.value(body.times(part, self.value.tile, "v0")), sums))
        assert self.sweep.gates is not None
        self.pairs = Pairs.load(view, scope, self.sweep.gates, t0, c0, shape)
        self.q, self.k = (view.rows(scope, x, t0, self.chunk, self.part, c0) for x in (self.op.q, self.op.k))
        reading, kept, lost, states = op.results
        kept = self.pairs.to_end(tiles, kept)
        after = self._after(tiles, kept, states)
        found = self._between(tiles, self._first(tiles, reading, kept, lost))
        for value, target in ((found.d_q, self.results.dq), (found.d_k, self.results.dk)):
            view.store_rows(scope, value, target, t0, self.part, c0)
        if found.change is not None and after is not None:
            self._decays(tiles, found.change, after)

    def _of_states(self, scope: Scope, v0: SSAValue, sums: list[SSAValue]) -> list[SSAValue]:
        """dO S^T, U D^T, dV S^T [C, channels] and the sums of S * D."""
        tiles, view, chunk = Tiles(scope, self.precision), self.view, self.chunk
        d_o = view.rows(scope, self.op.d_o, self.t0, chunk, self.value, v0)
        d_v = view.placed_rows(scope, self.results.dv, self.t0, chunk, self.value, v0)
        u = self.own(scope, self.kept.u, self.value.tile, v0, "u")
        index = [view.b, view.h, slot_of(view, scope, self.t0, chunk), self.c0, v0]
        shape = self.part.tile, self.value.tile
        before, after = (
            view.load_block(scope, x, index, shape, dict[int, SSAValue], "state")
            for x in (self.kept.before, self.kept.after)
        )
        products = tiles.map(shape, lambda t: t.mul(t.take(before, 0, 1), t.take(after, 0, 1)))
        met = tiles.sum(products, 1)
        turned = tiles.turned(before)
        return [
            tiles.dot(d_o, turned, sums[0]),
            tiles.dot(u, tiles.turned(after), sums[1]),
            tiles.dot(d_v, turned, sums[2]),
            tiles.map([self.part.tile], lambda t: t.add(t.take(sums[3], 0), t.take(met, 0))),
        ]

    def _first(self, tiles: Tiles, reading: SSAValue, kept: SSAValue, lost: SSAValue) -> Sums:
        """What comes of states, and of each token for itself."""
        scope, pairs, q, k = tiles.scope, self.pairs, self.q, self.k
        scale, place = self.view.kernel.take(self.setting.of(self.op.scale)), tiles.range(self.chunk)
        seen = self.own(scope, self.seen, self.chunk, scope.value(0), "seen")

        def own(t: Terms) -> SSAValue:
            return t.where(differ_at(t, t.take(place, 0), t.take(place, 1), None), t.take(seen, 0, 1))

        itself = tiles.sum(tiles.map([self.chunk, self.chunk], own), 1, "itself")
        reading, lost = pairs.from_start(tiles, reading), pairs.from_start(tiles, lost)

        def with_own(t: Terms, value: SSAValue, other: SSAValue) -> SSAValue:
            return t.add(value, t.mul(t.take(itself, 0), t.take(other, 0, 1)))

        def change(t: Terms) -> SSAValue:
            on_queries = t.mul(t.take(q, 0, 1), t.mul(t.take(reading, 0, 1), t.take(scale)))
            return t.sub(on_queries, t.mul(t.take(k, 0, 1), t.add(t.take(lost, 0, 1), t.take(kept, 0, 1))))

        d_q = tiles.map(self.shape, lambda t: with_own(t, t.mul(t.take(reading, 0, 1), t.take(scale)), k))
        d_k = tiles.map(self.shape, lambda t: with_own(t, t.sub(t.take(kept, 0, 1), t.take(lost, 0, 1)), q))
        return Sums(d_q, d_k, None if self.results.d_decay is None else tiles.map(self.shape, change))

    def _between(self, tiles: Tiles, start: Sums) -> Sums:
        """With what tokens give each other."""
        zero = tiles.scope.value(0)
        seen, below = (self.own(tiles.scope, x, self.chunk, zero, "pairs") for x in (self.seen, self.made))

        def step(inner: Scope, level: SSAValue, sums: list[SSAValue]) -> list[SSAValue]:
            inside, found = Tiles(inner, self.precision), Sums.of(sums)
            near = self.pairs.near(inside, level)
            for x, weights in ((self.q, seen), (self.k, below)):
                faded = met(inside, x, self.k, near, level, self.element)
                product = inside.dot(self._at(inside, level, weights), faded, hint="product")
                found = self._added(inside, level, found, near, faded, product, x is self.k)
            return found.all()

        return Sums.of(all_over_levels(tiles.scope, self.chunk, start.all(), step))

    def _at(self, tiles: Tiles, level: SSAValue, weights: SSAValue) -> SSAValue:
        """Mirrored weights of tokens whose places differ at a level."""
        place = tiles.range(self.chunk)

        def code(t: Terms) -> SSAValue:
            return t.where(apart_at(t, t.take(place, 0), t.take(place, 1), level), t.take(weights, 0, 1))

        return tiles.map([self.chunk, self.chunk], code, self.element)

    def _added(
        self, tiles: Tiles, level: SSAValue, sums: Sums, near: SSAValue, faded: SSAValue, product: SSAValue, keys: bool
    ) -> Sums:
        """With one of the products: of keys alone it is theirs, else that of later tokens is one of queries."""
        place, d_q = tiles.range(self.chunk), sums.d_q

        def of_queries(t: Terms) -> SSAValue:
            added = t.where(second_at(t, place, level), t.take(product, 0, 1))
            return t.add(t.take(sums.d_q, 0, 1), t.mul(t.take(near, 0, 1), added))

        def of_keys(t: Terms) -> SSAValue:
            added = t.take(product, 0, 1)
            added = added if keys else t.choose(second_at(t, place, level), t.real(0.0), added)
            return t.add(t.take(sums.d_k, 0, 1), t.mul(t.take(near, 0, 1), added))

        if not keys:
            d_q = tiles.map(self.shape, of_queries)
        change = self._changed(tiles, level, sums.change, faded, product)
        return Sums(d_q, tiles.map(self.shape, of_keys), change)

    def _changed(
        self, tiles: Tiles, level: SSAValue, before: SSAValue | None, faded: SSAValue, product: SSAValue
    ) -> SSAValue | None:
        if before is None:
            return None
        place = tiles.range(self.chunk)

        def code(t: Terms) -> SSAValue:
            got = t.mul(t.take(faded, 0, 1), t.take(product, 0, 1))
            signed = t.choose(second_at(t, place, level), got, t.sub(t.real(0.0), got))
            return t.add(t.take(before, 0, 1), signed)

        return tiles.map(self.shape, code)

    def _after(self, tiles: Tiles, kept: SSAValue, states: SSAValue) -> SSAValue | None:
        """What counts for all log decays of the chunk: what its end holds of its tokens, and of the state before it."""
        view, scope, (chunk, channels) = self.view, tiles.scope, self.shape
        if self.results.d_decay is None:
            return None
        gates, some = self.pairs.gates, self.pairs.some
        last = row_of(view, scope, gates.sums, self.t0, chunk, channels, self.c0)
        total = total_of(view, scope, gates, some, last, self.t0, chunk, self.c0)
        ends = tiles.sum(tiles.map(self.shape, lambda t: t.mul(t.take(self.k, 0, 1), t.take(kept, 0, 1))), 0)

        def code(t: Terms) -> SSAValue:
            return t.add(t.take(ends, 0), t.mul(t.take(states, 0), t.exp2(t.take(total, 0))))

        return tiles.map([channels], code)

    def _decays(self, tiles: Tiles, change: SSAValue, after: SSAValue) -> None:
        """A decay counts for all tokens of its chunk from its own on, and for the state after them."""
        view, scope, target = self.view, tiles.scope, self.results.d_decay
        assert self.op.decay is not None and target is not None
        sums = tiles.running(change, reverse=True)
        decay = view.rows(scope, self.op.decay, self.t0, self.chunk, self.part, self.c0)

        def code(t: Terms) -> SSAValue:
            return kept_gradient(t, t.take(decay, 0, 1), t.add(t.take(sums, 0, 1), t.take(after, 1)))

        view.store_rows(scope, tiles.map(self.shape, code, f32), target, self.t0, self.part, self.c0)
