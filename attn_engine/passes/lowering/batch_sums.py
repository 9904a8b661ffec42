"""Gradients of tables of scores that all batches share: each batch stores a part, and a kernel behind them adds these up.

Where batches are few, that moves fewer bytes than adding each part to sums in f32, which must be set to zero before and
made a result of behind, and additions have one order.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.frame import Frame, Operands, cast, spread
from attn_engine.passes.lowering.kernel import Blocks, Kernel, close, loop
from attn_engine.passes.lowering.program import Bound
from attn_engine.passes.lowering.scope import Scope
from attn_engine.passes.lowering.score_gradients import ScoreGradient, number_of

_ROWS, _COLUMNS, _WARPS = 32, 128, 4
"""Of the blocks that a program adds up, at most: few rows and many columns lie close together in memory."""


@dataclass
class BatchSums:
    """The temporary of one contribution: [batch, heads, queries, keys] in the type of the capture."""

    op: attn.BackwardOp
    operands: Operands
    gradient: ScoreGradient
    blocks: tuple[int, int]
    """Queries and keys of blocks of the gradients: those that are added up divide them."""

    def __post_init__(self) -> None:
        operands, scope = self.operands, self.operands.plan.scope
        sizes = [operands.batch, operands.heads, operands.sq, operands.skv]
        self.element = tile.element_of(operands[operands.capture_names[self.capture]])
        self.parts = scope.add(tile.AllocOp(sizes, tile.GlobalType(4, self.element)), "parts").result

    @property
    def capture(self) -> int:
        return self.gradient.capture

    @property
    def bounded(self) -> bool:
        return True

    def leave(self, frame: Frame, scope: Scope, value: SSAValue, q0: SSAValue, n0: SSAValue) -> None:
        """Stores a block of contributions, 0 where they do not count."""
        limits = {} if frame.operands.whole else {0: frame.sq, 1: frame.skv}
        scope.add(tile.StoreOp(value, frame.kernel.take(self.parts), [frame.b, frame.h, q0, n0], [2, 3], limits))

    def finish(self, name: str) -> tile.KernelOp:
        """The kernel that adds the parts up, behind all programs that store them; blocks without a visible score have none."""
        operands = self.operands
        m, n = min(self.blocks[0], _ROWS), min(self.blocks[1], _COLUMNS)
        kernel = Kernel(name, operands.plan, Blocks(m, n, _WARPS, 1))
        i, h, entry = (kernel.program_id(n, hint) for n, hint in enumerate(("i", "h", "entry")))
        scope = kernel.scope
        self.frame = frame = Frame(operands, kernel, 0, h, h, h)
        q0 = scope.value(scope.times(i, m, "q0"))
        rows = scope.add(tile.RangeOp(q0, m), "rows").result
        batches = self._batches(scope, entry, kernel.take(operands.batch))
        _, body, n0, _ = loop(scope, 0, frame.skv, n, [], "n0")
        cols = body.add(tile.RangeOp(n0, n), "cols").result
        sums, inner, b, (old,) = loop(body, 0, batches, 1, [body.splat([m, n], 0.0, "d")], "b")
        frame.b = b
        close(inner, [self._add(inner, [q0, n0], (rows, cols), old)])
        self._store(body, sums.results[0], entry, [q0, n0])
        close(body, [])
        blocks = operands.blocks(operands.sq, m, "table_blocks")
        return kernel.launch([blocks, operands.heads, self._entries()])

    def _axis(self) -> int | None:
        """The axis of the table that is read at a number."""
        return next((a for a, index in enumerate(self.gradient.leading) if number_of(index) is not None), None)

    def _entries(self) -> SSAValue:
        """How long that axis is: programs for the other entries store zeros."""
        axis, plan, name = self._axis(), self.operands.plan, self.operands.capture_names[self.capture]
        return plan.scope.value(1) if axis is None else plan.size(self.operands[name], axis, f"{name}_n{axis}")

    def _batches(self, scope: Scope, entry: SSAValue, batch: SSAValue) -> SSAValue:
        axis = self._axis()
        if axis is None:
            return batch
        number = scope.value(number_of(self.gradient.leading[axis]) or 0)
        mine = scope.add(arith.CmpiOp(entry, number, "eq"), "mine").result
        return scope.add(arith.SelectOp(mine, batch, scope.value(0)), "batches").result

    def _limits(self) -> dict[int, SSAValue]:
        return {} if self.operands.whole else {0: self.frame.sq, 1: self.frame.skv}

    def _add(self, scope: Scope, at: list[SSAValue], index: tuple[SSAValue, SSAValue], old: SSAValue) -> SSAValue:
        frame, type_ = self.frame, TensorType(self.element, self.frame.shape)
        place, parts = [frame.b, frame.h, *at], frame.kernel.take(self.parts)
        part = scope.add(tile.LoadOp(parts, place, [2, 3], type_, self._limits()), "part").result
        program = frame.program(covered=False)
        frame.see(program, frame.place(program, *index), [])
        wide = cast(program, program.argument(Bound(part, (0, 1)), "d"), f32)
        before = program.argument(Bound(old, (0, 1)), "sum")
        wanted = program.add(arith.AddfOp(before, program.where_visible(wide)), "sum")
        return spread(scope, frame.run(program, scope, [wanted])[0], frame.shape)

    def _store(self, scope: Scope, sums: SSAValue, entry: SSAValue, at: list[SSAValue]) -> None:
        frame, axis = self.frame, self._axis()
        program = frame.program(covered=False)
        value = cast(program, program.argument(Bound(sums, (0, 1)), "d"), self.element)
        result = spread(scope, frame.run(program, scope, [value])[0], frame.shape)
        leading = [entry if a == axis else frame.h for a in range(len(self.gradient.leading))]
        memory, dims = frame.take(f"d_{self.operands.capture_names[self.capture]}"), [len(leading), len(leading) + 1]
        scope.add(tile.StoreOp(result, memory, [*leading, *at], dims, self._limits()))
