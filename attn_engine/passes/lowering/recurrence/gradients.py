"""What a recurrence's backward needs beside sweeps: gradients per token, sums over heads that share a key."""

from __future__ import annotations

from xdsl.dialects import arith
from xdsl.dialects.builtin import f32
from xdsl.ir import SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.kernel import Blocks, Head, Kernel, close, loop
from attn_engine.passes.lowering.recurrence.chunks import staged
from attn_engine.passes.lowering.recurrence.decay import kept_gradient
from attn_engine.passes.lowering.recurrence.setting import Setting, Sizes, State, View, channels_of, padded
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.scope import Scope

STAGES = 2
TOKENS = 2048
"""Tokens per step of the running sum."""
COLUMNS = 32
ROWS = 64
WIDE_ROWS = 64
"""Tokens per step where every channel has a running sum."""


class TokenGradients:
    """One program per head of a sequence, blocks of tokens from the last to the first."""

    def __init__(
        self, setting: Setting, op: attn.TokenGradientsOp, d_decay: SSAValue | None, d_weight: SSAValue | None
    ):
        self.setting, self.op, self.d_decay, self.d_weight = setting, op, d_decay, d_weight

    def run(self) -> None:
        setting, op = self.setting, self.op
        given = op.decay if op.decay is not None else op.weight
        assert given is not None
        sizes = Sizes(setting, [given], op.bounds)
        self.kernel = kernel = Kernel(f"{setting.plan.name}_tokens", setting.plan, Blocks(TOKENS, TOKENS, 8, 1))
        scope = kernel.scope
        h, n = kernel.program_id(1, "h"), kernel.program_id(2, "n")
        self.view = view = View(sizes, kernel, h, n)
        blocks = scope.add(arith.CeilDivSIOp(scope.value(view.length), scope.value(TOKENS)), "blocks").result
        start = self._end_states(scope) if op.states else scope.real(0.0)
        steps, body, c, (later,) = loop(scope, 0, blocks, 1, [start], "c")
        staged(steps, STAGES)
        at = body.minus(body.minus(blocks, 1, "last"), c, "block")
        t0 = body.value(body.plus(view.begin, body.times(at, TOKENS, "t0"), "t0"))
        close(body, [self._block(body, t0, later)])
        one = setting.plan.scope.value(1)
        setting.kernels.append(kernel.launch([one, sizes.heads, sizes.sequences]))

    def _end_states(self, scope: Scope) -> SSAValue:
        """The sum of final * d_final."""
        final, d_final = self.op.states
        key, values = channels_of_state(final)
        pad = self.setting.form.pad
        state = State(Head(key, padded(key, pad)), Head(values, COLUMNS if pad else values))
        total = scope.real(0.0)
        for split in range(state.splits):
            v0 = scope.value(split * state.value.tile)
            parts = [state.load(scope, self.view.take(x), [self.view.n, self.view.h], v0) for x in (final, d_final)]
            terms = Terms(scope, state.shape)
            product = terms.result(terms.mul(terms.take(parts[0], 0, 1), terms.take(parts[1], 0, 1)))
            rows = scope.add(tile.ReduceOp(tile.Reduction.SUM, product, 1), "rows").result
            part = scope.add(tile.ReduceOp(tile.Reduction.SUM, rows, 0), "part").result
            total = scope.add(arith.AddfOp(total, part), "total").result
        return total

    def _rows(self, scope: Scope, value: SSAValue, t0: SSAValue) -> SSAValue:
        """Rows of a sweep, whose splits of the channels are added up here."""
        source, splits = self.view.take(value), self.setting.splits[value]
        terms = Terms(scope, [TOKENS])
        total: SSAValue | None = None
        for split in range(splits):
            index = [scope.value(split), self.view.b, self.view.h, t0]
            type_ = tile.tile_type([TOKENS], f32)
            part = scope.add(tile.LoadOp(source, index, [3], type_, {0: self.view.end}), "rows").result
            taken = terms.take(part, 0)
            total = taken if total is None else terms.add(total, taken)
        assert total is not None
        return terms.result(total)

    def _block(self, scope: Scope, t0: SSAValue, later: SSAValue) -> SSAValue:
        view, op = self.view, self.op
        r = self._rows(scope, op.r, t0)
        if self.d_weight is not None:
            self._store(scope, r, self.d_weight, t0)
        if self.d_decay is None or op.decay is None or op.p is None:
            return later
        p = self._rows(scope, op.p, t0)
        terms = Terms(scope, [TOKENS])
        written = terms.take(r, 0)
        if op.weight is not None:
            weight = view.vector(scope, view.take(op.weight), t0, TOKENS, "w")
            written = terms.mul(written, terms.take(weight, 0))
        change = terms.result(terms.sub(terms.take(p, 0), written))
        sums = scope.add(tile.ScanOp(tile.Reduction.SUM, change, 0, reverse=True), "sums").result
        decay = view.vector(scope, view.take(op.decay), t0, TOKENS, "decay")
        terms = Terms(scope, [TOKENS])
        gradient = terms.add(terms.take(sums, 0), terms.take(later))
        self._store(scope, terms.result(kept_gradient(terms, terms.take(decay, 0), gradient)), self.d_decay, t0)
        total = scope.add(tile.ReduceOp(tile.Reduction.SUM, change, 0), "total").result
        return scope.add(arith.AddfOp(later, total), "later").result

    def _store(self, scope: Scope, value: SSAValue, target: SSAValue, t0: SSAValue) -> None:
        view = self.view
        where = [view.b, view.h, t0]
        scope.add(tile.StoreOp(value, self.kernel.take(target), where, [2], {0: view.end}))


class ChannelGradients:
    """One program per head of a sequence and block of channels, tokens from the last to the first."""

    def __init__(self, setting: Setting, op: attn.ChannelGradientsOp, target: SSAValue):
        self.setting, self.op, self.target = setting, op, target
        size, pad = channels_of(op.decay), setting.form.pad
        self.head = Head(size, min(COLUMNS, padded(size, pad)) if pad else size)

    def run(self) -> None:
        setting, op = self.setting, self.op
        sizes = Sizes(setting, [op.decay], op.bounds)
        kernel = Kernel(f"{setting.plan.name}_channels", setting.plan, Blocks(WIDE_ROWS, WIDE_ROWS, 4, 2))
        scope = kernel.scope
        split, h, n = (kernel.program_id(axis, hint) for axis, hint in enumerate(("split", "h", "n")))
        self.c0 = scope.value(scope.times(split, self.head.tile, "c0"))
        self.view = view = View(sizes, kernel, h, n)
        for operand in (op.q, op.k, op.dq, op.dk):
            view.head(operand)
        blocks = scope.add(arith.CeilDivSIOp(scope.value(view.length), scope.value(WIDE_ROWS)), "blocks").result
        start = self._end_states(scope) if op.states else scope.splat([self.head.tile], 0.0, "later")
        steps, body, c, (later,) = loop(scope, 0, blocks, 1, [start], "c")
        staged(steps, STAGES)
        at = body.minus(body.minus(blocks, 1, "last"), c, "block")
        t0 = body.value(body.plus(view.begin, body.times(at, WIDE_ROWS, "t0"), "t0"))
        close(body, [self._block(body, t0, later)])
        splits = setting.plan.scope.value(-(-self.head.size // self.head.tile))
        setting.kernels.append(kernel.launch([splits, sizes.heads, sizes.sequences]))

    def _end_states(self, scope: Scope) -> SSAValue:
        """The sum over value channels of final * d_final."""
        values = channels_of(self.op.states[0])
        state = State(self.head, Head(values, COLUMNS if self.setting.form.pad else values))
        total = scope.splat([self.head.tile], 0.0, "later")
        for split in range(state.splits):
            v0 = scope.value(split * state.value.tile)
            index = [self.view.n, self.view.h]
            final, d_final = (state.load(scope, self.view.take(x), index, v0, k0=self.c0) for x in self.op.states)
            terms = Terms(scope, state.shape)
            product = terms.result(terms.mul(terms.take(final, 0, 1), terms.take(d_final, 0, 1)))
            part = scope.add(tile.ReduceOp(tile.Reduction.SUM, product, 1), "part").result
            terms = Terms(scope, [self.head.tile])
            total = terms.result(terms.add(terms.take(total, 0), terms.take(part, 0)))
        return total

    def _block(self, scope: Scope, t0: SSAValue, later: SSAValue) -> SSAValue:
        op, view, shape = self.op, self.view, [WIDE_ROWS, self.head.tile]
        terms = Terms(scope, shape)
        q, dq, k, dk = (
            terms.take(view.rows(scope, x, t0, WIDE_ROWS, self.head, self.c0), 0, 1) for x in (op.q, op.dq, op.k, op.dk)
        )
        change = terms.result(terms.sub(terms.mul(q, dq), terms.mul(k, dk)))
        sums = scope.add(tile.ScanOp(tile.Reduction.SUM, change, 0, reverse=True), "sums").result
        decay = view.rows(scope, op.decay, t0, WIDE_ROWS, self.head, self.c0)
        terms = Terms(scope, shape)
        gradient = terms.add(terms.take(sums, 0, 1), terms.take(later, 1))
        gradient = terms.result(kept_gradient(terms, terms.take(decay, 0, 1), gradient))
        view.store_rows(scope, gradient, self.target, t0, self.head, self.c0)
        total = scope.add(tile.ReduceOp(tile.Reduction.SUM, change, 0), "total").result
        terms = Terms(scope, [self.head.tile])
        return terms.result(terms.add(terms.take(later, 0), terms.take(total, 0)))


def channels_of_state(state: SSAValue) -> tuple[int, int]:
    """Key and value channels of a tensor of states."""
    return state.type.get_shape()[2], channels_of(state)  # type: ignore[union-attr]


def sum_heads(setting: Setting, value: SSAValue, like: SSAValue, target: SSAValue) -> None:
    """One program per block of tokens of a shared head: adds the heads of its group in order."""
    plan = setting.plan
    heads, shared = setting.dim(value, 1, "heads"), setting.dim(like, 1, "shared")
    batch, tokens = setting.dim(like, 0, "batch"), setting.dim(like, 2, "tokens")
    some = plan.scope.value(plan.scope.larger(shared, 1, "some"))
    group = plan.scope.add(arith.DivSIOp(heads, some), "group").result
    kernel = Kernel(f"{plan.name}_{target.name_hint}", plan, Blocks(ROWS, ROWS, 4, 2))
    scope = kernel.scope
    block, h, b = (kernel.program_id(axis, hint) for axis, hint in enumerate(("block", "h", "b")))
    size = channels_of(like)
    head = Head(size, padded(size, setting.form.pad))
    t0 = scope.value(scope.times(block, ROWS, "t0"))
    limits = {0: kernel.take(tokens)} | ({1: scope.value(size)} if head.padded else {})
    source, element = kernel.take(setting.of(value)), tile.element_of(target)
    members = kernel.take(group)
    zero = scope.splat([ROWS, head.tile], 0.0, "sum")
    op, body, g, (total,) = loop(scope, 0, members, 1, [zero], "g")
    own = body.value(body.plus(body.add(arith.MuliOp(h, members), "first").result, g, "own"))
    type_ = tile.tile_type([ROWS, head.tile], tile.element_of(source))
    part = body.add(tile.LoadOp(source, [b, own, t0, body.value(0)], [2, 3], type_, limits), "part").result
    terms = Terms(body, [ROWS, head.tile])
    close(body, [terms.result(terms.add(terms.take(total, 0, 1), terms.take(part, 0, 1)))])
    terms = Terms(scope, [ROWS, head.tile])
    result = terms.result(terms.take(op.results[0], 0, 1), element)
    scope.add(tile.StoreOp(result, kernel.take(target), [b, h, t0, scope.value(0)], [2, 3], limits))
    setting.kernels.append(kernel.launch([setting.blocks(tokens, ROWS, "blocks"), shared, batch]))
