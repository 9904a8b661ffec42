"""What the compiler proved about a definition, in words: reductions, loops over the keys, what backward saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue
from xdsl.parser import Parser

from attn_engine import pipelines
from attn_engine.backends.backend import get_backend
from attn_engine.dialects.attn import AttentionOp, BackwardOp, RowReduceOp
from attn_engine.ir.expression import show, show_atom
from attn_engine.ir.separation import Separation
from attn_engine.passes.online_plan import OnlinePlan, OnlineReport, plan_online
from attn_engine.runtime import driver
from attn_engine.runtime.attention import Attention
from attn_engine.runtime.choice import ASYNC_ARCH, consider
from attn_engine.runtime.inspect import View

_ASSEMBLER = "triton"


def explain(definition: Attention, view: View) -> str:
    """A page of text about the row function of a definition and its gradients."""
    module = _read(definition.ir("traced", view))
    backward = next((o for o in _read(definition.ir("attn", view)).walk() if isinstance(o, BackwardOp)), None)
    wrt = _wrt(backward) if backward is not None else ()
    driver.run_passes(module, (*pipelines.ATTN_ANALYSIS, *pipelines.derive_backward(wrt)))
    attention = next(o for o in module.walk() if isinstance(o, AttentionOp))
    _name_reductions(attention)
    plan = plan_online(attention.row.block)
    lines = [*_reductions(attention, plan), *_loops(plan.report()), *_combine(plan), *_saved(attention, plan)]
    return "\n".join([*lines, *_backward(backward), *_backends(attention, view), *_kernels(definition, view)])


def _backends(attention: AttentionOp, view: View) -> Iterator[str]:
    """Which backend would be taken by default where there is a choice, and why."""
    module = attention.get_toplevel_object()
    if view.arch == ASYNC_ARCH and isinstance(module, ModuleOp):
        yield f"backends on {view.arch}, by what a forward's schedule should cost:"
        yield from (f"  {line}" for line in consider(module, anywhere=True).lines())


def _kernels(definition: Attention, view: View) -> Iterator[str]:
    """The schedules that would be tried, for a backend that can tell what an assembler makes of them."""
    backend = get_backend(view.backend)
    if backend.examine is not None and find_spec(_ASSEMBLER) is not None:
        yield f"schedules for {view.backend} on {view.arch}, in order:"
        yield from (f"  {line}" for line in definition.kernels(view))


def _read(text: str) -> ModuleOp:
    return Parser(driver.context(), text).parse_module()


def _wrt(backward: BackwardOp) -> tuple[str, ...]:
    operands = [name for name in ("q", "k", "v") if getattr(backward, f"d{name}") is not None]
    return (*operands, *(str(n.value.data) for n in backward.grad_captures))


def _name_reductions(attention: AttentionOp) -> None:
    """Names for reductions that their user gave none, so that expressions read as sums of names."""
    taken: Counter[str] = Counter()
    for op in attention.row.block.ops:
        if isinstance(op, RowReduceOp) and op.result.name_hint is None:
            kind = str(op.kind.data.value)
            op.result.name_hint = f"{kind}{taken[kind] or ''}"
            taken[kind] += 1


def _reads(value: SSAValue) -> list[str]:
    """The reductions that a value is computed from, not those behind them."""
    found: dict[str, None] = {}
    stack, seen = [value], {value}
    while stack:
        owner = stack.pop().owner
        if isinstance(owner, RowReduceOp):
            found[owner.result.name_hint or owner.name] = None
        elif isinstance(owner, Operation):
            stack.extend(o for o in owner.operands if o not in seen)
            seen.update(owner.operands)
    return sorted(found)


def _reductions(attention: AttentionOp, plan: OnlinePlan) -> Iterator[str]:
    """Every node of the graph of reductions and the nodes that it reads."""
    last = attention.row.block.last_op
    assert last is not None
    yield "the row, as it was written:"
    nodes = [o for o in attention.row.block.ops if isinstance(o, RowReduceOp)]
    for op in nodes:
        yield _node(f"{op.result.name_hint} = {op.kind.data.value}", op.value, plan)
    yield _node("weight =", last.operands[0], plan)


def _node(what: str, value: SSAValue, plan: OnlinePlan) -> str:
    reads = ", ".join(_reads(value))
    return f"  {what} {show(plan.forms[value])}" + (f"   (reads {reads})" if reads else "")


def _loops(report: OnlineReport) -> Iterator[str]:
    """Where each node stands and why, and what the loops do to the accumulator."""
    yield f"{report.passes} loop{'s' if report.passes > 1 else ''} over the keys:"
    for verdict in report.verdicts:
        why = f"one pass: {verdict.detail}" if verdict.one_pass else f"waits: {verdict.detail}: {verdict.culprit}"
        yield f"  loop {verdict.level}: {verdict.node}: {why}"
    yield f"rescaled in the loop by: {', '.join(report.rescale) or 'nothing'}"
    yield f"epilogue: o = accumulator * {report.epilogue}"


def _combine(plan: OnlinePlan) -> Iterator[str]:
    """How the results of two parts of the keys become one."""
    for state in plan.states:
        kind, scales = state.kind.value, _scales(state.separation)
        merged = f"the {kind} of both" if kind in ("max", "min") else "both added"
        yield f"parts combine: {show_atom(state.atom)}: {merged}" + (f", each {scales}" if scales else "")
    scales = _scales(plan.weight)
    yield "parts combine: accumulators are added" + (f", each {scales}" if scales else " as they are")


def _scales(separation: Separation) -> str:
    """The factor that brings a part to the scale of both."""
    terms = [f"({show(s.coefficient)}) * ({show_atom(s.atom)} of the part - of both)" for s in separation.stabilisers]
    return f"times exp({' + '.join(terms)})" if terms else ""


def _saved(attention: AttentionOp, plan: OnlinePlan) -> Iterator[str]:
    first = len(attention.outputs)
    for n, value in enumerate(plan.outputs[:first]):
        yield f"row output {n}: {show(plan.forms[value])}"
    for n, value in enumerate(plan.outputs[first:]):
        yield f"backward saves, per row: saved{n} = {show(plan.forms[value])}"


def _backward(backward: BackwardOp | None) -> Iterator[str]:
    if backward is None:
        return
    if not backward.saved:
        yield "backward saves nothing per row"
    last = backward.rows.block.last_op
    vectors = len(last.operands) if last is not None else 0
    yield f"backward: {len(backward.row_steps)} loops over the keys before the gradients, {vectors} values per row"
    if backward.grad_captures:
        names = ", ".join(backward.captures[n.value.data].name_hint or "?" for n in backward.grad_captures)
        yield f"gradients of captures: {names}"
