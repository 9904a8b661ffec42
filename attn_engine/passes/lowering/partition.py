"""Turns a scalar program into `tile.map` and `tile.reduce`, one map per level and phase.

The level of a scalar is the set of tile axes that it depends on; work is done at the lowest level
that it needs (a per-row value once per row). Its phase counts the level changes before
it, so that a group of equal level and phase depends on earlier phases only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xdsl.dialects import arith
from xdsl.ir import Block, Operation, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.program import Bound, Program
from attn_engine.passes.lowering.scope import Scope

REDUCTION = {
    attn.ReduceKind.SUM: tile.Reduction.SUM,
    attn.ReduceKind.MAX: tile.Reduction.MAX,
    attn.ReduceKind.MIN: tile.Reduction.MIN,
}

Axes = tuple[int, ...]


@dataclass
class Partition:
    """One lowering of a program at the end of `scope`; `shape` is the tile, `reduced` the axis of the keys."""

    program: Program
    scope: Scope
    shape: tuple[int, ...]
    reduced: int
    values: dict[SSAValue, Bound] = field(default_factory=dict[SSAValue, Bound])
    axes: dict[SSAValue, Axes] = field(default_factory=dict[SSAValue, Axes])
    phase: dict[SSAValue, int] = field(default_factory=dict[SSAValue, int])
    ops: set[Operation] = field(default_factory=set[Operation])
    wanted: set[SSAValue] = field(default_factory=set[SSAValue])

    def run(self, wanted: Sequence[SSAValue]) -> list[Bound]:
        """Appends the ops that `wanted` needs and returns where its values are now."""
        ops = self._needed(wanted)
        self.ops, self.wanted = set(ops), set(wanted)
        for arg, bound in self.program.bound.items():
            self.values[arg], self.axes[arg], self.phase[arg] = bound, bound.axes, 0
        groups: dict[tuple[int, int, Axes], list[Operation]] = {}
        for op in ops:
            self._place(op)
            if not isinstance(op, arith.ConstantOp):
                axes, phase = self.axes[op.results[0]], self.phase[op.results[0]]
                groups.setdefault((phase, int(not isinstance(op, attn.RowReduceOp)), axes), []).append(op)
        used = set(wanted)
        for op in ops:
            used.update(op.operands)
        for (_, is_map, axes), members in sorted(groups.items(), key=lambda g: g[0]):
            if not is_map:
                for op in members:
                    self._reduce(op)
            elif axes:
                self._map(members, axes, used)
            else:
                self._scalars(members)
        return [self._result(w) for w in wanted]

    def _needed(self, wanted: Sequence[SSAValue]) -> list[Operation]:
        live, work = set[Operation](), [w.owner for w in wanted]
        while work:
            op = work.pop()
            if isinstance(op, Operation) and op not in live:
                live.add(op)
                work.extend(o.owner for o in op.operands)
        return [op for op in self.program.block.ops if op in live]

    def _place(self, op: Operation) -> None:
        """Level and phase of an op. Constants and arguments delay nobody."""
        axes: Axes = tuple(sorted({a for o in op.operands for a in self.axes[o]}))
        if isinstance(op, attn.RowReduceOp):
            self.axes[op.result] = tuple(a for a in axes if a != self.reduced)
            self.phase[op.result] = self.phase[op.value] + 1
            return
        phase = 0
        for operand in op.operands:
            outside = not isinstance(operand.owner, Operation) or isinstance(operand.owner, arith.ConstantOp)
            reduced = isinstance(operand.owner, attn.RowReduceOp)
            same = self.axes[operand] == axes and not reduced
            phase = max(phase, 0 if outside else self.phase[operand] + (0 if same or reduced else 1))
        for result in op.results:
            self.axes[result], self.phase[result] = axes, phase

    def _result(self, value: SSAValue) -> Bound:
        if value not in self.values:
            assert isinstance(value.owner, arith.ConstantOp)
            clone = self.scope.add(value.owner.clone(), value.name_hint or "c")
            self.values[value] = Bound(clone.results[0])
        return self.values[value]

    def _scalars(self, members: list[Operation]) -> None:
        for op in members:
            mapping = {o: self._result(o).value for o in op.operands}
            clone = self.scope.add(op.clone(value_mapper=mapping))
            for old, new in zip(op.results, clone.results, strict=True):
                new.name_hint = old.name_hint
                self.values[old] = Bound(new)

    def _reduce(self, op: Operation) -> None:
        assert isinstance(op, attn.RowReduceOp)
        source, kind = self._result(op.value), REDUCTION[op.kind.data]
        if self.reduced in source.axes:
            axis = source.axes.index(self.reduced)
            reduced = self.scope.add(tile.ReduceOp(kind, source.value, axis), op.result.name_hint or "r").result
            self.values[op.result] = Bound(reduced, tuple(a for a in source.axes if a != self.reduced))
        elif kind is tile.Reduction.SUM:
            self.values[op.result] = self._repeat(source)
        else:
            self.values[op.result] = source

    def _repeat(self, source: Bound) -> Bound:
        """The sum over the keys of a value that does not depend on them."""
        times = float(self.shape[self.reduced])
        if not source.axes:
            count = self.scope.real(times)
            return Bound(self.scope.add(arith.MulfOp(source.value, count), "r").result)
        body = Block(arg_types=[tile.element_of(source.value)])
        inner = Scope(body)
        product = inner.add(arith.MulfOp(body.args[0], inner.real(times))).result
        inner.add(tile.MapYieldOp(product))
        axes = [list(range(len(source.axes)))]
        op = self.scope.add(tile.MapOp([source.value], axes, [source.value.type], body), "r")
        return Bound(op.outputs[0], source.axes)

    def _escapes(self, value: SSAValue, members: set[Operation]) -> bool:
        """A value of a group is a result of its map if anything outside the group needs it."""
        return value in self.wanted or any(u.operation in self.ops and u.operation not in members for u in value.uses)

    def _map(self, members: list[Operation], axes: Axes, used: set[SSAValue]) -> None:
        inside = {r for op in members for r in op.results}
        group = set(members)
        outputs = [r for op in members for r in op.results if r in used and self._escapes(r, group)]
        inputs: list[SSAValue] = []
        for op in members:
            for o in op.operands:
                if o not in inside and o not in inputs and not isinstance(o.owner, arith.ConstantOp):
                    inputs.append(o)
        body, mapping = self._body(members, inputs)
        body.add_op(tile.MapYieldOp(*[mapping[o] for o in outputs]))
        sources = [self.values[i] for i in inputs]
        shape = [self.shape[a] for a in axes]
        types = [tile.tile_type(shape, o.type) for o in outputs]
        relative = [[axes.index(a) for a in s.axes] for s in sources]
        op = self.scope.add(tile.MapOp([s.value for s in sources], relative, types, body))
        for old, new in zip(outputs, op.outputs, strict=True):
            new.name_hint = old.name_hint
            self.values[old] = Bound(new, axes)

    def _body(self, members: list[Operation], inputs: list[SSAValue]) -> tuple[Block, dict[SSAValue, SSAValue]]:
        body = Block(arg_types=[i.type for i in inputs])
        mapping: dict[SSAValue, SSAValue] = {}
        for arg, source in zip(body.args, inputs, strict=True):
            arg.name_hint = source.name_hint
            mapping[source] = arg
        for op in members:
            for o in op.operands:
                if isinstance(o.owner, arith.ConstantOp) and o not in mapping:
                    constant = o.owner.clone()
                    body.add_op(constant)
                    constant.result.name_hint = o.name_hint
                    mapping[o] = constant.result
            clone = op.clone(value_mapper=mapping)
            body.add_op(clone)
            for old, new in zip(op.results, clone.results, strict=True):
                new.name_hint = old.name_hint
                mapping[old] = new
        return body, mapping
