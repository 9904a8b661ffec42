"""The late half of a step: what can run while the early half of the next step does, and what it takes from its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import AsyncLoadOp, BarrierArriveOp, BarrierExpectOp, BarrierWaitOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp, WaitOp
from attn_engine.dialects.tile_async_view import SlotOp
from attn_engine.dialects.tile_types import BufferType
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import PRODUCTS_PER_CYCLE, WARPGROUP_ROWS
from attn_engine.passes.hopper.pin import is_rounding

_PRODUCTS = 2


@dataclass(frozen=True)
class Late:
    """Ops that start the late half, in order; in a consumer also the wait for its product and the release of its slot."""

    start: list[Operation]
    early: AsyncDotOp | None = None
    """The product of the early half."""
    wait: WaitOp | None = None
    release: BarrierArriveOp | None = None
    rounding: tuple[Operation, ...] = ()
    """What makes the weights an operand. It follows the wait: registers of a product in flight cannot be written,
    so that the next product's operand would need registers of its own until then."""

    @property
    def ops(self) -> set[Operation]:
        return {*self.start, *(o for o in (self.wait, self.release) if o is not None)}


def product_cycles(step: Block) -> int:
    """How long the tensor cores of a multiprocessor take for the products of a consumer's step, at least."""
    cycles = 0
    for dot in (op for op in step.ops if isinstance(op, AsyncDotOp)):
        assert isinstance(dot.b.type, BufferType)
        depth, columns = dot.b.type.get_shape()
        cycles += WARPGROUP_ROWS * depth * columns // PRODUCTS_PER_CYCLE
    return cycles


def late_half(ops: Sequence[Operation], hold: bool = True) -> Late:
    """Of the ops of one step: the values, in a producer their copy and in a consumer the product with them.

    With `hold` the slot of keys is released there too, not as soon as the scores are known.
    """
    dots = [o for o in ops if isinstance(o, AsyncDotOp)]
    if dots:
        return _of_consumer(ops, dots, hold)
    loads = [o for o in ops if isinstance(o, AsyncLoadOp)]
    if not loads:
        raise AsyncUnsupportedError("a step of its producer copies nothing")
    load = loads[-1]
    expect, slot = load.prev_op, load.target.owner
    wait = expect.prev_op if expect is not None else None
    assert isinstance(expect, BarrierExpectOp) and isinstance(wait, BarrierWaitOp) and isinstance(slot, SlotOp)
    return Late([slot, wait, expect, load])


def _of_consumer(ops: Sequence[Operation], dots: Sequence[AsyncDotOp], hold: bool) -> Late:
    if len(dots) != _PRODUCTS:
        raise AsyncUnsupportedError(f"a step of its consumers has {len(dots)} products instead of two")
    early, late = dots
    slot = late.b.owner
    full = [o for o in ops[: ops.index(late)] if isinstance(o, BarrierWaitOp)][-1]
    assert isinstance(slot, SlotOp)
    waits = [next(o for o in ops if isinstance(o, WaitOp) and dot.result in o.pending) for dot in dots]
    releases = [w.next_op for w in waits]
    free_early, free_late = releases
    assert isinstance(free_early, BarrierArriveOp) and isinstance(free_late, BarrierArriveOp)
    return Late([slot, full, late, *([free_early] if hold else [])], early, waits[1], free_late, rounding_of(late))


def rounding_of(late: AsyncDotOp) -> tuple[Operation, ...]:
    """The map that rounds the weights, if it stands alone, and the move into the registers of an operand."""
    move = late.a.owner
    if not isinstance(move, DotOperandOp):
        return ()
    rounds = move.value.owner
    alone = isinstance(rounds, tile.MapOp) and is_rounding(rounds)
    return (rounds, move) if alone else (move,)  # type: ignore[return-value]


@dataclass
class Inputs:
    """What the late halves of several steps take from their own step: values that differ from step to step."""

    halves: Sequence[Late]
    loops: Sequence[Block]
    """The bodies of the steps but the first."""

    def __post_init__(self) -> None:
        self.groups: list[tuple[SSAValue, ...]] = []
        self.place: dict[tuple[int, int], int] = {}
        """Which group the operand of an op of the half is from, by the positions of op and operand."""
        for number, ops in enumerate(zip(*(half.start for half in self.halves), strict=True)):
            for position, values in enumerate(zip(*(op.operands for op in ops), strict=True)):
                if self._varies(values) and not self._internal(values):
                    self.place[number, position] = self._group(values)

    def _varies(self, values: tuple[SSAValue, ...]) -> bool:
        if all(isinstance(v.owner, arith.ConstantOp) and not self._is_tile(v) for v in values):
            return False
        return len(set(values)) > 1 or any(_block_of(v) in self.loops for v in values)

    @staticmethod
    def _is_tile(value: SSAValue) -> bool:
        return value.type.name == "tensor"

    def _internal(self, values: tuple[SSAValue, ...]) -> bool:
        return all(v.owner in half.start for v, half in zip(values, self.halves, strict=True))

    def _group(self, values: tuple[SSAValue, ...]) -> int:
        if values not in self.groups:
            self.groups.append(values)
        return self.groups.index(values)

    def of(self, step: int) -> list[SSAValue]:
        """The values that the late half of a step takes from it."""
        return [group[step] for group in self.groups]

    def mapping(self, step: int, given: Sequence[SSAValue]) -> dict[SSAValue, SSAValue]:
        """For a copy of the half of a step on values of another one."""
        return dict(zip(self.of(step), given, strict=True))


def _block_of(value: SSAValue) -> Block | None:
    return value.block if isinstance(value, BlockArgument) else value.owner.parent  # type: ignore[union-attr]
