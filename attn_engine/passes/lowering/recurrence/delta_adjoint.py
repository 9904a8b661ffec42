"""The gradients of the delta rule in chunks.

With S the state before a chunk, D the gradient of the one after it, P the masked exp(G_i - G_j) (q_i k_j), and U, T,
`reads` those of `delta_chunks`:

```
dU = scale P^T dO + exp(G_n - G) K D        D' = exp(G_n) D + scale (exp(G) Q)^T dO - reads^T dU
```
One sweep forward keeps S and U of every chunk, one backwards keeps D and dU, and then all chunks, side by side, do

```
dR = T^T dU      dV = beta dR      dP = scale dO U^T      dL = -dR U^T      A = beta dL E below the diagonal
dQ = scale exp(G) dO S^T + (dP E) K
dK = (dP E)^T Q + exp(G_n - G) U D^T - exp(G) dV S^T + A K + A^T K
```
where E_ij = exp(G_i - G_j), first what is written and then what is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from xdsl.ir import SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.recurrence.channels import RowsChunk
from attn_engine.passes.lowering.recurrence.chunks import slot_of, slots_of
from attn_engine.passes.lowering.recurrence.decay import Rows, rows_of
from attn_engine.passes.lowering.recurrence.delta import Results
from attn_engine.passes.lowering.recurrence.delta_channel_tokens import ChannelTokenGradients, WrittenByChannel
from attn_engine.passes.lowering.recurrence.delta_channels import solved_by_channel
from attn_engine.passes.lowering.recurrence.delta_chunks import Solved, Written, faded, parted
from attn_engine.passes.lowering.recurrence.delta_tokens import TokenGradients, WrittenGradients
from attn_engine.passes.lowering.recurrence.setting import Form, Setting, Sizes, rank_of
from attn_engine.passes.lowering.recurrence.sweep import Chunk, Sweep
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.recurrence.walk import Walk
from attn_engine.passes.lowering.scope import Index


@dataclass(frozen=True)
class Kept:
    """What the sweeps leave for all chunks: U and dU [B, H, T, V], S and D [B, H, slots, K, V]."""

    u: SSAValue
    d_u: SSAValue
    before: SSAValue
    after: SSAValue


class DeltaAdjoint:
    """The kernels of an `attn.delta_backward`."""

    def __init__(self, setting: Setting, op: attn.DeltaBackwardOp, results: Results, form: Form):
        self.setting, self.op, self.results, self.form = setting, op, results, form

    def run(self) -> None:
        op, results = self.op, self.results
        wide = op.decay is not None and rank_of(op.decay) == 4
        chunks = (KeepRowStates, KeepRowGradients) if wide else (KeepStates, KeepGradients)
        forward = Sweep(self.setting, self._walk(op.q, op.k, op.v, op.initial, False, None), chunks[0], self.form)
        sizes, state = forward.sizes, forward.state
        assert forward.solved is not None
        forward.kept = kept = self._kept(sizes, state.key.tile, state.splits * state.value.tile, forward.element)
        forward.run(None)
        back = replace(
            self._walk(op.k, op.q, op.d_o, op.d_final, True, results.d_initial), name=f"{self.setting.plan.name}_back"
        )
        backward = Sweep(self.setting, back, chunks[1], self.form)
        backward.rows_read, backward.solved, backward.kept = forward.rows_read, forward.solved, kept
        backward.gates, backward.prepared = forward.gates, forward.prepared
        backward.run(None)
        self._tokens(forward, kept, wide)

    def _tokens(self, forward: Sweep, kept: Kept, wide: bool) -> None:
        """All chunks side by side."""
        given = self.setting, self.op, self.results, forward, kept
        written_ = WrittenByChannel(*given) if wide else WrittenGradients(*given)
        written_.run()
        if isinstance(written_, WrittenByChannel):
            ChannelTokenGradients(*given).run_after(written_)
        else:
            TokenGradients(*given, written_.made).run()

    def _walk(
        self, q: SSAValue, k: SSAValue, v: SSAValue, initial: SSAValue | None, reverse: bool, final: SSAValue | None
    ) -> Walk:
        op, name = self.op, f"{self.setting.plan.name}_keep"
        return Walk(
            name, q, k, v, op.scale, op.decay, op.beta, initial, op.bounds, None, reverse, op.dv, final,
        )  # fmt: skip

    def _kept(self, sizes: Sizes, key: int, columns: int, element: object) -> Kept:
        setting = self.setting
        slots = slots_of(setting, sizes, setting.form.chunk)
        leading: list[Index] = [sizes.batch, sizes.heads]
        dtype = tile.element_of(self.op.v)
        rows, states = [*leading, setting.whole(sizes), columns], [*leading, slots, key, columns]
        u, d_u = (setting.temporary(rows, dtype, name) for name in ("u", "d_u"))
        before, after = (setting.temporary(states, dtype, name) for name in ("before", "after"))
        return Kept(u, d_u, before, after)


class Keeping(Chunk):
    """A chunk of a sweep that keeps the states before its chunks, as it goes."""

    turns: ClassVar[bool] = False
    multiplies: ClassVar[bool] = False

    def _start(self) -> None:
        self.total = self.weight = None
        self._operands()
        self._fades()
        self.v = self._values_written()

    def _keep(self, state: SSAValue, target: SSAValue) -> None:
        sweep, view, scope = self.sweep, self.view, self.scope
        rounded = Tiles(scope, sweep.precision).rounded(state, sweep.element)
        index = [view.b, view.h, slot_of(view, scope, self.t0, self.size), scope.value(0), sweep.v0]
        view.store_block(scope, rounded, target, index, dict[int, SSAValue])


class KeepStates(Keeping, Written):
    """A chunk of the sweep that keeps S and U."""

    @classmethod
    def prepare(cls, sweep: Sweep) -> Rows:
        setting, walk = sweep.setting, sweep.walk
        rows = rows_of(setting, sweep.sizes, walk.decay, walk.weight)
        sweep.solved = Solved(setting, sweep.sizes, sweep.state, walk.k, walk.v, rows, keep=True)
        return rows

    def run(self, inside: list[SSAValue]) -> list[SSAValue]:
        sweep, self.before = self.sweep, inside[0]
        assert sweep.kept is not None
        self._start()
        self.view.store_own(self.scope, self.v, sweep.kept.u, self.t0, sweep.v0)
        self._keep(inside[0], sweep.kept.before)
        return [self._next(inside[0])]

    def _next(self, state: SSAValue) -> SSAValue:
        """Unlike other sweeps this one has no scale."""
        tiles = Tiles(self.scope, self.sweep.precision)
        added = self.v
        if self.fade is not None:
            added = tiles.map(
                self._values(), lambda t: t.mul(t.take(self.v, 0, 1), self._decayed(t, True)), self.sweep.element
            )
        return tiles.dot(tiles.turned(self.k), added, self._kept(state), "state")


class KeepGradients(Keeping):
    """A chunk of the sweep backwards: q is k there, k is q, and v is dO."""

    @classmethod
    def prepare(cls, sweep: Sweep) -> Rows:
        """All is there already."""
        return Rows(None, None)

    def _operands(self) -> None:
        super()._operands()
        self.q = self.view.rows(self.scope, self.walk.q, self.t0, self.size, self.sweep.key, self.scope.value(0))

    def run(self, inside: list[SSAValue]) -> list[SSAValue]:
        sweep, view, scope, zero = self.sweep, self.view, self.scope, self.scope.value(0)
        assert sweep.solved is not None and sweep.kept is not None
        tiles, state = Tiles(scope, sweep.precision), inside[0]
        self._start()
        self._keep(state, sweep.kept.after)
        d_u = self._gradient_of_written(tiles, state)
        view.store_own(scope, d_u, sweep.kept.d_u, self.t0, sweep.v0)
        reads = view.own_rows(scope, sweep.solved.reads, self.t0, self.size, sweep.key.tile, zero, "reads")
        read = tiles.map(self._values(), self._read, sweep.element)
        state = tiles.dot(tiles.turned(self.k), read, self._kept(state), "state")
        lost = tiles.map(self._values(), lambda t: t.sub(t.real(0.0), t.take(d_u, 0, 1)), sweep.element)
        return [tiles.dot(tiles.turned(reads), lost, state, "state")]

    def _read(self, t: Terms) -> SSAValue:
        """dO as the state before the chunk sees it."""
        value = t.mul(t.take(self.v, 0, 1), t.take(self.scale()))
        return value if self.fade is None else t.mul(value, self._decayed(t, False))

    def _gradient_of_written(self, tiles: Tiles, state: SSAValue) -> SSAValue:
        d_u = tiles.dot_parts([self.q], tiles.parts(state, self.sweep.element), hint="d_u")
        if self.fade is not None:
            seen = d_u
            d_u = tiles.map(self._values(), lambda t: t.mul(t.take(seen, 0, 1), self._decayed(t, True)))
        return tiles.rounded(tiles.dot_parts(self._seen(tiles), [self.v], d_u, "d_u"), self.sweep.element)

    def _seen(self, tiles: Tiles) -> list[SSAValue]:
        """P, turned, in parts."""
        size, place = self.size, tiles.range(self.size)
        products = tiles.dot(self.q, tiles.turned(self.k), hint="p")

        def weights(t: Terms) -> SSAValue:
            value = t.mul(faded(t, self.fade, t.take(products, 0, 1), turned=True), t.take(self.scale()))
            return t.where(t.not_before(t.take(place, 1), t.take(place, 0)), value)

        return tiles.parts(parted(tiles, self.fade, tiles.map([size, size], weights)), self.sweep.element)


class KeepRowStates(KeepStates, RowsChunk):
    """The same where each row of the state has its decay: keys are ready for the end of the chunk."""

    @classmethod
    def prepare(cls, sweep: Sweep) -> Rows:
        return solved_by_channel(sweep, keep=True)


class KeepRowGradients(KeepGradients, RowsChunk):
    """The same backwards."""

    def _operands(self) -> None:
        RowsChunk._operands(self)

    def _seen(self, tiles: Tiles) -> list[SSAValue]:
        prepared = self.sweep.prepared
        assert prepared is not None

        def scaled(t: Terms, value: SSAValue) -> SSAValue:
            return t.mul(value, t.take(self.scale()))

        return [tiles.turned(x) for x in prepared.weights_of(self.view, tiles, self.t0, scaled)]
