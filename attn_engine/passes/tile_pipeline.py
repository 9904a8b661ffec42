"""`tile-pipeline`: operands through rings in shared memory, filled by asynchronous copies; products asynchronous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import (
    AsyncLoadOp,
    AsyncStoreOp,
    AsyncStoreWaitOp,
    BarrierExpectOp,
    BarrierWaitOp,
    MakeBarriersOp,
    ProxyFenceOp,
)
from attn_engine.dialects.tile_async_memory import DescribeOp, ReadOp, WriteOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp, WaitOp
from attn_engine.dialects.tile_async_view import PartOp, RingOp, SlotOp, TransposedSlotOp
from attn_engine.dialects.tile_types import BufferType, MmaLayoutAttr
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import AsyncSchedule
from attn_engine.passes.hopper.edit import After, Before, Signature, extend_for, extend_while, yield_more, yields
from attn_engine.passes.hopper.form import (
    Step,
    attribute,
    check_shared,
    dots,
    is_zero,
    ring_bytes,
    ring_key,
    signature_of,
    step_of,
    tables_of,
)

_LARGEST_N = 256
_WARPS = 4


@dataclass
class _Ring:
    """Stages of blocks of one operand, a barrier for each, and the descriptor that they are copied through."""

    name: str
    ring: SSAValue
    full: SSAValue
    descriptor: SSAValue

    @property
    def stages(self) -> int:
        assert isinstance(self.ring.type, BufferType)
        return self.ring.type.get_shape()[0]

    def load(self, scope: Before, load: tile.LoadOp, stage: SSAValue, parity: SSAValue) -> SSAValue:
        """Copies what `load` loads into a stage and waits for it; the slot."""
        slot = scope.add(SlotOp(self.ring, stage), self.name).result
        copy = AsyncLoadOp(self.descriptor, list(load.indices), slot, self.full, stage)
        scope.add(BarrierExpectOp(self.full, stage, copy.byte_size))
        scope.add(copy)
        scope.add(BarrierWaitOp(self.full, stage, parity))
        return slot


class _Pipeline:
    """One persistent kernel under conversion."""

    def __init__(self, signature: Signature, loop: scf.WhileOp, options: TilePipelinePass):
        self.signature, self.loop, self.queries = signature, loop, options.queries
        self.slot: SSAValue | None = None
        """Of the queries, if products read them from shared memory."""
        self.table_stages, self.shared_bytes = options.table_stages, options.shared_bytes
        self.stages = options.stages or attribute(signature.kernel, "num_stages", AsyncSchedule.stages)
        self.warps = attribute(signature.kernel, "num_warps", 4)
        first = signature.kernel.body.block.first_op
        assert first is not None
        self.top = Before(first)
        self.zero = self.top.value(0)

    def run(self) -> None:
        block = self.loop.after_region.block
        q, store = _query(block), _output(block)
        step = step_of(block)
        self.q = self._ring("q", q, 1)
        self.k, self.v = self._ring("k", step.k, self.stages), self._ring("v", step.v, self.stages)
        self.tables = {ring_key(load): self._ring("table", load, self.table_stages) for load in tables_of(block, step)}
        self.loop, (count, tiles) = extend_while(self.loop, [self.zero, self.zero], ["count", "tiles_done"])
        block = self.loop.after_region.block
        self._load_query(q, tiles, self._in_registers(q, step, store))
        self._store_output(store)
        count = self._steps(block, count)
        if self.slot is not None:
            Rewriter.erase_op(q)
        scope = Before(yields(block))
        more = scope.add(arith.AddiOp(tiles, scope.value(1)), "tiles_done").result
        yield_more(block, [count, more])
        After(self.loop).add(AsyncStoreWaitOp(0))
        self.signature.drop_unused()

    def _ring(self, name: str, load: tile.LoadOp, stages: int) -> _Ring:
        shape = tile.shape_of(load.result)
        type_ = BufferType([stages, *shape], tile.element_of(load.result))
        ring = self.top.add(RingOp(type_), f"{name}s").result
        full = self.top.add(MakeBarriersOp(stages, 1), f"{name}_full").result
        return _Ring(name, ring, full, self._descriptor(name, load.source, shape))

    def _descriptor(self, name: str, source: SSAValue, shape: Sequence[int]) -> SSAValue:
        assert isinstance(source.type, tile.GlobalType)
        lead = [1] * (source.type.rank.data - len(shape))
        described = Before(self.signature.launch).add(DescribeOp(self.signature.passed(source), [*lead, *shape]))
        return self.signature.add(described.result, f"{name}_copies")

    def _in_registers(self, load: tile.LoadOp, step: Step, store: tile.StoreOp) -> bool:
        """Whether queries stay in registers: they must where they are modified, and do where all blocks fit.

        Where the rings leave no room for a slot of the output, it leaves through that of the queries, which then stay there.
        """
        if any(not isinstance(use.operation, tile.DotOp) for use in load.result.uses):
            return True
        (keys, channels), (_, columns) = tile.shape_of(step.k.result), tile.shape_of(step.v.result)
        if self.tables:
            return False
        fits = AsyncSchedule.fits(self.warps // _WARPS, keys, channels, columns)
        output = BufferType(tile.shape_of(store.value), tile.element_of(store.value))
        fits = fits and ring_bytes(self.signature.kernel) + output.byte_size <= self.shared_bytes
        return fits if self.queries is None else self.queries == "registers"

    def _load_query(self, load: tile.LoadOp, tiles: SSAValue, in_registers: bool) -> None:
        """Through shared memory, to registers or not; the fence lets the next tile's copy follow the read."""
        scope = Before(load)
        parity = scope.add(arith.AndIOp(tiles, scope.value(1)), "tile_parity").result
        slot = self.q.load(scope, load, scope.value(0), parity)
        if not in_registers:
            self.slot = slot
            return
        read = scope.add(ReadOp(slot), load.result.name_hint or "q").result
        scope.add(ProxyFenceOp())
        load.result.replace_all_uses_with(read)
        Rewriter.erase_op(load)

    def _store_output(self, store: tile.StoreOp) -> None:
        """Through a slot of its own; through that of the queries where products read these and room is short."""
        shape, element = tile.shape_of(store.value), tile.element_of(store.value)
        type_ = BufferType([1, *shape], element)
        short = ring_bytes(self.signature.kernel) + type_.byte_size > self.shared_bytes
        descriptor, scope = self._descriptor("o", store.target, shape), Before(store)
        shared = self._within_queries(scope, BufferType(shape, element)) if short else None
        if shared is not None:
            slot = shared
        else:
            scope.add(AsyncStoreWaitOp(0))
            slot = scope.add(SlotOp(self.top.add(RingOp(type_), "os").result, scope.value(0)), "o_slot").result
        scope.add(WriteOp(store.value, slot))
        scope.add(ProxyFenceOp())
        scope.add(AsyncStoreOp(slot, descriptor, list(store.indices)))
        if shared is not None:
            scope.add(AsyncStoreWaitOp(0))
        Rewriter.erase_op(store)

    def _within_queries(self, scope: Before, output: BufferType) -> SSAValue | None:
        """The slot of the queries, or the first channels of it, if products read them there and it has them in one part."""
        if self.slot is None or self.slot.type == output:
            return self.slot
        assert isinstance(self.slot.type, BufferType)
        (_, channels), (_, columns) = self.slot.type.get_shape(), output.get_shape()
        if AsyncSchedule.first_part(channels) != columns:
            return None
        return scope.add(PartOp(self.slot, 1, scope.value(0), columns), "o_slot").result

    def _steps(self, block: Block, count: SSAValue) -> SSAValue:
        """Converts the loops and the step between them; `count` is the number of blocks that the program has had."""
        scores = dots(block)[0]
        for op in list(block.ops):
            if isinstance(op, scf.ForOp):
                new, (inner,) = extend_for(op, [count], ["count"])
                yield_more(new.body.block, [self._step(new.body.block, inner)])
                count = new.res[-1]
            elif op is scores:
                count = self._step(block, count)
        return count

    def _step(self, block: Block, count: SSAValue) -> SSAValue:
        step = step_of(block)
        for table, key in [(table, ring_key(table)) for table in tables_of(block, step)]:
            self._load_table(table, self.tables[key], count)
        scope = Before(step.scores)
        stage, parity = _place(scope, count, self.stages)
        k = self.k.load(scope, step.k, stage, parity)
        turned = scope.add(TransposedSlotOp(k), "k_turned").result
        self._product(step.scores, turned)
        scope = Before(step.output)
        self._product(step.output, self.v.load(scope, step.v, stage, parity))
        for op in (step.k, step.v):
            _erase_load(op)
        after = After(_last_wait(block))
        return after.add(arith.AddiOp(count, after.value(1)), "count").result

    @staticmethod
    def _load_table(load: tile.LoadOp, ring: _Ring, count: SSAValue) -> None:
        """Through shared memory to registers, where the scores meet it; the fence lets the next copy follow the read."""
        block = load.parent
        assert block is not None
        scope = Before(next(op for op in block.ops if load.result in op.operands))
        stage, parity = _place(scope, count, ring.stages)
        read = scope.add(ReadOp(ring.load(scope, load, stage, parity)), load.result.name_hint or "table").result
        scope.add(ProxyFenceOp())
        load.result.replace_all_uses_with(read)
        Rewriter.erase_op(load)

    def _product(self, dot: tile.DotOp, b: SSAValue) -> None:
        """A product, started and waited for at once."""
        scope = Before(dot)
        columns = tile.shape_of(dot.result)[1]
        layout = MmaLayoutAttr(self.warps, 1, min(columns, _LARGEST_N))
        a = self._operand(scope, dot, layout)
        acc = None if is_zero(dot.acc) and isinstance(b.owner, TransposedSlotOp) else dot.acc
        pending = scope.add(AsyncDotOp(a, b, acc, layout), "pending")
        value = scope.add(WaitOp(0, [pending]), dot.result.name_hint or "x").values[0]
        dot.result.replace_all_uses_with(value)
        Rewriter.erase_op(dot)

    def _operand(self, scope: Before, dot: tile.DotOp, layout: MmaLayoutAttr) -> SSAValue:
        """The first operand of a product: a slot, what was read from one, or a tile moved to where products want it."""
        if self.slot is not None and isinstance(dot.a.owner, tile.LoadOp):
            return self.slot
        return dot.a if isinstance(dot.a.owner, ReadOp) else scope.add(DotOperandOp(dot.a, layout), "operand").result


def _place(scope: Before, count: SSAValue, stages: int) -> tuple[SSAValue, SSAValue]:
    """The slot of a block of that number in a ring, and the parity of its phase."""
    size = scope.value(stages)
    stage = scope.add(arith.RemSIOp(count, size), "stage").result
    round_ = scope.add(arith.DivSIOp(count, size), "round").result
    return stage, scope.add(arith.AndIOp(round_, scope.value(1)), "parity").result


def _erase_load(load: tile.LoadOp) -> None:
    """The load, and the transpose of it if there is one: nothing reads them any more."""
    for use in list(load.result.uses):
        Rewriter.erase_op(use.operation)
    Rewriter.erase_op(load)


def _last_wait(block: Block) -> Operation:
    return [o for o in block.ops if isinstance(o, WaitOp)][-1]


def _query(block: Block) -> tile.LoadOp:
    first = dots(block)[0]
    behind = [first.a.owner]
    while behind:
        op = behind.pop()
        if isinstance(op, tile.LoadOp) and len(tile.shape_of(op.result)) == 2:
            return op
        if isinstance(op, Operation):
            behind.extend(o.owner for o in op.operands)
    raise AsyncUnsupportedError("its queries are not loaded")


def _output(block: Block) -> tile.StoreOp:
    return next(o for o in block.ops if isinstance(o, tile.StoreOp) and len(tile.shape_of(o.value)) == 2)


@dataclass(frozen=True)
class TilePipelinePass(ModulePass):
    """Moves the operands of a persistent forward kernel through shared memory, and makes its products asynchronous.

    Blocks of keys and of values go through rings of `stages` slots, queries and the output through slots of
    their own, or one for both.
    Every copy and every product is waited for where it is started: roles and order come later.

    ```
    %k = tile.load %K[%b, %h, %n0, %c0] dims [2, 3] ... -> tensor<128x64xf16>
    %t = tile.transpose %k
    %s = tile.dot %q, %t, %zero ieee
    ```
    becomes
    ```
    %slot = tile.slot %ks[%stage]
    tile.barrier_expect %k_full[%stage], 16384
    tile.async_load %k_copies[%b, %h, %n0, %c0], %slot, %k_full[%stage]
    tile.barrier_wait %k_full[%stage], %parity
    %t = tile.transposed_slot %slot
    %p = tile.async_dot %q, %t layout <4x1, 128>
    %s = tile.wait 0, %p
    ```
    """

    name = "tile-pipeline"

    plan: str = "forward"
    """The plan whose kernel is changed."""
    stages: int | None = None
    """Blocks of keys, and of values, that a ring holds; the kernel's `num_stages` if absent."""
    queries: str | None = None
    """Where products read queries: "registers" or "shared"; in registers, if these hold all blocks, if absent."""
    table_stages: int = AsyncSchedule.table_stages
    """Blocks of a table of scores that a ring holds."""
    shared_bytes: int = AsyncSchedule.shared_bytes
    """Shared memory that the rings may take."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        signature = signature_of(op, self.plan)
        loops = [o for o in signature.kernel.body.block.ops if isinstance(o, scf.WhileOp)]
        if len(loops) != 1:
            raise AsyncUnsupportedError("its kernel is not persistent: run tile-schedule-grid first")
        _Pipeline(signature, loops[0], self).run()
        check_shared(signature.kernel, self.shared_bytes)
