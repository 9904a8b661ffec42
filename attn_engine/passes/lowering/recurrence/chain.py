"""Pieces of a sequence one after the other, each a program of its own that waits for the state of the one before.

Nothing is computed twice and states cross memory once per piece. It pays where whole sequences would fill the device
a little more than a whole number of times: shorter programs leave a shorter rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import IntegerAttr, f32, i32
from xdsl.ir import Block, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_flag import AwaitOp, SignalOp
from attn_engine.passes.lowering.recurrence.setting import View
from attn_engine.passes.lowering.scope import Index, Scope

if TYPE_CHECKING:
    from attn_engine.passes.lowering.recurrence.sweep import Sweep


class Chain:
    """Temporaries [N, H, pieces, K, V] of states and [N, H, pieces, splits] of flags, and who waits for whom."""

    def __init__(self, sweep: Sweep):
        setting, sizes, state = sweep.setting, sweep.sizes, sweep.state
        self.state, self.count = state, sweep.form.pieces
        leading: list[Index] = [sizes.sequences, sizes.heads, self.count]
        self.states = setting.temporary([*leading, *state.held_sizes()], f32, "states")
        self.flags = setting.temporary([*leading, state.splits], i32, "flags")
        scope = setting.plan.scope
        zero = scope.add(arith.ConstantOp(IntegerAttr(0, i32)), "zero").result
        scope.add(tile.FillOp(self.flags, zero))
        self.programs = scope.value(scope.times(sizes.sequences, self.count, "programs"))

    def place(self, scope: Scope, number: SSAValue, sequences: SSAValue, reverse: bool) -> tuple[SSAValue, SSAValue]:
        """(piece, sequence) of a program: all first pieces come before all second ones."""
        step = scope.add(arith.DivSIOp(number, sequences), "step").result
        n = scope.add(arith.RemSIOp(number, sequences), "n").result
        piece = scope.value(scope.minus(self.count - 1, step, "piece")) if reverse else step
        return piece, n

    def start(self, sweep: Sweep, scope: Scope, view: View, piece: SSAValue, otherwise: SSAValue) -> SSAValue:
        """The state that the piece before has left; `otherwise` for the first one."""
        first, before = self._ends(scope, piece, sweep.walk.reverse)
        waiting, given = Scope(Block()), Scope(Block())
        index = [view.n, view.h, before]
        waiting.add(AwaitOp(view.kernel.take(self.flags), [*index, sweep.split]))
        states = view.kernel.take(self.states)
        waiting.add(scf.YieldOp(self.state.load(waiting, states, index, sweep.v0, as_held=True)))
        given.add(scf.YieldOp(otherwise))
        return scope.add(scf.IfOp(first, [otherwise.type], [given.block], [waiting.block]), "state").results[0]

    def finish(self, sweep: Sweep, scope: Scope, view: View, piece: SSAValue, state: SSAValue) -> None:
        """Hands the state on, and writes that of the last piece where it is wanted."""
        index = [view.n, view.h, piece]
        self.state.store(scope, state, view.kernel.take(self.states), index, sweep.v0, as_held=True)
        scope.add(SignalOp(view.kernel.take(self.flags), [*index, sweep.split]))
        if sweep.walk.final is None:
            return
        last, _ = self._ends(scope, piece, not sweep.walk.reverse)
        inside = Scope(Block())
        self.state.store(inside, state, view.kernel.take(sweep.walk.final), [view.n, view.h], sweep.v0)
        inside.add(scf.YieldOp())
        scope.add(scf.IfOp(last, [], [inside.block]))

    def _ends(self, scope: Scope, piece: SSAValue, reverse: bool) -> tuple[SSAValue, SSAValue]:
        """Whether a piece is the first one, and which comes before it."""
        first = scope.value(self.count - 1 if reverse else 0)
        is_first = scope.add(arith.CmpiOp(piece, first, "eq"), "first").result
        before = scope.plus(piece, 1, "before") if reverse else scope.minus(piece, 1, "before")
        return is_first, scope.value(before)
