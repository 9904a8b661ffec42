"""The delta rule in chunks where each key channel has its decay.

All is as in `delta_chunks`, but exp(G) is one number per token and channel: with K' = exp(G) K, and the weights of `levels`
for keys, W_ij = sum_c k_ic k_jc exp(G_ic - G_jc),

```
L_ij = beta_i W_ij for j < i,   reads = T beta K'
```
and the sweep is that of a decay per channel, whose values are what is written.
"""

from __future__ import annotations

from xdsl.ir import SSAValue

from attn_engine.passes.lowering.recurrence.channels import RowsChunk, over_parts, part_of
from attn_engine.passes.lowering.recurrence.decay import Rows
from attn_engine.passes.lowering.recurrence.delta_chunks import Solved, Written
from attn_engine.passes.lowering.recurrence.levels import Gates, Pairs
from attn_engine.passes.lowering.recurrence.setting import Setting, Sizes, State, View
from attn_engine.passes.lowering.recurrence.sweep import Sweep
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.scope import Index, Scope


class SolvedByChannel(Solved):
    """Of all chunks also, if `keep`: `decayed` [B, H, T, K], which is K', and `weights` [B, H, T, C], which is W."""

    def __init__(
        self, setting: Setting, sizes: Sizes, state: State, k: SSAValue, v: SSAValue, rows: Rows, gates: Gates,
        keep: bool = False,
    ):  # fmt: skip
        self.gates, self.part = gates, part_of(state.key, setting.form)
        self.decayed: SSAValue | None = None
        self.weights: SSAValue | None = None
        super().__init__(setting, sizes, state, k, v, rows, keep)

    def _allocate(self, leading: list[Index], keep: bool) -> None:
        super()._allocate(leading, keep)
        if keep:
            self.decayed = self.setting.temporary([*leading, self.state.key.tile], self.element, "decayed")
            self.weights = self.setting.temporary([*leading, self.chunk], self.element, "weights")

    def _open(self, view: View, scope: Scope, t0: SSAValue) -> None:
        self.view, self.t0 = view, t0

    def _part(self, scope: Scope, c0: SSAValue) -> tuple[Pairs, SSAValue]:
        shape = self.chunk, self.part.tile
        k = self.view.rows(scope, self.k, self.t0, self.chunk, self.part, c0)
        return Pairs.load(self.view, scope, self.gates, self.t0, c0, shape), k

    def _system(self, tiles: Tiles, beta: SSAValue) -> SSAValue:
        start, shape = tiles.scope.splat([self.chunk, self.chunk], 0.0, "weights"), [self.chunk, self.chunk]

        def step(inner: Scope, c0: SSAValue, before: list[SSAValue]) -> list[SSAValue]:
            pairs, k = self._part(inner, c0)
            return [pairs.weights(Tiles(inner, self.precision), k, k, before[0], self.element)]

        (weights,) = over_parts(tiles.scope, self.state.key, self.part, [start], step)
        if self.weights is not None:
            rounded = tiles.rounded(weights, self.element)
            self.view.store_own(tiles.scope, rounded, self.weights, self.t0, tiles.scope.value(0))
        return tiles.map(shape, lambda t: t.mul(t.take(weights, 0, 1), t.take(beta, 0)))

    def _read(self, tiles: Tiles, scaled: SSAValue) -> None:
        on_keys = tiles.rounded(scaled, self.element)

        def step(inner: Scope, c0: SSAValue, _: list[SSAValue]) -> list[SSAValue]:
            inside, (pairs, k) = Tiles(inner, self.precision), self._part(inner, c0)
            decayed = pairs.from_start(inside, k, self.element)
            if self.decayed is not None:
                self.view.store_own(inner, decayed, self.decayed, self.t0, c0)
            reads = inside.rounded(inside.dot(on_keys, decayed), self.element)
            self.view.store_own(inner, reads, self.reads, self.t0, c0)
            return []

        over_parts(tiles.scope, self.state.key, self.part, [], step)


def solved_by_channel(sweep: Sweep, keep: bool = False) -> Rows:
    """Adds the kernels before a sweep of the delta rule; what it reads of each token."""
    walk, setting = sweep.walk, sweep.setting
    rows = RowsChunk.prepare(sweep)
    assert sweep.gates is not None
    sweep.solved = SolvedByChannel(setting, sweep.sizes, sweep.state, walk.k, walk.v, rows, sweep.gates, keep)
    return rows


class DeltaRowsChunk(Written, RowsChunk):
    """A chunk whose values are what the delta rule writes, and whose state decays row by row."""

    @classmethod
    def prepare(cls, sweep: Sweep) -> Rows:
        solved_by_channel(sweep)
        return Rows(None, None)
