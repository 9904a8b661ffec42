"""`tile-overlap-products`: products start when their operands are there and are waited for where they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import (
    AsyncReduceAddOp,
    AsyncStoreOp,
    AsyncStoreWaitOp,
    BarrierArriveOp,
    BarrierWaitOp,
    ProxyFenceOp,
)
from attn_engine.dialects.tile_async_memory import ReadOp, WriteOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, WaitOp
from attn_engine.passes.hopper.role_steps import role_steps, sums
from attn_engine.passes.hopper.steps import roles_of

_ACCESSES = (ReadOp, WriteOp, ProxyFenceOp, BarrierWaitOp)
_BEHIND: dict[type[Operation], tuple[type[Operation], ...]] = {
    AsyncDotOp: (BarrierWaitOp,),
    ReadOp: (BarrierWaitOp,),
    ProxyFenceOp: (ReadOp, WriteOp),
    BarrierWaitOp: (BarrierWaitOp, BarrierArriveOp),
    WriteOp: (AsyncStoreWaitOp,),
    AsyncReduceAddOp: (ProxyFenceOp,),
    AsyncStoreOp: (ProxyFenceOp,),
    AsyncStoreWaitOp: (AsyncStoreOp, AsyncReduceAddOp),
}


class _Overlap:
    """The body of one loop whose products are waited for at once.

    Work comes in waves: wave n needs the result of product n - 1 and none of a later one. A wave starts its products
    first, then does what else the last result allows; the wait for the next product follows.
    """

    def __init__(self, body: Block, how: TileOverlapProductsPass):
        self.body, self.how = body, how
        self.late = set[Operation](sums(body)) if how.late_sums else set[Operation]()
        """Products that start behind the others of their wave."""
        *self.ops, self.end = body.ops
        self.waits = [op for op in self.ops if isinstance(op, WaitOp)]
        self.work = [op for op in self.ops if not isinstance(op, WaitOp)]
        self.owner: dict[SSAValue, AsyncDotOp] = {}
        """Which product the values of waits are from."""
        for wait in self.waits:
            for pending, value in zip(wait.pending, wait.values, strict=True):
                assert isinstance(pending.owner, AsyncDotOp)
                self.owner[value] = pending.owner
        self.before = {op: self._before(op) for op in self.work}
        self.needs = self._needs()
        self.started: list[AsyncDotOp] = []
        self.order: list[Operation] = []

    # --- dependences

    def _before(self, op: Operation) -> list[Operation]:
        """What must come before an op: what its operands are from, and what memory asks for."""
        inside = [o for inner in op.walk() for o in inner.operands]
        found = [o.owner for o in inside if isinstance(o.owner, Operation) and o.owner.parent is self.body]
        earlier = self.ops[: self.ops.index(op)]
        return found + [o for o in earlier if isinstance(o, self._kinds(op))]

    def _kinds(self, op: Operation) -> tuple[type[Operation], ...]:
        """The earlier ops that an op stays behind because of what they do to memory."""
        if isinstance(op, BarrierArriveOp):
            mutual = any(isinstance(o, BarrierWaitOp) and o.barriers is op.barriers for o in self.ops)
            return (ProxyFenceOp,) if mutual else (*_ACCESSES, AsyncDotOp, WaitOp)
        return _BEHIND.get(type(op), ())

    def _needs(self) -> dict[Operation, set[AsyncDotOp]]:
        """The products whose results an op needs."""
        needs: dict[Operation, set[AsyncDotOp]] = {}
        for op in self.work:
            found = set[AsyncDotOp]()
            for other in self.before[op]:
                if isinstance(other, WaitOp):
                    products = {
                        self.owner[v] for v in other.values if isinstance(op, BarrierArriveOp) or v in op.operands
                    }
                    found |= products.union(*(needs[p] for p in products))
                else:
                    found |= needs[other]
            needs[op] = found
        return needs

    # --- order

    def run(self) -> None:
        for number in range(len(self.waits) + 1):
            known = set(self.started[:number])
            ready = [op for op in self.work if op not in self.order and self.needs[op] <= known]
            for op in ready if self.how.early_sums else ():
                if isinstance(op, tile.ReduceOp):
                    self._emit(op)
            for op in sorted(ready, key=lambda op: op in self.late):
                if isinstance(op, AsyncDotOp):
                    self._emit(op)
            for op in ready:
                # What needs no product waits for its first user: until then it would only hold registers. Reads hide
                # behind the first product.
                if self.needs[op] or self._is_due(op, number):
                    self._emit(op)
        for op in self.work:
            self._emit(op)
        self._place()

    def _is_due(self, op: Operation, wave: int) -> bool:
        """Whether an op reads what the next wave uses, or, if reads are not late, reads at all; so do fences behind reads."""
        if not self.how.late_reads or not isinstance(op, ReadOp):
            return not self.how.late_reads and isinstance(op, ReadOp | ProxyFenceOp)
        known = set(self.started[: wave + 1])
        return any(self.needs.get(u.operation, known) <= known for u in op.result.uses)

    def _emit(self, op: Operation) -> None:
        """Appends an op behind those that must come before it."""
        if op in self.order or isinstance(op, WaitOp):
            return
        for other in self.before[op]:
            self._emit(other)
        self.order.append(op)
        if isinstance(op, AsyncDotOp):
            self.started.append(op)

    def _place(self) -> None:
        """Puts the ops in order, and in front of each the waits for the products that it needs."""
        for op in self.work:
            op.detach()
        for wait in self.waits:
            wait.detach()
        started: list[AsyncDotOp] = []
        waiting = dict.fromkeys(self.started)
        for op in self.order:
            self._wait(self.needs[op] | self._too_many(op, started, waiting), started, waiting)
            self.body.insert_op_before(op, self.end)
            if isinstance(op, AsyncDotOp):
                started.append(op)
        self._wait(set(started), started, waiting)
        for wait in self.waits:
            wait.erase()

    def _too_many(
        self, op: Operation, started: Sequence[AsyncDotOp], waiting: dict[AsyncDotOp, None]
    ) -> set[AsyncDotOp]:
        """The oldest products in flight that must end before one more starts."""
        flying = [p for p in started if p in waiting]
        most = self.how.in_flight - 1
        return set(flying[:-most]) if isinstance(op, AsyncDotOp) and 0 < most < len(flying) else set()

    def _wait(self, needed: set[AsyncDotOp], started: Sequence[AsyncDotOp], waiting: dict[AsyncDotOp, None]) -> None:
        """One wait for all of the needed products that have not been waited for, and for those that end before them."""
        last = max((n for n, p in enumerate(started) if p in needed and p in waiting), default=-1)
        fresh = [p for p in started[: last + 1] if p in waiting]
        if not fresh:
            return
        new = WaitOp(len(started) - 1 - started.index(fresh[-1]), [p.result for p in fresh])
        self.body.insert_op_before(new, self.end)
        for product, value in zip(fresh, new.values, strict=True):
            waiting.pop(product)
            old = next(v for v, p in self.owner.items() if p is product)
            value.name_hint = old.name_hint
            old.replace_all_uses_with(value)


@dataclass(frozen=True)
class TileOverlapProductsPass(ModulePass):
    """Starts the products of a step early and waits for them late, so that elementwise work runs beside them.

    Products complete in the order in which they start. Slots are released at the end of the step, after all waits.

    ```
    %x = wait 0, dot(k, q); %dp = wait 0, dot(v, do); %p = map(%x); %ds = map(%dp, %p)
    %dk = wait 0, dot(%ds, q, %dk0); %dv = wait 0, dot(%p, do, %dv0)
    ```
    becomes
    ```
    %xp = dot(k, q); %dpp = dot(v, do)
    %x = wait 1, %xp; %p = map(%x); %dvp = dot(%p, do, %dv0)
    %dp = wait 1, %dpp; %ds = map(%dp, %p); %dkp = dot(%ds, q, %dk0)
    %dv, %dk = wait 0, %dvp, %dkp
    ```
    """

    name = "tile-overlap-products"

    plan: str = "backward"
    """The plan whose kernels are changed."""
    late_sums: bool = False
    """Whether a product that is added to what steps before have left starts behind those whose results the step needs."""
    late_reads: bool = True
    """Whether vectors are read under the last product in front of the arithmetic with them, not under the first of all."""
    early_sums: bool = True
    """Whether sums of what a step finds are made before products start, so that what is summed holds no registers beside them."""
    in_flight: int = 2
    """At most so many products of a consumer at the same time, as each holds its operands' registers; 0 for any number."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for roles in roles_of(op, self.plan):
            for body in [body for role in roles.bodies for body in role_steps(role.block)]:
                _Overlap(body, self).run()
