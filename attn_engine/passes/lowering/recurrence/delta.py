"""The gradients of the delta rule, token by token: states kept every few tokens, the ones between made again."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import f32
from xdsl.ir import SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.kernel import Blocks, Head, Kernel, close, loop
from attn_engine.passes.lowering.recurrence.chunks import slots_of
from attn_engine.passes.lowering.recurrence.decay import LOG2_E
from attn_engine.passes.lowering.recurrence.setting import Setting, Sizes, State, View, channels_of, padded, rank_of
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.scope import Scope

KEPT = 32
"""Tokens between two states that are kept: as many states are in work at a time."""
PER_WARP = 1024
"""Numbers of a state for each warp: 32 for a thread, of which a step holds several such parts."""
MOST_WARPS = 16


@dataclass(frozen=True)
class Results:
    """Where gradients go, as values of the plan; None for those that nobody asks for."""

    dq: SSAValue
    dk: SSAValue
    dv: SSAValue
    d_beta: SSAValue
    d_decay: SSAValue | None
    d_initial: SSAValue | None


class DeltaBackward:
    """Two kernels: states at every KEPT-th token, then the tokens backwards. One program per head of a sequence."""

    def __init__(self, setting: Setting, op: attn.DeltaBackwardOp, results: Results):
        self.setting, self.op, self.results = setting, op, results
        form, key, value = setting.form, channels_of(op.q), channels_of(op.v)
        self.sizes = sizes = Sizes(setting, [op.v], op.bounds)
        self.state = State(Head(key, padded(key, form.pad)), Head(value, padded(value, form.pad)))
        self.warps = min(MOST_WARPS, max(4, self.state.key.tile * self.state.value.tile // PER_WARP))
        slots = slots_of(setting, sizes, KEPT)
        self.kept = setting.temporary([sizes.batch, sizes.heads, slots, key, value], f32, "kept")
        self.work = setting.temporary([sizes.sequences, sizes.heads, KEPT, key, value], f32, "work")

    def run(self) -> None:
        self._forward()
        self._backward()

    def _open(self, suffix: str) -> tuple[Kernel, Scope]:
        plan, op = self.setting.plan, self.op
        kernel = Kernel(f"{plan.name}_{suffix}", plan, Blocks(0, 0, self.warps, 1))
        h, n = kernel.program_id(1, "h"), kernel.program_id(2, "n")
        self.kernel, self.view = kernel, View(self.sizes, kernel, h, n)
        for operand in (op.q, op.k, op.v, op.d_o):
            self.view.head(operand)
        self.wide = op.decay is not None and rank_of(op.decay) == 4
        if op.decay is not None and self.wide:
            self.view.head(op.decay)
        self.zero = kernel.scope.value(0)
        self.chunks = kernel.scope.add(
            arith.CeilDivSIOp(kernel.scope.value(self.view.length), kernel.scope.value(KEPT)), "chunks"
        ).result
        return kernel, kernel.scope

    def _launch(self) -> None:
        one = self.setting.plan.scope.value(1)
        self.setting.kernels.append(self.kernel.launch([one, self.sizes.heads, self.sizes.sequences]))

    def _slot(self, scope: Scope, chunk: SSAValue) -> list[SSAValue]:
        """Where the state before a chunk is kept: packed sequences have a slot more than they need."""
        view, slot = self.view, chunk
        if self.op.bounds is not None:
            first = scope.add(arith.DivSIOp(scope.value(view.begin), scope.value(KEPT)), "first").result
            slot = scope.value(scope.plus(scope.plus(first, view.n, "first"), chunk, "slot"))
        return [view.b, view.h, slot]

    def _initial(self, scope: Scope, source: SSAValue | None, hint: str) -> SSAValue:
        if source is None:
            return scope.splat(self.state.shape, 0.0, hint)
        loaded = self.state.load(scope, self.view.take(source), [self.view.n, self.view.h], self.zero, hint)
        terms = Terms(scope, self.state.shape)
        return terms.result(terms.take(loaded, 0, 1))

    # --- forward -------------------------------------------------------------------------------------

    def _forward(self) -> None:
        _, scope = self._open("kept")
        start = self._initial(scope, self.op.initial, "state")
        _, body, c, (before,) = loop(scope, 0, self.chunks, 1, [start], "c")
        self.state.store(body, before, self.kernel.take(self.kept), self._slot(body, c), self.zero)
        close(body, [self._walk(body, c, before, keep=False)])
        self._launch()

    def _walk(self, scope: Scope, c: SSAValue, state: SSAValue, keep: bool) -> SSAValue:
        """The state after a chunk; with `keep` the decayed state at each of its tokens goes to `work`."""
        lo, hi = self._tokens(scope, c)
        op, body, t, (before,) = loop(scope, lo, hi, 1, [state], "t")
        decayed = self._decayed(body, t, before)
        if keep:
            place = body.value(body.minus(t, lo, "place"))
            self.state.store(body, decayed, self._work(), [self.view.n, self.view.h, place], self.zero)
        k, v = self._key(body, self.op.k, t), self._value(body, self.op.v, t)
        u = self._written(body, decayed, k, v)
        close(body, [self._after(body, t, decayed, k, u)])
        return op.results[0]

    def _tokens(self, scope: Scope, c: SSAValue) -> tuple[SSAValue, SSAValue]:
        lo = scope.value(scope.plus(self.view.begin, scope.times(c, KEPT, "t0"), "t0"))
        return lo, scope.value(scope.smaller(scope.plus(lo, KEPT, "t1"), self.view.end, "t1"))

    def _work(self) -> SSAValue:
        return self.kernel.take(self.work)

    def _channels(self, scope: Scope, tensor: SSAValue, t: SSAValue, head: Head) -> SSAValue:
        view, source = self.view, self.view.take(tensor)
        limits = {0: scope.value(head.size)} if head.padded else {}
        type_ = tile.tile_type([head.tile], tile.element_of(source))
        index = [view.b, view.head(tensor), t, self.zero]
        return scope.add(tile.LoadOp(source, index, [3], type_, limits), tensor.name_hint or "x").result

    def _key(self, scope: Scope, tensor: SSAValue, t: SSAValue) -> SSAValue:
        return self._channels(scope, tensor, t, self.state.key)

    def _value(self, scope: Scope, tensor: SSAValue, t: SSAValue) -> SSAValue:
        return self._channels(scope, tensor, t, self.state.value)

    def _number(self, scope: Scope, tensor: SSAValue, t: SSAValue) -> SSAValue:
        return self.view.number(scope, self.view.take(tensor), t, tensor.name_hint or "x")

    def _decayed(self, scope: Scope, t: SSAValue, state: SSAValue) -> SSAValue:
        decay = self.op.decay
        if decay is None:
            return state
        terms = Terms(scope, self.state.shape)
        log = terms.take(self._key(scope, decay, t), 0) if self.wide else terms.take(self._number(scope, decay, t))
        factor = terms.exp2(terms.mul(log, terms.real(LOG2_E)))
        return terms.result(terms.mul(terms.take(state, 0, 1), factor))

    def _written(self, scope: Scope, decayed: SSAValue, k: SSAValue, v: SSAValue) -> SSAValue:
        """u = v - S'^T k."""
        read = self._sum(scope, decayed, k, 0)
        terms = Terms(scope, [self.state.value.tile])
        return terms.result(terms.sub(terms.take(v, 0), terms.take(read, 0)))

    def _after(self, scope: Scope, t: SSAValue, decayed: SSAValue, k: SSAValue, u: SSAValue) -> SSAValue:
        """S = S' + beta k u^T."""
        beta = self._number(scope, self.op.beta, t)
        return self._plus(scope, decayed, k, u, beta)

    def _plus(self, scope: Scope, state: SSAValue, k: SSAValue, v: SSAValue, factor: SSAValue) -> SSAValue:
        """state + factor * k v^T."""
        terms = Terms(scope, self.state.shape)
        added = terms.mul(terms.mul(terms.take(k, 0), terms.take(factor)), terms.take(v, 1))
        return terms.result(terms.add(terms.take(state, 0, 1), added))

    def _sum(self, scope: Scope, state: SSAValue, vector: SSAValue, axis: int) -> SSAValue:
        """The sum of state * vector along the axis that the vector has."""
        terms = Terms(scope, self.state.shape)
        product = terms.result(terms.mul(terms.take(state, 0, 1), terms.take(vector, axis)))
        return scope.add(tile.ReduceOp(tile.Reduction.SUM, product, axis), "sum").result

    # --- backward ------------------------------------------------------------------------------------

    def _backward(self) -> None:
        _, scope = self._open("tokens")
        start = self._initial(scope, self.op.d_final, "d_state")
        last = scope.minus(self.chunks, 1, "last")
        op, body, i, (later,) = loop(scope, 0, self.chunks, 1, [start], "i")
        c = body.value(body.minus(last, i, "c"))
        kept = self.state.load(body, self.kernel.take(self.kept), self._slot(body, c), self.zero)
        self._walk(body, c, kept, keep=True)
        lo, hi = self._tokens(body, c)
        inner_op, inner, j, (after,) = loop(body, lo, hi, 1, [later], "j")
        end = inner.minus(inner.plus(lo, hi, "end"), 1, "end")
        t = inner.value(inner.minus(end, j, "t"))
        place = inner.value(inner.minus(t, lo, "place"))
        close(inner, [self._token(inner, t, place, after)])
        close(body, [inner_op.results[0]])
        if self.results.d_initial is not None:
            target, index = self.kernel.take(self.results.d_initial), [self.view.n, self.view.h]
            self.state.store(scope, op.results[0], target, index, self.zero)
        self._launch()

    def _token(self, scope: Scope, t: SSAValue, place: SSAValue, later: SSAValue) -> SSAValue:
        """Writes the gradients of one token; the gradient of the state before it."""
        op, view, state = self.op, self.view, self.state
        scale, beta = view.take(op.scale), self._number(scope, op.beta, t)
        decayed = state.load(scope, self._work(), [view.n, view.h, place], self.zero)
        q, k = self._key(scope, op.q, t), self._key(scope, op.k, t)
        v, d_o = self._value(scope, op.v, t), self._value(scope, op.d_o, t)
        u = self._written(scope, decayed, k, v)
        d_state = self._plus(scope, later, q, d_o, scale)
        reading = self._reading(scope, decayed, d_o, k, u, beta)
        self._scaled(scope, reading, scale, self.results.dq, t, state.key)
        through = self._sum(scope, d_state, k, 0)
        dv = self._scaled(scope, through, beta, self.results.dv, t, state.value)
        terms = Terms(scope, [state.value.tile])
        product = terms.result(terms.mul(terms.take(through, 0), terms.take(u, 0)))
        d_beta = scope.add(tile.ReduceOp(tile.Reduction.SUM, product, 0), "d_beta").result
        scope.add(tile.StoreOp(d_beta, self.kernel.take(self.results.d_beta), [view.b, view.h, t], []))
        written, lost = self._sum(scope, d_state, u, 1), self._sum(scope, decayed, dv, 1)
        terms = Terms(scope, [state.key.tile])
        dk = terms.sub(terms.mul(terms.take(written, 0), terms.take(beta)), terms.take(lost, 0))
        self._store(scope, terms.result(dk), self.results.dk, t, state.key)
        before = self._plus(scope, d_state, k, dv, scope.real(-1.0))
        if self.results.d_decay is not None:
            self._decay_gradient(scope, t, decayed, before)
        return self._decayed(scope, t, before)

    def _reading(
        self, scope: Scope, decayed: SSAValue, d_o: SSAValue, k: SSAValue, u: SSAValue, beta: SSAValue
    ) -> SSAValue:
        """S d_o = S' d_o + beta k (u . d_o): the state after the token need not be made."""
        terms = Terms(scope, [self.state.value.tile])
        product = terms.result(terms.mul(terms.take(u, 0), terms.take(d_o, 0)))
        both = scope.add(tile.ReduceOp(tile.Reduction.SUM, product, 0), "both").result
        read = self._sum(scope, decayed, d_o, 1)
        terms = Terms(scope, [self.state.key.tile])
        own = terms.mul(terms.mul(terms.take(k, 0), terms.take(beta)), terms.take(both))
        return terms.result(terms.add(terms.take(read, 0), own))

    def _scaled(
        self, scope: Scope, vector: SSAValue, factor: SSAValue, target: SSAValue, t: SSAValue, head: Head
    ) -> SSAValue:
        terms = Terms(scope, [head.tile])
        value = terms.result(terms.mul(terms.take(vector, 0), terms.take(factor)))
        self._store(scope, value, target, t, head)
        return value

    def _store(self, scope: Scope, value: SSAValue, target: SSAValue, t: SSAValue, head: Head) -> None:
        view, terms = self.view, Terms(scope, [head.tile])
        stored = terms.result(terms.take(value, 0), tile.element_of(target))
        limits = {0: scope.value(head.size)} if head.padded else {}
        scope.add(tile.StoreOp(stored, self.kernel.take(target), [view.b, view.h, t, self.zero], [3], limits))

    def _decay_gradient(self, scope: Scope, t: SSAValue, decayed: SSAValue, before: SSAValue) -> None:
        view, target = self.view, self.results.d_decay
        assert target is not None
        terms = Terms(scope, self.state.shape)
        product = terms.result(terms.mul(terms.take(decayed, 0, 1), terms.take(before, 0, 1)))
        rows = scope.add(tile.ReduceOp(tile.Reduction.SUM, product, 1), "rows").result
        if self.wide:
            self._store(scope, rows, target, t, self.state.key)
            return
        total = scope.add(tile.ReduceOp(tile.Reduction.SUM, rows, 0), "d_decay").result
        scope.add(tile.StoreOp(total, self.kernel.take(target), [view.b, view.h, t], []))
