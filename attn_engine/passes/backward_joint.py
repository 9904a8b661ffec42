"""The code that forward and backward share: score_mod and the row function in one graph, then their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import AnyFloat, IntegerAttr, TensorType, f32, i1, i64
from xdsl.ir import Attribute, Block, Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.errors import UnsupportedGradientError
from attn_engine.ir.autodiff.graph import Change, Graph, Needs
from attn_engine.ir.autodiff.products import Products
from attn_engine.ir.autodiff.signs import Signs
from attn_engine.ir.autodiff.terms import ONE
from attn_engine.ir.autodiff.writer import Writer
from attn_engine.ir.axes import axes_of
from attn_engine.ir.dead_rows import tells_dead_rows
from attn_engine.passes.backward_attained import EXTREMA, Attained, is_fragile
from attn_engine.passes.backward_dead_rows import DeadRows
from attn_engine.passes.backward_regions import BackwardCode
from attn_engine.passes.backward_sweep import Arguments, Sweep
from attn_engine.passes.simplify_algebra import rewrite
from attn_engine.passes.simplify_constants import fold_constants

INDEX_NAMES = ("b", "h", "qi", "kv")
OPERANDS = ("q", "k", "v")


@dataclass(frozen=True)
class Wanted:
    """Which gradients are asked for: operands by name, captures by position."""

    operands: frozenset[str]
    captures: tuple[int, ...]

    @classmethod
    def of(cls, wrt: Sequence[str | int], op: attn.AttentionOp) -> Wanted:
        names = [str(entry) for entry in wrt]
        captures = sorted({int(name) for name in names if name not in OPERANDS})
        for position in captures:
            if position >= len(op.captures):
                raise ValueError(f"wrt has capture {position}, but there are {len(op.captures)} captures")
            if not _is_float(op.captures[position].type):
                raise UnsupportedGradientError(f"capture {position}, which is {op.captures[position].type}")
        return cls(frozenset(names) & frozenset(OPERANDS), tuple(captures))


def _is_float(type_: Attribute) -> bool:
    return isinstance(type_, TensorType) and isinstance(type_.element_type, AnyFloat)


def simplified(op: Operation) -> Change:
    folded = fold_constants(op)
    return [folded] if folded is not None else rewrite(op)


@dataclass
class JointCode:
    """The row function behind score_mod in one graph, as the start of both passes."""

    graph: Graph
    signs: Signs
    arguments: Arguments
    weight: SSAValue
    outputs: tuple[SSAValue, ...]
    origin: dict[SSAValue, SSAValue]
    """Where values of the row function went: from the graph to the row function."""
    attained: Attained

    @classmethod
    def of(cls, op: attn.AttentionOp) -> JointCode:
        graph = Graph(simplified)
        signs = Signs(graph)
        arguments = _arguments(graph, op)
        attained = Attained(graph, arguments.indices[3])
        context = [*arguments.indices, *arguments.captures]

        def decide(scalar: Operation, written: Operation) -> SSAValue | None:
            if isinstance(scalar, arith.SubfOp) and is_fragile(written):
                return attained.distance(scalar.lhs, scalar.rhs)
            decided = signs.decided(scalar)
            return None if decided is None else graph.emit(arith.ConstantOp(IntegerAttr(int(decided), i1)))

        score = arguments.x
        if op.score_mod is not None:
            score = results_of(graph.inline(op.score_mod.block, [score, *context]), op.score_mod.block)[0]
        # To the forward pass a score differs from key to key, even where this one happens not to.
        graph.needs[score] |= Needs.ELEMENT
        found = graph.inline(op.row.block, [score, *context], decide)
        weight, *outputs = results_of(found, op.row.block)
        # What simplifies to one value per row here is still one per key there: its code is copied.
        axes = axes_of(op, "row")
        origin = {new: old for old, new in reversed(found.items()) if graph.is_element(new) or "kv" not in axes[old]}
        return cls(graph, signs, arguments, weight, tuple(outputs), origin, attained)


def results_of(found: dict[SSAValue, SSAValue], block: Block) -> list[SSAValue]:
    assert block.last_op is not None
    return [found[v] for v in block.last_op.operands]


def _arguments(graph: Graph, op: attn.AttentionOp) -> Arguments:
    gradient = Needs.BACKWARD
    x = graph.argument(f32, Needs.ELEMENT, "x")
    dp = graph.argument(f32, Needs.ELEMENT | gradient, "dp")
    indices = [graph.argument(i64, Needs.ELEMENT if n == "kv" else Needs.NOTHING, n) for n in INDEX_NAMES]
    delta = graph.argument(f32, gradient, "delta")
    d_outputs = [graph.argument(f32, gradient, f"d_out{i}") for i in range(len(op.outputs))]
    captures = [graph.argument(c.type, Needs.NOTHING, c.name_hint) for c in op.captures]
    return Arguments(x, dp, tuple(indices), delta, tuple(d_outputs), tuple(captures))


def derive(joint: JointCode, wanted: Wanted, through: frozenset[str]) -> BackwardCode:
    """Backward code for the row function and score_mod; `through` are operands whose modified elements need gradients."""
    graph, arguments = joint.graph, joint.arguments
    reductions = [op for op in graph.block.ops if isinstance(op, attn.RowReduceOp)]
    extrema = [op for op in reductions if op.kind.data in EXTREMA]
    written = [joint.origin.get(op.result, op.result).owner for op in extrema]
    telling = [op for op, old in zip(extrema, written, strict=True) if tells_dead_rows(old)]
    forward = list(graph.block.ops)
    products = Products(graph, joint.signs, joint.weight)
    sweep = Sweep(graph, products, joint.weight, joint.outputs, arguments, joint.attained)
    sources = {arguments.captures[i] for i in wanted.captures}
    if through & {"q", "k"}:
        sources.add(arguments.x)
    dx = sweep.run(forward, sources)
    p = sweep.writer.write([products[joint.weight]])
    _share_exponentials(graph, products, sweep.writer, forward)
    sweep.attained.replace_comparisons()
    dead_rows = DeadRows(graph, products, telling, len(telling) == len(extrema))
    return BackwardCode(graph, arguments, joint.outputs, p, dx, sweep.accumulations, dead_rows)


def _share_exponentials(graph: Graph, products: Products, writer: Writer, forward: Sequence[Operation]) -> None:
    """Code that reads exp(s - m) / l reads exp(s - (m + log l)) instead, where backward has that one."""
    for value in [op.results[0] for op in forward]:
        if value.type != f32 or not graph.is_element(value) or not graph.needs[value] & Needs.FORWARD:
            continue
        element, row = products.split(products[value])
        if row.key == ONE.key and row.coefficient == 1 and any(products.class_of(v) for v in element.powers):
            shared = writer.write([element])
            if shared is not value:
                value.replace_all_uses_with(shared)
