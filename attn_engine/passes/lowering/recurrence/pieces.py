"""States of the pieces of a sequence: what each piece adds, passed on from piece to piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.kernel import Blocks, Head, Kernel, close, loop
from attn_engine.passes.lowering.recurrence.setting import State, View
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.scope import Index, Scope

if TYPE_CHECKING:
    from attn_engine.passes.lowering.recurrence.sweep import Sweep

COLUMNS = 16
"""Value channels of a program that passes states on: many small programs, for each walks all pieces."""


def chunks_of(scope: Scope, chunks: SSAValue, piece: Index, count: int) -> tuple[Index, Index]:
    """The chunks of one of `count` pieces."""
    each = scope.add(arith.CeilDivSIOp(chunks, scope.value(count)), "each").result
    lo = scope.add(arith.MuliOp(scope.value(piece), each), "lo").result
    lo = scope.value(scope.smaller(lo, chunks, "lo"))
    return lo, scope.smaller(scope.plus(lo, each, "hi"), chunks, "hi")


class Pieces:
    """Temporaries [N, H, pieces, K, V] of states, and of decays: each program has its own to write.

    Those are [N, H, pieces, splits], with [.., K] behind where each row of a state has its own, and
    [N, H, pieces, 1, V] where each column has (`decayed` is 0 or 1).
    """

    def __init__(self, sweep: Sweep):
        self.setting, self.sizes, self.state, self.walk = sweep.setting, sweep.sizes, sweep.state, sweep.walk
        self.decayed, self.count = sweep.chunk.decayed, sweep.form.pieces
        setting, sizes, state = self.setting, self.sizes, self.state
        leading: list[Index] = [sizes.sequences, sizes.heads, self.count]
        self.states = setting.temporary([*leading, *state.held_sizes()], f32, "states")
        shape = {None: [state.splits], 0: [state.splits, state.key.tile], 1: [1, state.splits * state.value.tile]}
        self.totals = setting.temporary([*leading, *shape[self.decayed]], f32, "totals")

    def store(
        self, scope: Scope, view: View, found: tuple[SSAValue, SSAValue], piece: Index, split: SSAValue, v0: SSAValue
    ) -> None:
        """The state that a piece adds, and its total decay."""
        index, zero = [view.n, view.h, scope.value(piece)], scope.value(0)
        self.state.store(scope, found[0], view.kernel.take(self.states), index, v0, as_held=True)
        ends = {None: [split], 0: [split, zero], 1: [zero, v0]}
        dims = [] if self.decayed is None else [4]
        scope.add(tile.StoreOp(found[1], view.kernel.take(self.totals), [*index, *ends[self.decayed]], dims))

    def load(self, scope: Scope, view: View, piece: Index, v0: SSAValue) -> SSAValue:
        """The state before a piece, once they have been passed on."""
        index = [view.n, view.h, scope.value(piece)]
        return self.state.load(scope, view.kernel.take(self.states), index, v0, as_held=True)

    def passed(self) -> None:
        """Turns what each piece adds into the state before it; writes the state at the end."""
        plan, walk = self.setting.plan, self.walk
        value = Head(self.state.value.size, min(COLUMNS, self.state.value.tile))
        state = State(self.state.key, value, self.state.turned)
        kernel = Kernel(f"{walk.name}_pass", plan, Blocks(0, 0, 4, 1))
        scope = kernel.scope
        split, h, n = (kernel.program_id(axis, hint) for axis, hint in enumerate(("split", "h", "n")))
        v0 = scope.value(scope.times(split, value.tile, "v0"))
        start = scope.splat(state.shape, 0.0, "state")
        if walk.initial is not None:
            loaded = state.load(scope, kernel.take(self.setting.of(walk.initial)), [n, h], v0)
            terms = Terms(scope, state.shape)
            start = terms.result(terms.take(loaded, 0, 1))
        op, body, c, (before,) = loop(scope, 0, self.count, 1, [start], "c")
        piece = body.value(body.minus(self.count - 1, c, "piece") if walk.reverse else c)
        states, index = kernel.take(self.states), [n, h, piece]
        added = state.load(body, states, index, v0, "added", as_held=True)
        total = self._total(body, kernel, state, index, v0)
        state.store(body, before, states, index, v0, as_held=True)
        terms = Terms(body, state.shape)
        axes = [] if self.decayed is None else [self.decayed]
        kept = terms.mul(terms.take(before, 0, 1), terms.exp2(terms.take(total, *axes)))
        close(body, [terms.result(terms.add(kept, terms.take(added, 0, 1)))])
        if walk.final is not None:
            state.store(scope, op.results[0], kernel.take(walk.final), [n, h], v0)
        programs = plan.scope.value(state.splits)
        self.setting.kernels.append(kernel.launch([programs, self.sizes.heads, self.sizes.sequences]))

    def _total(self, scope: Scope, kernel: Kernel, state: State, index: list[SSAValue], v0: SSAValue) -> SSAValue:
        """The decay of a piece, as the tile of a program that passes states on has it."""
        zero = scope.value(0)
        ends = {None: [zero], 0: [zero, zero], 1: [zero, v0]}
        type_ = f32 if self.decayed is None else TensorType(f32, [state.shape[self.decayed]])
        dims = [] if self.decayed is None else [4]
        source = kernel.take(self.totals)
        return scope.add(tile.LoadOp(source, [*index, *ends[self.decayed]], dims, type_), "total").result
