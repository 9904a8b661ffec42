"""`tile-specialize-warps`: a producer that copies and consumers that compute, cut along the dependences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import IntegerAttr, i32, i64
from xdsl.ir import Block, BlockArgument, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import (
    AsyncStoreWaitOp,
    BarrierArriveOp,
    BarrierWaitOp,
    MakeBarriersOp,
)
from attn_engine.dialects.tile_async_memory import CellReadOp, CellWriteOp
from attn_engine.dialects.tile_async_view import RingOp
from attn_engine.dialects.tile_types import BufferType
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import WARPGROUP_THREADS, AsyncSchedule
from attn_engine.passes.hopper.counted_tiles import CELLS, cell_of
from attn_engine.passes.hopper.edit import Before, Signature, yields
from attn_engine.passes.hopper.form import consumers_of, signature_of
from attn_engine.passes.hopper.handshake import Handshake
from attn_engine.passes.hopper.rows import walk
from attn_engine.passes.hopper.slicing import Slice, depends_on
from attn_engine.passes.hopper.split_rows import SplitRows
from attn_engine.passes.lowering.scope import Scope

_WARPS = 4


class _Roles:
    """Builds the regions of the two roles from the loop of a persistent kernel."""

    def __init__(self, kernel: tile.KernelOp, loop: scf.WhileOp, consumers: int, part: SSAValue, top: Before):
        self.kernel, self.loop, self.part, self.top = kernel, loop, part, top
        self.block = loop.after_region.block
        self.tile, self.count, self.done = self.block.args
        self.next_tile, self.next_count, self.next_done = yields(self.block).operands
        self.full = top.add(MakeBarriersOp(CELLS, 1), "tile_full").result
        self.empty = top.add(MakeBarriersOp(CELLS, consumers), "tile_empty").result
        self.per_tile = depends_on(self.block, self.tile) - depends_on(self.block, part)

    def _published(self, value: SSAValue) -> bool:
        return value in self.per_tile and value.type == i32

    def build(self, produce: Sequence[Operation], consume: Sequence[Operation]) -> tuple[Block, Block]:
        """The blocks of consumer and producer."""
        own = Slice(self.block, lambda value: value is self.part or self._published(value))
        own.need(consume)
        for value in (self.next_count, self.next_done):
            own.need_value(value)
        self.cells = {
            value: self._cell(value) for value in dict.fromkeys([self.tile, *own.stopped]) if value is not self.part
        }
        return self._consumer(own), self._producer(produce)

    def _cell(self, value: SSAValue) -> SSAValue:
        return self.top.add(RingOp(BufferType([CELLS], i32)), f"next_{value.name_hint or 'i'}").result

    # --- consumer

    def _consumer(self, own: Slice) -> Block:
        role = Block(arg_types=[i32])
        role.args[0].name_hint = "part"
        test, body = (Block(arg_types=[i32, i32]) for _ in range(2))
        for block in (test, body):
            for argument, hint in zip(block.args, ("count", "tiles_done"), strict=True):
                argument.name_hint = hint
        self._await_tile(Scope(test), test)
        scope = Scope(body)
        mapping: dict[SSAValue, SSAValue] = {self.part: role.args[0], self.count: body.args[0], self.done: body.args[1]}
        cell, _ = cell_of(scope, body.args[1])
        for value in own.stopped:
            if value is not self.part:
                mapping[value] = scope.add(CellReadOp(self.cells[value], cell), value.name_hint or "i").result
        scope.add(BarrierArriveOp(self.empty, cell))
        own.copy(scope, mapping)
        scope.add(scf.YieldOp(mapping[self.next_count], mapping[self.next_done]))
        outer = Scope(role)
        zero = outer.value(0)
        outer.add(scf.WhileOp([zero, zero], [i32, i32], [test], [body]))
        outer.add(AsyncStoreWaitOp(0))
        outer.add(tile.EndOp())
        return role

    def _await_tile(self, scope: Scope, test: Block) -> None:
        """Waits for the next tile and asks whether there is one."""
        condition = self.loop.before_region.block.last_op
        assert isinstance(condition, scf.ConditionOp) and isinstance(condition.condition.owner, arith.CmpiOp)
        cell, parity = cell_of(scope, test.args[1])
        scope.add(BarrierWaitOp(self.full, cell, parity))
        number = scope.add(CellReadOp(self.cells[self.tile], cell), "tile").result
        mapping: dict[SSAValue, SSAValue] = {self.loop.before_region.block.args[0]: number}
        more = scope.add(condition.condition.owner.clone(value_mapper=mapping), "more").result
        scope.add(scf.ConditionOp(more, *test.args))

    # --- producer

    def _producer(self, produce: Sequence[Operation]) -> Block:
        role = Block(arg_types=[i32])
        role.args[0].name_hint = "part"
        needed = Slice(self.block, lambda value: False)
        needed.need(produce)
        shared = Slice(self.block, lambda value: False)
        for value in (self.next_tile, self.next_count, self.next_done):
            needed.need_value(value)
        for value in self.cells:
            shared.need_value(value)
        body = Block(arg_types=[i32] * 3)
        mapping: dict[SSAValue, SSAValue] = {}
        for old, new in zip(self.block.args, body.args, strict=True):
            new.name_hint = old.name_hint
            mapping[old] = new
        scope = Scope(body)
        shared.copy(scope, mapping)
        self._publish(scope, body.args[2], {cell: mapping[value] for value, cell in self.cells.items()})
        needed.copy(scope, mapping, lambda op: op not in shared.ops)
        scope.add(scf.YieldOp(*(mapping[v] for v in (self.next_tile, self.next_count, self.next_done))))
        outer = Scope(role)
        first = outer.add(tile.ProgramIdOp(0), "first_tile").result
        zero = outer.value(0)
        test = self.loop.before_region.clone()
        loop = outer.add(scf.WhileOp([first, zero, zero], [i32] * 3, test, [body]), "end", "count", "tiles_done")
        self._publish(outer, loop.res[2], {self.cells[self.tile]: loop.res[0]})
        outer.add(tile.EndOp())
        return role

    def _publish(self, scope: Scope, done: SSAValue, values: dict[SSAValue, SSAValue]) -> None:
        """Tells the consumers of a tile, or that there is none."""
        cell, parity = cell_of(scope, done)
        free = scope.add(arith.XOrIOp(parity, scope.value(1)), "free").result
        scope.add(BarrierWaitOp(self.empty, cell, free))
        for target, value in values.items():
            scope.add(CellWriteOp(value, target, cell))
        scope.add(BarrierArriveOp(self.full, cell))


def _captures(kernel: tile.KernelOp, blocks: Sequence[Block]) -> list[SSAValue]:
    """The kernel's values that roles use become arguments of all of them; constants are repeated instead."""
    captures: dict[SSAValue, None] = {}
    uses: list[tuple[Block, Operation, int, SSAValue]] = []
    for block in blocks:
        for op in block.walk():
            for place, operand in enumerate(op.operands):
                owner = operand.owner
                outer = owner if isinstance(owner, Block) else owner.parent
                if outer is kernel.body.block:
                    uses.append((block, op, place, operand))
    known: dict[tuple[Block, SSAValue], SSAValue] = {}
    for block, op, place, operand in uses:
        if isinstance(operand.owner, arith.ConstantOp):
            if (block, operand) not in known:
                clone = operand.owner.clone()
                assert block.first_op is not None
                block.insert_op_before(clone, block.first_op)
                known[block, operand] = clone.result
            op.operands[place] = known[block, operand]
        else:
            captures.setdefault(operand)
    ordered = sorted(captures, key=lambda v: (not isinstance(v, BlockArgument), _position(kernel, v)))
    for value in ordered:
        for block in blocks:
            argument = block.insert_arg(value.type, len(block.args))
            argument.name_hint = value.name_hint
            known[block, value] = argument
    for block, op, place, operand in uses:
        op.operands[place] = known[block, operand]
    return ordered


def _exchanges(loop: scf.WhileOp) -> bool:
    """Whether steps reduce rows of scores."""
    steps = [op for op in walk(loop.after_region.block) if isinstance(op, tile.ReduceOp)]
    return any(len(tile.shape_of(op.value)) > 1 for op in steps)


def _position(kernel: tile.KernelOp, value: SSAValue) -> int:
    owner = value.owner
    return value.index if isinstance(value, BlockArgument) else kernel.body.block.get_operation_index(owner)  # type: ignore[arg-type]


@dataclass(frozen=True)
class TileSpecializeWarpsPass(ModulePass):
    """Cuts a persistent, pipelined forward kernel into a producer role and consumer roles of 64 queries each.

    Copies into shared memory, the counter of tiles and all that they depend on go to the producer; products, tiles
    and stores to the consumers, each with its part of the queries. Loops over keys stand in both. Scalars that depend on the
    tile are computed by the producer and published in cells; other scalars that both need are computed twice. The producer
    waits for a slot until all consumers have released it; the warps of a consumer need not meet for that.

    ```
    scf.while (%tile = %first, ...) { ... } do { address; async_load; barrier_wait; async_dot; wait; ...; fetch_add }
    ```
    becomes
    ```
    tile.roles (...) : (...)
      role count 2 warps 4 registers 240 {
        scf.while (...) { barrier_wait %tile_full; cell_read } do { barrier_wait; async_dot; wait; barrier_arrive %k_empty; ... }
      }
      role count 1 warps 1 registers 24 {
        scf.while (%tile = %first, ...) {...} do { address; cell_write; barrier_wait %k_empty; async_load; ...; fetch_add }
      }
    ```
    """

    name = "tile-specialize-warps"

    plan: str = "forward"
    """The plan whose kernel is changed."""
    consumers: int | None = None
    """Warpgroups that compute; one for every four warps of the kernel if absent."""
    consumer_registers: int | None = None
    """Registers of a thread of a consumer; its part of what there are if absent."""
    producer_registers: int = AsyncSchedule.producer_registers
    """Registers of a thread of the producer."""
    apart: bool | None = None
    """Whether the threads of a consumer arrive each for itself at barriers of slots that products alone read; where steps
    exchange numbers of a row between threads, if absent. On an H200, 1 to 3 % faster for softmax, 3 to 5 % slower for
    sigmoid and relu."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        signature = signature_of(op, self.plan)
        kernel = signature.kernel
        loops = [o for o in kernel.body.block.ops if isinstance(o, scf.WhileOp)]
        if len(loops) != 1:
            raise AsyncUnsupportedError("its kernel is not pipelined: run tile-pipeline first")
        self._cut(signature, loops[0])
        kernel.attributes = {"num_warps": IntegerAttr(_WARPS, i64)}

    def _cut(self, signature: Signature, loop: scf.WhileOp) -> None:
        kernel = signature.kernel
        consumers = self.consumers or consumers_of(kernel)
        part = SplitRows(signature, loop.after_region.block, consumers).run()
        top = Before(loop)
        apart = _exchanges(loop) if self.apart is None else self.apart
        threads = WARPGROUP_THREADS if apart else 1
        produce, consume = Handshake(loop.after_region.block, top, consumers, part, threads).run()
        blocks = _Roles(kernel, loop, consumers, part, top).build(produce, consume)
        captures = _captures(kernel, blocks)
        registers = [self.consumer_registers or AsyncSchedule.registers_of(consumers), self.producer_registers]
        roles = RolesOp(captures, [consumers, 1], [_WARPS, 1], registers, [Region(b) for b in blocks])
        end = kernel.body.block.last_op
        assert end is not None
        Rewriter.insert_op(roles, InsertPoint.before(end))
        for op in reversed(list(kernel.body.block.ops)):
            if not isinstance(op, RolesOp | RingOp | MakeBarriersOp | tile.EndOp):
                Rewriter.erase_op(op)
        signature.drop_unused()
