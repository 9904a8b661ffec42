"""Gradients through query_mod, key_mod and value_mod, which are elementwise."""

from __future__ import annotations

from xdsl.dialects.builtin import f32, i64
from xdsl.ir import Block, Region

from attn_engine.dialects import attn
from attn_engine.errors import UnsupportedGradientError
from attn_engine.ir.autodiff.graph import Graph, Needs, Slicer
from attn_engine.ir.autodiff.products import Products
from attn_engine.ir.autodiff.signs import Signs
from attn_engine.passes.backward_joint import Wanted, results_of, simplified
from attn_engine.passes.backward_sweep import Arguments, Sweep

MODS = {"q": "query", "k": "key", "v": "value"}


def vjp(op: attn.AttentionOp, operand: str, wanted: Wanted) -> list[Region]:
    """(gradient of the modified element, element, indices, captures) -> gradient of the element."""
    region: Region | None = getattr(op, f"{MODS[operand]}_mod")
    if region is None or operand not in wanted.operands:
        return []
    graph = Graph(simplified)
    gradient = graph.argument(f32, Needs.ELEMENT | Needs.BACKWARD, "g")
    element = graph.argument(f32, Needs.ELEMENT, "x")
    indices = [graph.argument(i64, Needs.ELEMENT, n) for n in ("b", "h", "position", "channel")]
    captures = [graph.argument(c.type, Needs.NOTHING, c.name_hint) for c in op.captures]
    result = results_of(graph.inline(region.block, [element, *indices, *captures]), region.block)[0]
    arguments = Arguments(element, gradient, tuple(indices), gradient, (), tuple(captures))
    operations = list(graph.block.ops)
    sweep = Sweep(graph, Products(graph, Signs(graph), result), result, (), arguments)
    value = sweep.run(operations, {element})
    values = [gradient, element, *indices, *captures]
    block = Block(arg_types=[v.type for v in values])
    slicer = Slicer(block, dict(zip(values, block.args, strict=True)))
    block.add_op(attn.YieldOp(slicer.value(value)))
    return [Region(block)]


def refuse_captures_of_mods(op: attn.AttentionOp, wanted: Wanted) -> None:
    for mod in MODS.values():
        region: Region | None = getattr(op, f"{mod}_mod")
        if region is None:
            continue
        first = len(region.block.args) - len(op.captures)
        for position in wanted.captures:
            if list(region.block.args[first + position].uses):
                raise UnsupportedGradientError(f"capture {position} as {mod}_mod reads it")
