"""Sums of log decays, from the start of every chunk on, in the units of exp2."""

from __future__ import annotations

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.kernel import Blocks, Kernel, close, loop
from attn_engine.passes.lowering.recurrence.setting import Setting, Sizes, View
from attn_engine.passes.lowering.recurrence.terms import Terms

LOG2_E = 1.4426950408889634
FORGOTTEN = -150.0
"""exp2 of this is 0 in f32. A log decay of -inf counts as this much, or it would make a NaN of differences."""
HEADS = 8
"""Heads per program: log decays usually lie head beside head."""


def summed(setting: Setting, sizes: Sizes, decay: SSAValue) -> SSAValue:
    """A temporary [B, H, T] of the plan, made once per decay."""
    if decay not in setting.sums:
        target = setting.temporary([sizes.batch, sizes.heads, sizes.tokens], f32, "sums")
        _kernel(setting, sizes, decay, target)
        setting.sums[decay] = target
    return setting.sums[decay]


def _kernel(setting: Setting, sizes: Sizes, decay: SSAValue, target: SSAValue) -> None:
    plan, chunk = setting.plan, setting.form.chunk
    kernel = Kernel(f"{plan.name}_decay", plan, Blocks(chunk, chunk, 4, 1))
    scope = kernel.scope
    part, block, n = (kernel.program_id(axis, hint) for axis, hint in enumerate(("part", "block", "n")))
    # With bounds the chunks of a sequence are not known on the host: programs take every parts-th of them.
    chunks = setting.blocks(sizes.tokens, chunk, "chunks")
    parts = chunks
    if sizes.bounds is not None:
        some = plan.scope.value(plan.scope.larger(sizes.sequences, 1, "some"))
        parts = plan.scope.add(arith.CeilDivSIOp(chunks, some), "parts").result
    h0 = scope.value(scope.times(block, HEADS, "h0"))
    view = View(sizes, kernel, h0, n)
    own = scope.add(arith.CeilDivSIOp(scope.value(view.length), scope.value(chunk)), "chunks").result
    _, body, c, _ = loop(scope, part, own, kernel.take(parts), [], "c")
    t0 = body.value(body.plus(view.begin, body.times(c, chunk, "t0"), "t0"))
    limits = {0: view.end, 1: kernel.take(sizes.heads)}
    source = view.take(decay)
    type_ = TensorType(tile.element_of(source), [chunk, HEADS])
    raw = body.add(tile.LoadOp(source, [view.b, h0, t0], [2, 1], type_, limits), "decay").result
    terms = Terms(body, [chunk, HEADS])
    floored = terms.at_least(terms.mul(terms.take(raw, 0, 1), terms.real(LOG2_E)), FORGOTTEN)
    sums = body.add(tile.ScanOp(tile.Reduction.SUM, terms.result(floored), 0), "sums").result
    body.add(tile.StoreOp(sums, kernel.take(target), [view.b, h0, t0], [2, 1], limits))
    close(body, [])
    blocks = setting.blocks(sizes.heads, HEADS, "blocks")
    setting.kernels.append(kernel.launch([parts, blocks, sizes.sequences]))
