"""Gradients of keys and queries that several heads share: one per head, and their sum.

Rounded to bf16 per head they would cost a second rounding beside that of the sum. In f32 they would be twice the bytes, which is what
a sum takes its time for. So each row of a program's channels is divided by its largest number, which is kept beside it, and
lies in memory as f16: 11 bits of all that matters of a row, whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import f16
from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.ir.schedule import padded as tile_of
from attn_engine.passes.lowering.kernel import Blocks, Head, Kernel, close, loop
from attn_engine.passes.lowering.recurrence.setting import Setting, View, channel_limit, channels_of, padded
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.scope import Scope

ROWS, ADDED = 64, 4096
"""Tokens and numbers, at most, of a program that adds up heads: 32 a thread, beside the places of its rows in memory."""
SMALLEST = 2.0**-100
"""What a row is divided by at least, so that its inverse is finite."""


@dataclass(frozen=True)
class RowSizes:
    """The largest absolute value of each row of each program's channels, [splits, B, H, T], a value of the plan."""

    values: SSAValue
    columns: int
    """Channels of a program."""

    def divided(self, scope: Scope, view: View, o: SSAValue, tokens: int, where: Sequence[SSAValue]) -> SSAValue:
        """A tile, its tokens along one axis, by the sizes of its rows, which are stored from `where` on."""
        shape = tile.shape_of(o)
        terms = Terms(scope, shape)
        size = terms.result(terms.size(terms.take(o, 0, 1)))
        largest = scope.add(tile.ReduceOp(tile.Reduction.MAX, size, 1 - tokens), "largest").result
        terms = Terms(scope, [shape[tokens]])
        sizes = terms.result(terms.at_least(terms.take(largest, 0), SMALLEST))
        scope.add(tile.StoreOp(sizes, view.kernel.take(self.values), where, [3], {0: view.end}))
        terms = Terms(scope, [shape[tokens]])
        inverse = terms.result(terms.div(terms.real(1.0), terms.take(sizes, 0)))
        terms = Terms(scope, shape)
        return terms.result(terms.mul(terms.take(o, 0, 1), terms.take(inverse, tokens)), f16)


def sum_heads(setting: Setting, value: SSAValue, like: SSAValue, target: SSAValue) -> None:
    """One program per block of tokens and of channels of a shared head: adds the heads of its group in order."""
    plan = setting.plan
    heads, shared = setting.dim(value, 1, "heads"), setting.dim(like, 1, "shared")
    batch, tokens = setting.dim(like, 0, "batch"), setting.dim(like, 2, "tokens")
    some = plan.scope.value(plan.scope.larger(shared, 1, "some"))
    group = plan.scope.add(arith.DivSIOp(heads, some), "group").result
    size, sizes = channels_of(like), setting.row_sizes.get(value)
    head = Head(size, padded(size, setting.form.pad) if sizes is None else sizes.columns)
    rows = min(ROWS, ADDED // tile_of(head.tile))
    kernel = Kernel(f"{plan.name}_{target.name_hint}", plan, Blocks(rows, rows, 4, 2))
    scope = kernel.scope
    first, h, b = (kernel.program_id(axis, hint) for axis, hint in enumerate(("block", "h", "b")))
    splits = -(-size // head.tile)
    blocks = setting.blocks(tokens, rows, "blocks")
    block, split = first, scope.value(0)
    if splits > 1:
        count = scope.value(splits)
        block = scope.add(arith.DivSIOp(first, count), "block").result
        split = scope.add(arith.RemSIOp(first, count), "split").result
        blocks = plan.scope.value(plan.scope.times(blocks, splits, "blocks"))
    t0, c0 = scope.value(scope.times(block, rows, "t0")), scope.value(scope.times(split, head.tile, "c0"))
    limits = {0: kernel.take(tokens)} | channel_limit(scope, head, 1)
    source, element = kernel.take(setting.of(value)), tile.element_of(target)
    members = kernel.take(group)
    op, body, g, (total,) = loop(scope, 0, members, 1, [scope.splat([rows, head.tile], 0.0, "sum")], "g")
    own = body.value(body.plus(body.add(arith.MuliOp(h, members), "first").result, g, "own"))
    type_ = tile.tile_type([rows, head.tile], tile.element_of(source))
    part = body.add(tile.LoadOp(source, [b, own, t0, c0], [2, 3], type_, limits), "part").result
    terms = Terms(body, [rows, head.tile])
    added = terms.take(part, 0, 1)
    if sizes is not None:
        row = tile.tile_type([rows], tile.element_of(sizes.values))
        index = [split, b, own, t0]
        of_rows = tile.LoadOp(kernel.take(sizes.values), index, [3], row, {0: kernel.take(tokens)})
        added = terms.mul(added, terms.take(body.add(of_rows, "sizes").result, 0))
    close(body, [terms.result(terms.add(terms.take(total, 0, 1), added))])
    terms = Terms(scope, [rows, head.tile])
    result = terms.result(terms.take(op.results[0], 0, 1), element)
    scope.add(tile.StoreOp(result, kernel.take(target), [b, h, t0, c0], [2, 3], limits))
    setting.kernels.append(kernel.launch([blocks, shared, batch]))
