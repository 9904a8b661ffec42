"""Sums of a tensor times what a sweep computes: per token, and per chunk of what comes from beyond it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.recurrence.chunks import slot_of
from attn_engine.passes.lowering.recurrence.terms import Terms

if TYPE_CHECKING:
    from attn_engine.passes.lowering.recurrence.sweep import Chunk


class Dots:
    """Of one chunk; the tensor's tile is loaded where it is first needed."""

    def __init__(self, chunk: Chunk, dot: SSAValue, shape: tuple[int, int]):
        self.chunk, self.dot, self.shape = chunk, dot, shape
        self.loaded: SSAValue | None = None

    def rows(self, o: SSAValue, target: SSAValue) -> None:
        """The sums of each token's results, to [splits, B, H, T]."""
        chunk, view = self.chunk, self.chunk.view
        where = [chunk.sweep.split, view.b, view.h, chunk.t0]
        sums = self._sums(o, scaled=False)
        chunk.scope.add(tile.StoreOp(sums, view.kernel.take(target), where, [3], {0: view.end}))

    def crossing(self, o: SSAValue, target: SSAValue) -> None:
        """The sum of what comes from beyond the chunk and is not scaled yet, to [splits, B, H, chunks]."""
        chunk, scope, view = self.chunk, self.chunk.scope, self.chunk.view
        sums = self._sums(o, scaled=chunk.walk.scale_results)
        total = scope.add(tile.ReduceOp(tile.Reduction.SUM, sums, 0), "crossing").result
        where = [chunk.sweep.split, view.b, view.h, slot_of(view, scope, chunk.t0, chunk.size)]
        scope.add(tile.StoreOp(total, view.kernel.take(target), where, []))

    def _sums(self, o: SSAValue, scaled: bool) -> SSAValue:
        chunk, terms = self.chunk, Terms(self.chunk.scope, self.shape)
        product = terms.mul(terms.take(o, 0, 1), terms.take(self._tile(), 0, 1))
        if scaled:
            product = terms.mul(product, terms.take(chunk.scale()))
        return chunk.scope.add(
            tile.ReduceOp(tile.Reduction.SUM, terms.result(product), 1 - chunk.tokens), "rows"
        ).result

    def _tile(self) -> SSAValue:
        if self.loaded is None:
            chunk, sweep = self.chunk, self.chunk.sweep
            e = chunk.view.rows(chunk.scope, self.dot, chunk.t0, chunk.size, sweep.value, sweep.v0)
            self.loaded = chunk.scope.add(tile.TransposeOp(e), "et").result if chunk.turned else e
        return self.loaded
