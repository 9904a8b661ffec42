"""A recurrence token by token, the state in registers: every kind of recurrence, and the steps of decoding."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.ir import SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.kernel import Blocks, Head, Kernel, close, loop
from attn_engine.passes.lowering.recurrence.anchors import Anchors, Visitor
from attn_engine.passes.lowering.recurrence.decay import LOG2_E
from attn_engine.passes.lowering.recurrence.setting import (
    Setting,
    Sizes,
    State,
    View,
    channels_of,
    padded,
    rank_of,
)
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.scope import Scope


@dataclass
class TokenSteps:
    """One program per head of a sequence and block of value channels.

    Sweeps too, in both directions. Each program reads its part of the initial state before it writes that of the final
    one: they may be one tensor.
    """

    setting: Setting
    op: attn.RecurrenceOp | attn.SweepOp
    o: SSAValue
    final: SSAValue | None

    def __post_init__(self) -> None:
        form, key, values = self.setting.form, channels_of(self.op.q), channels_of(self.op.v)
        self.sizes = Sizes(self.setting, [self.op.q, self.op.k, self.op.v], self.op.bounds)
        self.key = Head(key, padded(key, form.pad))
        self.value = Head(values, min(form.value_block, padded(values, form.pad)) if form.pad else values)
        self.state = State(self.key, self.value)

    def run(self, rows: SSAValue | None = None, anchors: Anchors | None = None) -> None:
        """`rows` [splits, B, H, T] get the sums of a sweep's dot * o; `anchors` are where it keeps states, or meets them."""
        self.rows = rows
        setting, op, form = self.setting, self.op, self.setting.form
        self.beta = op.beta if isinstance(op, attn.RecurrenceOp) else None
        self.reverse = isinstance(op, attn.SweepOp) and op.reverse is not None
        self.columns = isinstance(op, attn.SweepOp) and op.columns is not None
        self.dot = op.dot if isinstance(op, attn.SweepOp) else None
        self.whole = isinstance(op, attn.SweepOp) and op.whole is not None
        sizes, state = self.sizes, self.state
        name = f"{setting.plan.name}_{op.o.name_hint or 'o'}_steps"
        kernel = Kernel(name, setting.plan, Blocks(0, 0, form.num_warps, form.num_stages))
        scope = kernel.scope
        split, h, n = (kernel.program_id(axis, hint) for axis, hint in enumerate(("split", "h", "n")))
        self.view = view = View(sizes, kernel, h, n)
        self.split, self.v0 = split, scope.value(scope.times(split, self.value.tile, "v0"))
        wide = op.decay if op.decay is not None and rank_of(op.decay) == 4 else op.v
        for operand in (op.q, op.k, op.v, wide, self.dot or op.v):
            view.head(operand)
        carried = self._start(scope)
        ends, body, t, (before,) = loop(scope, view.begin, view.end, 1, [carried], "t")
        if self.reverse:
            last = body.minus(body.plus(view.begin, view.end, "last"), 1, "last")
            t = body.value(body.minus(last, t, "t"))
        if anchors is not None:
            visitor = Visitor(1, self.reverse, state, split, self.v0, None)
            at = body.value(body.minus(t, view.begin, "at"))
            anchors.visit(visitor, body, view, at, scope.value(view.length), before)
        close(body, [self._back(body, t, before) if self.reverse else self._step(body, t, before)])
        if self.final is not None:
            state.store(scope, ends.results[0], kernel.take(self.final), [n, h], self.v0)
        programs = setting.plan.scope.value(state.splits)
        setting.kernels.append(kernel.launch([programs, sizes.heads, sizes.sequences]))

    def _start(self, scope: Scope) -> SSAValue:
        if self.op.initial is None:
            return scope.splat(self.state.shape, 0.0, "state")
        loaded = self.state.load(scope, self.view.take(self.op.initial), [self.view.n, self.view.h], self.v0)
        terms = Terms(scope, self.state.shape)
        return terms.result(terms.take(loaded, 0, 1))

    def _step(self, scope: Scope, t: SSAValue, before: SSAValue) -> SSAValue:
        """Writes one output; the state after the token. All is loaded before anything is waited for."""
        op, view = self.op, self.view
        k, v, q = self._operands(scope, t)
        strength = self.beta if self.beta is not None else op.weight
        factor = None if strength is None else view.number(scope, view.take(strength), t, "strength")
        state = self._decayed(scope, t, before)
        state = self._added(scope, state, k, self._written(scope, state, k, v, factor))
        self._store(scope, t, self._read(scope, q, state), view.take(op.scale))
        return state

    def _operands(self, scope: Scope, t: SSAValue) -> tuple[SSAValue, SSAValue, SSAValue]:
        """A token's key, value and query."""
        op, zero = self.op, scope.value(0)
        k = self._channels(scope, op.k, t, self.key, zero)
        v = self._channels(scope, op.v, t, self.value, self.v0)
        return k, v, self._channels(scope, op.q, t, self.key, zero)

    def _back(self, scope: Scope, t: SSAValue, before: SSAValue) -> SSAValue:
        """A step of the adjoint, from the last token to the first."""
        op, view = self.op, self.view
        k, v, q = self._operands(scope, t)
        weight = None if op.weight is None else view.number(scope, view.take(op.weight), t, "weight")
        terms = Terms(scope, [self.value.tile])
        state = self._added(
            scope, before, k, terms.result(terms.mul(terms.take(v, 0), terms.take(view.take(op.scale))))
        )
        self._store(scope, t, self._read(scope, q, state), weight)
        return self._decayed(scope, t, state)

    def _added(self, scope: Scope, state: SSAValue, k: SSAValue, written: SSAValue) -> SSAValue:
        terms = Terms(scope, self.state.shape)
        added = terms.mul(terms.take(k, 0), terms.take(written, 1))
        return terms.result(terms.add(terms.take(state, 0, 1), added))

    def _store(self, scope: Scope, t: SSAValue, value: SSAValue, factor: SSAValue | None) -> None:
        view = self.view
        if self.whole and factor is not None:
            terms = Terms(scope, [self.value.tile])
            value, factor = terms.result(terms.mul(terms.take(value, 0), terms.take(factor))), None
        terms = Terms(scope, [self.value.tile])
        if self.rows is not None and self.dot is not None:
            e = self._channels(scope, self.dot, t, self.value, self.v0)
            product = terms.result(terms.mul(terms.take(value, 0), terms.take(e, 0)))
            row = scope.add(tile.ReduceOp(tile.Reduction.SUM, product, 0), "row").result
            scope.add(tile.StoreOp(row, view.kernel.take(self.rows), [self.split, view.b, view.h, t], []))
            terms = Terms(scope, [self.value.tile])
        result = terms.take(value, 0)
        if factor is not None:
            result = terms.mul(result, terms.take(factor))
        target = view.kernel.take(self.o)
        stored = terms.result(result, tile.element_of(target))
        limits = {0: scope.value(self.value.size)} if self.value.size % self.value.tile else {}
        scope.add(tile.StoreOp(stored, target, [view.b, view.h, t, self.v0], [3], limits))

    def _channels(self, scope: Scope, tensor: SSAValue, t: SSAValue, head: Head, c0: SSAValue) -> SSAValue:
        view = self.view
        source = view.take(tensor)
        limits = {0: scope.value(head.size)} if head.size % head.tile else {}
        index = [view.b, view.head(tensor), t, c0]
        type_ = tile.tile_type([head.tile], tile.element_of(source))
        return scope.add(tile.LoadOp(source, index, [3], type_, limits), tensor.name_hint or "x").result

    def _decayed(self, scope: Scope, t: SSAValue, state: SSAValue) -> SSAValue:
        op, view = self.op, self.view
        if op.decay is None:
            return state
        terms = Terms(scope, self.state.shape)
        if self.columns and rank_of(op.decay) == 4:
            decay = terms.take(self._channels(scope, op.decay, t, self.value, self.v0), 1)
        elif rank_of(op.decay) == 4:
            decay = terms.take(self._channels(scope, op.decay, t, self.key, scope.value(0)), 0)
        else:
            decay = terms.take(view.number(scope, view.take(op.decay), t, "decay"))
        factor = terms.exp2(terms.mul(decay, terms.real(LOG2_E)))
        return terms.result(terms.mul(terms.take(state, 0, 1), factor))

    def _written(self, scope: Scope, state: SSAValue, k: SSAValue, v: SSAValue, strength: SSAValue | None) -> SSAValue:
        """What goes into the state beside the key: v, weighted, or what the delta rule leaves of it."""
        read = self._read(scope, k, state) if self.beta is not None else None
        terms = Terms(scope, [self.value.tile])
        value = terms.take(v, 0)
        if read is not None:
            value = terms.sub(value, terms.take(read, 0))
        if strength is not None:
            value = terms.mul(value, terms.take(strength))
        return terms.result(value)

    def _read(self, scope: Scope, vector: SSAValue, state: SSAValue) -> SSAValue:
        """vector^T state."""
        terms = Terms(scope, self.state.shape)
        product = terms.result(terms.mul(terms.take(vector, 0), terms.take(state, 0, 1)))
        return scope.add(tile.ReduceOp(tile.Reduction.SUM, product, 0), "read").result
