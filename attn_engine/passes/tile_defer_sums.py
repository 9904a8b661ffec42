"""`tile-defer-sums`: what a step adds to memory is multiplied, and added, beside the first arithmetic of the next step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import (
    AsyncReduceAddOp,
    AsyncStoreWaitOp,
    BarrierArriveOp,
    BarrierWaitOp,
    ProxyFenceOp,
)
from attn_engine.dialects.tile_async_memory import ReadOp, WriteOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp, WaitOp
from attn_engine.dialects.tile_async_view import PartOp, SlotOp, TransposedSlotOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import WARPGROUP_THREADS, AsyncSchedule
from attn_engine.ir.walks import behind, operands_of
from attn_engine.passes.hopper.edit import After, Before, yield_more
from attn_engine.passes.hopper.role_steps import carry, chain, holds_steps, role_steps, slot_of, sums
from attn_engine.passes.hopper.steps import roles_of
from attn_engine.passes.simplify_constants import constant_of

_FAR = 1 << 27
"""A row beyond every tensor: what is added there is added nowhere."""
_TWO = 2
_HALVES = 2
"""Numbers of 16 bits in a register."""


@dataclass
class _Sum:
    """The product of a step whose first operand all consumers have written, and its way to memory."""

    body: Block
    product: AsyncDotOp
    full: BarrierWaitOp
    """Until the operand is written."""
    wait: WaitOp
    leave: list[Operation]
    """Wait for the slot of the result, write, fence, addition."""

    @classmethod
    def of(cls, body: Block) -> _Sum:
        product = next(op for op in body.ops if isinstance(op, AsyncDotOp) and isinstance(op.a.owner, TransposedSlotOp))
        slot = slot_of(product.a)
        assert slot is not None
        full = next(op for op in body.ops if isinstance(op, BarrierWaitOp) and op.index is slot.index)
        wait = next(op for op in body.ops if isinstance(op, WaitOp) and product.result in op.pending)
        add = next(op for op in body.ops if isinstance(op, AsyncReduceAddOp))
        value = wait.values[list(wait.pending).index(product.result)]
        write = next(op for op in body.ops if isinstance(op, WriteOp) and op.value is value)
        kept = next(op for op in body.ops if isinstance(op, AsyncStoreWaitOp))
        fence = write.next_op
        assert isinstance(fence, ProxyFenceOp)
        return cls(body, product, full, wait, [kept, write, fence, add])

    @property
    def value(self) -> SSAValue:
        return self.wait.values[list(self.wait.pending).index(self.product.result)]

    @property
    def add(self) -> AsyncReduceAddOp:
        add = self.leave[-1]
        assert isinstance(add, AsyncReduceAddOp)
        return add

    @property
    def turn(self) -> arith.RemSIOp:
        turn = self.full.index.owner
        assert isinstance(turn, arith.RemSIOp)
        return turn

    def start(self, scope: Before, count: SSAValue) -> SSAValue:
        """Waits for the operand of the step before step `count` and starts the product; its pending result.

        One round of the slots further on is the same slot; the barrier has ended one phase less. Before the first step
        nothing is waited for, and whatever the slot holds is multiplied.
        """
        stages = self.turn.rhs.owner
        assert isinstance(stages, arith.ConstantOp)
        ahead = scope.value(stages.value.value.data - 1)  # type: ignore[attr-defined]
        mapping: dict[SSAValue, SSAValue] = {self.turn.lhs: scope.add(arith.AddiOp(count, ahead), "ahead").result}
        for op in chain(self.body, [self.full, self.product]):
            if op is self.full:
                parity = mapping[self.full.parity]
                before = scope.add(arith.XOrIOp(parity, scope.value(1)), "before").result
                scope.add(BarrierWaitOp(self.full.barriers, mapping[self.full.index], before))
            else:
                scope.add(op.clone(value_mapper=mapping))
        return mapping[self.product.result]

    def finish(self, scope: Before, pending: SSAValue, given: dict[int, SSAValue]) -> None:
        """Waits for the product and adds it to memory; some coordinates are given."""
        value = scope.add(WaitOp(0, [pending]), self.value.name_hint or "x").values[0]
        mapping: dict[SSAValue, SSAValue] = {self.value: value}
        for place, coordinate in given.items():
            mapping[self.add.coordinates[place]] = coordinate
        for op in chain(self.body, self.leave, set(mapping)):
            scope.add(op.clone(value_mapper=mapping))

    def erase(self) -> None:
        for op in reversed(self.leave):
            _erase(op)
        others = [p for p in self.wait.pending if p is not self.product.result]
        new = Before(self.wait).add(WaitOp(self.wait.count.value.data, others)) if others else None
        old = [v for v in self.wait.values if v is not self.value]
        for was, now in zip(old, new.values if new is not None else (), strict=True):
            now.name_hint = was.name_hint
            was.replace_all_uses_with(now)
        for op in (self.wait, self.full, self.product):
            _erase(op)


def _erase(op: Operation) -> None:
    """An op, and the views and numbers that nothing else needs."""
    owners = [o.owner for o in op.operands]
    Rewriter.erase_op(op)
    for owner in owners:
        if isinstance(owner, Operation) and owner.parent is not None and _is_unused_view(owner):
            _erase(owner)


def _is_unused_view(op: Operation) -> bool:
    view = isinstance(op, SlotOp | TransposedSlotOp | PartOp) or op.name.startswith("arith.")
    return view and not any(result.uses for result in op.results)


# --- coordinates -------------------------------------------------------------------------------


def _varies(role: Block, value: SSAValue) -> bool:
    """Whether a coordinate may differ from step to step: it depends on a loop."""

    def inside(value: SSAValue) -> Iterable[SSAValue]:
        return operands_of(value) if value.owner.parent is not role else ()

    return any(_is_of_loop(role, found) for found in behind([value], inside))


def _is_of_loop(role: Block, value: SSAValue) -> bool:
    """Whether a value is an argument or a result of a loop in another one, or an argument of one in the role."""
    if isinstance(value, BlockArgument):
        return value.block is not role
    return isinstance(value.owner, scf.ForOp) and value.owner.parent is not role


def _places(role: Block, bodies: Sequence[Block]) -> list[int]:
    """Which coordinates are carried from step to step."""
    adds = [_Sum.of(body).add for body in bodies]
    return [n for n in range(len(adds[0].coordinates)) if any(_varies(role, add.coordinates[n]) for add in adds)]


# --- steps -------------------------------------------------------------------------------------


def _step(body: Block, places: Sequence[int], before: Sequence[SSAValue], in_place: bool) -> None:
    """One step; it yields the coordinates of its own sum."""
    found = _Sum.of(body)
    yield_more(body, [found.add.coordinates[place] for place in places])
    if in_place:
        _swap(found, dict(zip(places, before, strict=True)))
        if _slots(found) <= _TWO:
            _write_late(found)
        return
    first = body.first_op
    assert first is not None
    pending = found.start(Before(first), found.turn.lhs)
    anchor = next(op for op in body.ops if isinstance(op, DotOperandOp))
    found.finish(Before(anchor), pending, dict(zip(places, before, strict=True)))
    _delay(body, anchor, pending)
    found.erase()


def _swap(found: _Sum, given: dict[int, SSAValue]) -> None:
    """The sum of the step before stands where that of this step stood."""
    write = next(op for op in found.body.ops if isinstance(op, WriteOp) and _is_shared(op, found))
    later = [op for op in sums(found.body) if found.product.is_before_in_block(op)]
    pending = found.start(Before(write), found.turn.lhs)
    for op in chain(found.body, later):
        if write.is_before_in_block(op):
            op.detach()
            found.body.insert_op_before(op, write)
    number = list(found.wait.pending).index(found.product.result)
    found.wait.operands[number] = pending
    coordinates = [given.get(place, c) for place, c in enumerate(found.add.coordinates)]
    Rewriter.replace_op(found.add, AsyncReduceAddOp(found.add.source, found.add.descriptor, coordinates))
    for op in (found.product, found.full):
        _erase(op)


def _write_late(found: _Sum) -> None:
    """What consumers share is written when the sum is there: those who see it know that its writer has read the other slot.

    One fence then stands behind both writes; theirs stays where a slot is released in between, for what was read of it.
    """
    _, leaves, fence, _ = found.leave
    write = next(op for op in found.body.ops if isinstance(op, WriteOp) and _is_shared(op, found))
    own = write.next_op
    arrive = next(op for op in found.body.ops if isinstance(op, BarrierArriveOp) and op.barriers is found.full.barriers)
    assert isinstance(own, ProxyFenceOp) and own.is_before_in_block(arrive)
    arrivals = [op for op in found.body.ops if isinstance(op, BarrierArriveOp) and op is not arrive]
    if not any(own.is_before_in_block(op) and op.is_before_in_block(fence) for op in arrivals):
        Rewriter.erase_op(own)
    for op, place in ((write, InsertPoint.before(leaves)), (arrive, InsertPoint.after(fence))):
        op.detach()
        Rewriter.insert_op(op, place)


def _is_shared(write: WriteOp, found: _Sum) -> bool:
    """Whether an op writes the operand of a sum."""
    own, slot = slot_of(write.target), slot_of(found.product.a)
    return own is not None and slot is not None and own.ring is slot.ring


def _delay(body: Block, anchor: DotOperandOp, started: SSAValue) -> None:
    """Products that came in front of the arithmetic start behind it: two results in flight would take too many registers.

    Those that the arithmetic itself needs stay: without dv, it needs all.
    """
    ops = [op for op in body.ops if op.is_before_in_block(anchor)]
    needs = {pending for op in ops if isinstance(op, WaitOp) for pending in op.pending}
    dots = [op for op in ops if isinstance(op, AsyncDotOp) and op.result is not started and op.result not in needs]
    needed = chain(body, dots)
    starts = [op for op in needed if isinstance(op, tile.MapOp)]
    reads = [op for op in needed if isinstance(op, ReadOp) and all(u.operation in starts for u in op.result.uses)]
    waits = [op for op in ops if isinstance(op, BarrierWaitOp) and any(op.index is d.index for d in _stages(dots))]
    for op in [*waits, *reads, *starts, *dots]:
        op.detach()
        body.insert_op_before(op, anchor)


def _stages(dots: Sequence[AsyncDotOp]) -> list[SlotOp]:
    """The slots that products read, turned or not."""
    owners = [d.b.owner for d in dots]
    owners = [o.source.owner if isinstance(o, TransposedSlotOp) else o for o in owners]
    return [o for o in owners if isinstance(o, SlotOp)]


def defer(role: Block, in_place: bool) -> None:
    """Changes a consumer role each of whose steps adds one product to memory."""
    bodies = role_steps(role)
    places = _places(role, bodies)
    rows = len(_Sum.of(bodies[0]).add.coordinates) - 2
    if rows not in places:
        raise AsyncUnsupportedError("its steps all add to the same rows")
    loops = [op for op in role.ops if holds_steps(op)]
    init = Before(loops[0])
    carried = [init.value(_FAR if place == rows else 0) for place in places]
    for value in carried:
        value.name_hint = "before"
    left = _finish(loops[-1], _Sum.of(bodies[-1]), places)
    for loop in loops:
        carried = carry(loop, carried, lambda body, before: _step(body, places, before, in_place))
    for value, result in zip(left, carried, strict=True):
        value.replace_all_uses_with(result)
        Rewriter.erase_op(value.owner)  # type: ignore[arg-type]


def _finish(loop: Operation, last: _Sum, places: Sequence[int]) -> list[SSAValue]:
    """The product of the last step of all, behind the loops; returns what stands for its coordinates."""
    scope = After(loop)
    left: list[SSAValue] = [scope.add(arith.ConstantOp.from_int_and_width(0, 32), "left").result for _ in places]
    count = next(r for r in loop.results if r.type == builtin.i32)
    last.finish(scope, last.start(scope, count), dict(zip(places, left, strict=True)))
    return left


def _sums(body: Block) -> list[AsyncDotOp]:
    """The products over the rows that consumers share."""
    return [op for op in body.ops if isinstance(op, AsyncDotOp) and isinstance(op.a.owner, TransposedSlotOp)]


def _registers(body: Block) -> int:
    """Of a thread, for what products of a step give and take from registers."""
    given = [op.result.type.value for op in body.ops if isinstance(op, AsyncDotOp)]
    taken = [op.result.type for op in body.ops if isinstance(op, DotOperandOp)]
    numbers = [prod(type_.get_shape()) for type_ in (*given, *given, *taken) if isinstance(type_, TensorType)]
    return sum(numbers) // (_HALVES * WARPGROUP_THREADS)


def _slots(found: _Sum) -> int:
    """Of what consumers share."""
    slots = constant_of(found.turn.rhs)
    return slots if isinstance(slots, int) else 0


@dataclass(frozen=True)
class TileDeferSumsPass(ModulePass):
    """Multiplies what a step adds to memory in the next step, so that nobody waits for the rows of the other consumers.

    The product starts in front of the next step's first arithmetic and is added behind it; the products that came in
    front of that arithmetic start then. Where rows are carried from step to step, the first step adds to rows beyond the
    tensor; what the last step leaves is added behind the loops.

    ```
    scf.for %q0 ... { %x = ...; %p = map(%x); write %ds; arrive; wait written; %dq = dot(%ds, k); add %dq at %q0 }
    ```
    becomes
    ```
    scf.for %q0 ... iter_args(%before = beyond) {
      wait written before; %dq = dot(%ds before, k); %p = map(%x); add %dq at %before; ...; write %ds; arrive
      yield %q0
    }
    wait written; add dot(%ds, k)
    ```
    """

    name = "tile-defer-sums"

    plan: str = "backward"
    """The plan whose kernels are changed."""
    registers: int = AsyncSchedule.deferred_registers
    """Of a consumer's thread, for results and operands of a step's products; with more there is no such kernel."""
    in_place: bool = True
    """Whether the product starts, and is added, where that of the step itself was, not around the first arithmetic."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for roles in roles_of(op, self.plan):
            consumer = roles.bodies[0].block
            steps = role_steps(consumer)
            if all(len(_sums(body)) == 1 for body in steps):
                if any(_registers(body) > self.registers for body in steps):
                    raise AsyncUnsupportedError("its steps leave no registers for sums of the step before")
                defer(consumer, self.in_place)
