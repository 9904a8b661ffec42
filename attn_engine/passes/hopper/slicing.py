"""Slices of a block with loops: the ops that some of them need, and a copy of just those."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.hopper.edit import yields
from attn_engine.passes.lowering.scope import Scope


@dataclass
class Slice:
    """What is needed of a block: ops, and of each loop the carries; `stop` says which values come from elsewhere."""

    block: Block
    stop: Callable[[SSAValue], bool]
    ops: set[Operation] = field(default_factory=set[Operation])
    carries: dict[Operation, set[int]] = field(default_factory=dict[Operation, set[int]])
    stopped: list[SSAValue] = field(default_factory=list[SSAValue])

    def need(self, ops: Iterable[Operation]) -> None:
        for op in ops:
            self._op(op)

    def need_value(self, value: SSAValue) -> None:
        if self.stop(value):
            if value not in self.stopped:
                self.stopped.append(value)
            return
        owner = value.owner
        if isinstance(value, BlockArgument):
            parent = value.block.parent_op()
            if isinstance(parent, scf.ForOp) and self._inside(parent):
                self._op(parent)
                if value.index:
                    self._carry(parent, value.index - 1)
            return
        assert isinstance(owner, Operation)
        if not self._inside(owner):
            return
        self._op(owner)
        if isinstance(owner, scf.ForOp):
            self._carry(owner, owner.results.index(value))

    def _inside(self, op: Operation) -> bool:
        block = op.parent
        while block is not None and block is not self.block:
            parent = block.parent_op()
            block = parent.parent if parent is not None else None
        return block is self.block

    def _op(self, op: Operation) -> None:
        if op in self.ops:
            return
        self.ops.add(op)
        parent = op.parent_op()
        if isinstance(parent, scf.ForOp) and self._inside(parent):
            self._op(parent)
        for operand in [op.lb, op.ub, op.step] if isinstance(op, scf.ForOp) else op.operands:
            self.need_value(operand)

    def _carry(self, loop: scf.ForOp, number: int) -> None:
        known = self.carries.setdefault(loop, set[int]())
        if number in known:
            return
        known.add(number)
        self.need_value(loop.iter_args[number])
        self.need_value(yields(loop.body.block).operands[number])

    def copy(self, scope: Scope, mapping: dict[SSAValue, SSAValue], only: Callable[[Operation], bool] | None = None):
        """Appends the needed ops of the block, those that pass `only`; `mapping` goes from old values to new ones."""
        for op in self.block.ops:
            if op in self.ops and (only is None or only(op)):
                self._copy(scope, op, mapping)

    def _copy(self, scope: Scope, op: Operation, mapping: dict[SSAValue, SSAValue]) -> None:
        if not isinstance(op, scf.ForOp):
            scope.add(op.clone(value_mapper=mapping))
            return
        kept = sorted(self.carries.get(op, ()))
        body = Block(arg_types=[op.body.block.args[0].type, *(op.iter_args[n].type for n in kept)])
        old = [op.body.block.args[0], *(op.body.block.args[n + 1] for n in kept)]
        for was, now in zip(old, body.args, strict=True):
            now.name_hint = was.name_hint
            mapping[was] = now
        inner = Scope(body)
        for inside in op.body.block.ops:
            if inside in self.ops:
                self._copy(inner, inside, mapping)
        ends = yields(op.body.block).operands
        inner.add(scf.YieldOp(*(mapping.get(ends[n], ends[n]) for n in kept)))
        low, high, step = (mapping.get(v, v) for v in (op.lb, op.ub, op.step))
        inits = [mapping.get(op.iter_args[n], op.iter_args[n]) for n in kept]
        new = scope.add(scf.ForOp(low, high, step, inits, body))
        for n, result in zip(kept, new.results, strict=True):
            result.name_hint = op.results[n].name_hint
            mapping[op.results[n]] = result


def is_scalar_code(op: Operation) -> bool:
    """Arithmetic on scalars, and scalars from memory, which any role may repeat."""
    if not op.name.startswith(("arith.", "math.")) and not isinstance(op, tile.LoadOp):
        return False
    return not any(isinstance(v.type, TensorType) for v in (*op.operands, *op.results))


def depends_on(block: Block, value: SSAValue) -> set[SSAValue]:
    """The results of a block's scalar code that depend on a value."""
    found = {value}
    for op in block.ops:
        if is_scalar_code(op) and not isinstance(op, arith.ConstantOp) and any(o in found for o in op.operands):
            found.update(op.results)
    return found
