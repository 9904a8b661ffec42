"""Sums of a tensor times what a sweep computes, one per token: of all of it, and of what comes from beyond its chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.ir import SSAValue

from attn_engine.dialects import tile
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
        self._store(self._sums(o), target)

    def crossing(self, o: SSAValue, target: SSAValue) -> None:
        """The sums of what comes from beyond the chunk and is not scaled yet."""
        chunk, sums = self.chunk, self._sums(o)
        if not chunk.scales_tokens:
            terms = Terms(chunk.scope, [chunk.size])
            sums = terms.result(terms.mul(terms.take(sums, 0), terms.take(chunk.scale())))
        self._store(sums, target)

    def _sums(self, o: SSAValue) -> SSAValue:
        chunk, terms = self.chunk, Terms(self.chunk.scope, self.shape)
        product = terms.result(terms.mul(terms.take(o, 0, 1), terms.take(self._tile(), 0, 1)))
        return chunk.scope.add(tile.ReduceOp(tile.Reduction.SUM, product, 1 - chunk.tokens), "rows").result

    def _store(self, sums: SSAValue, target: SSAValue) -> None:
        chunk, view = self.chunk, self.chunk.view
        where = [chunk.sweep.split, view.b, view.h, chunk.t0]
        chunk.scope.add(tile.StoreOp(sums, view.kernel.take(target), where, [3], {0: view.end}))

    def _tile(self) -> SSAValue:
        if self.loaded is None:
            chunk, sweep = self.chunk, self.chunk.sweep
            e = chunk.view.rows(chunk.scope, self.dot, chunk.t0, chunk.size, sweep.value, sweep.v0)
            self.loaded = chunk.scope.add(tile.TransposeOp(e), "et").result if chunk.turned else e
        return self.loaded
