"""The row kernel of a backward: delta, extra loops over the keys where needed, then the `rows` region."""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.dialects.builtin import f32
from xdsl.ir import SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.frame import Frame, Operands, cast, spread
from attn_engine.passes.lowering.gradients import counted, flush, target_of
from attn_engine.passes.lowering.kernel import Kernel
from attn_engine.passes.lowering.partition import Partition
from attn_engine.passes.lowering.program import Bound, Program
from attn_engine.passes.lowering.ranges import over, spans
from attn_engine.passes.lowering.scope import Scope


@dataclass
class RowVectors:
    op: attn.BackwardOp
    operands: Operands
    kernel: Kernel
    vectors: list[SSAValue]
    finals: list[SSAValue] = field(default_factory=list[SSAValue])

    def build(self) -> None:
        kernel, scope, operands = self.kernel, self.kernel.scope, self.operands
        i, h, b = (kernel.program_id(n, hint) for n, hint in enumerate(("i", "h", "b")))
        self.m = m = kernel.blocks.m
        hk = scope.add(arith.DivSIOp(h, kernel.take(operands.group)), "hk").result
        self.frame = frame = Frame(operands, kernel, 0, b, h, hk)
        self.q0 = q0 = scope.value(scope.times(i, m, "q0"))
        self.q_index = scope.add(tile.RangeOp(q0, m), "rows").result
        self.d_o = frame.rows(scope, "d_o", h, q0, m, operands.vo, frame.sq)
        self.inputs = [self._delta(scope), *self._loaded(scope)]
        if len(self.op.row_steps):
            self._steps(scope)
        self._rows(scope)

    def _delta(self, scope: Scope) -> SSAValue:
        """rowsum(d_o * o)."""
        frame, head = self.frame, self.operands.vo
        o = frame.rows(scope, "o", frame.h, self.q0, self.m, head, frame.sq)
        program = Program()
        left = cast(program, program.argument(Bound(o, (0, 1)), "o"), f32)
        right = cast(program, program.argument(Bound(self.d_o, (0, 1)), "d_o"), f32)
        product = program.add(arith.MulfOp(left, right), "product")
        delta = program.add(attn.RowReduceOp(attn.ReduceKind.SUM, product), "delta")
        return Partition(program, scope, (self.m, head.tile), 1).run([delta])[0].value

    def _loaded(self, scope: Scope) -> list[SSAValue]:
        op, frame = self.op, self.frame
        names = [f"saved{n}" for n in range(len(op.saved))] + [f"d_output{n}" for n in range(len(op.d_outputs))]
        return [frame.vector(scope, frame.take(n), self.q0, self.m, frame.sq, n) for n in names]

    def _steps(self, scope: Scope) -> None:
        frame, operands, m = self.frame, self.operands, self.m
        q = frame.rows(scope, "q", frame.h, self.q0, m, operands.qk, frame.sq)
        self.q = frame.modified(scope, q, self.op.query_mod, frame.h, self.q0, frame.sq, operands.qk)
        n = self.kernel.blocks.n
        runs = list(spans(frame, scope, (self.q0, m), n, transposed=False))
        for number, init in enumerate(self.op.init.data):
            states = [scope.splat([m], a.value.data, "state") for a in init.data]

            def body(
                inner: Scope, n0: SSAValue, masked: bool, inside: list[SSAValue], number: int = number
            ) -> list[SSAValue]:
                return self._block(inner, number, n0, masked, inside)

            self.finals += over(scope, runs, n, states, "n0", body)

    def _block(self, scope: Scope, number: int, n0: SSAValue, masked: bool, inside: list[SSAValue]) -> list[SSAValue]:
        frame, operands, op, n = self.frame, self.operands, self.op, self.kernel.blocks.n
        limit = frame.skv if masked else None
        k = frame.rows(scope, "k", frame.hk, n0, n, operands.qk, limit)
        k = frame.modified(scope, k, op.key_mod, frame.hk, n0, frame.skv, operands.qk)
        v = frame.rows(scope, "v", frame.hk, n0, n, operands.vo, limit)
        v = frame.modified(scope, v, op.value_mod, frame.hk, n0, frame.skv, operands.vo)
        x, dp = frame.product(scope, self.q, k, "x"), frame.product(scope, self.d_o, v, "dp")
        program = frame.program()
        program.tables = frame.tables(scope, op.row_steps[number].block, self.q0, n0)
        cols = scope.add(tile.RangeOp(n0, n), "cols").result
        index = frame.place(program, self.q_index, cols, masked)
        if masked:
            frame.see(program, index, [(index[3], frame.skv)])
        scaled = scaled_product(program, Bound(x, (0, 1)), frame.take("scale"))
        rows = [program.argument(Bound(r, (0,)), r.name_hint or "r") for r in [*self.inputs, *inside, *self.finals]]
        arguments = [scaled, program.argument(Bound(dp, (0, 1)), "dp"), *index, *rows]
        end = program.inline(op.row_steps[number].block, arguments)
        assert isinstance(end, attn.StepYieldOp)
        return [spread(scope, f, frame.shape, (0,)) for f in frame.run(program, scope, list(end.states))]

    def _rows(self, scope: Scope) -> None:
        frame = self.frame
        program = frame.program()
        index = frame.place(program, self.q_index, None)
        rows = [program.argument(Bound(r, (0,)), r.name_hint or "r") for r in [*self.inputs, *self.finals]]
        end = program.inline(self.op.rows.block, [*index, *rows])
        found = frame.run(program, scope, list(end.operands))
        for vector, value in zip(self.vectors, found, strict=True):
            tensor = spread(scope, value, (self.m,))
            place = [frame.b, frame.h, self.q0]
            scope.add(tile.StoreOp(tensor, self.kernel.take(vector), place, [2], frame.limits(frame.sq)))
        for contribution in program.contributions:
            (value,) = frame.run(program, scope, [counted(frame, program, contribution.value, index[2], frame.sq)])
            flush(frame, scope, target_of(frame, scope, program, contribution), value, frame.shape)


def scaled_product(program: Program, x: Bound, scale: SSAValue) -> SSAValue:
    return program.add(arith.MulfOp(program.argument(x, "x"), program.argument(Bound(scale), "scale")), "x")
