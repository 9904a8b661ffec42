"""Tiles that programs take off a counter: how many programs there are, and the cells by which roles hear of a tile."""

from __future__ import annotations

from xdsl.dialects import arith
from xdsl.dialects.builtin import i32
from xdsl.ir import SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_memory import ProcessorCountOp
from attn_engine.passes.lowering.scope import Scope

CELLS = 2
"""The producer is at most so many tiles ahead."""


def programs_and_counter(scope: Scope, tiles: SSAValue) -> tuple[SSAValue, SSAValue]:
    """In a plan: one program for each multiprocessor, if there are so many tiles, and the counter of those taken beyond."""
    processors = scope.add(ProcessorCountOp(), "processors").result
    programs = scope.value(scope.smaller(processors, tiles, "programs"))
    counter = scope.add(tile.AllocOp([scope.value(1)], tile.GlobalType(1, i32)), "counter").result
    scope.add(tile.FillOp(counter, scope.value(0)))
    return programs, counter


def cell_of(scope: Scope, done: SSAValue) -> tuple[SSAValue, SSAValue]:
    """Which cell a tile uses, and the parity of its phase."""
    cells = scope.value(CELLS)
    cell = scope.add(arith.RemSIOp(done, cells), "cell").result
    round_ = scope.add(arith.DivSIOp(done, cells), "round").result
    return cell, scope.add(arith.AndIOp(round_, scope.value(1)), "cell_parity").result
