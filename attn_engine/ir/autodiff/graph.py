"""One block of scalar code in which equal operations exist once: where forward and backward code meet.

A `Graph` grows by `emit`, which simplifies an operation on its way in, shares equal operations and records what
each value depends on. Regions are cut out of it at the end (`Slicer`), so that
code which nobody uses never reaches the IR.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Flag, auto

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import FloatAttr, f32
from xdsl.ir import Attribute, Block, Operation, SSAValue
from xdsl.traits import IsTerminator

from attn_engine.dialects import attn

IDENTITY = {
    attn.ReduceKind.SUM: 0.0,
    attn.ReduceKind.COUNT: 0.0,
    attn.ReduceKind.MAX: float("-inf"),
    attn.ReduceKind.MIN: float("inf"),
}
"""What a reduction of no elements gives."""

Change = SSAValue | Sequence[Operation] | None
Simplify = Callable[[Operation], Change]


class Needs(Flag):
    """What a value depends on."""

    NOTHING = 0
    ELEMENT = auto()
    """It differs from key to key."""
    FORWARD = auto()
    """It reads a reduction of the forward pass."""
    BACKWARD = auto()
    """It reads a gradient."""


def defined_by(value: SSAValue, *kinds: type[Operation]) -> Operation | None:
    """The operation of one of these kinds that makes this value."""
    return value.owner if isinstance(value.owner, kinds) else None


class Graph:
    """Scalar code without duplicates; values are in an order in which operands come first."""

    def __init__(self, simplify: Simplify = lambda op: None) -> None:
        """`simplify` gives what an operation may be replaced with: a value, or operations of which the last counts."""
        self.block = Block()
        self.simplify = simplify
        self.needs: dict[SSAValue, Needs] = {}
        self.order: dict[SSAValue, int] = {}
        self._known: dict[tuple[object, ...], SSAValue] = {}

    def argument(self, type_: Attribute, needs: Needs = Needs.NOTHING, name: str | None = None) -> SSAValue:
        value = self.block.insert_arg(type_, len(self.block.args))
        value.name_hint = name
        self._record(value, needs)
        return value

    def _record(self, value: SSAValue, needs: Needs) -> None:
        self.needs[value] = needs
        self.order[value] = len(self.order)

    def emit(self, op: Operation, name: str | None = None) -> SSAValue:
        """The value of an operation on values of the graph, which may exist already or need no operation."""
        key = self._key(op)
        if (known := self._known.get(key)) is not None:
            return self._replaced(op, known)
        self.block.add_op(op)
        value = self._simplified(op)
        if value is None:
            value = op.results[0]
            value.name_hint = name
            self._record(value, self._needs_of(op))
        else:
            op.detach()
            self._replaced(op, value)
        self._known[key] = value
        return value

    def _replaced(self, op: Operation, value: SSAValue) -> SSAValue:
        op.results[0].replace_all_uses_with(value)
        op.erase()
        return value

    def _key(self, op: Operation) -> tuple[object, ...]:
        properties = tuple(sorted((k, v) for k, v in op.properties.items()))
        return (type(op), tuple(op.operands), tuple(r.type for r in op.results), properties)

    def _simplified(self, op: Operation) -> SSAValue | None:
        change = self.simplify(op)
        if change is None or isinstance(change, SSAValue):
            return change
        value: SSAValue | None = None
        for new in change:
            value = self.emit(new)
        return value

    def _needs_of(self, op: Operation) -> Needs:
        needs = Needs.NOTHING
        for operand in op.operands:
            needs |= self.needs[operand]
        if isinstance(op, attn.RowReduceOp):
            return (needs & ~Needs.ELEMENT) | Needs.FORWARD
        return needs

    def is_element(self, value: SSAValue) -> bool:
        return bool(self.needs[value] & Needs.ELEMENT)

    # --- short spellings -------------------------------------------------------------------------

    def constant(self, number: float) -> SSAValue:
        return self.emit(arith.ConstantOp(FloatAttr(number, f32)))

    def add(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.emit(arith.AddfOp(a, b))

    def sub(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.emit(arith.SubfOp(a, b))

    def mul(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.emit(arith.MulfOp(a, b))

    def div(self, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.emit(arith.DivfOp(a, b))

    def neg(self, a: SSAValue) -> SSAValue:
        return self.emit(arith.NegfOp(a))

    def log(self, a: SSAValue) -> SSAValue:
        return self.emit(math.LogOp(a))

    def compare(self, a: SSAValue, b: SSAValue, predicate: str) -> SSAValue:
        return self.emit(arith.CmpfOp(a, b, predicate))

    def select(self, cond: SSAValue, a: SSAValue, b: SSAValue) -> SSAValue:
        return self.emit(arith.SelectOp(cond, a, b))

    def number(self, value: SSAValue) -> float | None:
        """What a constant holds."""
        op = value.owner
        if isinstance(op, arith.ConstantOp) and isinstance(op.value, FloatAttr):
            return op.value.value.data
        return None

    def existing(self, op: Operation) -> SSAValue | None:
        """The value that this operation would give, where the graph has it; the operation is consumed."""
        known = self._known.get(self._key(op))
        op.erase(safe_erase=False)
        return known

    def reduce(self, kind: attn.ReduceKind, value: SSAValue) -> SSAValue:
        """A reduction that the backward pass does itself, never one of the forward pass."""
        key = ("backward", kind, value)
        if key not in self._known:
            op = attn.RowReduceOp(kind, value)
            self.block.add_op(op)
            self._known[key] = op.result
            self._record(op.result, Needs.BACKWARD)
        return self._known[key]

    def reduce_where(self, kind: attn.ReduceKind, condition: SSAValue, value: SSAValue) -> SSAValue:
        """A reduction of the backward pass over the elements for which a condition holds."""
        return self.reduce(kind, self.select(condition, value, self.constant(IDENTITY[kind])))

    # --- whole regions ---------------------------------------------------------------------------

    def inline(
        self,
        block: Block,
        arguments: Sequence[SSAValue],
        decide: Callable[[Operation, Operation], SSAValue | None] = lambda copy, op: None,
    ) -> dict[SSAValue, SSAValue]:
        """Copies a block into the graph; gives where each of its values went.

        `decide` may replace an operation; it gets the copy, and what that is of.
        """
        found: dict[SSAValue, SSAValue] = dict(zip(block.args, arguments, strict=True))
        for op in block.ops:
            if op.has_trait(IsTerminator):
                continue
            new = op.clone(value_mapper=dict(found))
            value = decide(new, op)
            name = op.results[0].name_hint
            if value is None:
                value = self.emit(new, name)
            else:
                new.erase()
            found[op.results[0]] = value
        return found


class Slicer:
    """Cuts the code of some values out of a graph, into the end of another block."""

    def __init__(self, target: Block, known: dict[SSAValue, SSAValue]):
        self.target = target
        self.known = known

    def value(self, value: SSAValue) -> SSAValue:
        """The value in the target block; its operation and what it needs are copied on first use."""
        pending = [value]
        while pending:
            top = pending[-1]
            if top in self.known:
                pending.pop()
                continue
            op = top.owner
            if not isinstance(op, Operation):
                raise ValueError(f"'{top.name_hint}' is an argument that this region does not have")
            missing = [operand for operand in op.operands if operand not in self.known]
            if missing:
                pending.extend(reversed(missing))
                continue
            pending.pop()
            new = op.clone(value_mapper=dict(self.known))
            self.append(new)
            for old, fresh in zip(op.results, new.results, strict=True):
                fresh.name_hint = old.name_hint
                self.known[old] = fresh
        return self.known[value]

    def values(self, values: Iterable[SSAValue]) -> list[SSAValue]:
        return [self.value(value) for value in values]

    def append(self, op: Operation) -> None:
        last = self.target.last_op
        if last is not None and last.has_trait(IsTerminator):
            self.target.insert_op_before(op, last)
        else:
            self.target.add_op(op)
