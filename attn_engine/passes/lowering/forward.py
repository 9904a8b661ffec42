"""`attn.online` as a plan with one kernel: a block of queries, loops over blocks of keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.dialects.builtin import f32
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.distances import LOADED, DistanceTables
from attn_engine.passes.lowering.frame import Frame, Operands, cast, combine, present, spread
from attn_engine.passes.lowering.kernel import Blocks, Kernel, Plan, global_of
from attn_engine.passes.lowering.mods import Mods
from attn_engine.passes.lowering.program import Bound, Program
from attn_engine.passes.lowering.ranges import over, spans
from attn_engine.passes.lowering.scope import Scope
from attn_engine.passes.lowering.tables import Tables


@dataclass
class ForwardLowering:
    op: attn.OnlineOp
    name: str
    blocks: Blocks
    pad: bool
    tf32: bool
    positive_scale: bool
    covered: bool
    whole: bool = False
    table_tile: int = 1
    """Rows and columns of tiles of pairs of blocks, at least; 0 for no tables."""
    descriptors: bool = False
    one_loop: bool = False
    distances: str = ""
    """How numbers are read that scores compute by the distance of two positions; they compute them if empty."""
    unit: int = 0
    """What tiles round head dims up to a multiple of, if not to a power of two."""
    finals: list[SSAValue] = field(default_factory=list[SSAValue])

    def run(self) -> list[Operation]:
        """The kernel and the plan."""
        plan = Plan(self.name)
        self.operands = operands = Operands(self.op, plan, self.pad, self.tf32, self.covered, self.whole, self.unit)
        operands.descriptors, operands.one_loop = self.descriptors, self.one_loop
        self._arguments(plan)
        operands.describe()
        self._aside(plan)
        kernel = Kernel(f"{self.name}_kernel", plan, self.blocks)
        blocks = operands.blocks(operands.sq, self.blocks.m, "q_blocks")
        self._kernel(kernel, blocks)
        launched = kernel.launch([blocks, operands.heads, operands.batch])
        by_distance = self.operands.distances.kernels if self.operands.distances is not None else []
        return [*self.tables.kernels, *by_distance, launched, plan.finish()]

    def _aside(self, plan: Plan) -> None:
        """What other kernels do first: ranges of blocks when they are asked for, and operands that are modified apart."""
        self.tables = self.operands.tables = Tables(self.name, plan, self.operands, self.table_tile)
        mods = Mods(self.name, plan, self.operands, min(self.blocks.m, self.blocks.n))
        mods.before()
        self.tables.kernels += mods.kernels
        if self.distances:
            self.operands.distances = DistanceTables(
                self.name, self.operands, self.blocks.m + self.blocks.n, self.distances == LOADED
            )

    def _arguments(self, plan: Plan) -> None:
        op = self.op
        for name, value in (("q", op.q), ("k", op.k), ("v", op.v), ("o", op.o)):
            plan.argument(name, global_of(value.type))
        self.row_names = [f"output{n}" for n in range(len(op.outputs))] + [f"saved{n}" for n in range(len(op.saved))]
        for name in self.row_names:
            plan.argument(name, tile.GlobalType(3, f32))
        for name, value in zip(self.operands.capture_names, op.captures, strict=True):
            plan.argument(name, global_of(value.type))
        plan.argument("scale", f32)

    def _kernel(self, kernel: Kernel, blocks: SSAValue) -> None:
        scope = kernel.scope
        q0 = self._queries(kernel, kernel.program_id(0, "i"), blocks)
        self.runs = list(spans(self.frame, scope, (q0, self.blocks.m), self.blocks.n, transposed=False))
        acc = scope.splat([self.blocks.m, self.operands.vo.tile], 0.0, "acc")
        for number in range(len(self.op.steps)):
            acc = self._step(scope, number, acc)
        self._epilogue(scope, acc, q0)

    def _queries(self, kernel: Kernel, i: SSAValue, blocks: SSAValue) -> SSAValue:
        """The frame and the queries of block `i`; its first row."""
        scope, operands, m = kernel.scope, self.operands, self.blocks.m
        h, b = kernel.program_id(1, "h"), kernel.program_id(2, "b")
        if present(self.op.blocks) is not None:
            # The last queries see the most keys under a causal mask: longest programs first.
            last = scope.minus(kernel.take(blocks), 1, "last")
            i = scope.value(scope.minus(last, i, "i"))
        hk = scope.add(arith.DivSIOp(h, kernel.take(operands.group)), "hk").result
        self.frame = frame = Frame(operands, kernel, 0, b, h, hk)
        q0 = self.q0 = scope.value(scope.times(i, m, "q0"))
        q = frame.rows(scope, "q", h, q0, m, operands.qk, frame.sq)
        self.q = frame.modified(scope, q, self.op.query_mod, h, q0, frame.sq, operands.qk)
        self.q_index = scope.add(tile.RangeOp(q0, m), "rows").result
        self.scale = frame.take("scale")
        return q0

    def _step(self, scope: Scope, number: int, acc: SSAValue) -> SSAValue:
        """One loop over the keys; appends its final states to `finals`."""
        init = [a.value.data for a in self.op.init.data[number].data]
        states = [scope.splat([self.blocks.m], value, "state") for value in init]
        names = [a.name_hint for a in self.op.steps[number].block.args[5:]]
        for state, name in zip(states, names, strict=False):
            state.name_hint = name
        final = number == len(self.op.steps) - 1
        carried = [*states, acc] if final else states

        def body(inner: Scope, n0: SSAValue, masked: bool, inside: list[SSAValue]) -> list[SSAValue]:
            return self._block(inner, number, n0, masked, inside)

        values = over(scope, self.runs, self.blocks.n, carried, "n0", body)
        self.finals += values[: len(init)]
        return values[-1] if final else acc

    def _block(self, scope: Scope, number: int, n0: SSAValue, masked: bool, inside: list[SSAValue]) -> list[SSAValue]:
        frame, operands, op = self.frame, self.operands, self.op
        limit = frame.skv if masked else None
        k = frame.rows(scope, "k", frame.hk, n0, self.blocks.n, operands.qk, limit)
        k = frame.modified(scope, k, op.key_mod, frame.hk, n0, frame.skv, operands.qk)
        tables = frame.tables(scope, present(op.score_mod), self.q0, n0)
        x = frame.product(scope, self.q, k, "x")
        program = frame.program()
        program.tables = tables
        cols = scope.add(tile.RangeOp(n0, self.blocks.n), "cols").result
        index = frame.place(program, self.q_index, cols, masked)
        if masked:
            frame.see(program, index, [(index[3], frame.skv)])
        states = len(op.init.data[number])
        s = score(program, op, Bound(x, (0, 1)), self.scale, index, self.positive_scale)
        vectors = [program.argument(Bound(v, (0,)), v.name_hint or "r") for v in [*inside[:states], *self.finals]]
        end = program.inline(op.steps[number].block, [s, *index, *vectors])
        assert isinstance(end, attn.StepYieldOp)
        wanted = list(end.states)
        if end.weight is not None:
            wanted.append(cast(program, program.where_visible(end.weight), operands.element))
        if end.rescale is not None:
            wanted.append(end.rescale)
        found = frame.run(program, scope, wanted)
        new = [spread(scope, f, frame.shape, (0,)) for f in found[:states]]
        if end.weight is None:
            return new
        acc = inside[-1]
        if end.rescale is not None:
            acc = combine(scope, arith.MulfOp, Bound(acc, (0, 1)), found[-1], tile.shape_of(acc), "acc")
        v = frame.rows(scope, "v", frame.hk, n0, self.blocks.n, operands.vo, limit)
        v = frame.modified(scope, v, op.value_mod, frame.hk, n0, frame.skv, operands.vo)
        p = spread(scope, found[states], frame.shape)
        return [*new, frame.dot(scope, p, v, acc, "acc")]

    def _epilogue(self, scope: Scope, acc: SSAValue, q0: SSAValue) -> None:
        frame, m = self.frame, self.blocks.m
        program = frame.program()
        index = frame.place(program, self.q_index, None)
        finals = [program.argument(Bound(f, (0,)), f.name_hint or "state") for f in self.finals]
        end = program.inline(self.op.epilogue.block, [*index, *finals])
        assert isinstance(end, attn.EpilogueYieldOp)
        scale, *vectors = frame.run(program, scope, [end.scale, *end.outputs, *end.saved])
        o = combine(scope, arith.MulfOp, Bound(acc, (0, 1)), scale, tile.shape_of(acc), "o", self.operands.element)
        store_rows(frame, scope, o, "o", frame.h, q0, self.operands.vo.size, self.operands.vo.padded, frame.sq)
        for name, vector in zip(self.row_names, vectors, strict=True):
            value = spread(scope, vector, (m,))
            scope.add(tile.StoreOp(value, frame.take(name), [frame.b, frame.h, q0], [2], frame.limits(frame.sq)))


def score(
    program: Program, op: attn.OnlineOp, x: Bound, scale: SSAValue, index: list[SSAValue], positive_scale: bool
) -> SSAValue:
    """scale * (q k^T), then the user's score_mod."""
    product = program.argument(x, "x")
    factor = program.argument(Bound(scale), "scale")
    if positive_scale:
        program.positive.add(factor)
    scaled = program.add(arith.MulfOp(product, factor), "s")
    block = present(op.score_mod)
    return scaled if block is None else program.inline(block, [scaled, *index]).operands[0]


def store_rows(
    frame: Frame,
    scope: Scope,
    value: SSAValue,
    name: str,
    h: SSAValue,
    row0: SSAValue,
    size: int,
    padded: bool,
    limit: SSAValue,
) -> None:
    """Writes [rows, head] of a result; rows from `limit` on and padded channels are not written."""
    limits = frame.limits(limit) | ({1: scope.value(size)} if padded else {})
    scope.add(tile.StoreOp(value, frame.target(name), [frame.b, h, row0, scope.value(0)], [2, 3], limits))
