"""`tile-rotate-steps`: the first product of a step starts under the last ones of the step before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import IntegerAttr, i64
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects.tile_async_copy import AsyncLoadOp, BarrierExpectOp, BarrierWaitOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, WaitOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.hopper.edit import Before, yield_more, yields
from attn_engine.passes.hopper.role_steps import (
    carry,
    chain,
    count_of,
    has_one_sum,
    holds_steps,
    role_steps,
    steps_meet,
)
from attn_engine.passes.hopper.steps import roles_of


@dataclass
class _First:
    """The first product of the steps of a consumer: where one finds its operands, for the step of any number."""

    body: Block
    product: AsyncDotOp
    wait: WaitOp
    full: BarrierWaitOp

    @classmethod
    def of(cls, body: Block) -> _First:
        product = next(op for op in body.ops if isinstance(op, AsyncDotOp))
        wait = next(op for op in body.ops if isinstance(op, WaitOp) and product.result in op.pending)
        full = next(op for op in body.ops if isinstance(op, BarrierWaitOp))
        alone = product.acc is None and len(wait.pending) == 1 and full.is_before_in_block(product)
        depends = any(isinstance(op, WaitOp) for op in chain(body, [product]))
        if not alone or depends:
            raise AsyncUnsupportedError("the first product of its steps needs something from the step before")
        return cls(body, product, wait, full)

    @property
    def value(self) -> SSAValue:
        return self.wait.values[0]

    def start(self, scope: Before, count: SSAValue) -> SSAValue:
        """Waits for the slot of step `count` and starts the product on it; its pending result."""
        mapping: dict[SSAValue, SSAValue] = {count_of(self.full): count}
        for op in chain(self.body, [self.full, self.product]):
            scope.add(op.clone(value_mapper=mapping))
        return mapping[self.product.result]

    def finish(self, scope: Before, pending: SSAValue) -> SSAValue:
        return scope.add(WaitOp(0, [pending]), self.value.name_hint or "x").values[0]

    def erase(self) -> None:
        for op in (self.wait, self.product, self.full):
            Rewriter.erase_op(op)


def _consumer(role: Block, how: TileRotateStepsPass) -> None:
    loops = [op for op in role.ops if holds_steps(op)]
    first, *others = [_First.of(body) for body in role_steps(role)]
    for other in others:
        if other.product.result.type != first.product.result.type:
            raise AsyncUnsupportedError("its steps start with different products")
    scope = Before(loops[0])
    zero = next(v for v in loops[0].iter_args if v.type == builtin.i32)
    carried = [first.finish(scope, first.start(scope, zero))]
    for loop in loops:
        carried = carry(loop, carried, lambda body, before: _step(body, before, how))


def _step(body: Block, carried: Sequence[SSAValue], how: TileRotateStepsPass) -> None:
    """One step: its own first product has come with the carries, that of the next starts behind the others."""
    first = _First.of(body)
    first.value.replace_all_uses_with(carried[0])
    last = [op for op in body.ops if isinstance(op, AsyncDotOp)][-1]
    behind = [op for op in body.ops if isinstance(op, WaitOp) and last.is_before_in_block(op)]
    if not behind:
        raise AsyncUnsupportedError("its steps end without a product")
    if how.last:
        behind = behind[-1:]
    if how.in_flight:
        behind[0] = _wait_for_some(behind[0], how.in_flight - 1)
    scope = Before(behind[0])
    count = count_of(first.full)
    following = scope.add(arith.AddiOp(count, scope.value(1)), "following").result
    pending = first.start(scope, following)
    for wait in behind:
        wait.properties["count"] = IntegerAttr(wait.count.value.data + 1, i64)
    yield_more(body, [first.finish(Before(yields(body)), pending)])
    first.erase()


def _wait_for_some(wait: WaitOp, most: int) -> WaitOp:
    """Waits in two parts: first until `most` products are in flight, then for the rest; returns the second part."""
    flying = wait.count.value.data + len(wait.pending)
    early = min(flying - most, len(wait.pending) - 1)
    if early <= 0:
        return wait
    scope, pending, values = Before(wait), list(wait.pending), list(wait.values)
    parts = [
        (flying - early, pending[:early], values[:early]),
        (wait.count.value.data, pending[early:], values[early:]),
    ]
    new = [scope.add(WaitOp(count, some)) for count, some, _ in parts]
    for (_, _, old), made in zip(parts, new, strict=True):
        for was, now in zip(old, made.values, strict=True):
            now.name_hint = was.name_hint
            was.replace_all_uses_with(now)
    Rewriter.erase_op(wait)
    return new[1]


def _producer(role: Block) -> None:
    """One block more than there are steps: that of the product which nobody uses, from the start of the tensor."""
    loops = [op for op in role.ops if isinstance(op, scf.ForOp) and any(isinstance(o, AsyncLoadOp) for o in op.walk())]
    steps = [o for loop in loops for o in loop.walk() if isinstance(o, scf.ForOp) and _copies(o.body.block)]
    body = steps[0].body.block
    free = next(op for op in body.ops if isinstance(op, BarrierWaitOp))
    expect = _copies(body)[0]
    loads = [op for op in body.ops if isinstance(op, AsyncLoadOp) and op.barriers is expect.barriers]
    end = role.last_op
    assert end is not None
    scope = Before(end)
    result = next(r for r in loops[-1].results if r.type == builtin.i32)
    mapping: dict[SSAValue, SSAValue] = {count_of(free): result}
    zero = scope.value(0)
    slots = [load.target.owner for load in loads]
    for op in chain(body, [free, expect, *(s for s in slots if isinstance(s, Operation))]):
        scope.add(op.clone(value_mapper=mapping))
    for load in loads:
        place = [zero] * len(load.coordinates)
        scope.add(AsyncLoadOp(load.descriptor, place, mapping[load.target], load.barriers, mapping[load.index]))


def _copies(body: Block) -> list[BarrierExpectOp]:
    return [op for op in body.ops if isinstance(op, BarrierExpectOp)]


@dataclass(frozen=True)
class TileRotateStepsPass(ModulePass):
    """Starts the first product of the next step behind the last ones of a step, so that the wait for those is not idle.

    For steps with several sums, or in loops of loops; others have `tile-defer-product`, which costs fewer instructions.
    Rings must hold two steps. The result of the product is carried to the next step. Behind the last step a product on a block that nothing needs
    runs: the producer copies one block more, from the start of the tensor.

    ```
    scf.for ... { wait full; %xp = dot(k, q[i]); %x = wait 0, %xp; ...; %dkp = dot(...); %dk = wait 0, %dkp; release }
    ```
    becomes
    ```
    wait full; %xp = dot(k, q[0]); %x0 = wait 0, %xp
    scf.for ... iter_args(%x = %x0) {
      ...; %dkp = dot(...); wait full; %xp = dot(k, q[i + 1])
      %dk = wait 1, %dkp; release; %next = wait 0, %xp
      yield %next
    }
    ```
    """

    name = "tile-rotate-steps"

    plan: str = "backward"
    """The plan whose kernels are changed."""
    in_flight: int = 0
    """At most so many products of a consumer at the same time; 0 for any number."""
    last: bool = False
    """Whether the first product of the next step starts in front of the last wait of a step only, behind what others leave to do."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for roles in roles_of(op, self.plan):
            consumer, producer = (region.block for region in roles.bodies)
            if not has_one_sum(consumer) and steps_meet(consumer):
                _consumer(consumer, self)
                _producer(producer)
