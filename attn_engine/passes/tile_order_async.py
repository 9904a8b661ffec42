"""`tile-order-async`: the early half of a step beside the late half of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import (
    AsyncStoreOp,
    AsyncStoreWaitOp,
    BarrierArriveOp,
    BarrierWaitOp,
    ProxyFenceOp,
)
from attn_engine.dialects.tile_async_memory import WriteOp
from attn_engine.dialects.tile_async_product import WaitOp
from attn_engine.dialects.tile_types import BarriersType
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import AsyncSchedule
from attn_engine.passes.hopper.edit import Before, yields
from attn_engine.passes.hopper.form import signature_of
from attn_engine.passes.hopper.late import Inputs, late_half, product_cycles
from attn_engine.passes.hopper.pin import behind, pin_weights, round_alone
from attn_engine.passes.lowering.scope import Scope

_NOTHING = -1
_IN_ORDER = (WriteOp, ProxyFenceOp, AsyncStoreOp, AsyncStoreWaitOp, BarrierArriveOp, BarrierWaitOp)


class _Rotation:
    """One role. The step in front of the last loop keeps its early half; the last late half comes after the loop."""

    def __init__(self, body: Block, hold: bool):
        self.body, self.hold = body, hold
        self.loop = [o for o in body.ops if isinstance(o, scf.ForOp)][-1]
        ops, inner = list(body.ops), self.loop.body.block
        place = ops.index(self.loop)
        self.rest = ops[place + 1 : -1]
        self.first, self.half = late_half(ops[:place], hold), late_half(list(inner.ops)[:-1], hold)
        self.inputs = Inputs([self.first, self.half], [inner])
        ends = list(yields(inner).operands)
        done = self.half.wait.values[0] if self.half.wait is not None else None
        self.accumulator = ends.index(done) if done is not None else None
        """Which carry of the loop is the result of the late product."""

    def run(self) -> None:
        carried = self.inputs.of(0)
        if self.accumulator is not None and self.hold:
            # No slot of values waits for its release yet.
            carried.append(Before(self.loop).add(arith.ConstantOp.from_int_and_width(_NOTHING, 32), "free").result)
        self._finish(self._rotate(carried))
        ops = self.first.ops
        for op in reversed([*(op for op in self.body.ops if op in ops), self.loop]):
            Rewriter.erase_op(op)

    def _rotate(self, carried: Sequence[SSAValue]) -> list[SSAValue]:
        """The loop with the halves of neighbouring steps side by side; what its last step leaves to a late half."""
        old, ends = self.loop.body.block, yields(self.loop.body.block).operands
        kept = [n for n in range(len(ends)) if n != self.accumulator]
        inits = [*(self.loop.iter_args[n] for n in kept), *carried]
        block = Block(arg_types=[old.args[0].type, *(i.type for i in inits)])
        sources = [old.args[0], *(old.args[n + 1] for n in kept)]
        mapping: dict[SSAValue, SSAValue] = dict(zip(sources, block.args, strict=False))
        for source, argument in zip([*sources, *carried], block.args, strict=True):
            argument.name_hint = source.name_hint
        scope = Scope(block)
        released = self._step(scope, mapping, block.args[len(sources) :])
        values = [*(ends[n] for n in kept), *self.inputs.of(1)]
        scope.add(scf.YieldOp(*(mapping.get(v, v) for v in values), *released))
        new = Before(self.loop).add(scf.ForOp(self.loop.lb, self.loop.ub, self.loop.step, inits, block))
        for result, init in zip(new.results, inits, strict=True):
            result.name_hint = init.name_hint
        for n, result in zip(kept, new.results, strict=False):
            self.loop.results[n].replace_all_uses_with(result)
        return list(new.results[len(kept) :])

    def _step(self, scope: Scope, mapping: dict[SSAValue, SSAValue], given: Sequence[SSAValue]) -> list[SSAValue]:
        """One iteration; for a consumer, the slot of values to release in the next one."""
        half, old = self.half, self.loop.body.block
        own = [op for op in old.ops if op not in half.ops][:-1]
        if half.early is None or half.wait is None or self.accumulator is None:
            _clone(scope, own, mapping)
            self._start(scope, given)
            return []
        accumulator = old.args[self.accumulator + 1]
        split = own.index(half.early) + 1
        late = behind(own[split:], [accumulator]) | set(half.rounding)
        _clone(scope, own[:split], mapping)
        pending, slot = self._start(scope, given)
        for op in own[split:]:
            if op not in late:
                clone = scope.add(op.clone(value_mapper=mapping))
                if isinstance(op, WaitOp):
                    clone.properties["count"] = builtin.IntegerAttr(1, builtin.i64)
        done = scope.add(WaitOp(0, [pending]), half.wait.values[0].name_hint or "acc")
        mapping[accumulator] = done.values[0]
        if not self.hold and half.release is not None:
            scope.add(BarrierArriveOp(half.release.barriers, slot))
        _clone(scope, [op for op in own[split:] if op in late], mapping)
        return [slot] if self.hold else []

    def _start(self, scope: Scope, given: Sequence[SSAValue]) -> tuple[SSAValue, SSAValue]:
        """The late half of the step before, on what it left; its pending product and its slot's index."""
        half = self.half
        mapping = self.inputs.mapping(1, given[: len(self.inputs.groups)])
        for op in half.start:
            self._constants(scope, op, mapping)
            scope.add(op.clone(value_mapper=mapping))
        slot, _, product = half.start[:3]
        if half.release is not None and self.hold:
            self._release(scope, half.release, given[-1])
        index = slot.operands[1]
        return (mapping[product.results[0]] if product.results else index), mapping.get(index, index)

    def _constants(self, scope: Scope, op: Operation, mapping: dict[SSAValue, SSAValue]) -> None:
        """Constants that stood in the loop are repeated."""
        for operand in op.operands:
            owner = operand.owner
            if isinstance(owner, arith.ConstantOp) and owner.parent is not self.body and operand not in mapping:
                scope.add(owner.clone(value_mapper=mapping))

    def _release(self, scope: Scope, release: BarrierArriveOp, index: SSAValue) -> None:
        """The slot of the product that has ended, if there is one: late, so that its barrier hides under products."""
        known = scope.add(arith.CmpiOp(index, scope.value(0), "sge"), "some").result
        scope.add(BarrierArriveOp(release.barriers, index, known))

    # --- after the loop

    def _finish(self, carried: Sequence[SSAValue]) -> None:
        """The last late half; what does not need its result comes before the wait for it."""
        half = self.half
        pending, slot = self._start(Before(self.rest[0] if self.rest else yields(self.body)), carried)
        if half.release is None or self.accumulator is None:
            return
        result = self.loop.results[self.accumulator]
        late = self._ordered(behind(self.rest, [result]))
        for op in [op for op in self.rest if op in late]:
            op.detach()
            self.body.insert_op_before(op, yields(self.body))
        end = Before(next((op for op in self.rest if op in late), yields(self.body)))
        done = end.add(WaitOp(0, [pending]), "acc")
        end.add(BarrierArriveOp(half.release.barriers, slot))
        result.replace_all_uses_with(done.values[0])

    def _ordered(self, late: set[Operation]) -> set[Operation]:
        """Accesses of shared memory keep their order behind one that is late."""
        found = set(late)
        for op in self.rest:
            if isinstance(op, _IN_ORDER) and any(
                o in found and isinstance(o, _IN_ORDER) for o in self.rest[: self.rest.index(op)]
            ):
                found.add(op)
        return found


def _clone(scope: Scope, ops: Sequence[Operation], mapping: dict[SSAValue, SSAValue]) -> None:
    for op in ops:
        scope.add(op.clone(value_mapper=mapping))


def _two_steps(step: Block) -> bool:
    """Whether slots hold a block of two steps: one that waits for the next before it has released its own waits forever."""
    rings = [op.barriers.type for op in step.ops if isinstance(op, BarrierWaitOp)]
    return all(isinstance(type_, BarriersType) and type_.size.data > 1 for type_ in rings)


def _holds(step: Block) -> bool:
    """Whether the products of a step are short, and warps meet to release its slots."""
    arrivals = [op.barriers.type for op in step.ops if isinstance(op, BarrierArriveOp)]
    meets = any(isinstance(type_, BarriersType) and type_.threads.data == 1 for type_ in arrivals)
    return meets and AsyncSchedule.holds(product_cycles(step))


@dataclass(frozen=True)
class TileOrderAsyncPass(ModulePass):
    """Runs the early half of a step (keys, scores, weights) beside the late half of the step before (values, output).

    In a consumer the product for the scores of a block is started first, then the one for the output of the block before,
    and the arithmetic on the scores overlaps with the latter. What the late half needs of its own step is carried by
    the loops. In the producer copies take the same order. With rings of one slot nothing changes.

    Slots are released behind the waits for the products that read them, so that copies start early; where the warps of
    a consumer meet for that and the products of a step are short, under those of the next step.

    ```
    scf.for ... { %s = wait 0, dot(q, k); %p = weights(%s); %acc1 = wait 0, dot(%p, v, %acc) }
    ```
    becomes
    ```
    scf.for ... iter_args(%p0, %acc0, ...) {
      %sp = dot(q, k); %op = dot(%p0, v0, %acc0)
      %s = wait 1, %sp; %p = weights(%s); pin; %acc = wait 0, %op
      yield %p, %acc, ...
    }
    %last = wait 0, dot(%p, v, %acc)
    ```
    """

    name = "tile-order-async"

    plan: str = "forward"
    """The plan whose kernel is changed."""
    pin: bool = AsyncSchedule.pin
    """Whether to keep the assembler from hoisting the wait for the output above the exponentials."""
    hold: bool | None = None
    """Whether slots are released under the products of the next step, not behind the waits for their own; where these
    are short and warps meet for it, if absent."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        kernel = signature_of(op, self.plan).kernel
        roles = next((o for o in kernel.body.block.ops if isinstance(o, RolesOp)), None)
        if roles is None:
            raise AsyncUnsupportedError("its kernel has no roles: run tile-specialize-warps first")
        for region in roles.bodies:
            loop = next(o for o in region.block.ops if isinstance(o, scf.WhileOp))
            body = loop.after_region.block
            loops = [o for o in body.ops if isinstance(o, scf.ForOp)]
            if not _two_steps(loops[-1].body.block):
                continue
            for block in (body, loops[-1].body.block):
                round_alone(block)
            if self.pin:
                pin_weights(loops[-1].body.block)
            _Rotation(body, _holds(loops[-1].body.block) if self.hold is None else self.hold).run()
