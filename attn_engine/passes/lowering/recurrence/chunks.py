"""Kernels that do all chunks side by side: what needs no state, or has the states of all chunks at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import IntegerAttr, i64
from xdsl.ir import SSAValue

from attn_engine.passes.lowering.kernel import Blocks, Kernel, close, loop
from attn_engine.passes.lowering.recurrence.setting import Setting, Sizes, View
from attn_engine.passes.lowering.scope import Index, Scope

Body = Callable[[View, Scope, SSAValue, SSAValue], None]
"""Appends the work on one chunk: the program's place, the scope, the first token, the split."""


def parts_of(setting: Setting, sizes: Sizes, chunk: int = 0) -> SSAValue:
    """Programs per sequence: with bounds its chunks are not known on the host, programs take every parts-th of them."""
    scope = setting.plan.scope
    chunks = setting.blocks(sizes.tokens, chunk or setting.form.chunk, "chunks")
    if sizes.bounds is None:
        return chunks
    some = scope.value(scope.larger(sizes.sequences, 1, "some"))
    return scope.add(arith.CeilDivSIOp(chunks, some), "parts").result


def each_chunk(
    setting: Setting,
    sizes: Sizes,
    name: str,
    warps: int,
    operands: Sequence[SSAValue | None],
    body: Body,
    splits: int = 1,
    chunk: int = 0,
) -> None:
    """Adds a kernel with one program per chunk, head and split; `operands` may have fewer heads."""
    chunk = chunk or setting.form.chunk
    kernel = Kernel(f"{setting.plan.name}_{name}", setting.plan, Blocks(chunk, chunk, warps, 1))
    scope = kernel.scope
    part, h, n = (kernel.program_id(axis, hint) for axis, hint in enumerate(("part", "h", "n")))
    split = scope.value(0)
    if splits > 1:
        count = scope.value(splits)
        split = scope.add(arith.RemSIOp(part, count), "split").result
        part = scope.add(arith.DivSIOp(part, count), "part").result
    view = View(sizes, kernel, h, n)
    for operand in operands:
        if operand is not None:
            view.head(operand)
    parts = parts_of(setting, sizes, chunk)
    if sizes.bounds is None:
        body(view, scope, scope.value(scope.times(part, chunk, "t0")), split)
    else:
        own = scope.add(arith.CeilDivSIOp(scope.value(view.length), scope.value(chunk)), "chunks").result
        _, inner, c, _ = loop(scope, part, own, kernel.take(parts), [], "c")
        body(view, inner, inner.value(inner.plus(view.begin, inner.times(c, chunk, "t0"), "t0")), split)
        close(inner, [])
    if splits > 1:
        parts = setting.plan.scope.value(setting.plan.scope.times(parts, splits, "programs"))
    setting.kernels.append(kernel.launch([parts, sizes.heads, sizes.sequences]))


def slot_of(view: View, scope: Scope, t0: SSAValue, chunk: int) -> SSAValue:
    """Where the states of a chunk are: packed sequences have a slot more than they need."""
    size = scope.value(chunk)
    if view.sizes.bounds is None:
        return scope.add(arith.DivSIOp(t0, size), "slot").result
    begin = scope.value(view.begin)
    first = scope.add(arith.DivSIOp(begin, size), "first").result
    own = scope.add(arith.DivSIOp(scope.value(scope.minus(t0, begin, "inside")), size), "own").result
    return scope.value(scope.plus(scope.plus(first, view.n, "first"), own, "slot"))


def slots_of(setting: Setting, sizes: Sizes, chunk: int) -> Index:
    """How many places `slot_of` may give."""
    scope = setting.plan.scope
    slots: Index = setting.blocks(sizes.tokens, chunk, "slots")
    return slots if sizes.bounds is None else scope.plus(slots, sizes.sequences, "slots")


def staged(op: scf.ForOp, stages: int) -> None:
    """Loads of this loop run ahead even where no product reads them."""
    op.attributes["num_stages"] = IntegerAttr(stages, i64)
