"""`attn.backward` as a plan: a kernel for row vectors, one for dq, one for dk and dv.

Each gradient is owned by one kernel. A capture whose index has no key is accumulated where a program
owns its queries (the row kernel for contributions of `rows`, else dq); one with a key and no query where
a program owns its keys (dk/dv); one with both with dq: summed along diagonals first where it depends on
positions through their distance alone, in blocks where it is read at [.., q, kv] (of each batch, if all share it and a
kernel is to add these up), else element by element.

Fused, the dk/dv kernel adds its part of dq to sums in memory, in no particular order: five products a block instead of
seven; captures whose index has no query are found with them, and those that leave in blocks or along diagonals, others
keep the two kernels
apart. Heads so wide that
registers do not hold the sums of both have dk and dv apart too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.dialects.builtin import AnyFloat, FloatAttr, f32
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.batch_sums import BatchSums
from attn_engine.passes.lowering.diagonals import DiagonalSums, by_distance
from attn_engine.passes.lowering.distances import LOADED, DistanceTables
from attn_engine.passes.lowering.frame import Operands, present
from attn_engine.passes.lowering.gradients import capture_axes
from attn_engine.passes.lowering.kernel import Blocks, Kernel, Plan, global_of
from attn_engine.passes.lowering.key_gradients import KeyGradients
from attn_engine.passes.lowering.mods import Mods
from attn_engine.passes.lowering.query_gradients import QueryGradients
from attn_engine.passes.lowering.query_sums import QuerySums
from attn_engine.passes.lowering.row_vectors import RowVectors
from attn_engine.passes.lowering.scope import Scope
from attn_engine.passes.lowering.score_gradients import score_gradients, shares_batches, stored
from attn_engine.passes.lowering.tables import Tables


@dataclass
class BackwardLowering:
    op: attn.BackwardOp
    name: str
    rows: Blocks
    dq: Blocks
    dkdv: Blocks
    pad: bool
    tf32: bool
    covered: bool
    whole: bool = False
    table_tile: int = 1
    descriptors: bool = False
    one_loop: bool = False
    fused: bool = False
    diagonals: bool = False
    apart: bool = False
    exact: bool = False
    single: bool = False
    by_batch: bool = False
    masks_once: bool = True
    distances: str = ""
    rounded: bool = False
    alike: bool = False
    kernels: list[Operation] = field(default_factory=list[Operation])

    def run(self) -> list[Operation]:
        """Kernels, then the plan that launches them."""
        op, plan = self.op, Plan(self.name)
        self.blockwise = score_gradients(op, self.exact, self.single, self.by_batch)
        distant = by_distance(op) if self.diagonals else []
        fused = self.fused and fuses(op, [*self.blockwise, *distant])
        if fused and self.rounded:
            self.blockwise = {n: gradient.added for n, gradient in self.blockwise.items()}
        operands = Operands(op, plan, self.pad, self.tf32, self.covered, self.whole)
        operands.descriptors, operands.one_loop = self.descriptors, self.one_loop
        operands.masks_once = self.masks_once
        self._arguments(plan, operands)
        operands.describe()
        operands.tables = tables = Tables(self.name, plan, operands, self.table_tile)
        self._zero(plan)
        mods = Mods(self.name, plan, operands, min(n for b in (self.rows, self.dq, self.dkdv) for n in (b.m, b.n)))
        mods.before()
        if self.distances:
            beyond = max(b.m for b in (self.rows, self.dq, self.dkdv)) + max(
                b.n for b in (self.rows, self.dq, self.dkdv)
            )
            operands.distances = DistanceTables(self.name, operands, beyond, self.distances == LOADED)
        vectors = self._row_vectors(plan, operands)
        owned = dict(enumerate(capture_axes(op)))
        sums = QuerySums(op, operands, self.alike) if fused else None
        by_key = [n for n, axes in owned.items() if "q" not in axes and ("kv" in axes or sums is not None)]
        by_query = [n for n, axes in owned.items() if "kv" not in axes and n not in by_key]
        by_both = [n for n, axes in owned.items() if "kv" in axes and "q" in axes]
        largest = (max(self.dq.m, self.dkdv.m), max(self.dq.n, self.dkdv.n))
        shared = {n: BatchSums(op, operands, g, largest) for n, g in self.blockwise.items() if g.shared}
        leaving = {**self.blockwise, **shared}
        diagonals = self._diagonals(operands, owned, [n for n in by_both if n in distant])
        if sums is None and (operands.leads("dq") or by_query or by_both):
            kernel = Kernel(f"{self.name}_dq", plan, self.dq, shares_batches(op))
            blocks = operands.blocks(operands.sq, self.dq.m, "dq_blocks")
            scattered = [n for n in by_both if n not in diagonals and n not in self.blockwise]
            contributions = (by_query, scattered, diagonals, leaving)
            QueryGradients(op, operands, kernel, vectors, *contributions).build(blocks)
            self.kernels.append(kernel.launch([blocks, operands.heads, operands.batch]))
            self._finish(diagonals, shared)
        for only in (("dk",), ("dv",)) if self.apart else (("dk", "dv"),):
            carried = by_key if "dk" in only else []
            if carried or any(operands.leads(name) for name in only):
                kernel = Kernel(f"{self.name}_{''.join(only)}", plan, self.dkdv, shares_batches(op))
                blocks = operands.blocks(operands.skv, self.dkdv.n, "dkdv_blocks")
                found = KeyGradients(op, operands, kernel, vectors, carried, sums if "dk" in only else None, only)
                if sums is not None:
                    found.diagonals, found.blockwise = diagonals, leaving
                found.build()
                self.kernels.append(kernel.launch([blocks, operands.kv_heads, operands.batch]))
        if sums is not None:
            self._finish(diagonals, shared)
            self.kernels.append(sums.finish(f"{self.name}_dq_result", self.rows))
        mods.after()
        first = operands.distances.kernels if operands.distances is not None else []
        return [*tables.kernels, *mods.kernels, *first, *self.kernels, plan.finish()]

    def _finish(self, diagonals: Mapping[int, DiagonalSums], shared: Mapping[int, BatchSums]) -> None:
        """Kernels that add numbers of distances to their places, and parts of batches up."""
        self.kernels += [found.finish(f"{self.name}_distances{n}") for n, found in diagonals.items()]
        self.kernels += [found.finish(f"{self.name}_batches{n}") for n, found in shared.items()]

    def _diagonals(
        self, operands: Operands, owned: Mapping[int, frozenset[str]], numbers: Sequence[int]
    ) -> dict[int, DiagonalSums]:
        """Temporaries for the contributions that are summed along diagonals of the scores."""
        beyond = max(n for b in (self.dq, self.dkdv) for n in (b.m, b.n))
        return {n: DiagonalSums(self.op, operands, n, owned[n], beyond) for n in numbers}

    def _arguments(self, plan: Plan, operands: Operands) -> None:
        op = self.op
        for name, value in (("q", op.q), ("k", op.k), ("v", op.v), ("o", op.o), ("d_o", op.d_o)):
            plan.argument(name, global_of(value.type))
        for prefix, values in (("saved", op.saved), ("d_output", op.d_outputs)):
            for n, value in enumerate(values):
                plan.argument(f"{prefix}{n}", global_of(value.type))
        for name, value in zip(operands.capture_names, op.captures, strict=True):
            plan.argument(name, global_of(value.type))
        for name, value in (("dq", op.dq), ("dk", op.dk), ("dv", op.dv)):
            if value is not None:
                plan.argument(name, global_of(value.type))
        self.grad_names = [f"d_{operands.capture_names[n.value.data]}" for n in op.grad_captures]
        self.stored = stored(list(self.blockwise.values()))
        for name, position in zip(self.grad_names, op.grad_captures, strict=True):
            memory = global_of(op.captures[position.value.data].type)
            own = memory if position.value.data in self.stored else tile.GlobalType(memory.rank.data, f32)
            plan.argument(name, own)
        plan.argument("scale", f32)

    def _zero(self, plan: Plan) -> None:
        """Capture gradients are sums over programs, or of scores of which some are not visited."""
        every = present(self.op.blocks) is None and present(self.op.kinds) is None
        whole = {g.capture for g in self.blockwise.values() if g.shared or (g.alone and every)}
        for name, position in zip(self.grad_names, self.op.grad_captures, strict=True):
            if position.value.data not in whole:
                plan.scope.add(tile.FillOp(plan.args[name], _zero_like(plan.scope, plan.args[name])))

    def _row_vectors(self, plan: Plan, operands: Operands) -> list[SSAValue]:
        """Temporaries for what `rows` yields, filled by a kernel of their own where there is anything to do."""
        last = self.op.rows.block.last_op
        assert isinstance(last, attn.YieldOp)
        adds = any(isinstance(o, attn.AccumulateGradOp) for o in self.op.rows.block.ops)
        if not last.values and not adds:
            return []
        sizes = [operands.batch, operands.heads, operands.sq]
        vectors: list[SSAValue] = [
            plan.scope.add(tile.AllocOp(sizes, tile.GlobalType(3, f32)), f"row{n}").result
            for n in range(len(last.values))
        ]
        kernel = Kernel(f"{self.name}_rows", plan, self.rows)
        blocks = operands.blocks(operands.sq, self.rows.m, "row_blocks")
        RowVectors(self.op, operands, kernel, vectors).build()
        self.kernels.append(kernel.launch([blocks, operands.heads, operands.batch]))
        return vectors


def fuses(op: attn.BackwardOp, leaving: Container[int] = ()) -> bool:
    """Whether the dk/dv kernel can find dq too: there are such gradients, and no other of a capture with an index of queries
    than those contributions that leave as blocks, or along their diagonals."""
    found = all("q" not in axes or n in leaving for n, axes in enumerate(capture_axes(op)))
    return found and op.dq is not None and (op.dk is not None or op.dv is not None)


def _zero_like(scope: Scope, memory: SSAValue) -> SSAValue:
    element = tile.element_of(memory)
    assert isinstance(element, AnyFloat)
    return scope.add(arith.ConstantOp(FloatAttr(0.0, element)), "c").result
