"""What a recurrence's backward needs beside sweeps: gradients per token, sums over heads that share a key."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import Attribute, Block, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.kernel import Head, close, loop
from attn_engine.passes.lowering.recurrence.chunks import each_chunk, slot_of, staged
from attn_engine.passes.lowering.recurrence.decay import LOG2_E, kept_gradient
from attn_engine.passes.lowering.recurrence.setting import Setting, Sizes, State, View, channels_of, padded
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.tiles import Tiles
from attn_engine.passes.lowering.scope import Scope

STAGES = 2
TOKENS = 256
"""Tokens per program where nothing says how long a segment is."""
COLUMNS = 32
WIDE_ROWS = 64
"""Tokens per step where every channel has a running sum."""
TINY = 1e-30
"""What is added up is nowhere taken for less where errors are parts of it."""
ROUNDED = {"bf16": -10.0, "f16": -13.0, "f32": -30.0}
"""By the type of states in products: exp2 of this is less of a state than its rounding changes."""


class Segments:
    """What comes after a segment: the states there times their gradients, as sweeps met them or at the very end."""

    def __init__(self, setting: Setting, op: attn.TokenGradientsOp | attn.ChannelGradientsOp):
        self.setting, self.op = setting, op
        self.size = TOKENS if op.segment is None else op.segment.value.data

    def after(
        self, scope: Scope, view: View, t0: SSAValue, head: Head | None, c0: SSAValue, type_: Attribute
    ) -> SSAValue:
        """A number, or with `head` one per channel from `c0` on."""
        begins = scope.value(scope.plus(t0, self.size, "begins"))
        more = scope.add(arith.CmpiOp(begins, scope.value(view.end), "slt"), "more").result
        met, end = Scope(Block()), Scope(Block())
        met.add(scf.YieldOp(self._met(met, view, begins, head, c0)))
        end.add(scf.YieldOp(self._end_states(end, view, head, c0)))
        return scope.add(scf.IfOp(more, [type_], [met.block], [end.block]), "after").results[0]

    def before(self, scope: Scope, view: View, t0: SSAValue) -> tuple[SSAValue, SSAValue]:
        """What crosses the start of a segment, and 1 if that is known: an initial state's gradient is not at hand here."""
        inside = scope.add(arith.CmpiOp(t0, scope.value(view.begin), "sgt"), "inside").result
        met, none = Scope(Block()), Scope(Block())
        met.add(scf.YieldOp(self._met(met, view, t0, None, scope.value(0)), met.real(1.0)))
        fresh = isinstance(self.op, attn.TokenGradientsOp) and self.op.fresh is not None
        none.add(scf.YieldOp(none.real(0.0), none.real(1.0 if fresh else 0.0)))
        op = scope.add(scf.IfOp(inside, [f32, f32], [met.block], [none.block]))
        for result, hint in zip(op.results, ("before", "known"), strict=True):
            result.name_hint = hint
        return op.results[0], op.results[1]

    def _met(self, scope: Scope, view: View, begins: SSAValue, head: Head | None, c0: SSAValue) -> SSAValue:
        assert self.op.ends is not None
        source = view.take(self.op.ends)
        place = [view.b, view.h, slot_of(view, scope, begins, self.size)]
        if head is not None:
            index = [scope.value(0), *place, c0]
            return scope.add(tile.LoadOp(source, index, [4], TensorType(f32, [head.tile])), "met").result
        total = scope.real(0.0)
        for split in range(self.setting.splits[self.op.ends]):
            part = scope.add(tile.LoadOp(source, [scope.value(split), *place], [], f32), "met").result
            total = scope.add(arith.AddfOp(total, part), "met").result
        return total

    def _end_states(self, scope: Scope, view: View, head: Head | None, c0: SSAValue) -> SSAValue:
        """The sum of final * d_final, over the value channels or over all."""
        pad, total = self.setting.form.pad, scope.real(0.0)
        if not self.op.states:
            return total if head is None else scope.splat([head.tile], 0.0, "none")
        key, values = channels_of_state(self.op.states[0])
        state = State(head or Head(key, padded(key, pad)), Head(values, COLUMNS if pad else values))
        sums = scope.splat([state.key.tile], 0.0, "sums")
        for split in range(state.splits):
            v0 = scope.value(split * state.value.tile)
            final, d_final = (state.load(scope, view.take(x), [view.n, view.h], v0, k0=c0) for x in self.op.states)
            terms = Terms(scope, state.shape)
            product = terms.result(terms.mul(terms.take(final, 0, 1), terms.take(d_final, 0, 1)))
            part = scope.add(tile.ReduceOp(tile.Reduction.SUM, product, 1), "part").result
            terms = Terms(scope, [state.key.tile])
            sums = terms.result(terms.add(terms.take(sums, 0), terms.take(part, 0)))
        return sums if head is not None else scope.add(tile.ReduceOp(tile.Reduction.SUM, sums, 0), "total").result


@dataclass
class _Part:
    """A chunk of a segment: sums of its tokens, and what crosses its end."""

    decay: SSAValue
    sums: SSAValue
    sizes: SSAValue
    total: SSAValue
    size: SSAValue
    own: SSAValue | None = None
    """What crosses its end if it forgets all that is older, as its own tokens give it."""
    forgets: SSAValue | None = None
    end: SSAValue | None = None
    after: SSAValue | None = None
    """The sizes added up from where the sum was known last to its end."""


class TokenGradients:
    """One program per segment of a head's tokens.

    A sum over later tokens cancels but for what a token's own decay lets through. What sweeps round differently, the
    states between chunks, remains in it, and adds up where sums of such gradients over tokens are wanted. So it starts
    anew at each chunk that forgets all but what half types round off: what passes its end then comes of its own tokens.
    In such a chunk sums err at its first tokens only. Elsewhere, what a sum is off by where it is known again is taken back on
    the way, in parts as large as what was added up.
    """

    def __init__(
        self, setting: Setting, op: attn.TokenGradientsOp, d_decay: SSAValue | None, d_weight: SSAValue | None
    ):
        self.setting, self.op, self.d_decay, self.d_weight = setting, op, d_decay, d_weight
        self.segments = Segments(setting, op)
        found = None if op.ends is None else setting.crossings.get(op.ends)
        self.crossings, element = (None, f32) if found is None else found
        self.forgotten = ROUNDED[str(element)] / LOG2_E
        self.count = self.segments.size if self.crossings is None else setting.form.chunk

    def run(self) -> None:
        given = self.op.decay if self.op.decay is not None else self.op.d_weight
        assert given is not None
        sizes = Sizes(self.setting, [given], self.op.bounds)
        warps = 4 if self.crossings is None else 1
        each_chunk(self.setting, sizes, "tokens", warps, [], self._body, chunk=self.segments.size)

    def _rows(self, scope: Scope, view: View, value: SSAValue, t0: SSAValue, splits: int) -> SSAValue:
        """Rows of a sweep, whose splits of the channels are added up here."""
        terms = Terms(scope, [self.count])
        total: SSAValue | None = None
        for split in range(splits):
            index = [scope.value(split), view.b, view.h, t0]
            type_ = tile.tile_type([self.count], f32)
            part = scope.add(tile.LoadOp(value, index, [3], type_, {0: view.end}), "rows").result
            taken = terms.take(part, 0)
            total = taken if total is None else terms.add(total, taken)
        assert total is not None
        return terms.result(total)

    def _body(self, view: View, scope: Scope, t0: SSAValue, split: SSAValue) -> None:
        op, splits = self.op, self.setting.splits
        starts = [scope.value(scope.plus(t0, at, "t")) for at in range(0, self.segments.size, self.count)]
        if self.d_weight is not None and op.r is not None:
            for start in starts:
                self._store(
                    scope, view, self._rows(scope, view, view.take(op.r), start, splits[op.r]), self.d_weight, start
                )
        if self.d_decay is None or op.decay is None or op.p is None or op.n is None:
            return
        parts = [self._part(scope, view, start) for start in starts]
        after = self.segments.after(scope, view, t0, None, scope.value(0), f32)
        self._ends(scope, parts, after)
        before = None if op.ends is None else self.segments.before(scope, view, t0)
        off, size = scope.real(0.0), scope.real(TINY)
        for number, (part, start) in enumerate(zip(parts, starts, strict=True)):
            off, size = self._off(scope, parts, number, before, (off, size))
            self._store(scope, view, self._gradient(scope, part, off, size), self.d_decay, start)

    def _part(self, scope: Scope, view: View, t0: SSAValue) -> _Part:
        op, tiles, shape = self.op, Tiles(scope, tile.Precision.IEEE), [self.count]
        assert op.p is not None and op.n is not None and op.decay is not None
        p, n = (self._rows(scope, view, view.take(x), t0, self.setting.splits[x]) for x in (op.p, op.n))
        change = tiles.map(shape, lambda t: t.sub(t.take(p, 0), t.take(n, 0)))
        size = tiles.map(shape, lambda t: t.add(t.size(t.take(p, 0)), t.size(t.take(n, 0))))
        decay = view.vector(scope, view.take(op.decay), t0, self.count, "decay")
        sums, sizes = (tiles.running(x, reverse=True) for x in (change, size))
        part = _Part(decay, sums, sizes, tiles.sum(change, 0), tiles.sum(size, 0))
        if self.crossings is not None and op.ends is not None:
            own = self._rows(scope, view, view.kernel.take(self.crossings), t0, self.setting.splits[op.ends])
            part.own, kept = tiles.sum(own, 0, "own"), tiles.sum(decay, 0, "kept")
            part.forgets = scope.add(arith.CmpfOp(kept, scope.real(self.forgotten), "ole"), "forgets").result
        return part

    def _ends(self, scope: Scope, parts: list[_Part], after: SSAValue) -> None:
        """What crosses the end of each chunk, from the last one on."""
        end, size = after, scope.real(0.0)
        for part in reversed(parts):
            if part.forgets is not None and part.own is not None:
                end = scope.add(arith.SelectOp(part.forgets, part.own, end), "end").result
                size = scope.add(arith.SelectOp(part.forgets, scope.real(0.0), size), "size").result
            part.end, part.after = end, size
            end = scope.add(arith.AddfOp(end, part.total), "start").result
            size = scope.add(arith.AddfOp(size, part.size), "size").result

    def _off(
        self,
        scope: Scope,
        parts: list[_Part],
        number: int,
        before: tuple[SSAValue, SSAValue] | None,
        same: tuple[SSAValue, SSAValue],
    ) -> tuple[SSAValue, SSAValue]:
        """What sums are off by where they are known at or before a chunk's start, and the sizes added up until there."""
        part, known = parts[number], before if number == 0 else None
        assert part.end is not None and part.after is not None
        if number:
            sooner = parts[number - 1]
            if sooner.forgets is None or sooner.own is None:
                return same
            right, condition = sooner.own, sooner.forgets
        elif known is None:
            return same
        else:
            right, condition = known[0], scope.add(arith.CmpfOp(known[1], scope.real(0.0), "ogt")).result
        start = scope.add(arith.AddfOp(part.end, part.total), "start").result
        found = scope.add(arith.SubfOp(start, right), "off").result
        size = scope.add(arith.AddfOp(part.after, part.size), "size").result
        pairs = zip((found, size), same, strict=True)
        off, size = (scope.add(arith.SelectOp(condition, new, old), "off").result for new, old in pairs)
        return off, size

    def _gradient(self, scope: Scope, part: _Part, off: SSAValue, size: SSAValue) -> SSAValue:
        end, after = part.end, part.after
        assert end is not None and after is not None
        if part.forgets is not None:
            off = scope.add(arith.SelectOp(part.forgets, scope.real(0.0), off), "off").result

        def code(t: Terms) -> SSAValue:
            share = t.div(t.add(t.take(part.sizes, 0), t.take(after)), t.at_least(t.take(size), TINY))
            found = t.sub(t.add(t.take(part.sums, 0), t.take(end)), t.mul(t.take(off), share))
            return kept_gradient(t, t.take(part.decay, 0), found)

        return Tiles(scope, tile.Precision.IEEE).map([self.count], code)

    def _store(self, scope: Scope, view: View, value: SSAValue, target: SSAValue, t0: SSAValue) -> None:
        where = [view.b, view.h, t0]
        scope.add(tile.StoreOp(value, view.kernel.take(target), where, [2], {0: view.end}))


class ChannelGradients:
    """One program per segment of a head's tokens and block of channels, blocks of tokens from the last to the first."""

    def __init__(self, setting: Setting, op: attn.ChannelGradientsOp, target: SSAValue):
        self.setting, self.op, self.target = setting, op, target
        size, pad = channels_of(op.decay), setting.form.pad
        self.head = Head(size, min(COLUMNS, padded(size, pad)) if pad else size)
        self.segments = Segments(setting, op)
        self.count = min(WIDE_ROWS, self.segments.size)

    def run(self) -> None:
        op, sizes = self.op, Sizes(self.setting, [self.op.decay], self.op.bounds)
        operands = [op.q, op.k, op.dq, op.dk]
        splits, size = -(-self.head.size // self.head.tile), self.segments.size
        each_chunk(self.setting, sizes, "channels", 4, operands, self._body, splits, chunk=size)

    def _body(self, view: View, scope: Scope, t0: SSAValue, split: SSAValue) -> None:
        c0 = scope.value(scope.times(split, self.head.tile, "c0"))
        start = self.segments.after(scope, view, t0, self.head, c0, tile.tile_type([self.head.tile], f32))
        blocks = self.segments.size // self.count
        steps, body, c, (later,) = loop(scope, 0, blocks, 1, [start], "c")
        staged(steps, STAGES)
        at = body.minus(blocks - 1, c, "block")
        close(
            body, [self._block(body, view, body.value(body.plus(t0, body.times(at, self.count, "t"), "t")), c0, later)]
        )

    def _block(self, scope: Scope, view: View, t0: SSAValue, c0: SSAValue, later: SSAValue) -> SSAValue:
        op, count, shape = self.op, self.count, [self.count, self.head.tile]
        terms = Terms(scope, shape)
        q, dq, k, dk = (
            terms.take(view.rows(scope, x, t0, count, self.head, c0), 0, 1) for x in (op.q, op.dq, op.k, op.dk)
        )
        change = terms.result(terms.sub(terms.mul(q, dq), terms.mul(k, dk)))
        sums = scope.add(tile.ScanOp(tile.Reduction.SUM, change, 0, reverse=True), "sums").result
        decay = view.rows(scope, op.decay, t0, count, self.head, c0)
        terms = Terms(scope, shape)
        gradient = terms.add(terms.take(sums, 0, 1), terms.take(later, 1))
        gradient = terms.result(kept_gradient(terms, terms.take(decay, 0, 1), gradient))
        view.store_rows(scope, gradient, self.target, t0, self.head, c0)
        total = scope.add(tile.ReduceOp(tile.Reduction.SUM, change, 0), "total").result
        terms = Terms(scope, [self.head.tile])
        return terms.result(terms.add(terms.take(later, 0), terms.take(total, 0)))


def channels_of_state(state: SSAValue) -> tuple[int, int]:
    """Key and value channels of a tensor of states."""
    assert isinstance(state.type, TensorType)
    return state.type.get_shape()[2], channels_of(state)
