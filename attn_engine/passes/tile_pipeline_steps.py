"""`tile-pipeline-steps`: the blocks of steps through rings in shared memory; products asynchronous."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.ir import Block, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import (
    AsyncReduceAddOp,
    AsyncStoreOp,
    AsyncStoreWaitOp,
    BarrierExpectOp,
    BarrierWaitOp,
    MakeBarriersOp,
    ProxyFenceOp,
)
from attn_engine.dialects.tile_async_memory import DescribeOp, ReadOp, WriteOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp, OpaqueZeroOp, WaitOp
from attn_engine.dialects.tile_async_view import RingOp, SlotOp, TransposedSlotOp
from attn_engine.dialects.tile_types import BufferType, MmaLayoutAttr
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import WARPGROUP_ROWS, AsyncSchedule
from attn_engine.passes.hopper.edit import Before, Signature, extend_for, yield_more, yields
from attn_engine.passes.hopper.form import RingKey, attribute, check_shared, is_zero, ring_key
from attn_engine.passes.hopper.rings import Ring, align, check_behind, erase_load, erase_turned
from attn_engine.passes.hopper.spare import widen
from attn_engine.passes.hopper.steps import (
    SHARED_STAGES,
    Shared,
    Step,
    Write,
    check_kernel,
    check_size,
    is_step,
    launched,
    signatures,
    step_of,
    turned_of,
)

_LARGEST_N = 256
_REGISTERS = AsyncSchedule.consumer_registers - AsyncSchedule.other_registers
_WARPS = 4


class _Pipeline:
    """One kernel under conversion."""

    def __init__(self, signature: Signature, stages: int | None):
        self.signature = signature
        self.block = signature.kernel.body.block
        self.stages = stages or attribute(signature.kernel, "num_stages", AsyncSchedule.stages)
        self.warps = attribute(signature.kernel, "num_warps", 4)
        assert self.block.first_op is not None
        self.top = Before(self.block.first_op)
        self.rings: dict[RingKey, Ring] = {}
        self.full: dict[RingKey, SSAValue] = {}
        self.owned: dict[SSAValue, SSAValue] = {}
        """The rings of the blocks that the program owns."""
        self.sums: dict[tuple[SSAValue, tuple[int, ...]], SSAValue] = {}
        self.leaving: dict[SSAValue, tuple[SSAValue, SSAValue]] = {}
        """Slots through which results leave in every step, and where they go."""
        self.passing: list[tuple[SSAValue, SSAValue]] = []
        """The rings through which the operand and the result of each product over shared rows go."""
        self.turns: list[arith.RemSIOp] = []
        """The numbers of the slots of such operands."""

    def run(self) -> None:
        self._steps(self.block, self.top.value(0))
        for op in [o for o in self.block.ops if isinstance(o, tile.StoreOp)]:
            self._store(op)
        if self.passing or self.leaving:
            self._wait_for_stores()
        self.signature.drop_unused()

    # --- rings

    def _ring(self, load: tile.LoadOp, stages: int) -> Ring:
        key = ring_key(load)
        if key not in self.rings:
            name, shape = load.source.name_hint or "x", tile.shape_of(load.result)
            type_ = BufferType([stages, *shape], tile.element_of(load.result))
            ring = self.top.add(RingOp(type_), f"{name}s").result
            self.rings[key] = Ring(ring, self._descriptor(load.source, len(load.indices), shape))
        return self.rings[key]

    def _barriers(self, load: tile.LoadOp, stages: int) -> SSAValue:
        key = ring_key(load)
        if key not in self.full:
            name = f"{load.source.name_hint or 'x'}_full"
            self.full[key] = self.top.add(MakeBarriersOp(stages, 1), name).result
        return self.full[key]

    def _descriptor(self, memory: SSAValue, rank: int, shape: Sequence[int]) -> SSAValue:
        """A new argument: the descriptor of blocks of a global tensor along its last axes."""
        source = self.signature.passed(memory)
        if isinstance(source.owner, tile.AllocOp):
            align(source.owner)
        described = Before(self.signature.launch).add(DescribeOp(source, [*[1] * (rank - len(shape)), *shape]))
        return self.signature.add(described.result, f"{memory.name_hint or 'x'}_copies")

    # --- blocks that the program owns

    def _own(self, load: tile.LoadOp) -> SSAValue:
        """The ring of one stage that holds an owned block, copied once."""
        if load.result not in self.owned:
            ring, full = self._ring(load, 1), self._barriers(load, 1)
            scope = Before(load)
            zero = scope.value(0)
            _, copy = ring.copy(scope, load, full, zero)
            scope.add(BarrierExpectOp(full, zero, copy.byte_size))
            scope.add(copy)
            scope.add(BarrierWaitOp(full, zero, zero))
            self.owned[load.result] = ring.ring
        return self.owned[load.result]

    # --- results

    def _store(self, store: tile.StoreOp) -> None:
        """A block of results leaves through the slot of an owned block of the same type, which nothing reads any more."""
        type_ = store.value.type
        load = next((v for v in self.owned if v.type == type_), None)
        if load is None or tile.ints_of(store.dims) != (2, 3):
            return
        ring = self.owned.pop(load)
        name, scope = store.target.name_hint or "x", Before(store)
        descriptor = self._descriptor(store.target, len(store.indices), tile.shape_of(store.value))
        slot = scope.add(SlotOp(ring, scope.value(0)), f"{name}_slot").result
        scope.add(WriteOp(store.value, slot))
        scope.add(ProxyFenceOp())
        scope.add(AsyncStoreOp(slot, descriptor, list(store.indices)))
        self._wait_for_stores()
        Rewriter.erase_op(store)

    def _wait_for_stores(self) -> None:
        """At the end of the kernel."""
        end = self.block.last_op
        if end is not None and not isinstance(end.prev_op, AsyncStoreWaitOp):
            Before(end).add(AsyncStoreWaitOp(0))

    # --- steps

    def _steps(self, block: Block, count: SSAValue) -> SSAValue:
        """Converts the loops of a block; `count` is the number of steps that the program has had."""
        for op in list(block.ops):
            if isinstance(op, scf.ForOp):
                new, (inner,) = extend_for(op, [count], ["count"])
                body = new.body.block
                after = self._step(body, inner) if is_step(new) else self._steps(body, inner)
                yield_more(body, [after])
                count = new.res[-1]
        return count

    def _step(self, body: Block, count: SSAValue) -> SSAValue:
        step = step_of(body, self.signature)
        first = body.first_op
        assert first is not None
        scope = Before(first)
        stages, one = scope.value(self.stages), scope.value(1)
        stage = scope.add(arith.RemSIOp(count, stages), "stage").result
        round_ = scope.add(arith.DivSIOp(count, stages), "round").result
        parity = scope.add(arith.AndIOp(round_, one), "parity").result
        zero = scope.add(OpaqueZeroOp(count), "zero").result
        slots = {load: self._load(step, load, stage, parity) for load in step.blocks}
        for dot in step.dots:
            self._product(dot, slots, zero)
        end = Before(yields(body))
        if step.beside and not step.shared:
            end.add(ProxyFenceOp())  # what consumers share is fenced anyway
        for number, shared in enumerate(step.shared):
            self._shared(shared, number, count, zero)
        for write in step.writes:
            self._leave(write)
        for load in (*step.blocks, *step.beside):
            erase_load(load)
        return end.add(arith.AddiOp(count, one), "count").result

    def _load(self, step: Step, load: tile.LoadOp, stage: SSAValue, parity: SSAValue) -> SSAValue:
        """Copies a block in front of its first product; vectors and tables come with the first block of the step."""
        scope, full = Before(step.first_use(load)), self._barriers(load, self.stages)
        together = [load, *(step.beside if load is step.blocks[0] else ())]
        copied = [self._ring(one, self.stages).copy(scope, one, full, stage) for one in together]
        scope.add(BarrierExpectOp(full, stage, sum(copy.byte_size for _, copy in copied)))
        for _, copy in copied:
            scope.add(copy)
        scope.add(BarrierWaitOp(full, stage, parity))
        for beside, (slot, _) in list(zip(together, copied, strict=True))[1:]:
            check_behind(beside, scope)
            for value, source in self._ways(scope, beside, slot):
                value.replace_all_uses_with(scope.add(ReadOp(source), value.name_hint or "row").result)
        return copied[0][0].result

    @staticmethod
    def _ways(scope: Before, load: tile.LoadOp, slot: SlotOp) -> Iterator[tuple[SSAValue, SSAValue]]:
        """The values that arithmetic reads of what was loaded, as it is and turned, and where they lie."""
        turns = [use.operation for use in load.result.uses if isinstance(use.operation, tile.TransposeOp)]
        for turn in turns:
            yield turn.result, scope.add(TransposedSlotOp(slot.result), "turned").result
        if len(turns) < len(list(load.result.uses)):
            yield load.result, slot.result

    def _product(self, dot: tile.DotOp, slots: dict[tile.LoadOp, SSAValue], zero: SSAValue) -> None:
        """A product, started and waited for at once."""
        scope = Before(dot)
        layout = MmaLayoutAttr(self.warps, 1, min(tile.shape_of(dot.result)[1], _LARGEST_N))
        turned = isinstance(dot.b.owner, tile.TransposeOp)
        load = dot.b.owner.value.owner if isinstance(dot.b.owner, tile.TransposeOp) else dot.b.owner
        assert isinstance(load, tile.LoadOp)
        b = slots[load]
        if turned:
            b = scope.add(TransposedSlotOp(b), f"{b.name_hint}_turned").result
        acc = None if is_zero(dot.acc) else dot.acc
        pending = scope.add(AsyncDotOp(self._left(scope, dot, zero, layout), b, acc, layout), "pending")
        value = scope.add(WaitOp(0, [pending]), dot.result.name_hint or "x").values[0]
        dot.result.replace_all_uses_with(value)
        Rewriter.erase_op(dot)

    # --- results that leave in every step

    def _leave(self, write: Write) -> None:
        """A block is written to a slot, once the block of the step before has left it, and copied or added from there."""
        if write.target not in self.leaving:
            self.leaving[write.target] = self._passing(write.value, 1), self._described(write)
        (ring, descriptor), scope = self.leaving[write.target], Before(write)
        scope.add(AsyncStoreWaitOp(0))
        slot = scope.add(SlotOp(ring, scope.value(0)), "leaving").result
        turned = turned_of(write.value)
        if turned is None:
            scope.add(WriteOp(write.value, slot))
        else:
            scope.add(WriteOp(turned, scope.add(TransposedSlotOp(slot), "leaving_turned")))
        scope.add(ProxyFenceOp())
        self._send(scope, write, slot, descriptor)

    def _described(self, write: Write) -> SSAValue:
        return self._descriptor(write.target, len(write.indices), tile.shape_of(write.value))

    @staticmethod
    def _send(scope: Before, write: Write, slot: SSAValue, descriptor: SSAValue) -> None:
        """Copies or adds a slot to memory in place of a write."""
        kind = AsyncStoreOp if isinstance(write, tile.StoreOp) else AsyncReduceAddOp
        scope.add(kind(slot, descriptor, list(write.indices)))
        erase_turned(write)

    # --- products over the rows that consumers share

    def _shared(self, shared: Shared, number: int, count: SSAValue, zero: SSAValue) -> None:
        """The operand goes through a slot, so that every consumer sees all rows of it, and the result through one to memory.

        An operand that leaves itself lies in its slot as it does in memory.
        """
        if number == len(self.passing):
            operand = shared.dot.a if shared.leaving else shared.result
            self.passing.append((self._passing(operand, SHARED_STAGES), self._passing(shared.dot.result, 1)))
        operands, results = self.passing[number]
        scope = Before(shared.dot)
        self.turns.append(scope.add(arith.RemSIOp(count, scope.value(SHARED_STAGES)), "turn"))
        stage = self.turns[-1].result
        whole = slot = scope.add(SlotOp(operands, stage), "shared").result
        if shared.leaving:
            slot = scope.add(TransposedSlotOp(slot), "shared_turned").result
        scope.add(WriteOp(shared.result, slot))
        scope.add(ProxyFenceOp())
        turned = scope.add(TransposedSlotOp(slot), "shared_turned")
        block = scope.add(SlotOp(self._own(shared.block), zero), shared.block.result.name_hint or "owned")
        pending = scope.add(AsyncDotOp(turned, block, None, self._beside(shared.dot)), "pending")
        for write in shared.leaving:
            if write.target not in self.leaving:
                self.leaving[write.target] = operands, self._described(write)
            self._send(scope, write, whole, self.leaving[write.target][1])
        value = scope.add(WaitOp(0, [pending]), shared.dot.result.name_hint or "x").values[0]
        self._add(shared, value, results)
        erase_turned(shared.dot, shared.add)

    def _add(self, shared: Shared, value: SSAValue, results: SSAValue) -> None:
        """Adds a result to memory, through a slot that the result of the step before has left.

        An operand that leaves in the same step may still be on its way: its slot is written again two steps later.
        """
        scope = Before(shared.add)
        descriptor = self._sums(shared)
        scope.add(AsyncStoreWaitOp(len(shared.leaving)))
        slot = scope.add(SlotOp(results, scope.value(0)), "sums").result
        scope.add(WriteOp(value, slot))
        scope.add(ProxyFenceOp())
        scope.add(AsyncReduceAddOp(slot, descriptor, list(shared.add.indices)))

    def _passing(self, value: SSAValue, stages: int) -> SSAValue:
        type_ = BufferType([stages, *tile.shape_of(value)], tile.element_of(value))
        return self.top.add(RingOp(type_), f"{value.name_hint or 'x'}_passed").result

    def _beside(self, dot: tile.DotOp) -> MmaLayoutAttr:
        """Warpgroups below each other, if there are rows for all of them, or beside each other along the columns."""
        rows, columns = tile.shape_of(dot.result)
        high = self.warps if rows == WARPGROUP_ROWS * self.warps // _WARPS else _WARPS
        return MmaLayoutAttr(high, self.warps // high, min(columns * high // self.warps, _LARGEST_N))

    def _sums(self, shared: Shared) -> SSAValue:
        """The descriptor of the sums in memory."""
        key = (shared.add.target, tile.shape_of(shared.dot.result))
        if key not in self.sums:
            self.sums[key] = self._descriptor(shared.add.target, len(shared.add.indices), key[1])
        return self.sums[key]

    def _left(self, scope: Before, dot: tile.DotOp, zero: SSAValue, layout: MmaLayoutAttr) -> SSAValue:
        owner = dot.a.owner
        if isinstance(owner, tile.LoadOp):
            return scope.add(SlotOp(self._own(owner), zero), owner.result.name_hint or "owned").result
        return scope.add(DotOperandOp(dot.a, layout), "operand").result


@dataclass(frozen=True)
class TilePipelineStepsPass(ModulePass):
    """Moves the blocks of a kernel's steps through shared memory, and makes its products asynchronous.

    Each tensor has a ring of `stages` slots, the blocks that a program owns one slot each; vectors of numbers per
    position land on the barrier of the step's first block. Every copy and every product is waited for where it is started.
    Results leave through the slots of owned blocks.

    ```
    scf.for ... { %q = tile.load %Q[...]; %t = tile.transpose %q; %x = tile.dot %k, %t, %zero; ... }
    ```
    becomes
    ```
    scf.for ... iter_args(%count = ...) {
      tile.barrier_expect %q_full[%stage], 16384
      tile.async_load %q_copies[...], %slot, %q_full[%stage]
      tile.barrier_wait %q_full[%stage], %parity
      %t = tile.transposed_slot %slot
      %pending = tile.async_dot %k_slot, %t layout <8x1, 64>
      %x = tile.wait 0, %pending
      ...
    }
    ```
    """

    name = "tile-pipeline-steps"

    plan: str = "backward"
    """The plan whose kernels are changed."""
    stages: int | None = None
    """Steps whose blocks a ring holds; the kernel's `num_stages` if absent."""
    shared_bytes: int = AsyncSchedule.shared_bytes
    """Shared memory that the rings may take."""
    spare: bool = False
    """Whether what consumers share has one slot more than there are steps in flight, if there is room, for `tile-defer-sums`."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        if not (found := signatures(op, self.plan)):
            raise AsyncUnsupportedError(f"plan @{self.plan} has no kernel that multiplies blocks in a loop")
        for signature in launched(op, self.plan):
            check_kernel(signature)
        for signature in found:
            check_size(signature, AsyncSchedule.consumers, _REGISTERS)
            pipeline = _Pipeline(signature, self.stages)
            pipeline.run()
            if self.spare:
                widen(
                    signature.kernel,
                    [ring for ring, _ in pipeline.passing],
                    pipeline.turns,
                    pipeline.stages,
                    self.shared_bytes,
                )
            check_shared(signature.kernel, self.shared_bytes)
            _erase_owned(signature.kernel)


def _erase_owned(kernel: tile.KernelOp) -> None:
    """Loads whose blocks are all copied now."""
    for op in list(kernel.body.block.ops):
        if isinstance(op, tile.LoadOp) and not op.result.uses:
            Rewriter.erase_op(op)
