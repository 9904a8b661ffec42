"""What backward takes over from the forward pass: a minimum cut between reductions and the code that reads rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx
from xdsl.dialects.builtin import f32
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.ir.autodiff.graph import Graph, Needs

SOURCE, SINK = "source", "sink"
VECTOR, OUTPUT_VECTOR = 100, 99
"""What it costs to save a row vector, and one that the op returns anyway."""


def _is_forward_row(graph: Graph, value: SSAValue) -> bool:
    """Whether the forward pass knows the value once its reductions are done, and not before."""
    needs = graph.needs[value]
    return bool(needs & Needs.FORWARD) and not needs & (Needs.ELEMENT | Needs.BACKWARD)


def _operands(value: SSAValue) -> Sequence[SSAValue]:
    return value.owner.operands if isinstance(value.owner, Operation) else ()


def rows_read(graph: Graph, targets: Iterable[SSAValue]) -> set[SSAValue]:
    """The row values of the forward pass that backward code reads directly."""
    found, seen, pending = set[SSAValue](), set[SSAValue](), list(targets)
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if _is_forward_row(graph, value):
            found.add(value)
        else:
            pending.extend(_operands(value))
    return found


def choose_saved(graph: Graph, targets: Iterable[SSAValue], outputs: Sequence[SSAValue]) -> list[SSAValue]:
    """The fewest row vectors from which all of `targets` can be computed, the closest to them that there are."""
    network: nx.DiGraph[object] = nx.DiGraph()
    network.add_nodes_from((SOURCE, SINK))
    read = rows_read(graph, targets)
    seen, pending = set[SSAValue](), list(read)
    for value in read:
        network.add_edge(SINK, (value, "out"))
    # Edges run from the reader to what it reads: the cut that networkx finds is the one next to its source.
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.type != f32:
            network.add_edge((value, "out"), (value, "in"))
        else:
            network.add_edge((value, "out"), (value, "in"), capacity=OUTPUT_VECTOR if value in outputs else VECTOR)
        if isinstance(value.owner, attn.RowReduceOp):
            network.add_edge((value, "in"), SOURCE)
            continue
        for operand in _operands(value):
            if _is_forward_row(graph, operand):
                network.add_edge((value, "in"), (operand, "out"))
                pending.append(operand)
    if not read:
        return []
    near: set[object] = nx.minimum_cut(network, SINK, SOURCE)[1][0]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    saved = [value for value in seen if (value, "out") in near and (value, "in") not in near]
    return sorted(saved, key=graph.order.__getitem__)
