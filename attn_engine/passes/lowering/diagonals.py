"""Gradients of what a score reads by the distance of its query and key: sums along diagonals of the scores.

Programs add them, diagonal by diagonal of their blocks, to a temporary with a number for each distance; a kernel behind
them adds each of these numbers to the place that its distance has in the capture. A table of buckets is much smaller
than a block of scores, so that additions element by element would wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, f32, i64
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.ir.walks import bottom_up, operands_of
from attn_engine.passes.lowering.frame import Frame, Operands
from attn_engine.passes.lowering.gradients import flush, target_of
from attn_engine.passes.lowering.kernel import Blocks, Kernel
from attn_engine.passes.lowering.program import Bound
from attn_engine.passes.lowering.scope import Index, Scope

Slope = tuple[int, int]
"""How much an integer grows with the position of the query, and with that of the key."""

_POSITIONS: dict[int, Slope] = {2: (0, 0), 3: (0, 0), 4: (1, 0), 5: (0, 1)}
"""Of the arguments b, h, q and kv of an element region."""
_KEEP = (arith.ExtSIOp, arith.TruncIOp)
_DISTANCES = 1024
"""That a program of the last kernel looks at."""


class _Distances:
    """Which values of an element region depend on positions through q - kv alone."""

    def __init__(self) -> None:
        self.slopes: dict[SSAValue, Slope | None] = {}
        self.known: dict[SSAValue, bool] = {}

    def holds(self, value: SSAValue) -> bool:
        return bottom_up(value, operands_of, self._holds, self.known)

    def _holds(self, value: SSAValue) -> bool:
        slope = self._slope(value)
        if slope is not None:
            return slope[0] == -slope[1]
        if isinstance(value.owner, Operation):
            return all(self.known[o] for o in value.owner.operands)
        return isinstance(value.type, TensorType)

    def _slope(self, value: SSAValue) -> Slope | None:
        """None for what is no sum of positions. Positions are too small for sums to overflow."""
        return bottom_up(value, operands_of, self._find, self.slopes)

    def _find(self, value: SSAValue) -> Slope | None:
        owner = value.owner
        if isinstance(value, BlockArgument):
            return _POSITIONS.get(value.index) if value.type == i64 else None
        assert isinstance(owner, Operation)
        if isinstance(owner, arith.ConstantOp):
            return 0, 0
        if isinstance(owner, _KEEP):
            return self.slopes[owner.operands[0]]
        if isinstance(owner, arith.AddiOp | arith.SubiOp):
            a, b = self.slopes[owner.lhs], self.slopes[owner.rhs]
            sign = 1 if isinstance(owner, arith.AddiOp) else -1
            return (a[0] + sign * b[0], a[1] + sign * b[1]) if a is not None and b is not None else None
        fixed = all(isinstance(o.type, TensorType) or self.slopes[o] == (0, 0) for o in owner.operands)
        return (0, 0) if fixed else None


def by_distance(op: attn.BackwardOp) -> list[int]:
    """The contributions of the element region, by number, whose place depends on positions through q - kv alone."""
    adds = [o for o in op.element.block.ops if isinstance(o, attn.AccumulateGradOp)]
    distances = _Distances()
    return [n for n, add in enumerate(adds) if all(distances.holds(i) for i in add.indices)]


@dataclass
class DiagonalSums:
    """The temporary of one contribution: [batch or 1, heads or 1, distances] in f32, kv - q growing along the last axis."""

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
        sizes = [*(scope.value(n) for n in self._leading(operands.batch, operands.heads)), self.length]
        self.sums = scope.add(tile.AllocOp(sizes, tile.GlobalType(3, f32)), "diagonals").result
        scope.add(tile.FillOp(self.sums, scope.real(0.0)))

    def _leading(self, b: Index, h: Index) -> list[Index]:
        """With 1 (or 0) for what the place does not depend on."""
        return [b if "b" in self.axes else 1, h if "h" in self.axes else 1]

    def add(self, frame: Frame, scope: Scope, value: SSAValue, q0: SSAValue, n0: SSAValue) -> None:
        """Adds a block of contributions, 0 where they do not count."""
        origin, kernel = frame.kernel.take(self.origin), frame.kernel
        start = scope.plus(scope.minus(n0, q0, "start"), origin, "start")
        place = [frame.b if "b" in self.axes else 0, frame.h if "h" in self.axes else 0, start]
        scope.add(tile.AddDiagonalsOp(value, kernel.take(self.sums), [scope.value(i) for i in place]))

    def finish(self, name: str) -> tile.KernelOp:
        """The kernel that adds the sums to the capture's gradient, as if distances were queries and the key the first one."""
        kernel = Kernel(name, self.operands.plan, Blocks(_DISTANCES, _DISTANCES, 4, 1))
        scope = kernel.scope
        i, h, b = (kernel.program_id(n, hint) for n, hint in enumerate(("i", "h", "b")))
        frame = Frame(self.operands, kernel, 0, b, h, h)
        first = scope.value(scope.times(i, _DISTANCES, "first"))
        limit = kernel.take(self.length)
        type_ = TensorType(f32, [_DISTANCES])
        sums = scope.add(tile.LoadOp(kernel.take(self.sums), [b, h, first], [2], type_, {0: limit}), "sums").result
        rows = scope.add(tile.RangeOp(first, _DISTANCES), "rows").result
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
        return kernel.launch([self.operands.blocks(self.length, _DISTANCES, "distance_blocks"), heads, batch])
