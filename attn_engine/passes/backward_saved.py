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
    read = sorted(rows_read(graph, targets), key=graph.order.__getitem__)
    if not read:
        return []
    network, values = _network(graph, read, outputs)
    # Of several minimum cuts networkx gives the one next to the sink.
    far: set[object] = nx.minimum_cut(network, SOURCE, SINK)[1][1]  # pyright: ignore[reportUnknownVariableType]
    saved = [value for value in values if (value, "in") not in far and (value, "out") in far]
    return sorted(saved, key=graph.order.__getitem__)


def _network(
    graph: Graph, read: Sequence[SSAValue], outputs: Sequence[SSAValue]
) -> tuple[nx.DiGraph[object], list[SSAValue]]:
    """Reductions flow to the values that are computed from them and on to those that are `read`."""
    network: nx.DiGraph[object] = nx.DiGraph()
    network.add_edges_from(((value, "out"), SINK) for value in read)
    values: dict[SSAValue, None] = {}
    pending = list(read)
    while pending:
        value = pending.pop()
        if value in values:
            continue
        values[value] = None
        cost = {"capacity": OUTPUT_VECTOR if value in outputs else VECTOR} if value.type == f32 else {}
        network.add_edge((value, "in"), (value, "out"), **cost)
        if isinstance(value.owner, attn.RowReduceOp):
            network.add_edge(SOURCE, (value, "in"))
            continue
        earlier = [operand for operand in _operands(value) if _is_forward_row(graph, operand)]
        network.add_edges_from(((operand, "out"), (value, "in")) for operand in earlier)
        pending += earlier
    return network, list(values)
