"""The regions of `attn.backward`, cut out of the joint code of forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.dialects.builtin import ArrayAttr, FloatAttr, f32
from xdsl.ir import Block, Operation, Region, SSAValue

from attn_engine.dialects import attn
from attn_engine.ir.autodiff.graph import IDENTITY, Graph, Needs, Slicer
from attn_engine.passes.backward_dead_rows import INF, DeadRows, element_code
from attn_engine.passes.backward_saved import choose_saved
from attn_engine.passes.backward_sweep import Accumulation, Arguments
from attn_engine.passes.simplify_rule import predicate_of

_COMBINE: dict[attn.ReduceKind, type[arith.AddfOp | arith.MaximumfOp | arith.MinimumfOp]] = {
    attn.ReduceKind.SUM: arith.AddfOp,
    attn.ReduceKind.COUNT: arith.AddfOp,
    attn.ReduceKind.MAX: arith.MaximumfOp,
    attn.ReduceKind.MIN: arith.MinimumfOp,
}


@dataclass
class BackwardCode:
    """What the sweep found, in the joint graph; `saved` are the row values that the forward pass has to hand over."""

    graph: Graph
    arguments: Arguments
    outputs: tuple[SSAValue, ...]
    p: SSAValue
    dx: SSAValue
    accumulations: list[Accumulation]
    dead_rows: DeadRows
    saved: list[SSAValue] = field(default_factory=list[SSAValue])
    marker: SSAValue | None = None
    """Stands for a saved vector of no content: only -inf in dead rows."""
    vectors: list[SSAValue] = field(default_factory=list[SSAValue])
    row_vectors: list[SSAValue] = field(default_factory=list[SSAValue])
    """Of each vector that the element code reads, the value that `rows` yields."""
    stages: list[list[SSAValue]] = field(default_factory=list[list[SSAValue]])

    def __post_init__(self) -> None:
        graph = self.graph
        self.saved = choose_saved(graph, self._targets(), self.outputs)
        per_row = [a for a in self.accumulations if a.per_row]
        stop = bool(self.dead_rows.extrema)
        if (stop or per_row) and not (self.saved and self.dead_rows.alone):
            self.marker = graph.argument(f32, Needs.FORWARD, "alive")
            self.saved = [*self.saved, self.marker]
        dead = self._dead() if stop or per_row else None
        fills = self._stop_elements(dead) if stop and dead is not None else {}
        self.vectors, _ = element_code(graph, self._elements())
        self.row_vectors = [self._filled(v, fills.get(v), dead) for v in self.vectors]
        self.accumulations = [self._stopped(a, dead) for a in self.accumulations]
        self.stages = self._staged()

    def _elements(self) -> list[SSAValue]:
        return [self.p, self.dx, *(a.value for a in self.accumulations if not a.per_row), *self._indices(False)]

    def _indices(self, per_row: bool) -> list[SSAValue]:
        return [index for a in self.accumulations if a.per_row == per_row for index in a.load.indices]

    def _targets(self) -> list[SSAValue]:
        per_row = [a.value for a in self.accumulations if a.per_row]
        return [*self._elements(), *per_row, *self._indices(True)]

    # --- dead rows -------------------------------------------------------------------------------

    def _dead(self) -> SSAValue:
        """All saved values are -inf; one alone can be that in a live row, a minimum for example."""
        graph = self.graph
        dead, *others = [graph.compare(v, graph.constant(-INF), "oeq") for v in self.saved]
        for other in others:
            dead = graph.emit(arith.AndIOp(dead, other))
        return dead

    def _stop_elements(self, dead: SSAValue) -> dict[SSAValue, float]:
        gradients = [a.value for a in self.accumulations if not a.per_row]
        outputs = [self.p, self.dx, *gradients]
        fills = self.dead_rows.fills(outputs)
        if fills is not None:
            return fills
        self.p, self.dx, *gradients = self.dead_rows.stopped(outputs, dead)
        values = iter(gradients)
        self.accumulations = [a if a.per_row else Accumulation(a.load, next(values), False) for a in self.accumulations]
        return {}

    def _filled(self, vector: SSAValue, fill: float | None, dead: SSAValue | None) -> SSAValue:
        if fill is None or dead is None:
            return vector
        return self.graph.select(dead, self.graph.constant(fill), vector)

    def _stopped(self, accumulation: Accumulation, dead: SSAValue | None) -> Accumulation:
        if not accumulation.per_row or dead is None:
            return accumulation
        value = self.graph.select(dead, self.graph.constant(0.0), accumulation.value)
        return Accumulation(accumulation.load, value, True)

    # --- row steps -------------------------------------------------------------------------------

    def _staged(self) -> list[list[SSAValue]]:
        """The reductions that backward does itself, each in the first loop in which all that it reads is known."""
        stage: dict[SSAValue, int] = {}
        per_row = [a.value for a in self.accumulations if a.per_row]
        for value in self._reachable([*self._elements(), *self.row_vectors, *per_row, *self._indices(True)]):
            read = [stage[v] for v in _operands(value) if v in stage]
            own = isinstance(value.owner, attn.RowReduceOp) and value.owner.result is value
            if own and self.graph.needs[value] & Needs.BACKWARD:
                best = _extremum_attained(value)
                before = [stage[v] for v in _behind_attained(value) if v in stage] if best else read
                stage[value] = max([s + 1 for s in before] + ([stage[best]] if best else []), default=0)
            elif read:
                stage[value] = max(read)
        sums = [v for v in stage if isinstance(v.owner, attn.RowReduceOp)]
        count = max((stage[v] for v in sums), default=-1) + 1
        return [[v for v in sums if stage[v] == i] for i in range(count)]

    def _reachable(self, targets: Iterable[SSAValue]) -> list[SSAValue]:
        """All values behind the targets, operands first; saved ones have nothing behind them."""
        found: dict[SSAValue, None] = {}
        pending = list(targets)
        while pending:
            value = pending[-1]
            missing = [] if value in self.saved else [v for v in _operands(value) if v not in found]
            if missing:
                pending.extend(missing)
            else:
                found[pending.pop()] = None
        return list(found)

    # --- regions ---------------------------------------------------------------------------------

    def element(self) -> Region:
        arguments = self.arguments
        scalars = [arguments.x, arguments.dp, *arguments.indices]
        block, slicer = self._block([*scalars, *self.vectors])
        p, dx = slicer.values([self.p, self.dx])
        self._accumulate(block, slicer, per_row=False)
        block.add_op(attn.YieldOp(p, dx))
        return Region(block)

    def rows(self) -> Region:
        finals = [v for stage in self.stages for v in stage]
        block, slicer = self._block([*self.arguments.indices[:3], *self._row_inputs(), *finals])
        vectors = slicer.values(self.row_vectors)
        self._accumulate(block, slicer, per_row=True)
        block.add_op(attn.YieldOp(*vectors))
        return Region(block)

    def row_steps(self) -> list[Region]:
        regions: list[Region] = []
        for i, stage in enumerate(self.stages):
            finals = [v for earlier in self.stages[:i] for v in earlier]
            regions.append(self._row_step(stage, finals))
        return regions

    def _row_step(self, stage: Sequence[SSAValue], finals: Sequence[SSAValue]) -> Region:
        arguments = self.arguments
        leading = [arguments.x, arguments.dp, *arguments.indices, *self._row_inputs()]
        block, slicer = self._block([*leading, *stage, *finals])
        running = {v: slicer.known.pop(v) for v in stage}
        states: list[SSAValue] = []
        for value in stage:
            old, best = running[value], _extremum_attained(value)
            if best is not None and best in running:
                old = self._still_attained(block, value, old, running[best], slicer.known[best])
            combine = _COMBINE[_kind(value)](old, slicer.value(value))
            block.add_op(combine)
            states.append(combine.result)
            slicer.known[value] = combine.result
        block.add_op(attn.StepYieldOp(states))
        return Region(block)

    @staticmethod
    def _still_attained(block: Block, value: SSAValue, old: SSAValue, before: SSAValue, now: SSAValue) -> SSAValue:
        """A running reduction over the elements that attain an extremum: it starts again with a new extremum."""
        nothing = arith.ConstantOp(FloatAttr(IDENTITY[_kind(value)], f32))
        same = arith.CmpfOp(before, now, "oeq")
        kept = arith.SelectOp(same.result, old, nothing.result)
        block.add_ops([nothing, same, kept])
        return kept.result

    def init(self) -> ArrayAttr[ArrayAttr[FloatAttr]]:
        return ArrayAttr(ArrayAttr(FloatAttr(IDENTITY[_kind(v)], f32) for v in stage) for stage in self.stages)

    def _row_inputs(self) -> list[SSAValue]:
        return [self.arguments.delta, *self.saved, *self.arguments.d_outputs]

    def _block(self, leading: Sequence[SSAValue]) -> tuple[Block, Slicer]:
        """A block with arguments for these values and for the captures."""
        values = [*leading, *self.arguments.captures]
        block = Block(arg_types=[v.type for v in values])
        for value, argument in zip(values, block.args, strict=True):
            argument.name_hint = value.name_hint
        return block, Slicer(block, dict(zip(values, block.args, strict=True)))

    def _accumulate(self, block: Block, slicer: Slicer, per_row: bool) -> None:
        for accumulation in self.accumulations:
            if accumulation.per_row == per_row:
                load = accumulation.load
                value, source, *indices = slicer.values([accumulation.value, load.source, *load.indices])
                block.add_op(attn.AccumulateGradOp(value, source, indices))


def _operands(value: SSAValue) -> Sequence[SSAValue]:
    return value.owner.operands if isinstance(value.owner, Operation) else ()


def _kind(value: SSAValue) -> attn.ReduceKind:
    assert isinstance(value.owner, attn.RowReduceOp)
    return value.owner.kind.data


def _extremum_attained(value: SSAValue) -> SSAValue | None:
    """m where the value is a reduction over the elements x = m, and m the maximum or minimum of x."""
    condition = _condition(value)
    if not isinstance(condition, arith.CmpfOp) or predicate_of(condition) != "oeq":
        return None
    best = condition.rhs.owner
    return condition.rhs if isinstance(best, attn.RowReduceOp) and best.value is condition.lhs else None


def _condition(value: SSAValue) -> Operation | Block | None:
    """What decides which elements are in a reduction, where the others have no part in it."""
    assert isinstance(value.owner, attn.RowReduceOp)
    select = value.owner.value.owner
    if not isinstance(select, arith.SelectOp) or not isinstance(select.rhs.owner, arith.ConstantOp):
        return None
    nothing = select.rhs.owner.value
    is_identity = isinstance(nothing, FloatAttr) and nothing.value.data == IDENTITY[_kind(value)]
    return select.cond.owner if is_identity else None


def _behind_attained(value: SSAValue) -> list[SSAValue]:
    """What a reduction over the elements that attain an extremum reads, but for the extremum."""
    assert isinstance(value.owner, attn.RowReduceOp) and isinstance(value.owner.value.owner, arith.SelectOp)
    select = value.owner.value.owner
    return [select.lhs, *_operands(select.cond)[:1]]
