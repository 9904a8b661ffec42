"""`attn.online` with its keys in parts: every part is folded apart, then the `combine` regions make one result of all.

One kernel per loop over the keys writes the states of each part to memory, the last one the accumulators too; each
begins with the final states of the loops before it. A last kernel combines and writes the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerAttr, TensorType, f32, i64
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.forward import ForwardLowering
from attn_engine.passes.lowering.frame import Operands, spread
from attn_engine.passes.lowering.kernel import Kernel, Plan, close, loop
from attn_engine.passes.lowering.partition import Partition
from attn_engine.passes.lowering.program import Bound
from attn_engine.passes.lowering.ranges import spans
from attn_engine.passes.lowering.scope import Scope

PARTS_AHEAD = 4
"""Parts on their way while one is combined: few programs combine, each waits for memory and does little else."""

MOST_KEYS = 4096
"""Of a part: beyond that, combining more parts costs less than waiting for the last ones does."""


@dataclass(frozen=True)
class Split:
    """Keys in `parts`, or in as many parts as it takes for about `programs` programs to run, each with at most `MOST_KEYS` keys."""

    parts: int = 1
    programs: int = 0

    @property
    def is_wanted(self) -> bool:
        return self.parts > 1 or self.programs > 0


@dataclass
class SplitForwardLowering(ForwardLowering):
    """Rows of temporaries are `part` * sq + query; parts hold whole blocks of keys and may be empty."""

    split: Split = field(default_factory=Split)
    states: list[list[SSAValue]] = field(default_factory=list[list[SSAValue]])

    def run(self) -> list[Operation]:
        """The kernels and the plan."""
        plan = Plan(self.name)
        self.operands = operands = Operands(self.op, plan, self.pad, self.tf32, self.covered, self.whole)
        operands.one_loop = self.one_loop
        self._arguments(plan)
        operands.describe()
        self._aside(plan)
        blocks = operands.blocks(operands.sq, self.blocks.m, "q_blocks")
        self._parts(plan, blocks)
        kernels = [self._part_kernel(plan, number, blocks) for number in range(len(self.op.steps))]
        kernels.append(self._combine_kernel(plan, blocks))
        return [*self.tables.kernels, *kernels, plan.finish()]

    def _parts(self, plan: Plan, blocks: SSAValue) -> None:
        """How many parts there are, how many keys each has, and where results of parts are kept."""
        scope, operands = plan.scope, self.operands
        key_blocks = operands.blocks(operands.skv, self.blocks.n, "key_blocks")
        if self.split.programs:
            each = scope.add(arith.MuliOp(blocks, operands.heads), "each").result
            each = scope.larger(scope.add(arith.MuliOp(each, operands.batch), "each").result, 1, "each")
            parts = scope.add(arith.CeilDivSIOp(scope.value(self.split.programs), scope.value(each)), "parts").result
            least = scope.add(arith.CeilDivSIOp(operands.skv, scope.value(MOST_KEYS)), "least").result
            parts = scope.value(scope.larger(parts, least, "parts"))
            self.parts = scope.value(scope.larger(scope.smaller(parts, key_blocks, "parts"), 1, "parts"))
        else:
            self.parts = scope.value(self.split.parts)
        per_part = scope.add(arith.CeilDivSIOp(key_blocks, self.parts), "per_part").result
        self.part_keys = scope.value(scope.times(per_part, self.blocks.n, "part_keys"))
        rows = scope.add(arith.MuliOp(self.parts, operands.sq), "part_rows").result
        sizes = [operands.batch, operands.heads, rows]
        for number, init in enumerate(self.op.init.data):
            names = [f"part{number}_{n}" for n in range(len(init))]
            self.states.append([scope.add(tile.AllocOp(sizes, tile.GlobalType(3, f32)), n).result for n in names])
        channels = scope.value(operands.vo.size)
        self.accumulators = scope.add(tile.AllocOp([*sizes, channels], tile.GlobalType(4, f32)), "part_acc").result

    # --- one part --------------------------------------------------------------------------------

    def _part_kernel(self, plan: Plan, number: int, blocks: SSAValue) -> Operation:
        """Loop `number` over the keys of one part."""
        kernel = Kernel(f"{self.name}_part{number}", plan, self.blocks)
        scope, program = kernel.scope, kernel.program_id(0, "program")
        parts = kernel.take(self.parts)
        i = scope.add(arith.DivSIOp(program, parts), "i").result
        part = scope.add(arith.RemSIOp(program, parts), "part").result
        q0 = self._queries(kernel, i, blocks)
        self.finals = []
        for earlier in range(number):
            self.finals += self._combined_states(scope, kernel, earlier, q0)
        first = scope.add(arith.MuliOp(part, kernel.take(self.part_keys)), "first").result
        after = scope.add(arith.AddiOp(first, kernel.take(self.part_keys)), "after").result
        every = spans(self.frame, scope, (q0, self.blocks.m), self.blocks.n, transposed=False)
        self.runs = [span.within(scope, first, after) for span in every]
        known = len(self.finals)
        acc = self._step(scope, number, scope.splat([self.blocks.m, self.operands.vo.tile], 0.0, "acc"))
        row0, limit = self._rows_of(scope, part, q0)
        for state, memory in zip(self.finals[known:], self.states[number], strict=True):
            place = [self.frame.b, self.frame.h, row0]
            scope.add(tile.StoreOp(state, kernel.take(memory), place, [2], {0: limit}))
        if number == len(self.op.steps) - 1:
            place, limits = self._place(scope, row0, limit)
            scope.add(tile.StoreOp(acc, kernel.take(self.accumulators), place, [2, 3], limits))
        grid = plan.scope.add(arith.MuliOp(blocks, self.parts), "programs").result
        return kernel.launch([grid, self.operands.heads, self.operands.batch])

    def _rows_of(self, scope: Scope, part: SSAValue, q0: SSAValue) -> tuple[SSAValue, SSAValue]:
        """The rows of a part in the temporaries: the first of this block of queries, and the end."""
        start = scope.add(arith.MuliOp(part, self.frame.sq), "start").result
        row0 = scope.add(arith.AddiOp(start, q0), "row0").result
        return row0, scope.add(arith.AddiOp(start, self.frame.sq), "limit").result

    def _place(self, scope: Scope, row0: SSAValue, limit: SSAValue) -> tuple[list[SSAValue], dict[int, SSAValue]]:
        head = self.operands.vo
        limits = {0: limit, **({1: scope.value(head.size)} if head.padded else {})}
        return [self.frame.b, self.frame.h, row0, scope.value(0)], limits

    # --- all parts -------------------------------------------------------------------------------

    def _combine_kernel(self, plan: Plan, blocks: SSAValue) -> Operation:
        kernel = Kernel(f"{self.name}_combine", plan, self.blocks)
        scope = kernel.scope
        q0 = self._queries(kernel, kernel.program_id(0, "i"), blocks)
        self.finals = []
        for number in range(len(self.op.steps) - 1):
            self.finals += self._combined_states(scope, kernel, number, q0)
        *states, acc = self._combined(scope, kernel, len(self.op.steps) - 1, q0, with_acc=True)
        self.finals += states
        self._epilogue(scope, acc, q0)
        return kernel.launch([blocks, self.operands.heads, self.operands.batch])

    def _combined_states(self, scope: Scope, kernel: Kernel, number: int, q0: SSAValue) -> list[SSAValue]:
        return self._combined(scope, kernel, number, q0, with_acc=False)

    def _combined(self, scope: Scope, kernel: Kernel, number: int, q0: SSAValue, with_acc: bool) -> list[SSAValue]:
        """The states of one loop over all keys, and the accumulator if wanted: a loop over the parts."""
        m, names = self.blocks.m, [a.name_hint for a in self.op.steps[number].block.args[5:]]
        carried = [scope.splat([m], a.value.data, "state") for a in self.op.init.data[number].data]
        for state, name in zip(carried, names, strict=False):
            state.name_hint = name
        if with_acc:
            carried.append(scope.splat([m, self.operands.vo.tile], 0.0, "acc"))
        op, inner, part, inside = loop(scope, 0, kernel.take(self.parts), 1, carried, "part")
        op.attributes["num_stages"] = IntegerAttr(PARTS_AHEAD, i64)
        row0, limit = self._rows_of(inner, part, q0)
        other = [
            self.frame.vector(inner, kernel.take(memory), row0, m, limit, "part") for memory in self.states[number]
        ]
        if with_acc:
            place, limits = self._place(inner, row0, limit)
            type_ = TensorType(f32, [m, self.operands.vo.tile])
            source = kernel.take(self.accumulators)
            other.append(inner.add(tile.LoadOp(source, place, [2, 3], type_, limits), "part_acc").result)
        close(inner, self._both(inner, number, inside, other))
        return list(op.results)

    def _both(self, scope: Scope, number: int, a: Sequence[SSAValue], b: Sequence[SSAValue]) -> list[SSAValue]:
        """Two partial results as one, by the `combine` region."""
        frame, m, count = self.frame, self.blocks.m, len(self.states[number])
        program = frame.program()
        index = frame.place(program, self.q_index, None)
        vectors = [*a[:count], *b[:count], *self.finals]
        states = [program.argument(Bound(v, (0,)), v.name_hint or "state") for v in vectors]
        end = program.inline(self.op.combine[number].block, [*index, *states])
        assert isinstance(end, attn.CombineYieldOp)
        wanted = list(end.states)
        if len(a) > count:
            sides = [program.argument(Bound(x[count], (0, 1)), "acc") for x in (a, b)]
            left, right = (
                program.add(arith.MulfOp(side, factor), "acc") for side, factor in zip(sides, end.rescale, strict=True)
            )
            wanted.append(program.add(arith.AddfOp(left, right), "acc"))
        found = Partition(program, scope, (m, self.operands.vo.tile), 1).run(wanted)
        new = [spread(scope, f, frame.shape, (0,)) for f in found[:count]]
        return [*new, *(spread(scope, f, (m, self.operands.vo.tile)) for f in found[count:])]
