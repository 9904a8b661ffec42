"""Sums of log decays from the start of every chunk on, in the units of exp2, and weights beside them."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.kernel import Blocks, Kernel, close, loop
from attn_engine.passes.lowering.program import Bound
from attn_engine.passes.lowering.recurrence.chunks import parts_of
from attn_engine.passes.lowering.recurrence.setting import Setting, Sizes, View
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.scope import Index, Scope

LOG2_E = 1.4426950408889634
FORGOTTEN = -150.0
"""exp2 of this is 0 in f32: a log decay that is no more, -inf for one, forgets everything before its token."""
HEADS = 8
"""Heads per program: log decays usually lie head beside head."""


@dataclass(frozen=True)
class Rows:
    """What a sweep reads of each token of a head: temporaries [B, H, T] of the plan, token beside token.

    Without bounds T is whole chunks: past the end sums go on and weights are 0, and no access needs a limit.
    """

    sums: SSAValue | None
    weight: SSAValue | None
    resets: SSAValue | None = None
    """How many tokens of the chunk forget everything, up to each one; sums leave them out."""


def forgets(terms: Terms, log: SSAValue) -> SSAValue:
    """Whether a log decay in the units of exp2 leaves nothing."""
    return terms.at_or_below(log, FORGOTTEN)


def kept_gradient(terms: Terms, decay: SSAValue, gradient: SSAValue) -> SSAValue:
    """The gradient of a log decay: 0 where it forgets."""
    return terms.choose(forgets(terms, terms.mul(decay, terms.real(LOG2_E))), terms.real(0.0), gradient)


def rows_of(setting: Setting, sizes: Sizes, decay: SSAValue | None, weight: SSAValue | None) -> Rows:
    """Made once for a decay and a weight."""
    key = (decay, weight)
    if key not in setting.rows:
        shape: list[Index] = [sizes.batch, sizes.heads, setting.whole(sizes)]
        found = Rows(
            None if decay is None else setting.temporary(shape, f32, "sums"),
            None if weight is None else setting.temporary(shape, f32, "weights"),
            None if decay is None else setting.temporary(shape, f32, "resets"),
        )
        if decay is not None or weight is not None:
            _Kernel(setting, sizes, found).run(decay, weight)
        setting.rows[key] = found
    return setting.rows[key]


class _Kernel:
    """One program per chunk and block of heads."""

    def __init__(self, setting: Setting, sizes: Sizes, rows: Rows):
        self.setting, self.sizes, self.rows = setting, sizes, rows
        self.shape = [setting.form.chunk, HEADS]

    def run(self, decay: SSAValue | None, weight: SSAValue | None) -> None:
        setting, sizes, chunk = self.setting, self.sizes, self.setting.form.chunk
        plan = setting.plan
        self.kernel = kernel = Kernel(f"{plan.name}_decay", plan, Blocks(chunk, chunk, 4, 1))
        scope = kernel.scope
        part, block, n = (kernel.program_id(axis, hint) for axis, hint in enumerate(("part", "block", "n")))
        parts = parts_of(setting, sizes)
        self.h0 = scope.value(scope.times(block, HEADS, "h0"))
        self.view = view = View(sizes, kernel, self.h0, n)
        own = scope.add(arith.CeilDivSIOp(scope.value(view.length), scope.value(chunk)), "chunks").result
        _, body, c, _ = loop(scope, part, own, kernel.take(parts), [], "c")
        t0 = body.value(body.plus(view.begin, body.times(c, chunk, "t0"), "t0"))
        if decay is not None and self.rows.sums is not None and self.rows.resets is not None:
            self._sum(body, decay, (self.rows.sums, self.rows.resets), t0)
        if weight is not None and self.rows.weight is not None:
            terms = Terms(body, self.shape)
            self._store(body, terms.result(terms.take(self._load(body, weight, t0), 0, 1)), self.rows.weight, t0)
        close(body, [])
        blocks = setting.blocks(sizes.heads, HEADS, "blocks")
        setting.kernels.append(kernel.launch([parts, blocks, sizes.sequences]))

    def _load(self, scope: Scope, tensor: SSAValue, t0: SSAValue) -> SSAValue:
        source, limits = self.view.take(tensor), {0: self.view.end, 1: self.kernel.take(self.sizes.heads)}
        type_ = TensorType(tile.element_of(source), self.shape)
        index = [self.view.b, self.h0, t0]
        return scope.add(tile.LoadOp(source, index, [2, 1], type_, limits), tensor.name_hint or "x").result

    def _sum(self, scope: Scope, decay: SSAValue, targets: tuple[SSAValue, SSAValue], t0: SSAValue) -> None:
        """Sums, and counts of what they leave out."""
        raw = self._modified(scope, decay, self._load(scope, decay, t0), t0)
        for number, target in enumerate(targets):
            terms = Terms(scope, self.shape)
            log = terms.mul(terms.take(raw, 0, 1), terms.real(LOG2_E))
            zero, one = terms.real(0.0), terms.real(1.0)
            added = terms.choose(forgets(terms, log), one if number else zero, zero if number else log)
            sums = scope.add(tile.ScanOp(tile.Reduction.SUM, terms.result(added), 0), "sums").result
            self._store(scope, sums, target, t0)

    def _modified(self, scope: Scope, decay: SSAValue, raw: SSAValue, t0: SSAValue) -> SSAValue:
        mod = self.setting.mods.get(decay)
        if mod is None:
            return raw
        token, head = (
            Bound(scope.add(tile.RangeOp(start, size), hint).result, (axis,))
            for axis, (start, size, hint) in enumerate(zip((t0, self.h0), self.shape, ("token", "head"), strict=True))
        )
        limits = [(token, Bound(self.view.end)), (head, Bound(self.kernel.take(self.sizes.heads)))]
        return mod.apply(self.kernel, scope, raw, [Bound(self.view.b), head, token, 0], limits)

    def _store(self, scope: Scope, value: SSAValue, target: SSAValue, t0: SSAValue) -> None:
        limits = {1: self.kernel.take(self.sizes.heads)}
        if self.sizes.bounds is not None:
            limits[0] = self.view.end
        index = [self.view.b, self.h0, t0]
        scope.add(tile.StoreOp(value, self.kernel.take(target), index, [2, 1], limits))
