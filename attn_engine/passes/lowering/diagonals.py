"""Gradients of what a score reads by the distance of its query and key: sums along diagonals of the scores.

Programs add them, diagonal by diagonal of their blocks, to a temporary with a number for each distance; a kernel behind
them adds each of these numbers to the place that its distance has in the capture. A table of buckets is much smaller
than a block of scores, so that additions element by element would wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, f32, i64
from xdsl.ir import Block, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.distances import DISTANCES, ByDistance
from attn_engine.passes.lowering.frame import Frame, Operands
from attn_engine.passes.lowering.gradients import flush, target_of
from attn_engine.passes.lowering.kernel import Blocks, Kernel
from attn_engine.passes.lowering.program import Bound
from attn_engine.passes.lowering.scope import Index, Scope


def by_distance(op: attn.BackwardOp) -> list[int]:
    """The contributions of the element region, by number, whose place depends on positions through q - kv alone."""
    adds = [o for o in op.element.block.ops if isinstance(o, attn.AccumulateGradOp)]
    distances = ByDistance(op.element.block)
    return [n for n, add in enumerate(adds) if all(distances.holds(i) for i in add.indices)]


COPIES = 8
"""Programs that run side by side are about as far from the diagonal: those of neighbouring blocks add to different copies."""


@dataclass
class DiagonalSums:
    """The temporary of one contribution: [copies, batch or 1, heads or 1, distances] in f32, kv - q growing along the last axis."""

    op: attn.BackwardOp
    operands: Operands
    number: int
    axes: frozenset[str]
    """Of b, h, q and kv, those on which the place depends."""
    block: int
    """Queries, and keys, by which blocks may go beyond their tensors."""

    def __post_init__(self) -> None:
        operands, scope = self.operands, self.operands.plan.scope
        beyond = scope.value(self.block)
        self.origin = scope.add(arith.AddiOp(operands.sq, beyond), "origin").result
        keys = scope.add(arith.AddiOp(operands.skv, beyond), "keys").result
        self.length = scope.add(arith.AddiOp(self.origin, keys), "distances").result
        sizes = [scope.value(n) for n in (COPIES, *self._leading(operands.batch, operands.heads))]
        self.sums = scope.add(tile.AllocOp([*sizes, self.length], tile.GlobalType(4, f32)), "diagonals").result
        scope.add(tile.FillOp(self.sums, scope.real(0.0)))

    def _leading(self, b: Index, h: Index) -> list[Index]:
        """With 1 (or 0) for what the place does not depend on."""
        return [b if "b" in self.axes else 1, h if "h" in self.axes else 1]

    def add(self, frame: Frame, scope: Scope, value: SSAValue, q0: SSAValue, n0: SSAValue) -> None:
        """Adds a block of contributions, 0 where they do not count, with queries or keys along its rows."""
        origin, kernel = frame.kernel.take(self.origin), frame.kernel
        start = scope.plus(scope.minus(n0, q0, "start"), origin, "start")
        turned = frame.q_axis == 1
        own, size = (n0, kernel.blocks.n) if turned else (q0, kernel.blocks.m)
        block = scope.add(arith.DivSIOp(own, scope.value(size)), "block").result
        copy = scope.add(arith.RemSIOp(block, scope.value(COPIES)), "copy").result
        place = [copy, frame.b if "b" in self.axes else 0, frame.h if "h" in self.axes else 0, start]
        scope.add(tile.AddDiagonalsOp(value, kernel.take(self.sums), [scope.value(i) for i in place], turned))

    def finish(self, name: str) -> tile.KernelOp:
        """The kernel that adds the sums to the capture's gradient, as if distances were queries and the key the first one."""
        kernel = Kernel(name, self.operands.plan, Blocks(DISTANCES, DISTANCES, 4, 1))
        scope = kernel.scope
        i, h, b = (kernel.program_id(n, hint) for n, hint in enumerate(("i", "h", "b")))
        frame = Frame(self.operands, kernel, 0, b, h, h)
        first = scope.value(scope.times(i, DISTANCES, "first"))
        limit = kernel.take(self.length)
        place, type_ = [scope.value(0), b, h, first], TensorType(f32, [COPIES, DISTANCES])
        copies = scope.add(tile.LoadOp(kernel.take(self.sums), place, [0, 3], type_, {1: limit}), "copies").result
        sums = scope.add(tile.ReduceOp(tile.Reduction.SUM, copies, 0), "sums").result
        rows = scope.add(tile.RangeOp(first, DISTANCES), "rows").result
        program = frame.program(covered=False)
        origin, row = (
            program.argument(Bound(kernel.take(self.origin)), "origin"),
            program.argument(Bound(rows, (0,)), "row"),
        )
        distance = program.add(arith.SubiOp(origin, row), "distance")
        q = program.add(arith.ExtSIOp(distance, i64), "q")
        kv = program.add(arith.ConstantOp.from_int_and_width(0, 64), "kv")
        nothing = program.argument(Bound(frame.take("scale")), "unused")
        region: Block = self.op.element.block
        others = [nothing for a in region.args[6:] if a.type == f32]
        program.inline(region, [nothing, nothing, *frame.heads(program), q, kv, *others])
        target = target_of(frame, scope, program, program.contributions[self.number])
        flush(frame, scope, target, Bound(sums, (0,)), frame.shape)
        batch, heads = (
            self.operands.plan.scope.value(n) for n in self._leading(self.operands.batch, self.operands.heads)
        )
        return kernel.launch([self.operands.blocks(self.length, DISTANCES, "distance_blocks"), heads, batch])
