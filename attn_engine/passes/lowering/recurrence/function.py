"""A function of recurrences and sweeps as a plan: where its values are, one kernel after the other."""

from __future__ import annotations

from dataclasses import replace

from xdsl.dialects import arith, func
from xdsl.dialects.builtin import AnyFloat, FloatAttr, IntegerAttr, TensorType, f16, f32, i64
from xdsl.ir import Attribute, Operation, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.dialects.attn_recurrence import MODS
from attn_engine.errors import RecurrenceFormError
from attn_engine.passes.attn_schedule_recurrence import form_of
from attn_engine.passes.lowering.kernel import Plan, global_of
from attn_engine.passes.lowering.recurrence.anchors import Anchors
from attn_engine.passes.lowering.recurrence.channels import ColumnsChunk, RowsChunk
from attn_engine.passes.lowering.recurrence.chunks import slots_of
from attn_engine.passes.lowering.recurrence.delta import DeltaBackward, Results
from attn_engine.passes.lowering.recurrence.delta_adjoint import DeltaAdjoint
from attn_engine.passes.lowering.recurrence.delta_channels import DeltaRowsChunk
from attn_engine.passes.lowering.recurrence.delta_chunks import DeltaChunk
from attn_engine.passes.lowering.recurrence.gradients import ChannelGradients, TokenGradients
from attn_engine.passes.lowering.recurrence.heads import RowSizes, sum_heads
from attn_engine.passes.lowering.recurrence.mods import Mod
from attn_engine.passes.lowering.recurrence.setting import Form, Setting, Sizes, channels_of, rank_of
from attn_engine.passes.lowering.recurrence.sweep import Chunk, Sweep
from attn_engine.passes.lowering.recurrence.tokens import TokenSteps
from attn_engine.passes.lowering.recurrence.walk import Walk
from attn_engine.passes.lowering.scope import Index


def lower_function(function: func.FuncOp, form: Form) -> list[Operation]:
    """The kernels and the plan of a function."""
    return FunctionLowering(function, form).run()


class FunctionLowering:
    def __init__(self, function: func.FuncOp, form: Form):
        self.block = function.body.block
        self.plan = Plan(function.sym_name.data)
        self.setting = Setting(self.plan, form)

    def run(self) -> list[Operation]:
        self._arguments()
        for op in self.block.ops:
            match op:
                case attn.RecurrenceOp():
                    self._recurrence(op)
                case attn.SweepOp():
                    self._sweep(op)
                case attn.TokenGradientsOp():
                    d_decay, d_weight = (None if r is None else self.setting.of(r) for r in (op.d_decay, op.d_weight))
                    for target in (d_decay, d_weight):
                        if target is not None and op.bounds is not None:
                            self._clear(target)
                    TokenGradients(self.setting, op, d_decay, d_weight).run()
                case attn.ChannelGradientsOp():
                    if op.bounds is not None:
                        self._clear(self.setting.of(op.result))
                    ChannelGradients(self.setting, op, self.setting.of(op.result)).run()
                case attn.DeltaBackwardOp():
                    self._delta(op)
                case attn.SumHeadsOp():
                    sum_heads(self.setting, op.value, op.like, self.setting.of(op.result))
                case _:
                    pass
        if any(self._form(op).careful for op in self.block.ops):
            for kernel in self.setting.kernels:
                kernel.attributes["assembler_level"] = IntegerAttr(0, i64)
        return [*self.setting.kernels, self.plan.finish()]

    def _arguments(self) -> None:
        end = self.block.last_op
        assert isinstance(end, func.ReturnOp)
        for argument in self.block.args:
            type_: Attribute = argument.type
            if isinstance(type_, TensorType):
                type_ = global_of(argument.type)
            self.setting.values[argument] = self.plan.argument(argument.name_hint or "x", type_)
        for number, value in enumerate(end.operands):
            name = value.name_hint or f"result{number}"
            self.setting.values[value] = self.plan.argument(name, global_of(value.type))

    def _recurrence(self, op: attn.RecurrenceOp) -> None:
        stepwise = self.setting.form.chunk == 1
        captures = [self.setting.of(c) for c in op.captures]
        for name in MODS:
            region = getattr(op, name)
            if region is None or not region.blocks:
                continue
            if stepwise:
                raise RecurrenceFormError(name, "chunk=1", "apply it to the tensors first")
            operand = getattr(op, name.removesuffix("_mod"))
            self.setting.mods[operand] = Mod(region.block, captures)
        form = self._form(op)
        side_by_side = form.pieces > 1 and not form.chained
        if stepwise:
            o, final = self._results(op)
            TokenSteps(self.setting, op, o, final).run()
        elif op.beta is not None and side_by_side:
            raise RecurrenceFormError("the delta rule in pieces", "chunked", "chunk=1 goes token by token")
        else:
            self._run(op, dot=None, reverse=False, rows=None)

    def _results(self, op: attn.RecurrenceOp | attn.SweepOp) -> tuple[SSAValue, SSAValue | None]:
        """Where o and the final state go; None for a final state that nobody asks for."""
        values = self.setting.values
        if op.o not in values:
            sizes = Sizes(self.setting, [op.q, op.k, op.v], op.bounds)
            shape = [sizes.batch, sizes.heads, sizes.tokens, channels_of(op.o)]
            element = tile.element_of(op.o)
            if self._summed(op):
                element = f32 if self.setting.form.chunk == 1 else f16
            values[op.o] = self.setting.temporary(shape, element, op.o.name_hint or "o")
        if op.bounds is not None:
            self._clear(values[op.o])
        return values[op.o], None if op.final is None else values.get(op.final)

    def _sweep(self, op: attn.SweepOp) -> None:
        if self.setting.form.chunk == 1:
            o, final = self._results(op)
            steps = TokenSteps(self.setting, op, o, final)
            steps.run(self._rows(op.rows, steps), self._anchors(op, steps))
            return
        self._run(op, op.dot, op.reverse is not None, op.rows)

    def _run(
        self, op: attn.RecurrenceOp | attn.SweepOp, dot: SSAValue | None, reverse: bool, rows: SSAValue | None
    ) -> None:
        setting, name = self.setting, op.o.name_hint or "o"
        o, final = self._results(op)
        strength = op.beta if isinstance(op, attn.RecurrenceOp) and op.beta is not None else op.weight
        sweep = Sweep(
            setting,
            Walk(
                f"{self.plan.name}_{name}", op.q, op.k, op.v, op.scale, op.decay, strength, op.initial, op.bounds,
                dot, reverse, o, final, whole=isinstance(op, attn.SweepOp) and op.whole is not None,
                scaled=dot is not None and not reverse and self._scaled(),
            ),
            _chunk_of(op),
            self._form(op),
        )  # fmt: skip
        sweep.walk = replace(sweep.walk, anchors=self._anchors(op, sweep), sizes=self._row_sizes(op, sweep))
        sweep.run(self._rows(rows, sweep))

    def _scaled(self) -> bool:
        """Whether the sweep in reverse whose sums are taken starts from a state, and so has the scale inside."""
        sweeps = [op for op in self.block.ops if isinstance(op, attn.SweepOp)]
        return any(op.whole is not None and op.initial is not None for op in sweeps)

    def _summed(self, op: attn.RecurrenceOp | attn.SweepOp) -> bool:
        """Whether results in 16 bits are of heads that are summed, and so must not be rounded to bf16 before."""
        summed = [isinstance(use.operation, attn.SumHeadsOp) for use in op.o.uses]
        return isinstance(op, attn.SweepOp) and bool(summed) and all(summed) and tile.element_of(op.o) != f32

    def _row_sizes(self, op: attn.RecurrenceOp | attn.SweepOp, sweep: Sweep) -> RowSizes | None:
        if not self._summed(op):
            return None
        sizes = sweep.sizes
        shape = [sweep.state.splits, sizes.batch, sizes.heads, sizes.tokens]
        values = self.setting.temporary(shape, f32, "sizes")
        if op.bounds is not None:  # rows of no sequence are added up too
            self._clear(values)
        self.setting.row_sizes[op.o] = RowSizes(values, sweep.value.tile)
        return self.setting.row_sizes[op.o]

    def _anchors(self, op: attn.RecurrenceOp | attn.SweepOp, sweep: Sweep | TokenSteps) -> Anchors | None:
        """Where a sweep keeps states, or meets those that another has kept."""
        if not isinstance(op, attn.SweepOp) or op.segment is None:
            return None
        setting, sizes, segment = self.setting, sweep.sizes, op.segment.value.data
        leading: list[Index] = [sizes.batch, sizes.heads, slots_of(setting, sizes, segment)]
        if op.kept is not None:
            shape: list[Index] = [*leading, sweep.key.size, sweep.value.size]
            if self._aside(op):
                shape = [*leading, sweep.state.splits * sweep.state.shape[0] * sweep.state.shape[1]]
            setting.values[op.kept] = setting.temporary(shape, tile.element_of(op.kept), "kept")
            return Anchors(segment, setting.values[op.kept], None)
        assert op.meets is not None and op.ends is not None
        wide = rank_of(op.ends) == 4
        splits = 1 if wide else sweep.state.splits
        channels = [sweep.state.splits * sweep.value.tile] if wide else []
        setting.values[op.ends] = setting.temporary([splits, *leading, *channels], f32, "ends")
        setting.splits[op.ends] = splits
        crossings = None
        if op.rows is not None and isinstance(sweep, Sweep):
            crossings = setting.temporary([splits, sizes.batch, sizes.heads, sizes.tokens], f32, "crossings")
            setting.crossings[op.ends] = crossings, sweep.element
        return Anchors(segment, setting.of(op.meets), setting.values[op.ends], crossings)

    def _aside(self, op: attn.SweepOp) -> bool:
        """Whether the states that a sweep keeps are met in the tiles in which it holds them, where copies are of whole blocks."""
        assert op.kept is not None
        own, others = self._form(op), [self._form(use.operation) for use in op.kept.uses]
        alike = all((other.value_block, other.turned) == (own.value_block, own.turned) for other in others)
        return own.descriptors and alike

    def _form(self, op: Operation) -> Form:
        """The form of all, but for what a schedule says of this op."""
        found = form_of(op.attributes)
        for name in ("turned", "chained", "careful"):
            found |= {name: bool(found[name])} if name in found else {}
        return replace(self.setting.form, **found)

    def _rows(self, rows: SSAValue | None, sweep: Sweep | TokenSteps) -> SSAValue | None:
        if rows is None:
            return None
        sizes, splits = sweep.sizes, sweep.state.splits
        shape = [splits, sizes.batch, sizes.heads, sizes.tokens]
        self.setting.values[rows] = self.setting.temporary(shape, f32, rows.name_hint or "rows")
        self.setting.splits[rows] = splits
        return self.setting.values[rows]

    def _delta(self, op: attn.DeltaBackwardOp) -> None:
        setting, sizes = self.setting, Sizes(self.setting, [op.v], op.bounds)
        leading: list[Index] = [sizes.batch, sizes.heads, sizes.tokens]
        for result, like in ((op.dq, op.q), (op.dk, op.k), (op.dv, op.v), (op.d_beta, None)):
            if result not in setting.values:
                channels = [] if like is None else [channels_of(like)]
                setting.values[result] = setting.temporary(
                    [*leading, *channels], tile.element_of(result), "d_temporary"
                )
        optional = [None if r is None else setting.values.get(r) for r in (op.d_decay, op.d_initial)]
        main = [setting.of(r) for r in (op.dq, op.dk, op.dv, op.d_beta)]
        for target in (*main, optional[0]):
            if op.bounds is not None and target is not None:
                self._clear(target)
        results = Results(*main, *optional)
        if setting.form.chunk == 1:
            DeltaBackward(setting, op, results).run()
        else:
            form = self._form(op)
            if form.pieces > 1 and not form.chained:
                raise RecurrenceFormError("the delta rule in pieces", "chunked", "chunk=1 goes token by token")
            DeltaAdjoint(setting, op, results, form).run()

    def _clear(self, target: SSAValue) -> None:
        """Tokens past the last bound belong to no sequence: nobody else writes them."""
        element = tile.element_of(target)
        assert isinstance(element, AnyFloat)
        zero = self.plan.scope.add(arith.ConstantOp(FloatAttr(0.0, element)), "zero").result
        self.plan.scope.add(tile.FillOp(target, zero))


def _chunk_of(op: attn.RecurrenceOp | attn.SweepOp) -> type[Chunk]:
    """How a sweep does a chunk: by where its decays are."""
    delta = isinstance(op, attn.RecurrenceOp) and op.beta is not None
    if op.decay is None or rank_of(op.decay) == 3:
        return DeltaChunk if delta else Chunk
    if delta:
        return DeltaRowsChunk
    return ColumnsChunk if isinstance(op, attn.SweepOp) and op.columns is not None else RowsChunk
