"""`tile-narrow-results`: integers that maps pass to maps in 32 bits, where they were widened for nobody else."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin
from xdsl.dialects.builtin import IntegerType, TensorType, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.error_bounds import maps_of
from attn_engine.passes.simplify_rule import predicate_of

_SIGNED = ("eq", "ne", "slt", "sle", "sgt", "sge")
"""Comparisons that widened integers pass as narrow ones do."""


def _readers(output: SSAValue) -> list[tuple[tile.MapOp, int]] | None:
    """The maps that read a result, and as which of their inputs; None if anything else does."""
    found: list[tuple[tile.MapOp, int]] = []
    for use in output.uses:
        if not isinstance(use.operation, tile.MapOp):
            return None
        found.append((use.operation, use.index))
    return found


def _pass_narrow(op: tile.MapOp) -> None:
    """Results that are widened integers of 32 bits are passed on as they were."""
    end = op.body.block.last_op
    assert isinstance(end, tile.MapYieldOp)
    for n, output in enumerate(op.outputs):
        wide, readers = end.values[n].owner, _readers(output)
        if not isinstance(wide, arith.ExtSIOp) or wide.result.type != i64 or not readers:
            continue
        narrow = wide.input
        end.operands[n] = narrow
        Rewriter.replace_value_with_new_type(output, TensorType(narrow.type, tile.shape_of(output)))
        for reader, place in readers:
            _widen_argument(reader, place, narrow.type)
        if not wide.result.uses:
            Rewriter.erase_op(wide)


def _widen_argument(reader: tile.MapOp, place: int, narrow: Attribute) -> None:
    block = reader.body.block
    argument = Rewriter.replace_value_with_new_type(block.args[place], narrow)
    first = block.first_op
    assert first is not None and isinstance(narrow, IntegerType)
    wide = arith.ExtSIOp(argument, i64)
    Rewriter.insert_op(wide, InsertPoint.before(first))
    argument.replace_uses_with_if(wide.result, lambda use: use.operation is not wide)


def _compare_narrow(op: Operation) -> None:
    """Compares what two integers were widened from."""
    if not isinstance(op, arith.CmpiOp) or predicate_of(op) not in _SIGNED:
        return
    sides = [value.owner for value in op.operands]
    narrow = [side.input for side in sides if isinstance(side, arith.ExtSIOp)]
    if len(narrow) == len(sides) and narrow[0].type == narrow[1].type:
        op.operands = narrow
    for side in dict.fromkeys(sides):
        if isinstance(side, arith.ExtSIOp) and not side.result.uses:
            Rewriter.erase_op(side)


@dataclass(frozen=True)
class TileNarrowResultsPass(ModulePass):
    """Passes loaded integers from map to map in the 32 bits that they have in memory, and compares them so.

    Regions see integers of 64 bits. A number of a document that is read once for a row would cross to the layout of the
    scores in 64 bits, and stay there in two registers.

    ```
    %d = tile.map (%doc, %rows) { %n = tile.gather %doc[%row]; tile.yield arith.extsi %n }
    tile.map (%d, %e) { arith.cmpi eq, %d, %e : i64 }
    ```
    becomes
    ```
    %d = tile.map (%doc, %rows) { tile.yield tile.gather %doc[%row] }
    tile.map (%d, %e) { arith.cmpi eq, %d, %e : i32 }
    ```
    """

    name = "tile-narrow-results"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for kernel in [o for o in op.ops if isinstance(o, tile.KernelOp)]:
            for inside in list(maps_of(kernel)):
                _pass_narrow(inside)
            for inside in list(maps_of(kernel)):
                for inner in list(inside.body.block.ops):
                    _compare_narrow(inner)
