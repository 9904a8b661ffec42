"""attn-narrow-integers: 64-bit index arithmetic of scalar regions in 32 bits, where its values are proved to fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from xdsl.context import Context
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import IntegerType, ModuleOp, i32, i64
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import attn
from attn_engine.ir.intervals import INDEX, INT64, IntRange
from attn_engine.passes.attn_simplify import simplify
from attn_engine.passes.simplify_constants import constant, constant_of
from attn_engine.passes.simplify_rule import predicate_of

BINARY: dict[type[Operation], Callable[[IntRange, IntRange], IntRange | None]] = {
    arith.AddiOp: IntRange.__add__,
    arith.SubiOp: IntRange.__sub__,
    arith.MuliOp: IntRange.__mul__,
    arith.MaxSIOp: IntRange.maximum,
    arith.MinSIOp: IntRange.minimum,
    arith.FloorDivSIOp: IntRange.floor_divide,
    arith.RemSIOp: IntRange.remainder,
    arith.AndIOp: IntRange.bits_of_both,
    arith.OrIOp: IntRange.bits_of_any,
    arith.XOrIOp: IntRange.bits_of_any,
    arith.ShLIOp: IntRange.shift_left,
    arith.ShRSIOp: IntRange.shift_right,
}
NARROWED = (*BINARY, math.AbsIOp, arith.SelectOp)
KIND_INDICES = 6
"""Of `kinds`: the ends of both blocks, b and h."""
# The other operations that read an integer and give none: they may read the narrow one.
READERS = (arith.CmpiOp, arith.SIToFPOp)


@dataclass
class Narrower:
    """The ranges of one block, and the 32-bit twins of its values."""

    block: Block
    positions: int | None = None
    """How many arguments come first that are indices; all, if not said."""
    ranges: dict[SSAValue, IntRange] = field(default_factory=dict[SSAValue, IntRange])
    narrow: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])
    twins: list[Operation] = field(default_factory=list[Operation])

    def find(self) -> dict[SSAValue, IntRange]:
        """Ranges alone; nothing is changed."""
        self._start()
        for op in self.block.ops:
            if len(op.results) == 1 and op.results[0].type == i64:
                self.ranges[op.results[0]] = self._range(op)
        return self.ranges

    def _start(self) -> None:
        self.ranges |= {arg: INDEX for arg in self.block.args[: self.positions] if arg.type == i64}

    def apply(self) -> None:
        self._start()
        for op in list(self.block.ops):
            if isinstance(op, READERS):
                self._read_narrow(op)
            elif len(op.results) == 1 and op.results[0].type == i64:
                self.ranges[op.results[0]] = self._range(op)
                self._add_twin(op)
        for op in reversed(self.twins):
            self._replace_by_twin(op)

    def _range(self, op: Operation) -> IntRange:
        if (number := constant_of(op.results[0])) is not None:
            return IntRange.of(int(number))
        args = [self.ranges.get(value, INT64) for value in op.operands]
        if isinstance(op, arith.SubiOp) and (divisor := _modulus(op)) is not None:
            found = IntRange.of(0, divisor + 1 if divisor < 0 else divisor - 1)
        elif type(op) in BINARY:
            found = BINARY[type(op)](*args)
        elif isinstance(op, math.AbsIOp):
            found = abs(args[0])
        elif isinstance(op, arith.SelectOp):
            found = args[1] | args[2]
        else:
            found = _extended(op)
        # What may leave 64 bits wraps there, and may be anything.
        return found if found is not None and found.fits(64) else INT64

    def _fits(self, value: SSAValue) -> bool:
        return value.type != i64 or self.ranges.get(value, INT64).fits(32)

    def _add_twin(self, op: Operation) -> None:
        """The same operation on 32 bits, where it and all that it reads fit."""
        result = op.results[0]
        if type(op) not in NARROWED or not all(self._fits(value) for value in (*op.operands, result)):
            return
        twin = type(op).create(
            operands=[self._narrowed(value, op) for value in op.operands],
            result_types=[i32],
            properties=dict(op.properties),
        )
        Rewriter.insert_op(twin, InsertPoint.before(op))
        twin.results[0].name_hint = result.name_hint
        self.narrow[result] = twin.results[0]
        self.twins.append(op)

    def _narrowed(self, value: SSAValue, user: Operation) -> SSAValue:
        """The 32-bit twin of a value; made from it where there is none."""
        if value.type != i64:
            return value
        if value not in self.narrow:
            number = constant_of(value)
            new = arith.TruncIOp(value, i32) if number is None else constant(number, i32)
            Rewriter.insert_op(new, InsertPoint.before(user))
            new.results[0].name_hint = value.name_hint
            self.narrow[value] = new.results[0]
        return self.narrow[value]

    def _read_narrow(self, op: arith.CmpiOp | arith.SIToFPOp) -> None:
        if op.operands[0].type != i64 or not all(self._fits(value) for value in op.operands):
            return
        operands = [self._narrowed(value, op) for value in op.operands]
        if isinstance(op, arith.CmpiOp):
            new: Operation = arith.CmpiOp(operands[0], operands[1], predicate_of(op))
        else:
            new = arith.SIToFPOp(operands[0], op.result.type)
        Rewriter.insert_op(new, InsertPoint.before(op))
        new.results[0].name_hint = op.results[0].name_hint
        op.results[0].replace_all_uses_with(new.results[0])
        Rewriter.erase_op(op)

    def _replace_by_twin(self, op: Operation) -> None:
        """What still reads the 64-bit value reads the twin, extended."""
        result = op.results[0]
        if result.first_use is not None:
            wide = arith.ExtSIOp(self.narrow[result], i64)
            Rewriter.insert_op(wide, InsertPoint.before(op))
            result.replace_all_uses_with(wide.result)
        Rewriter.erase_op(op)


def _modulus(op: arith.SubiOp) -> int | None:
    """The constant n in x - floor(x / n) * n, which is Python's x % n."""
    product = op.rhs.owner
    if not isinstance(product, arith.MuliOp) or not isinstance(product.lhs.owner, arith.FloorDivSIOp):
        return None
    quotient = product.lhs.owner
    number = constant_of(product.rhs)
    same = quotient.lhs is op.lhs and constant_of(quotient.rhs) == number
    return int(number) if same and number else None


def _extended(op: Operation) -> IntRange | None:
    """What an extension of a narrower integer can be."""
    if not isinstance(op, arith.ExtUIOp | arith.ExtSIOp) or not isinstance(op.input.type, IntegerType):
        return None
    width = cast(IntegerType, op.input.type).width.data
    return (
        IntRange(0, (1 << width) - 1)
        if isinstance(op, arith.ExtUIOp)
        else IntRange(-(1 << (width - 1)), (1 << (width - 1)) - 1)
    )


def narrow_integers(op: Operation) -> None:
    """Narrows every region of one attention."""
    kinds: Region | None = getattr(op, "kinds", None)
    for region in op.regions:
        for block in region.blocks:
            # The ends of terms, which follow the indices, may be anything.
            Narrower(block, KIND_INDICES if region is kinds else None).apply()
    simplify(op)


@dataclass(frozen=True)
class AttnNarrowIntegersPass(ModulePass):
    """Computes positions and what follows from them in 32 bits: indices are below 2**30, captures may be anything.

    Block arguments and the indices of `attn.load` keep 64 bits.

    ```
    %d = arith.subi %q, %kv : i64          ->   %q32 = arith.trunci %q : i64 to i32
    %f = arith.sitofp %d : i64 to f32           %kv32 = arith.trunci %kv : i64 to i32
                                                %d = arith.subi %q32, %kv32 : i32
                                                %f = arith.sitofp %d : i32 to f32
    ```
    """

    name = "attn-narrow-integers"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for inner in list(op.walk()):
            if isinstance(inner, attn.AttentionRegions):
                narrow_integers(inner)
