"""`attn-hoist-rows`: arithmetic on row vectors is done once per row, not in every block of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, f32
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from attn_engine.dialects import attn
from attn_engine.ir.axes import Axes, axes_of
from attn_engine.ir.walks import behind
from attn_engine.passes.attn_simplify import simplify

LEADING = 6
"""Element arguments before the row vectors: x, dp, b, h, q, kv."""


def _derived(block: Block, vectors: list[SSAValue], axes: Mapping[SSAValue, Axes]) -> set[SSAValue]:
    """f32 values per row that depend on a row vector: what a row vector can hold."""
    found = set(vectors)
    for op in block.ops:
        if found.intersection(op.operands):
            found.update(r for r in op.results if r.type == f32 and "kv" not in axes[r])
    return found


def _crossing(block: Block, derived: set[SSAValue]) -> list[SSAValue]:
    """Those that code per element reads, in the order of their definition."""
    order = [*block.args, *(r for op in block.ops for r in op.results)]
    return [v for v in order if v in derived and any(not derived.intersection(u.operation.results) for u in v.uses)]


def _needed(block: Block, wanted: list[SSAValue], stop: set[SSAValue]) -> list[Operation]:
    """The ops that compute `wanted` from block arguments, in order."""
    live: set[Operation] = set()
    work = [v for v in wanted if v not in stop]
    while work:
        owner = work.pop().owner
        if isinstance(owner, Operation) and owner not in live:
            live.add(owner)
            work += list(owner.operands)
    return [op for op in block.ops if op in live]


def _clone_into_rows(op: attn.BackwardOp, vectors: list[SSAValue], wanted: list[SSAValue]) -> None:
    """Makes the rows region yield `wanted`, values of the element region."""
    element, rows = op.element.block, op.rows.block
    last = rows.last_op
    assert isinstance(last, attn.YieldOp)
    captures = len(op.captures)
    mapping: dict[SSAValue, SSAValue] = dict(zip(vectors, last.values, strict=True))
    mapping.update(zip(element.args[2:5], rows.args[:3], strict=True))
    if captures:
        mapping.update(zip(element.args[-captures:], rows.args[-captures:], strict=True))
    for inner in _needed(element, wanted, set(vectors)):
        clone = inner.clone(value_mapper=mapping)
        rows.insert_op_before(clone, last)
        for old, new in zip(inner.results, clone.results, strict=True):
            new.name_hint = old.name_hint
            mapping[old] = new
    rows.insert_op_before(attn.YieldOp(*(mapping[w] for w in wanted)), last)
    rows.erase_op(last)


def _replace_vectors(block: Block, vectors: list[SSAValue], wanted: list[SSAValue]) -> None:
    """New row vectors in the place of the old ones."""
    for n, value in enumerate(wanted):
        arg = block.insert_arg(value.type, LEADING + len(vectors) + n)
        arg.name_hint = value.name_hint
        value.replace_all_uses_with(arg)
    for op in reversed(list(block.ops)):
        dead = op.results and not any(r.uses for r in op.results)
        if dead and any(v in vectors for v in _sources(op)):
            block.erase_op(op)
    for vector in reversed(vectors):
        block.erase_arg(vector)  # type: ignore[arg-type]


def _sources(op: Operation) -> set[SSAValue]:
    return set(behind(op.operands))


def hoist_rows(op: attn.BackwardOp) -> None:
    """Moves what the element region computes per row into `rows`, if that needs no more row vectors."""
    simplify(op)
    block, last = op.element.block, op.rows.block.last_op
    assert isinstance(last, attn.YieldOp)
    vectors: list[SSAValue] = list(block.args[LEADING : LEADING + len(last.values)])
    derived = _derived(block, vectors, axes_of(op, "element"))
    wanted = _crossing(block, derived)
    if set(wanted) == set(vectors) or len(wanted) > len(vectors):
        return
    _clone_into_rows(op, vectors, wanted)
    _replace_vectors(block, vectors, wanted)
    simplify(op)


@dataclass(frozen=True)
class AttnHoistRowsPass(ModulePass):
    """In `attn.backward`, computes values per row in `rows` instead of `element`, where the row vectors do not multiply.

    ```
    rows: attn.yield %lse : f32                  ->  %r = arith.mulf %lse, %log2e : f32
                                                     attn.yield %r : f32
    element(%x, ..., %lse):                          element(%x, ..., %r):
      %r = arith.mulf %lse, %log2e : f32
      %e = arith.subf %x2, %r : f32                    %e = arith.subf %x2, %r : f32
    ```
    """

    name = "attn-hoist-rows"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for inner in list(op.walk()):
            if isinstance(inner, attn.BackwardOp):
                hoist_rows(inner)
