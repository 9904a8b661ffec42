"""One sweep over the chunks of every sequence, the state in registers.

With gc the summed log decays of a chunk and G their total, a chunk does

```
o_i = exp(gc_i) q_i S + sum_{j <= i} exp(gc_i - gc_j) (q_i k_j) v_j,   S = exp(G) S + sum_j exp(G - gc_j) k_j v_j^T
```

and in reverse the chunks come from the last to the first, j >= i, and exp(gc) and exp(G - gc) change places. Every
exponent is a sum of log decays that are at most 0.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, ClassVar

from xdsl.dialects import arith
from xdsl.dialects.builtin import UnitAttr, f32
from xdsl.ir import Attribute, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_block import EARLY_COPIES
from attn_engine.passes.lowering.kernel import Blocks, Head, Kernel, close, loop
from attn_engine.passes.lowering.recurrence.anchors import Visitor
from attn_engine.passes.lowering.recurrence.chain import Chain
from attn_engine.passes.lowering.recurrence.chunks import staged
from attn_engine.passes.lowering.recurrence.decay import Rows, rows_of
from attn_engine.passes.lowering.recurrence.dots import Dots
from attn_engine.passes.lowering.recurrence.fade import Fade
from attn_engine.passes.lowering.recurrence.pieces import Pieces, chunks_of
from attn_engine.passes.lowering.recurrence.setting import Form, Setting, Sizes, State, View, channels_of, padded
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.recurrence.walk import Walk
from attn_engine.passes.lowering.scope import Index, Scope

if TYPE_CHECKING:
    from attn_engine.passes.lowering.recurrence.channels import Prepared
    from attn_engine.passes.lowering.recurrence.delta_adjoint import Kept
    from attn_engine.passes.lowering.recurrence.delta_chunks import Solved
    from attn_engine.passes.lowering.recurrence.levels import Gates


class Sweep:
    """The kernels of a sweep: one, or three where a sequence is cut in pieces that run side by side."""

    def __init__(self, setting: Setting, walk: Walk, chunk: type[Chunk] | None = None, form: Form | None = None):
        """`form` is the setting's, but for what a schedule says of this sweep."""
        self.setting, self.walk, self.chunk = setting, walk, chunk or Chunk
        self.gates: Gates | None = None
        self.prepared: Prepared | None = None
        self.solved: Solved | None = None
        self.kept: Kept | None = None
        self.chain: Chain | None = None
        self.form = form = form or setting.form
        self.sizes = Sizes(setting, [walk.q, walk.k, walk.v], walk.bounds)
        self.key = Head(channels_of(walk.q), padded(channels_of(walk.q), form.pad))
        values = channels_of(walk.v)
        self.value = Head(values, min(form.value_block, padded(values, form.pad)) if form.pad else values)
        self.state = State(self.key, self.value, form.turned and self.chunk.turns)
        self.element = tile.element_of(walk.v)
        self.precision = setting.precision(self.element)
        self.rows_read = self.chunk.prepare(self)

    def run(self, rows: SSAValue | None) -> None:
        """`rows` [splits, B, H, T] get the sums of dot * o."""
        self.rows, pieces = rows, None
        self.chain = None
        if self.form.chained:
            self.chain = Chain(self)
        elif self.form.pieces > 1:
            pieces = Pieces(self)
            self._kernel("states", None, pieces)
            pieces.passed()
        self._kernel("sweep", self.walk, pieces)
        self.chunk.finish(self)

    def _kernel(self, suffix: str, outputs: Walk | None, pieces: Pieces | None) -> None:
        """With `outputs` results are written; without, what each piece adds to the state."""
        plan, form, walk = self.setting.plan, self.form, self.walk
        kernel = Kernel(f"{walk.name}_{suffix}", plan, self._blocks())
        scope = kernel.scope
        first, h, n = (kernel.program_id(axis, hint) for axis, hint in enumerate(("split", "h", "n")))
        split, piece = self._place(scope, first)
        if self.chain is not None:
            piece, n = self.chain.place(scope, n, kernel.take(self.sizes.sequences), walk.reverse)
        self.view = view = View(self.sizes, kernel, h, n)
        self.v0 = scope.value(scope.times(split, self.value.tile, "v0"))
        self.split = scope.value(split)
        own = scope.add(arith.CeilDivSIOp(scope.value(view.length), scope.value(form.chunk)), "chunks").result
        lo, hi = (0, own) if form.pieces == 1 else chunks_of(scope, own, piece, form.pieces)
        for operand in (walk.q, walk.k, walk.v, walk.dot):
            if operand is not None:
                view.head(operand)
        state = self._start(scope, outputs, pieces, piece)
        carried = [state] if outputs is not None else [state, self._no_decay(scope)]
        op, body, c, inside = loop(scope, lo, hi, 1, carried, "c")
        if view.whole_blocks:
            op.attributes[EARLY_COPIES] = UnitAttr()
        if walk.dot is not None and outputs is not None:
            staged(op, form.num_stages)
        last = body.minus(body.plus(lo, hi, "last"), 1, "last") if walk.reverse else 0
        at = body.minus(last, c, "c") if walk.reverse else c
        t0 = body.value(body.plus(view.begin, body.times(at, form.chunk, "t0"), "t0"))
        if walk.anchors is not None and outputs is not None:
            walk.anchors.visit(self._visitor(view), body, view, body.value(at), own, inside[0])
        close(body, self.chunk(self, body, t0, outputs).run(inside))
        if pieces is not None and outputs is None:
            pieces.store(scope, view, (op.results[0], op.results[1]), piece, self.split, self.v0)
        elif self.chain is not None:
            self.chain.finish(self, scope, view, scope.value(piece), op.results[0])
        elif pieces is None and walk.final is not None:
            self.state.store(scope, op.results[0], kernel.take(walk.final), [n, h], self.v0)
        sequences = self.sizes.sequences if self.chain is None else self.chain.programs
        programs = plan.scope.value(self.state.splits * (form.pieces if self.chain is None else 1))
        self.setting.kernels.append(kernel.launch([programs, self.sizes.heads, sequences]))

    def _visitor(self, view: View) -> Visitor:
        scale = view.kernel.take(self.setting.of(self.walk.scale)) if self.walk.scale_results else None
        return Visitor(self.form.chunk, self.walk.reverse, self.state, self.split, self.v0, scale)

    def _no_decay(self, scope: Scope) -> SSAValue:
        """The sum of no log decays."""
        if self.chunk.decayed is None:
            return scope.real(0.0)
        return scope.splat([self.state.shape[self.chunk.decayed]], 0.0, "total")

    def _blocks(self) -> Blocks:
        form = self.form
        return Blocks(form.chunk, form.chunk, form.num_warps, form.num_stages)

    def _place(self, scope: Scope, first: SSAValue) -> tuple[Index, Index]:
        """Splits of one state are neighbours, so that the second finds q and k in the cache."""
        splits, pieces = self.state.splits, self.form.pieces
        if self.chain is not None:
            return (0 if splits == 1 else first), 0
        if splits == 1:
            return 0, first
        if pieces == 1:
            return first, 0
        count = scope.value(splits)
        split = scope.add(arith.RemSIOp(first, count), "split").result
        return split, scope.add(arith.DivSIOp(first, count), "piece").result

    def _start(self, scope: Scope, outputs: Walk | None, pieces: Pieces | None, piece: Index) -> SSAValue:
        view, walk = self.view, self.walk
        if pieces is not None and outputs is not None:
            return pieces.load(scope, view, piece, self.v0)
        state = scope.splat(self.state.shape, 0.0, "state")
        if pieces is None and walk.initial is not None:
            loaded = self.state.load(scope, view.take(walk.initial), [view.n, view.h], self.v0)
            terms = Terms(scope, self.state.shape)
            state = terms.result(terms.take(loaded, 0, 1))
        return state if self.chain is None else self.chain.start(self, scope, view, scope.value(piece), state)


class Chunk:
    """One chunk of a sweep, at the end of a loop body.

    With a state that is turned all products are: results and weights stand as [channels, tokens] and [key's token,
    query's token], and the state is the left operand of its product, which needs no shared memory there.
    """

    decayed: ClassVar[int | None] = None
    """The axis of a state along which decays differ."""
    turns: ClassVar[bool] = True
    multiplies: ClassVar[bool] = True
    """Whether the sweep itself has the products of a chunk's tokens with each other."""
    fades_values: ClassVar[bool] = True
    """Whether values are what decays on the way to the end of the chunk; else keys have done so."""

    @classmethod
    def prepare(cls, sweep: Sweep) -> Rows:
        """What the kernels of a sweep read per token, made before them."""
        return rows_of(sweep.setting, sweep.sizes, sweep.walk.decay, sweep.walk.weight)

    @classmethod
    def finish(cls, sweep: Sweep) -> None:
        """Adds kernels that complete the results."""

    def __init__(self, sweep: Sweep, scope: Scope, t0: SSAValue, outputs: Walk | None):
        self.sweep, self.scope, self.t0, self.outputs = sweep, scope, t0, outputs
        self.walk, self.view, self.size = sweep.walk, sweep.view, sweep.form.chunk
        self.turned = sweep.state.turned
        self.tokens = 1 if self.turned else 0
        """The axis of tokens in a tile of values."""

    def run(self, inside: list[SSAValue]) -> list[SSAValue]:
        """The state after the chunk, and without outputs the decay of all chunks so far."""
        sweep, scope = self.sweep, self.scope
        rows = sweep.rows_read
        self.total: SSAValue | None = None
        dot = self.walk.dot
        self.dots = None if dot is None or self.outputs is None else Dots(self, dot, self._values())
        self._operands()
        self._fades()
        self.weight = None if rows.weight is None else self.view.own_vector(scope, rows.weight, self.t0, self.size, "w")
        self.v = self._values_written()
        if self.outputs is not None:
            # The products of tokens come first and the results last: fewest registers are alive then.
            o = self._outputs(inside[0], self.outputs)
            state = self._next(inside[0])
            self._store(self.outputs, o)
            return [state]
        total = inside[1]
        if self.total is not None:
            together = Terms(scope, tile.shape_of(total))
            axes = range(len(tile.shape_of(total)))
            total = together.result(together.add(together.take(total, *axes), together.take(self.total, *axes)))
        return [self._next(inside[0]), total]

    def _operands(self) -> None:
        """The tiles of keys and queries, and what needs neither decays nor values, which arrive meanwhile."""
        sweep, scope, view, walk, size = self.sweep, self.scope, self.view, self.walk, self.size
        self.k = view.rows(scope, walk.k, self.t0, size, sweep.key, scope.value(0))
        if self.outputs is not None and self.multiplies:
            self._products(self.outputs)

    def _values_written(self) -> SSAValue:
        """What is written beside keys, a tile [C, columns]."""
        sweep = self.sweep
        return self.view.rows(self.scope, self.walk.v, self.t0, self.size, sweep.value, sweep.v0)

    def _fades(self) -> None:
        """What decays by as a whole, and `total`, the log decay of the chunk."""
        self.fade = Fade.load(self.view, self.scope, self.sweep.rows_read, self.t0, self.size)
        if self.fade is not None:
            self.total = self.fade.total

    def _values(self) -> tuple[int, int]:
        """The shape of a tile of values."""
        tokens, channels = self.size, self.sweep.value.tile
        return (channels, tokens) if self.turned else (tokens, channels)

    def _transposed(self, value: SSAValue, hint: str) -> SSAValue:
        return self.scope.add(tile.TransposeOp(value), hint).result

    def _ordered(self, tokens: SSAValue, other: SSAValue, acc: SSAValue, hint: str) -> SSAValue:
        """tokens @ other, or its transpose of operands that are turned already."""
        return self._dot(other, tokens, acc, hint) if self.turned else self._dot(tokens, other, acc, hint)

    def _products(self, walk: Walk) -> None:
        """Those of queries and keys, which need neither decays nor values."""
        scope, size = self.scope, self.size
        q = self.view.rows(scope, walk.q, self.t0, size, self.sweep.key, scope.value(0))
        self.q = self._transposed(q, "qt") if self.turned else q
        k = self.k if self.turned else self._transposed(self.k, "kt")
        self.s = self._ordered(self.q, k, scope.splat([size, size], 0.0, "zero"), "s")

    def _outputs(self, state: SSAValue, walk: Walk) -> SSAValue:
        sweep, scope = self.sweep, self.scope
        if self.turned:
            self.vt = self._transposed(self.v, "vt")
        values, weights = self._values(), self._weights()
        terms = Terms(scope, sweep.state.shape)
        held = terms.result(terms.take(state, 0, 1), sweep.element)
        o = self._ordered(self.q, held, scope.splat(values, 0.0, "zero"), "o")
        terms = Terms(scope, values)
        if self.fade is not None or (walk.reverse and walk.weighs and self.weight is not None):
            o = terms.result(terms.mul(terms.take(o, 0, 1), self.decayed_here(terms)))
        if self.dots is not None and walk.anchors is not None and walk.anchors.crossings is not None:
            self.dots.crossing(o, walk.anchors.crossings)
        o = self._ordered(weights, self.vt if self.turned else self.v, o, "o")
        return self._scaled(o)

    def decayed_here(self, terms: Terms) -> SSAValue:
        """How much of what comes from beyond the chunk a token gets, or gives where that is the other sweep."""
        factors = [] if self.fade is None else [self._from_state(terms)]
        if self.walk.reverse and self.walk.weighs and self.weight is not None:
            factors.append(terms.take(self.weight, self.tokens))
        if self.scales_tokens and self.walk.scale_results:
            factors.append(terms.take(self.scale()))
        return reduce(terms.mul, factors)

    def _scaled(self, o: SSAValue) -> SSAValue:
        if self.scales_tokens:
            return o
        terms = Terms(self.scope, self._values())
        return terms.result(terms.mul(terms.take(o, 0, 1), terms.take(self.scale())))

    def _from_state(self, terms: Terms) -> SSAValue:
        """How much of the state before the chunk a token sees."""
        return self._decayed(terms, to_end=self.walk.reverse)

    def _decayed(self, terms: Terms, to_end: bool, tokens: int | None = None) -> SSAValue:
        """exp of the decay from the start of the chunk to a token, or from a token to the end; tokens along any axis."""
        assert self.fade is not None
        tokens = self.tokens if tokens is None else tokens
        return self.fade.to_end(terms, tokens) if to_end else self.fade.from_start(terms, tokens)

    def _weights(self) -> SSAValue:
        """The weights of the chunk's tokens for each other, [C, C]."""
        scope, size, walk = self.scope, self.size, self.walk
        place = scope.add(tile.RangeOp(scope.value(0), size), "place").result
        query, key = self.tokens, 1 - self.tokens
        later, sooner = (key, query) if walk.reverse else (query, key)
        # Turned weights go to memory: in 16 bits before, they would be paired, taken apart for `parted` and paired again.
        # Others stay in registers, of which they take fewest if they are in 16 bits early.
        element = self.sweep.element
        early = f32 if self.turned and self.fade is not None else element
        terms = Terms(scope, [size, size])
        seen, p = terms.not_before(terms.take(place, later), terms.take(place, sooner)), terms.take(self.s, 0, 1)
        p = terms.where(seen, p) if self.turned else p
        if self.fade is not None:
            p = terms.mul(p, self.fade.between(terms, later, sooner))
        factors: list[SSAValue] = []
        if walk.weighs and self.weight is not None:
            factors.append(terms.take(self.weight, sooner))
        if self.scales_tokens:
            factors.append(terms.take(self.scale()))
        p = terms.mul(p, reduce(terms.mul, factors)) if factors else p
        weights = terms.result(p if self.turned else terms.where(seen, p), early)
        weights = weights if self.fade is None else self.fade.parted(scope, weights)
        terms = Terms(scope, [size, size])
        return weights if early == element else terms.result(terms.take(weights, 0, 1), element)

    @property
    def scales_tokens(self) -> bool:
        """Whether the scale is in the products of tokens and in what decays on the way from the state: so it must where states
        have it, and it costs nothing where tokens have factors in both."""
        return self.walk.scale_weights or (self.fade is not None and self.walk.weighs and self.weight is not None)

    def scale(self) -> SSAValue:
        return self.view.kernel.take(self.sweep.setting.of(self.walk.scale))

    def _store(self, walk: Walk, o: SSAValue) -> None:
        sweep, scope, view = self.sweep, self.scope, self.view
        values = self._values()
        if sweep.rows is not None and self.dots is not None:
            self.dots.rows(o, sweep.rows)
        terms = Terms(scope, values)
        result = terms.take(o, 0, 1)
        if not walk.weighs and self.weight is not None:
            result = terms.mul(result, terms.take(self.weight, self.tokens))
        if walk.sizes is None:
            stored = terms.result(result, tile.element_of(walk.o))
        else:
            where = [sweep.split, view.b, view.h, self.t0]
            stored = walk.sizes.divided(scope, view, terms.result(result), self.tokens, where)
        if self.turned:
            stored = self._transposed(stored, "stored")
        view.store_rows(scope, stored, walk.o, self.t0, sweep.value, sweep.v0)

    def _next(self, state: SSAValue) -> SSAValue:
        """The state after the chunk."""
        state = self._kept(state)
        if self.turned and self.outputs is None:
            self.vt = self._transposed(self.v, "vt")
        if self.turned:
            return self._dot(self._written(self.vt, 1), self.k, state, "state")
        k = self._transposed(self.k, "kt")
        if self._narrow_keys():
            return self._dot(self._written(k, 1), self.v, state, "state")
        return self._dot(k, self._written(self.v, 0), state, "state")

    def _narrow_keys(self) -> bool:
        """Whether keys rather than values take the factors of their tokens: less to multiply, and a left operand needs
        no shared memory."""
        alike = self.fades_values and self.decayed is None
        return alike and not self.turned and self.sweep.key.tile < self.sweep.value.tile

    def _kept(self, state: SSAValue) -> SSAValue:
        """What is left of the state at the end of the chunk."""
        if self.total is None:
            return state
        axes = [] if self.decayed is None else [self.decayed]
        terms = Terms(self.scope, self.sweep.state.shape)
        return terms.result(terms.mul(terms.take(state, 0, 1), terms.exp2(terms.take(self.total, *axes))))

    def _written(self, v: SSAValue, tokens: int, to: Attribute | None = None) -> SSAValue:
        """Values, or keys, tokens along one axis, with all factors that the state at the end of the chunk has of each token,
        of type `to` or as products take them; as they are where there are no factors."""
        walk, terms = self.walk, Terms(self.scope, tile.shape_of(v))
        factors: list[SSAValue] = []
        if self.fades_values and self.total is not None:
            factors.append(self._decayed(terms, not walk.reverse, tokens))
        if not walk.reverse and self.weight is not None:
            factors.append(terms.take(self.weight, tokens))
        if not walk.scale_results:
            factors.append(terms.take(self.scale()))
        if not factors:
            return v
        factor = factors[0]
        for other in factors[1:]:
            factor = terms.mul(factor, other)
        return terms.result(terms.mul(terms.take(v, 0, 1), factor), to or self.sweep.element)

    def _dot(self, a: SSAValue, b: SSAValue, acc: SSAValue, hint: str) -> SSAValue:
        return self.scope.add(tile.DotOp(a, b, acc, self.sweep.precision), hint).result
