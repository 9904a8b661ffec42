"""tilelang-nest-scalars: what loops around a pipelined one compute from scalars, in the form that TileLang takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, OpResult, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile


def _loops_around(op: Operation) -> list[scf.ForOp]:
    """The loops that an op stands in, outermost first."""
    found: list[scf.ForOp] = []
    parent = op.parent_op()
    while parent is not None:
        if isinstance(parent, scf.ForOp):
            found.append(parent)
        parent = parent.parent_op()
    return found[::-1]


def _is_scalar_code(op: Operation) -> bool:
    """Whether an op can be computed again anywhere: arithmetic, or a read of an argument, which no kernel writes."""
    is_computed = op.name.startswith("arith.") and not isinstance(op, arith.ConstantOp)
    return is_computed or isinstance(op, tile.GatherOp)


def _scalars_from_outside(loop: scf.ForOp) -> Iterator[Operation]:
    """Scalar code outside of a loop that its body depends on, in an order in which it can be computed."""
    seen: set[Operation] = set()

    def visit(value: SSAValue) -> Iterator[Operation]:
        op = value.owner
        if not isinstance(value, OpResult) or not isinstance(op, Operation) or op in seen or loop.is_ancestor(op):
            return
        if not _is_scalar_code(op):
            return
        seen.add(op)
        for operand in op.operands:
            yield from visit(operand)
        yield op

    for inner in loop.body.walk():
        for operand in inner.operands:
            yield from visit(operand)


def _compute_inside(loop: scf.ForOp) -> None:
    """Computes what the body of a loop takes from outside anew at its head."""
    new: dict[SSAValue, SSAValue] = {}
    clones: list[Operation] = []
    originals = list(_scalars_from_outside(loop))
    for op in originals:
        clones.append(op.clone(value_mapper=new))
        for old, result in zip(op.results, clones[-1].results, strict=True):
            new[old] = result
            result.name_hint = old.name_hint
    for inner in loop.body.walk():
        for index, operand in enumerate(inner.operands):
            if operand in new:
                inner.operands[index] = new[operand]
    Rewriter.insert_op(clones, InsertPoint.at_start(loop.body.block))
    for op in reversed(originals):
        if not any(result.uses for result in op.results):
            Rewriter.erase_op(op)


@dataclass(frozen=True)
class TilelangNestScalarsPass(ModulePass):
    """Computes what the loops around a loop with stages need of scalars in them.

    ```
    %last = arith.minsi %a, %b : i32
    scf.for %g = %c0 to %group step %c1 : i32 {
      scf.for %n0 = %c0 to %last step %c64 : i32 { ... } {stages = 3 : i64}
    }
    ```
    becomes
    ```
    scf.for %g = %c0 to %group step %c1 : i32 {
      %last = arith.minsi %a, %b : i32
      scf.for %n0 = %c0 to %last step %c64 : i32 { ... } {stages = 3 : i64}
    }
    ```
    TileLang copies ahead in threads of their own, and moves scalars from outside to right before the loop that these
    share with the rest: too late for what else stands in the loops around it.
    """

    name = "tilelang-nest-scalars"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for loop in [o for o in op.walk() if isinstance(o, scf.ForOp) and "stages" in o.attributes]:
            for outer in _loops_around(loop):
                _compute_inside(outer)
