"""The dq kernel: a block of queries, loops over blocks of keys; with it the capture gradients that queries own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.dialects.builtin import f32
from xdsl.ir import Region, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.batch_sums import BatchSums
from attn_engine.passes.lowering.diagonals import DiagonalSums
from attn_engine.passes.lowering.forward import store_rows
from attn_engine.passes.lowering.frame import Frame, Operands, cast, present, spread
from attn_engine.passes.lowering.gradients import counted, flush, in_range, places_of, summed, target_of
from attn_engine.passes.lowering.kernel import Head, Kernel
from attn_engine.passes.lowering.mask_once import mask_once
from attn_engine.passes.lowering.partition import Partition
from attn_engine.passes.lowering.program import Bound, Program
from attn_engine.passes.lowering.ranges import over, spans
from attn_engine.passes.lowering.row_vectors import scaled_product
from attn_engine.passes.lowering.scope import Scope
from attn_engine.passes.lowering.score_gradients import ScoreGradient


@dataclass
class QueryGradients:
    """`carried` are the contributions summed over the keys in registers, `scattered` those added element by element.

    `diagonals` are those that are summed along diagonals of a block first, `blockwise` those that leave as a block.
    """

    op: attn.BackwardOp
    operands: Operands
    kernel: Kernel
    vectors: list[SSAValue]
    carried: list[int]
    scattered: list[int]
    diagonals: Mapping[int, DiagonalSums] = field(default_factory=dict[int, DiagonalSums])
    blockwise: Mapping[int, ScoreGradient | BatchSums] = field(default_factory=dict[int, ScoreGradient | BatchSums])

    def build(self, blocks: SSAValue) -> None:
        kernel, scope, operands = self.kernel, self.kernel.scope, self.operands
        i, h, b = (kernel.program_id(n, hint) for n, hint in enumerate(("i", "h", "b")))
        m = kernel.blocks.m
        if present(self.op.blocks) is not None:
            last = scope.minus(kernel.take(blocks), 1, "last")
            i = scope.value(scope.minus(last, i, "i"))
        hk = scope.add(arith.DivSIOp(h, kernel.take(operands.group)), "hk").result
        self.frame = frame = Frame(operands, kernel, 0, b, h, hk)
        q0 = self.q0 = scope.value(scope.times(i, m, "q0"))
        self.q_index = scope.add(tile.RangeOp(q0, m), "rows").result
        q = frame.rows(scope, "q", h, q0, m, operands.qk, frame.sq)
        self.q = frame.modified(scope, q, self.op.query_mod, h, q0, frame.sq, operands.qk)
        self.d_o = frame.rows(scope, "d_o", h, q0, m, operands.vo, frame.sq)
        self.rows = [frame.vector(scope, kernel.take(v), q0, m, frame.sq, v.name_hint or "row") for v in self.vectors]
        runs = list(spans(frame, scope, (q0, m), kernel.blocks.n, transposed=False))
        carried = [scope.splat([m], 0.0, "d") for _ in self.carried]
        if frame.leads("dq"):
            carried.append(scope.splat([m, operands.qk.tile], 0.0, "dq"))
        final = over(scope, runs, kernel.blocks.n, carried, "n0", self._block)
        if frame.leads("dq"):
            self._store(scope, final[-1], q, q0)
        for number, value in zip(self.carried, final, strict=False):
            self._flush(scope, number, value)

    def _block(self, scope: Scope, n0: SSAValue, masked: bool, inside: list[SSAValue]) -> list[SSAValue]:
        frame, operands, op, n = self.frame, self.operands, self.op, self.kernel.blocks.n
        limit = frame.skv if masked else None
        k = frame.rows(scope, "k", frame.hk, n0, n, operands.qk, limit)
        k = frame.modified(scope, k, op.key_mod, frame.hk, n0, frame.skv, operands.qk)
        v = frame.rows(scope, "v", frame.hk, n0, n, operands.vo, limit)
        v = frame.modified(scope, v, op.value_mod, frame.hk, n0, frame.skv, operands.vo)
        x, dp = frame.product(scope, self.q, k, "x"), frame.product(scope, self.d_o, v, "dp")
        program = frame.program()
        program.tables = frame.tables(scope, op.element.block, self.q0, n0)
        cols = scope.add(tile.RangeOp(n0, n), "cols").result
        index = frame.place(program, self.q_index, cols, masked)
        if masked:
            frame.see(program, index, [(index[3], frame.skv)])
        _, dx = element(frame, program, op, x, dp, index, self.rows)
        wanted = [
            program.add(
                arith.AddfOp(program.argument(Bound(old, (0,)), "d"), summed(program, program.contributions[c])), "d"
            )
            for c, old in zip(self.carried, inside, strict=False)
        ]
        if frame.leads("dq"):
            wanted.append(cast(program, dx, operands.element))
        apart = [*self.scattered, *self.diagonals, *self.blockwise]
        wanted += [contribution(frame, program, c, index[2], self.blockwise) for c in apart]
        found = frame.run(program, scope, wanted)
        for c, value in zip(apart, found[len(found) - len(apart) :], strict=True):
            self._leave(scope, program, c, value, n0)
        new = [spread(scope, f, frame.shape, (0,)) for f in found[: len(self.carried)]]
        if frame.leads("dq"):
            ds = spread(scope, found[len(self.carried)], frame.shape)
            new.append(frame.dot(scope, ds, k, inside[-1], "dq"))
        return new

    def _leave(self, scope: Scope, program: Program, number: int, value: Bound, n0: SSAValue) -> None:
        frame = self.frame
        if number in self.diagonals:
            self.diagonals[number].add(frame, scope, spread(scope, value, frame.shape), self.q0, n0)
        elif number in self.blockwise:
            self.blockwise[number].leave(frame, scope, spread(scope, value, frame.shape), self.q0, n0)
        else:
            flush(frame, scope, target_of(frame, scope, program, program.contributions[number]), value, frame.shape)

    def _store(self, scope: Scope, acc: SSAValue, q: SSAValue, q0: SSAValue) -> None:
        frame, head = self.frame, self.operands.qk
        dq = operand_gradient(frame, scope, acc, q, self.op.query_vjp, frame.h, q0, head, frame.take("scale"))
        store_rows(frame, scope, dq, "dq", frame.h, q0, head.size, head.padded, frame.sq)

    def _flush(self, scope: Scope, number: int, value: SSAValue) -> None:
        frame, region = self.frame, self.op.element.block
        program = frame.program()
        value = in_range(frame, scope, Bound(value, (0,)), Bound(self.q_index, (0,)), frame.sq)
        nothing = program.argument(Bound(frame.take("scale")), "unused")
        # The place depends on no key: any index stands for kv.
        index = [*frame.place(program, self.q_index, None), program.index(Bound(frame.h), "kv")]
        target = places_of(
            frame, scope, region, program, [nothing, nothing, *index, *[nothing] * len(self.vectors)], number
        )
        flush(frame, scope, target, Bound(value, (0,)), frame.shape)


def contribution(
    frame: Frame, program: Program, number: int, q: SSAValue, blockwise: Mapping[int, ScoreGradient | BatchSums]
) -> SSAValue:
    """An element of a contribution, in the type of the memory that it goes to; 0 beyond the end, unless that stays out there."""
    value, gradient = program.contributions[number].value, blockwise.get(number)
    if gradient is None or not gradient.bounded:
        value = counted(frame, program, value, q, frame.sq)
    if gradient is None:
        return value
    name = frame.operands.capture_names[gradient.capture]
    return cast(program, value, tile.element_of(frame.operands[f"d_{name}"]))


def element(
    frame: Frame,
    program: Program,
    op: attn.BackwardOp,
    x: SSAValue,
    dp: SSAValue,
    index: list[SSAValue],
    rows: list[SSAValue],
) -> tuple[SSAValue, SSAValue]:
    """(p, dx) of the element region, 0 where masked; contributions are left in the program."""
    scaled = scaled_product(program, Bound(x, (0, 1)), frame.take("scale"))
    gradient = program.argument(Bound(dp, (0, 1)), "dp")
    vectors = [program.argument(Bound(r, (frame.q_axis,)), r.name_hint or "row") for r in rows]
    end = program.inline(op.element.block, [scaled, gradient, *index, *vectors])
    p, dx = end.operands
    # Rows beyond the end may have any numbers.
    if not frame.operands.masks_once:
        return program.where_visible(p), program.where_visible(dx)
    return mask_once(program, p, dx, [scaled, gradient], vectors if frame.operands.whole else [])


def operand_gradient(
    frame: Frame,
    scope: Scope,
    acc: SSAValue,
    loaded: SSAValue,
    vjp: Region | None,
    h: SSAValue,
    row0: SSAValue,
    head: Head,
    factor: SSAValue | None,
) -> SSAValue:
    """factor * acc in the operands' type, carried through the derivative of the operand's mod.

    Where a kernel of its own does that, it is left in f32 and as it is.
    """
    program, shape = frame.program(covered=False), tile.shape_of(acc)
    value = program.argument(Bound(acc, (0, 1)), "g")
    if factor is not None:
        value = program.add(arith.MulfOp(value, program.argument(Bound(factor), "scale")), "g")
    apart = vjp in frame.operands.apart
    block = None if apart else present(vjp)
    if block is not None:
        x = cast(program, program.argument(Bound(loaded, (0, 1)), "x"), f32)
        index = frame.channel_index(program, scope, h, row0, shape[0], head)
        value = program.inline(block, [value, x, *index]).operands[0]
    result = value if apart else cast(program, value, frame.operands.element)
    return spread(scope, Partition(program, scope, shape, -1).run([result])[0], shape)
