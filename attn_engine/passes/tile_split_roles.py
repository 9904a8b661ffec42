"""`tile-split-roles`: a producer that copies and consumers that compute, for kernels of one block a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import IntegerAttr, i32, i64
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import (
    AsyncReduceAddOp,
    AsyncStoreOp,
    AsyncStoreWaitOp,
    BarrierArriveOp,
    BarrierExpectOp,
    BarrierWaitOp,
    MakeBarriersOp,
    ProxyFenceOp,
)
from attn_engine.dialects.tile_async_memory import WriteOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, WaitOp
from attn_engine.dialects.tile_async_view import PartOp, RingOp, SlotOp, TransposedSlotOp
from attn_engine.dialects.tile_types import BarriersType, BufferType
from attn_engine.ir.async_schedule import WARPGROUP_THREADS, AsyncSchedule
from attn_engine.passes.hopper.edit import Before, Signature, yields
from attn_engine.passes.hopper.handshake import COMPUTES, COPIES
from attn_engine.passes.hopper.role_steps import slot_of
from attn_engine.passes.hopper.rows import walk
from attn_engine.passes.hopper.slicing import Slice
from attn_engine.passes.hopper.split_parts import SplitParts
from attn_engine.passes.hopper.steps import kernels_at_async_level
from attn_engine.passes.lowering.scope import Scope

_WARPS = 4


def _handshake(block: Block, top: Before, consumers: int, threads: int) -> tuple[list[Operation], list[Operation]]:
    """Barriers by which consumers tell the producer that the slots of a step are free; the ops of either side."""
    produce: list[Operation] = [o for o in walk(block) if isinstance(o, COPIES)]
    consume: list[Operation] = [o for o in walk(block) if isinstance(o, COMPUTES)]
    empty: SSAValue | None = None
    for loop in [o for o in walk(block) if isinstance(o, scf.ForOp)]:
        body = loop.body.block
        expects = [o for o in body.ops if isinstance(o, BarrierExpectOp)]
        if not expects:
            continue
        first = expects[0]
        wait = next(o for o in body.ops if isinstance(o, BarrierWaitOp) and o.barriers is first.barriers)
        if empty is None:
            type_ = first.barriers.type
            assert isinstance(type_, BarriersType)
            empty = top.add(MakeBarriersOp(type_.size.data, consumers, threads), "free").result
        scope = Before(first)
        parity = scope.add(arith.XOrIOp(wait.parity, scope.value(1)), "free_parity").result
        produce.append(scope.add(BarrierWaitOp(empty, first.index, parity)))
        consume.append(_behind_products(body).add(BarrierArriveOp(empty, first.index)))
    return produce, consume


def _behind_products(body: Block) -> Before:
    """Where nothing of a step reads its slots any more; results may still leave through others."""
    ops = list(body.ops)
    if isinstance(_end(body), ProxyFenceOp):
        return Before(yields(body))
    last = max(n for n, op in enumerate(ops) if isinstance(op, WaitOp))
    return Before(next((op for op in ops[last:] if isinstance(op, AsyncStoreWaitOp)), yields(body)))


def _end(body: Block) -> Operation:
    """The last access of a step: a fence where reads of its slots end there."""
    return [op for op in body.ops if isinstance(op, WaitOp | AsyncStoreOp | AsyncReduceAddOp | ProxyFenceOp)][-1]


def _between_consumers(block: Block, top: Before, consumers: int) -> list[Operation]:
    """Barriers by which consumers tell each other that their rows of a slot that all read are written."""
    added: list[Operation] = []
    barriers: dict[SSAValue, SSAValue] = {}
    owned: list[SSAValue] = []
    for dot in [op for op in walk(block) if isinstance(op, AsyncDotOp) and isinstance(op.a.owner, TransposedSlotOp)]:
        slot, block_ = slot_of(dot.a), slot_of(dot.b)
        assert slot is not None and block_ is not None
        owned.append(block_.ring)
        if slot.ring not in barriers:
            assert isinstance(slot.ring.type, BufferType)
            stages = slot.ring.type.get_shape()[0]
            barriers[slot.ring] = top.add(MakeBarriersOp(stages, consumers), "written").result
        turn = slot.index.owner
        assert isinstance(turn, arith.RemSIOp)
        scope, written = Before(dot), barriers[slot.ring]
        round_ = scope.add(arith.DivSIOp(turn.lhs, turn.rhs), "round").result
        parity = scope.add(arith.AndIOp(round_, scope.value(1)), "parity").result
        added.append(scope.add(BarrierArriveOp(written, slot.index)))
        added.append(scope.add(BarrierWaitOp(written, slot.index, parity)))
    return [*added, *_before_results(block, top, consumers, owned)]


def _before_results(block: Block, top: Before, consumers: int, owned: Sequence[SSAValue]) -> list[Operation]:
    """Results leave through a block that every consumer reads whole: all must have done so."""
    for op in block.ops:
        part = op.target.owner if isinstance(op, WriteOp) else None
        if isinstance(part, PartOp) and isinstance(part.source.owner, SlotOp) and part.source.owner.ring in owned:
            barriers = top.add(MakeBarriersOp(1, consumers), "done").result
            scope = Before(op)
            zero = scope.value(0)
            return [scope.add(BarrierArriveOp(barriers, zero)), scope.add(BarrierWaitOp(barriers, zero, zero))]
    return []


def _is_shared(value: SSAValue) -> bool:
    return isinstance(value.owner, RingOp | MakeBarriersOp)


def _role(block: Block, part: SSAValue, captures: Sequence[SSAValue], ops: Sequence[Operation]) -> Block:
    """The code of one role: what some ops of the kernel need."""
    role = Block(arg_types=[i32, *(c.type for c in captures)])
    mapping: dict[SSAValue, SSAValue] = {}
    for old, new in zip([part, *captures], role.args, strict=True):
        new.name_hint, mapping[old] = old.name_hint, new
    needed = Slice(block, lambda value: value is part or _is_shared(value))
    needed.need(ops)
    scope = Scope(role)
    needed.copy(scope, mapping)
    scope.add(tile.EndOp())
    return role


def split(signature: Signature, consumers: int, registers: Sequence[int], threads: int = 1) -> None:
    """Replaces the code of a kernel by roles."""
    kernel = signature.kernel
    part = SplitParts(signature, consumers).run()
    block = kernel.body.block
    first = block.first_op
    assert first is not None
    produce, consume = _handshake(block, Before(first), consumers, threads)
    consume += _between_consumers(block, Before(first), consumers)
    shared = [o.results[0] for o in block.ops if isinstance(o, RingOp | MakeBarriersOp)]
    captures: list[SSAValue] = [*block.args, *shared]
    roles = [_role(block, part, captures, ops) for ops in (consume, produce)]
    captures = _drop_unused(captures, roles)
    end = block.last_op
    assert end is not None
    regions = [Region(role) for role in roles]
    Rewriter.insert_op(RolesOp(captures, [consumers, 1], [_WARPS, 1], registers, regions), InsertPoint.before(end))
    for op in reversed(list(block.ops)):
        if not isinstance(op, RolesOp | RingOp | MakeBarriersOp | tile.EndOp):
            Rewriter.erase_op(op)
    kernel.attributes = {"num_warps": IntegerAttr(_WARPS, i64)}
    signature.drop_unused()


def _drop_unused(captures: Sequence[SSAValue], roles: Sequence[Block]) -> list[SSAValue]:
    """Captures that some role uses; all roles take the same ones."""
    used = [n for n in range(len(captures)) if any(role.args[n + 1].uses for role in roles)]
    for role in roles:
        for n in reversed(range(len(captures))):
            if n not in used:
                role.erase_arg(role.args[n + 1])
    return [captures[n] for n in used]


@dataclass(frozen=True)
class TileSplitRolesPass(ModulePass):
    """Cuts a pipelined kernel of one block a program into a producer role and consumer roles of 64 rows each.

    Copies into shared memory and all that they depend on go to the producer; products, tiles and stores to the consumers,
    each with its part of the rows that the program owns. Loops stand in both, and so do scalars that both need. The
    slots of a step are released together, at its end; the producer waits for that before it copies into them again.
    Consumers wait for each other where a product reads what all of them have written.

    ```
    scf.for ... { async_load; barrier_wait; async_dot; wait; ... }
    tile.store
    ```
    becomes
    ```
    tile.roles (...) : (...)
      role count 2 warps 4 registers 240 {
        scf.for ... { barrier_wait %full; async_dot; wait; ...; barrier_arrive %free }
        tile.store
      }
      role count 1 warps 1 registers 24 { scf.for ... { barrier_wait %free; async_load } }
    ```
    """

    name = "tile-split-roles"

    plan: str = "backward"
    """The plan whose kernels are changed."""
    consumers: int = AsyncSchedule.consumers
    """Warpgroups that compute."""
    consumer_registers: int = AsyncSchedule.consumer_registers
    """Registers of a thread of a consumer."""
    producer_registers: int = AsyncSchedule.producer_registers
    """Registers of a thread of the producer."""
    apart_arrivals: bool = AsyncSchedule.apart_arrivals
    """Whether the threads of a consumer release slots each for itself."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        threads = WARPGROUP_THREADS if self.apart_arrivals else 1
        for signature in kernels_at_async_level(op, self.plan):
            split(signature, self.consumers, [self.consumer_registers, self.producer_registers], threads)
