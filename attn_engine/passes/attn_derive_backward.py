"""attn-derive-backward: the gradients of an attention, by reverse mode on its scalar regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, func
from xdsl.dialects.builtin import AnyFloat, ArrayAttr, FloatAttr, IntegerAttr, ModuleOp, TensorType, f32, i1, i64
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import attn
from attn_engine.errors import UnsupportedGradientError
from attn_engine.ir.autodiff.graph import Change, Graph, Needs, Slicer
from attn_engine.ir.autodiff.products import Products
from attn_engine.ir.autodiff.signs import Signs
from attn_engine.ir.autodiff.terms import ONE
from attn_engine.ir.autodiff.writer import Writer
from attn_engine.passes.attn_simplify import simplify
from attn_engine.passes.backward_dead_rows import DeadRows
from attn_engine.passes.backward_regions import BackwardCode
from attn_engine.passes.backward_sweep import Arguments, Sweep
from attn_engine.passes.simplify_algebra import rewrite
from attn_engine.passes.simplify_constants import fold_constants

_INDEX_NAMES = ("b", "h", "qi", "kv")
_OPERANDS = ("q", "k", "v")
_MODS = {"q": "query", "k": "key", "v": "value"}


@dataclass(frozen=True)
class Wanted:
    """Which gradients are asked for: operands by name, captures by position."""

    operands: frozenset[str]
    captures: tuple[int, ...]

    @classmethod
    def of(cls, wrt: Sequence[str | int], op: attn.AttentionOp) -> Wanted:
        names = [str(entry) for entry in wrt]
        captures = sorted({int(name) for name in names if name not in _OPERANDS})
        for position in captures:
            if position >= len(op.captures):
                raise ValueError(f"wrt has capture {position}, but there are {len(op.captures)} captures")
            if not _is_float(op.captures[position].type):
                raise UnsupportedGradientError(f"capture {position}, which is {op.captures[position].type}")
        return cls(frozenset(names) & frozenset(_OPERANDS), tuple(captures))


def _is_float(type_: Attribute) -> bool:
    return isinstance(type_, TensorType) and isinstance(type_.element_type, AnyFloat)  # pyright: ignore[reportUnknownMemberType]


def _simplify(op: Operation) -> Change:
    folded = fold_constants(op)
    return [folded] if folded is not None else rewrite(op)


# --- the joint code ------------------------------------------------------------------------------


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

    @classmethod
    def of(cls, op: attn.AttentionOp) -> JointCode:
        graph = Graph(_simplify)
        signs = Signs(graph)
        arguments = _arguments(graph, op)
        context = [*arguments.indices, *arguments.captures]

        def decide(scalar: Operation) -> SSAValue | None:
            decided = signs.decided(scalar)
            return None if decided is None else graph.emit(arith.ConstantOp(IntegerAttr(int(decided), i1)))

        score = arguments.x
        if op.score_mod is not None:
            score = _results(graph.inline(op.score_mod.block, [score, *context]), op.score_mod.block)[0]
        found = graph.inline(op.row.block, [score, *context], decide)
        weight, *outputs = _results(found, op.row.block)
        origin = {new: old for old, new in reversed(found.items())}
        return cls(graph, signs, arguments, weight, tuple(outputs), origin)


def _results(found: dict[SSAValue, SSAValue], block: Block) -> list[SSAValue]:
    assert block.last_op is not None
    return [found[v] for v in block.last_op.operands]


def _arguments(graph: Graph, op: attn.AttentionOp) -> Arguments:
    gradient = Needs.BACKWARD
    x = graph.argument(f32, Needs.ELEMENT, "x")
    dp = graph.argument(f32, Needs.ELEMENT | gradient, "dp")
    indices = [graph.argument(i64, Needs.ELEMENT if n == "kv" else Needs.NOTHING, n) for n in _INDEX_NAMES]
    delta = graph.argument(f32, gradient, "delta")
    d_outputs = [graph.argument(f32, gradient, f"d_out{i}") for i in range(len(op.outputs))]
    captures = [graph.argument(c.type, Needs.NOTHING, c.name_hint) for c in op.captures]
    return Arguments(x, dp, tuple(indices), delta, tuple(d_outputs), tuple(captures))


def derive(joint: JointCode, wanted: Wanted) -> BackwardCode:
    """Backward code for the row function and score_mod."""
    graph, arguments = joint.graph, joint.arguments
    extrema = [
        op
        for op in graph.block.ops
        if isinstance(op, attn.RowReduceOp) and op.kind.data in (attn.ReduceKind.MAX, attn.ReduceKind.MIN)
    ]
    forward = list(graph.block.ops)
    products = Products(graph, joint.signs, joint.weight)
    sweep = Sweep(graph, products, joint.weight, joint.outputs, arguments)
    sources = {arguments.captures[i] for i in wanted.captures}
    if wanted.operands & {"q", "k"}:
        sources.add(arguments.x)
    dx = sweep.run(forward, sources)
    p = sweep.writer.write([products[joint.weight]])
    _share_exponentials(graph, products, sweep.writer, forward)
    dead_rows = DeadRows(graph, products, extrema)
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


def _save(op: attn.AttentionOp, joint: JointCode, code: BackwardCode) -> attn.AttentionOp:
    """The attention with row values for backward; their code is cut out of the joint graph."""
    row = op.row.block
    slicer = Slicer(row, dict(joint.origin))
    if code.marker is not None:
        zero = arith.ConstantOp(FloatAttr(0.0, f32))
        slicer.append(zero)
        slicer.known[code.marker] = zero.result
    saved = slicer.values(code.saved)
    assert row.last_op is not None
    row.last_op.operands = [*row.last_op.operands, *saved]
    return _with_results(op, len(saved))


def _with_results(op: attn.AttentionOp, count: int) -> attn.AttentionOp:
    row_type = TensorType(f32, op.q.type.get_shape()[:3])  # type: ignore[union-attr]
    outputs = [r.type for r in op.outputs]
    names = attn.AttentionOp.get_irdl_definition().regions
    regions = [_moved(getattr(op, name)) for name, _ in names]
    new = attn.AttentionOp(
        operands=[op.q, op.k, op.v, op.scale, list(op.captures)],
        result_types=[op.o.type, outputs, [row_type] * count],
        regions=regions,
    )
    for i, saved in enumerate(new.saved):
        saved.name_hint = f"saved{i}"
    Rewriter.insert_op(new, InsertPoint.before(op))
    for old, fresh in zip(op.results, new.results[: len(op.results)], strict=True):
        fresh.name_hint = old.name_hint
        old.replace_all_uses_with(fresh)
    Rewriter.erase_op(op)
    return new


def _moved(region: Region | None) -> list[Region] | Region:
    if region is None:
        return []
    new = Region()
    region.move_blocks(new)
    return new


# --- modifications of operands -------------------------------------------------------------------


def _vjp(op: attn.AttentionOp, operand: str, wanted: Wanted) -> list[Region]:
    """(gradient of the modified element, element, indices, captures) -> gradient of the element."""
    region: Region | None = getattr(op, f"{_MODS[operand]}_mod")
    if region is None or operand not in wanted.operands:
        return []
    graph = Graph(_simplify)
    gradient = graph.argument(f32, Needs.ELEMENT | Needs.BACKWARD, "g")
    element = graph.argument(f32, Needs.ELEMENT, "x")
    indices = [graph.argument(i64, Needs.ELEMENT, n) for n in ("b", "h", "position", "channel")]
    captures = [graph.argument(c.type, Needs.NOTHING, c.name_hint) for c in op.captures]
    result = _results(graph.inline(region.block, [element, *indices, *captures]), region.block)[0]
    arguments = Arguments(element, gradient, tuple(indices), gradient, (), tuple(captures))
    operations = list(graph.block.ops)
    sweep = Sweep(graph, Products(graph, Signs(graph), result), result, (), arguments)
    value = sweep.run(operations, {element})
    values = [gradient, element, *indices, *captures]
    block = Block(arg_types=[v.type for v in values])
    slicer = Slicer(block, dict(zip(values, block.args, strict=True)))
    block.add_op(attn.YieldOp(slicer.value(value)))
    return [Region(block)]


def _refuse_captures_of_mods(op: attn.AttentionOp, wanted: Wanted) -> None:
    for mod in _MODS.values():
        region: Region | None = getattr(op, f"{mod}_mod")
        if region is None:
            continue
        first = len(region.block.args) - len(op.captures)
        for position in wanted.captures:
            if list(region.block.args[first + position].uses):
                raise UnsupportedGradientError(f"capture {position} as {mod}_mod reads it")


# --- functions -----------------------------------------------------------------------------------


def _backward_function(op: attn.AttentionOp, code: BackwardCode, wanted: Wanted) -> func.FuncOp:
    """func.func @backward(q, k, v, scale, o, d_o, saved..., d_outputs..., captures...) around attn.backward."""
    rows = [r.type for r in op.outputs]
    saved = [r.type for r in op.saved]
    types = [op.q.type, op.k.type, op.v.type, f32, op.o.type, op.o.type, *saved, *rows, *(c.type for c in op.captures)]
    block = Block(arg_types=types)
    names = ["q", "k", "v", "scale", "o", "d_o", *(f"saved{i}" for i in range(len(saved)))]
    names += [*(f"d_out{i}" for i in range(len(rows))), *(c.name_hint for c in op.captures)]
    for argument, name in zip(block.args, names, strict=True):
        argument.name_hint = name
    backward = _backward_op(op, code, wanted, list(block.args))
    results = [f"d{name}" for name in _OPERANDS if name in wanted.operands]
    results += [f"d_{op.captures[i].name_hint or f'capture{i}'}" for i in wanted.captures]
    for result, name in zip(backward.results, results, strict=True):
        result.name_hint = name
    block.add_ops([backward, func.ReturnOp(*backward.results)])
    return func.FuncOp("backward", (types, [r.type for r in backward.results]), Region(block))


def _backward_op(op: attn.AttentionOp, code: BackwardCode, wanted: Wanted, args: Sequence[SSAValue]) -> attn.BackwardOp:
    saved, outputs = 6 + len(op.saved), 6 + len(op.saved) + len(op.outputs)
    cloned = {name: _cloned(getattr(op, name)) for name in ("query_mod", "key_mod", "value_mod", "score_mod", "mask")}
    # score_mod is part of `element` and of the row steps.
    cloned["score_mod"] = []
    vjps = [_vjp(op, operand, wanted) for operand in _OPERANDS]
    results = [[getattr(op, name).type] if name in wanted.operands else [] for name in _OPERANDS]
    d_captures = [TensorType(f32, op.captures[i].type.get_shape()) for i in wanted.captures]  # type: ignore[union-attr]
    return attn.BackwardOp(
        operands=[*args[:6], args[6:saved], args[saved:outputs], args[outputs:]],
        result_types=[*results, d_captures],
        properties={
            "init": code.init(),
            "grad_captures": ArrayAttr(IntegerAttr(i, i64) for i in wanted.captures),
        },
        regions=[
            *cloned.values(),
            *vjps,
            code.rows(),
            code.element(),
            _cloned(op.blocks),
            _cloned(op.blocks_t),
            code.row_steps(),
        ],
    )


def _cloned(region: Region | None) -> list[Region]:
    return [] if region is None else [region.clone()]


def derive_backward(function: func.FuncOp, op: attn.AttentionOp, wrt: Sequence[str | int]) -> func.FuncOp:
    """Adds saved row values to an attention and to the results of its function; gives the backward function."""
    wanted = Wanted.of(wrt, op)
    _refuse_captures_of_mods(op, wanted)
    joint = JointCode.of(op)
    code = derive(joint, wanted)
    op = _save(op, joint, code)
    simplify(op)
    last = function.body.block.last_op
    assert isinstance(last, func.ReturnOp)
    last.operands = [*last.operands, *op.saved]
    function.update_function_type()
    return _backward_function(op, code, wanted)


@dataclass(frozen=True)
class AttnDeriveBackwardPass(ModulePass):
    """Derives the gradients of every function that holds an `attn.attention`, from its regions alone.

    The row function yields further row values, `saved`, chosen as a minimum cut of what backward reads; a function
    @backward(q, k, v, scale, o, d_o, saved..., d_outputs..., captures...) follows. Softmax:

    ```
    row {                                        row { ... attn.yield %p, %lse : f32, f32 }
      %m = attn.row_reduce max %s                rows { ... attn.yield %lse, %delta : f32, f32 }
      %e = math.exp (%s - %m)               ->   element {
      %l = attn.row_reduce sum %e                  %p = math.exp (%s - %lse)
      attn.yield %e / %l                           attn.yield %p, %p * (%dp - %delta)
    }                                            }
    ```
    """

    name = "attn-derive-backward"

    wrt: tuple[str | int, ...] = _OPERANDS
    """What gradients are needed: `q`, `k`, `v` and positions of captures."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for attention in [a for a in op.walk() if isinstance(a, attn.AttentionOp)]:
            function = attention.parent_op()
            if not isinstance(function, func.FuncOp):
                raise ValueError("attn.attention must stand directly in a func.func")
            backward = derive_backward(function, attention, self.wrt)
            Rewriter.insert_op(backward, InsertPoint.after(function))
