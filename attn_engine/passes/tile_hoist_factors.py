"""`tile-hoist-factors`: what every kernel multiplies the numbers of a temporary with is multiplied where they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin
from xdsl.dialects.builtin import FloatAttr, f32
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.hopper.edit import Before, Signature
from attn_engine.passes.hopper.form import find_plan
from attn_engine.passes.hopper.steps import launched

_NEGATION = -1.0


@dataclass
class _Temporary:
    """One temporary of a plan: who writes it, and the scalar ops that read its numbers."""

    writers: list[tile.StoreOp]
    readers: list[tuple[Operation, SSAValue]]
    """Each with the number that it reads."""

    @classmethod
    def of(cls, alloc: tile.AllocOp, signatures: Sequence[Signature]) -> _Temporary | None:
        """None if something else than stores and elementwise arithmetic uses it."""
        found = cls([], [])
        if not all(isinstance(use.operation, tile.LaunchOp) for use in alloc.result.uses):
            return None
        for signature in signatures:
            for argument in signature.kernel.body.block.args:
                if signature.passed(argument) is alloc.result and not found._add(argument):
                    return None
        return found

    def _add(self, argument: SSAValue) -> bool:
        for use in argument.uses:
            op = use.operation
            if isinstance(op, tile.StoreOp) and op.target is argument and tile.shape_of(op.value):
                self.writers.append(op)
            elif isinstance(op, tile.LoadOp) and tile.shape_of(op.result):
                if not all(isinstance(u.operation, tile.MapOp) for u in op.result.uses):
                    return False
                for u in op.result.uses:
                    number = u.operation.regions[0].block.args[u.index]
                    self.readers += [(inner.operation, number) for inner in number.uses]
            else:
                return False
        return True

    def factor(self) -> float | None:
        """What all readers multiply with."""
        found = {_factor(op, number) for op, number in self.readers}
        return found.pop() if len(found) == 1 and self.writers else None

    def move(self, factor: float) -> None:
        for writer in self.writers:
            writer.operands[0] = _scaled(Before(writer), writer.value, factor)
        for op, number in self.readers:
            if isinstance(op, arith.SubfOp):
                Rewriter.replace_op(op, arith.AddfOp(op.lhs, number))
            else:
                op.results[0].replace_all_uses_with(number)
                Rewriter.erase_op(op)


def _factor(op: Operation, number: SSAValue) -> float | None:
    if isinstance(op, arith.NegfOp) or (isinstance(op, arith.SubfOp) and op.rhs is number and op.lhs is not number):
        return _NEGATION
    if not isinstance(op, arith.MulfOp):
        return None
    other = op.rhs if op.lhs is number else op.lhs
    constant = None if isinstance(other, BlockArgument) else other.owner
    if isinstance(constant, arith.ConstantOp) and isinstance(constant.value, FloatAttr):
        return constant.value.value.data
    return None


def _scaled(scope: Before, value: SSAValue, factor: float) -> SSAValue:
    body = Block(arg_types=[f32])
    if factor == _NEGATION:
        result: Operation = arith.NegfOp(body.args[0])
        body.add_op(result)
    else:
        constant = arith.ConstantOp(FloatAttr(factor, f32))
        result = arith.MulfOp(body.args[0], constant)
        body.add_ops([constant, result])
    body.add_op(tile.MapYieldOp(result.results[0]))
    axes = list(range(len(tile.shape_of(value))))
    return scope.add(tile.MapOp([value], [axes], [value.type], body), value.name_hint or "row").outputs[0]


@dataclass(frozen=True)
class TileHoistFactorsPass(ModulePass):
    """Multiplies, or negates, the numbers of a temporary once, where a kernel writes them, if all that read them would.

    ```
    @rows: tile.store %lse, %row        @dkdv: %r = tile.load %row; tile.map (%x, %r) { x - r * log2e }
    ```
    becomes
    ```
    @rows: tile.store %lse * log2e, %row        @dkdv: %r = tile.load %row; tile.map (%x, %r) { x - r }
    ```
    """

    name = "tile-hoist-factors"

    plan: str = "backward"
    """The plan whose temporaries are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        plan, signatures = find_plan(op, self.plan), launched(op, self.plan)
        for alloc in [o for o in plan.body.block.ops if isinstance(o, tile.AllocOp)]:
            found = _Temporary.of(alloc, signatures)
            factor = found.factor() if found is not None else None
            if found is not None and factor is not None:
                found.move(factor)
