"""Reads the scalar code of a mask as a condition on positions (`attn_engine.ir.affine`).

What does not depend on the positions of query and key becomes a leaf or a flag: it is computed, not
analysed. What is neither that nor affine is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import IntegerType, i64
from xdsl.ir import Block, Operation, SSAValue
from xdsl.traits import Pure

from attn_engine.dialects import attn
from attn_engine.ir.affine import (
    FALSE,
    TRUE,
    All,
    Any,
    Below,
    Choice,
    Condition,
    Flag,
    Leaf,
    Linear,
    Position,
    Unknown,
    extremum,
    floor_div,
    negated,
)
from attn_engine.passes.simplify_constants import constant_of
from attn_engine.passes.simplify_rule import predicate_of

QUERY, KEY = Position("q"), Position("kv")
I1 = IntegerType(1)
# Bigger numbers are no positions; they would leave 64 bits once multiplied.
LARGEST = 1 << 40
MOST_NODES, DEEPEST = 4000, 100
"""Of the tree that a condition is written as. Code is a graph; its tree can be exponentially larger."""


def uniform_values(block: Block) -> set[SSAValue]:
    """The values of a mask block that neither position reaches, and that may be computed away from it."""
    uniform: set[SSAValue] = {arg for i, arg in enumerate(block.args) if i not in (2, 3)}
    for op in block.ops:
        movable = op.has_trait(Pure) or isinstance(op, attn.LoadOp)
        if movable and not op.regions and all(v in uniform for v in op.operands):
            uniform.update(op.results)
    return uniform


def _legible(block: Block) -> set[SSAValue]:
    """The values of a block whose code, written out as a tree, is of a size to reason about."""
    extents: dict[SSAValue, tuple[int, int]] = {}
    for op in block.ops:
        below = [extents.get(operand, (1, 1)) for operand in op.operands]
        # What is compared or chosen stands in the tree together with its negation.
        copies = 2 if isinstance(op, arith.XOrIOp | arith.SelectOp | arith.CmpiOp) else 1
        size = min(MOST_NODES + 1, 1 + copies * sum(size for size, _ in below))
        extents |= dict.fromkeys(op.results, (size, 1 + max((depth for _, depth in below), default=0)))
    return {v for v, (size, depth) in extents.items() if size <= MOST_NODES and depth <= DEEPEST} | {*block.args}


@dataclass
class MaskReader:
    """Conditions and integers of one mask block; of code that is too much to reason about, nothing is known."""

    block: Block

    def __post_init__(self) -> None:
        self.legible = _legible(self.block)
        self.uniform = uniform_values(self.block)
        self.positions: dict[SSAValue, Position] = {self.block.args[2]: QUERY, self.block.args[3]: KEY}

    def condition(self, value: SSAValue) -> Condition:
        """The condition that an i1 stands for."""
        if (number := constant_of(value)) is not None:
            return TRUE if number else FALSE
        op = value.owner
        if isinstance(op, arith.CmpiOp) and value in self.legible:
            return self._compared(op)
        if value in self.uniform:
            return Flag(value)
        if value not in self.legible:
            return Unknown()
        if isinstance(op, arith.AndIOp):
            return All((self.condition(op.lhs), self.condition(op.rhs)))
        if isinstance(op, arith.OrIOp):
            return Any((self.condition(op.lhs), self.condition(op.rhs)))
        if isinstance(op, arith.XOrIOp):
            return _differ(self.condition(op.lhs), self.condition(op.rhs))
        if isinstance(op, arith.SelectOp):
            test = self.condition(op.cond)
            then, other = self.condition(op.lhs), self.condition(op.rhs)
            return Any((All((test, then)), All((negated(test), other))))
        return Unknown()

    def _compared(self, op: arith.CmpiOp) -> Condition:
        name = predicate_of(op)
        if op.lhs.type == I1 and name in ("eq", "ne"):
            differ = _differ(self.condition(op.lhs), self.condition(op.rhs))
            return differ if name == "ne" else negated(differ)
        left, right = self.linear(op.lhs), self.linear(op.rhs)
        if left is None or right is None or op.lhs.type == I1:
            return Flag(op.result) if op.result in self.uniform else Unknown()
        return compared(name, left - right) or Unknown()

    def linear(self, value: SSAValue) -> Linear | None:
        """The affine expression that an integer stands for."""
        if (number := constant_of(value)) is not None:
            return Linear(int(number)) if abs(number) <= LARGEST else None
        if value in self.positions:
            return Linear.of(self.positions[value])
        op = value.owner
        if value in self.legible and isinstance(op, Operation) and (found := self._arithmetic(op)) is not None:
            return found
        return Linear.of(Leaf(value)) if value in self.uniform and value.type == i64 else None

    def _arithmetic(self, op: Operation) -> Linear | None:
        if isinstance(op, arith.SelectOp):
            return self._selected(op)
        if isinstance(op, math.AbsIOp):
            inner = self.linear(op.operands[0])
            return None if inner is None else extremum(True, inner, -inner)
        if not isinstance(op, arith.SignlessIntegerBinaryOperation):
            return None
        left, right = self.linear(op.lhs), self.linear(op.rhs)
        return None if left is None or right is None else _combined(op, left, right)

    def _selected(self, op: arith.SelectOp) -> Linear | None:
        then, other = self.linear(op.lhs), self.linear(op.rhs)
        if then is None or other is None or op.result in self.uniform:
            return None
        condition = self.condition(op.cond)
        if isinstance(condition, Below) and (then + other).is_constant(0):
            # x > 0 ? x : -x is the larger of both, x < 0 ? x : -x the smaller, whatever happens at 0.
            if condition.x in (-then, -then + 1):
                return extremum(True, then, other)
            if condition.x in (then, then + 1):
                return extremum(False, then, other)
        return Linear.of(Choice(condition, then, other))


def _differ(a: Condition, b: Condition) -> Condition:
    return Any((All((a, negated(b))), All((negated(a), b))))


def compared(name: str, difference: Linear) -> Condition | None:
    """The comparison of two integers, given left - right."""
    match name:
        case "sle":
            return Below(difference)
        case "slt":
            return Below(difference + 1)
        case "sge":
            return Below(-difference)
        case "sgt":
            return Below(-difference + 1)
        case "eq":
            return All((Below(difference), Below(-difference)))
        case "ne":
            return Any((Below(difference + 1), Below(-difference + 1)))
        case _:
            return None


def _combined(op: Operation, left: Linear, right: Linear) -> Linear | None:
    match op:
        case arith.AddiOp():
            return left + right
        case arith.SubiOp():
            return left - right
        case arith.MaxSIOp():
            return extremum(True, left, right)
        case arith.MinSIOp():
            return extremum(False, left, right)
        case arith.MuliOp() if not right.terms:
            return _limited(left * right.constant)
        case arith.MuliOp() if not left.terms:
            return _limited(right * left.constant)
        case arith.FloorDivSIOp() if not right.terms and right.constant > 0:
            return floor_div(left, right.constant)
        case _:
            return None


def _limited(x: Linear) -> Linear | None:
    return x if all(abs(n) <= LARGEST for n in (x.constant, *(c for _, c in x.terms))) else None
