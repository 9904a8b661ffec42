"""`tile-order-async`: the early half of a step beside the late half of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import TensorType, f32, i32
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import AsyncStoreOp, BarrierArriveOp, BarrierWaitOp, ProxyFenceOp
from attn_engine.dialects.tile_async_memory import WriteOp
from attn_engine.dialects.tile_async_product import PinOp, WaitOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import AsyncSchedule
from attn_engine.passes.hopper.edit import Before, yields
from attn_engine.passes.hopper.form import find_plan, signature_of
from attn_engine.passes.hopper.late import Inputs, Late, late_half
from attn_engine.passes.lowering.scope import Scope

_NOTHING = -1
_IN_ORDER = (WriteOp, ProxyFenceOp, AsyncStoreOp, BarrierArriveOp, BarrierWaitOp)


def _behind(block_ops: Sequence[Operation], roots: Sequence[SSAValue]) -> set[Operation]:
    """The ops that depend on some values."""
    known, found = set(roots), set[Operation]()
    for op in block_ops:
        if any(o in known for o in op.operands):
            found.add(op)
            known.update(op.results)
    return found


class _Rotation:
    """One role: its first step stays in front of the loops, but for its late half; the last late half comes after them."""

    def __init__(self, body: Block, pin: bool):
        self.body, self.pin = body, pin
        self.loops = [o for o in body.ops if isinstance(o, scf.ForOp)][-1:]
        ops = list(body.ops)
        first, last = (ops.index(loop) for loop in (self.loops[0], self.loops[-1]))
        self.rest = ops[last + 1 : -1]
        blocks = [loop.body.block for loop in self.loops]
        self.halves = [late_half(ops[:first]), *(late_half(list(b.ops)[:-1]) for b in blocks)]
        self.inputs = Inputs(self.halves, blocks)

    @property
    def consumes(self) -> bool:
        return self.halves[0].wait is not None

    def run(self) -> None:
        carried = self.inputs.of(0)
        if self.consumes:
            # No slot of values waits for its release yet.
            carried.append(Before(self.loops[0]).add(arith.ConstantOp.from_int_and_width(_NOTHING, 32), "free").result)
        mapping: dict[SSAValue, SSAValue] = {}
        for number, loop in enumerate(self.loops, start=1):
            carried = self._loop(number, loop, carried, mapping)
        self._finish(carried, mapping)
        for op in reversed([*self._first_half(), *self.loops]):
            Rewriter.erase_op(op)

    def _first_half(self) -> list[Operation]:
        """What is left of the first step's late half, in the order of the block."""
        ops = self.halves[0].ops
        return [op for op in self.body.ops if op in ops]

    def _accumulator(self, number: int, loop: scf.ForOp) -> int | None:
        """Which carry of a loop is the result of the late product."""
        wait = self.halves[number].wait
        if wait is None:
            return None
        ends = list(yields(loop.body.block).operands)
        return next(n for n, end in enumerate(ends) if end is wait.values[0])

    def _loop(
        self, number: int, loop: scf.ForOp, carried: Sequence[SSAValue], outer: dict[SSAValue, SSAValue]
    ) -> list[SSAValue]:
        accumulator = self._accumulator(number, loop)
        kept = [n for n in range(len(loop.iter_args)) if n != accumulator]
        inits = [outer.get(loop.iter_args[n], loop.iter_args[n]) for n in kept] + list(carried)
        old = loop.body.block
        block = Block(arg_types=[old.args[0].type, *(i.type for i in inits)])
        sources = [old.args[0], *(old.args[n + 1] for n in kept)]
        mapping: dict[SSAValue, SSAValue] = dict(zip(sources, block.args, strict=False))
        for source, argument in zip([*sources, *carried], block.args, strict=True):
            argument.name_hint = source.name_hint
        given = block.args[len(sources) :]
        argument = old.args[accumulator + 1] if accumulator is not None else None
        scope = Scope(block)
        released = self._step(scope, number, list(old.ops)[:-1], mapping, given, argument)
        ends = yields(old).operands
        values = [*(ends[n] for n in kept), *self.inputs.of(number)]
        scope.add(scf.YieldOp(*(mapping.get(v, v) for v in values), *released))
        bounds = [outer.get(v, v) for v in (loop.lb, loop.ub, loop.step)]
        new = Before(loop).add(scf.ForOp(*bounds, inits, block))
        for result, init in zip(new.results, inits, strict=True):
            result.name_hint = init.name_hint
        for n, result in zip(kept, new.results, strict=False):
            outer[loop.results[n]] = result
        return list(new.results[len(kept) :])

    def _step(
        self,
        scope: Scope,
        number: int,
        ops: Sequence[Operation],
        mapping: dict[SSAValue, SSAValue],
        given: Sequence[SSAValue],
        accumulator: SSAValue | None,
    ) -> list[SSAValue]:
        """One iteration; for a consumer, the slot of values to release in the next one."""
        half = self.halves[number]
        own = [op for op in ops if op not in half.ops]
        if half.early is None or half.wait is None or accumulator is None:
            _clone(scope, own, mapping)
            self._start(scope, number, given)
            return []
        split = own.index(half.early) + 1
        late = _behind(own[split:], [accumulator])
        _clone(scope, own[:split], mapping)
        pending, slot = self._start(scope, number, given)
        for op in own[split:]:
            if op not in late:
                clone = scope.add(op.clone(value_mapper=mapping))
                if isinstance(op, WaitOp):
                    clone.properties["count"] = builtin.IntegerAttr(1, builtin.i64)
        if self.pin:
            self._pin(scope, half, yields(ops[0].parent).operands, mapping)  # type: ignore[arg-type]
        done = scope.add(WaitOp(0, [pending]), half.wait.values[0].name_hint or "acc")
        mapping[accumulator] = done.values[0]
        _clone(scope, [op for op in own[split:] if op in late], mapping)
        return [slot]

    def _start(self, scope: Scope, number: int, given: Sequence[SSAValue]) -> tuple[SSAValue, SSAValue]:
        """The late half of the step before, on what it left; its pending product and its slot's index."""
        half = self.halves[number]
        mapping = self.inputs.mapping(number, given[: len(self.inputs.groups)])
        for op in half.start:
            self._constants(scope, op, mapping)
            scope.add(op.clone(value_mapper=mapping))
        slot, _, product = half.start[:3]
        if half.release is not None:
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

    def _pin(self, scope: Scope, half: Late, ends: Sequence[SSAValue], mapping: dict[SSAValue, SSAValue]) -> None:
        """Fixes in front of the wait a state that depends on all weights."""
        weights = half.start[2].operands[0].owner
        assert isinstance(weights, Operation)
        source = weights.operands[0].owner
        assert isinstance(source, Operation)
        block = source.parent
        assert block is not None
        after = _behind([op for op in block.ops if op not in half.ops], source.results)
        states = [end for end in ends if isinstance(end.type, TensorType) and tile.element_of(end) == f32]
        known = [end for end in states if end.owner in after]
        if known:
            pinned = scope.add(PinOp(mapping[known[-1]]), known[-1].name_hint or "pinned")
            mapping[known[-1]] = pinned.result

    # --- after the loops

    def _finish(self, carried: Sequence[SSAValue], outer: dict[SSAValue, SSAValue]) -> None:
        """The last late half; what does not need its result comes before the wait for it."""
        number = len(self.loops)
        half, loop = self.halves[number], self.loops[-1]
        anchor = self.rest[0] if self.rest else yields(self.body)
        scope = Before(anchor)
        pending, slot = self._start(scope, number, carried)
        for old, new in outer.items():
            old.replace_all_uses_with(new)
        accumulator = self._accumulator(number, loop)
        if half.wait is None or half.release is None or accumulator is None:
            return
        late = self._ordered(_behind(self.rest, [loop.results[accumulator]]))
        for op in [op for op in self.rest if op in late]:
            op.detach()
            self.body.insert_op_before(op, yields(self.body))
        done = WaitOp(0, [pending])
        end = Before(next((op for op in self.rest if op in late), yields(self.body)))
        end.add(done, "acc")
        end.add(BarrierArriveOp(half.release.barriers, slot))
        loop.results[accumulator].replace_all_uses_with(done.values[0])

    def _ordered(self, late: set[Operation]) -> set[Operation]:
        """Accesses of shared memory keep their order behind one that is late."""
        found = set(late)
        for op in self.rest:
            if isinstance(op, _IN_ORDER) and any(o in found and isinstance(o, _IN_ORDER) for o in self.rest[: self.rest.index(op)]):
                found.add(op)
        return found


def _clone(scope: Scope, ops: Sequence[Operation], mapping: dict[SSAValue, SSAValue]) -> None:
    for op in ops:
        scope.add(op.clone(value_mapper=mapping))


@dataclass(frozen=True)
class TileOrderAsyncPass(ModulePass):
    """Runs the early half of a step (keys, scores, weights) beside the late half of the step before (values, output).

    In a consumer the product for the scores of a block is started first, then the one for the output of the block before,
    and the arithmetic on the scores overlaps with the latter. What the late half needs of its own step is carried by
    the loops. Slots are released late, under products. In the producer copies take the same order.

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

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        plan = find_plan(op, self.plan)
        if plan is None:
            raise AsyncUnsupportedError(f"no plan is named @{self.plan}")
        kernel = signature_of(op, plan).kernel
        roles = next((o for o in kernel.body.block.ops if isinstance(o, RolesOp)), None)
        if roles is None:
            raise AsyncUnsupportedError("its kernel has no roles: run tile-specialize-warps first")
        for region in roles.bodies:
            loop = next(o for o in region.block.ops if isinstance(o, scf.WhileOp))
            _Rotation(loop.after_region.block, self.pin).run()
