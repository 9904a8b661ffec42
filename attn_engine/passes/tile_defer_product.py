"""`tile-defer-product`: the last product of a step runs beside the first ones of the next step."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, scf
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, IntegerAttr, TensorType, f32, i1, i64
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import BarrierArriveOp, BarrierWaitOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, DotOperandOp, PinOp, WaitOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.hopper.edit import After, Before, extend_for, yield_more
from attn_engine.passes.hopper.late import rounding_of
from attn_engine.passes.hopper.pin import round_alone
from attn_engine.passes.hopper.role_steps import chain, count_of, has_one_sum, is_role_step, role_steps, steps_meet
from attn_engine.passes.hopper.steps import roles_of


@dataclass
class _Last:
    """The last product of the steps of a loop, whose first operand is in registers."""

    body: Block
    product: AsyncDotOp
    rounding: list[Operation]
    """What makes an operand of `source`: a map that rounds, if it stands alone, and the move into an operand's registers."""
    wait: WaitOp
    count: BlockArgument
    """The number of the step."""
    acc: BlockArgument

    @classmethod
    def of(cls, body: Block) -> _Last:
        product, wait = ([op for op in body.ops if isinstance(op, kind)][-1] for kind in (AsyncDotOp, WaitOp))
        assert isinstance(product, AsyncDotOp) and isinstance(wait, WaitOp)
        full = next(op for op in body.ops if isinstance(op, BarrierWaitOp))
        operand, acc, count = product.a.owner, product.acc, count_of(full)
        alone = list(wait.pending) == [product.result] and isinstance(operand, DotOperandOp)
        if not alone or not isinstance(acc, BlockArgument) or not isinstance(count, BlockArgument):
            raise AsyncUnsupportedError("the last product of its steps does not stand alone")
        return cls(body, product, list(rounding_of(product)), wait, count, acc)

    @property
    def source(self) -> SSAValue:
        return self.rounding[0].operands[0]

    def start(self, scope: Before, count: SSAValue, source: SSAValue, acc: SSAValue) -> AsyncDotOp:
        """Starts the product of step `count`, whose first operand is made of `source`."""
        mapping: dict[SSAValue, SSAValue] = {self.source: source}
        for op in self.rounding:
            scope.add(op.clone(value_mapper=mapping))
        b = self.at(scope, count, self.product.b)
        return scope.add(AsyncDotOp(mapping[self.product.a], b, acc, self.product.layout), "pending")

    def at(self, scope: Before, count: SSAValue, value: SSAValue) -> SSAValue:
        """A slot or the number of a stage, as they are in step `count`."""
        mapping: dict[SSAValue, SSAValue] = {self.count: count}
        assert isinstance(value.owner, Operation)
        for op in chain(self.body, [value.owner]):
            scope.add(op.clone(value_mapper=mapping))
        return mapping.get(value, value)


def _before(scope: Before, count: SSAValue) -> SSAValue:
    """The step before, or the first one."""
    return scope.value(scope.larger(scope.minus(count, 1, "earlier"), 0, "earlier"))


def _some(scope: Before, count: SSAValue) -> SSAValue:
    return scope.add(arith.CmpiOp(count, scope.value(0), "sgt"), "some").result


def _step(last: _Last, source: SSAValue) -> SSAValue:
    """Starts the product of the step before behind the first products of this one, and frees the slots of that step.

    What the next step needs is pinned, so that the wait does not move above it.
    """
    *waits, final = [op for op in last.body.ops if isinstance(op, WaitOp)]
    scope = Before(waits[0])
    earlier = _before(scope, last.count)
    pending = last.start(scope, earlier, source, last.acc)
    for wait in waits:
        wait.properties["count"] = IntegerAttr(wait.count.value.data + 1, i64)
    final.operands = [pending.result]
    for arrive in [op for op in last.body.ops if isinstance(op, BarrierArriveOp)]:
        at = Before(arrive)
        at.add(BarrierArriveOp(arrive.barriers, last.at(at, earlier, arrive.index), _some(at, last.count)))
        Rewriter.erase_op(arrive)
    left = last.source
    for op in reversed([*last.rounding, last.product]):
        Rewriter.erase_op(op)
    return Before(final).add(PinOp(left), "pinned").result if tile.element_of(left) == f32 else left


def _finish(loop: scf.ForOp) -> SSAValue:
    """The last product of all behind the last loop; without any step the sum is what it was.

    Returns what stands for that which the last step leaves to it.
    """
    last, scope = _Last.of(loop.body.block), After(loop)
    result, count = loop.results[last.acc.index - 1], loop.results[last.count.index - 1]
    init = _initial(loop, last.acc.index - 1)
    users = list(result.uses)
    some = _some(scope, count)
    nothing = _nothing(scope, last.source)
    pending = last.start(scope, _before(scope, count), nothing, result)
    done = scope.add(WaitOp(0, [pending]), result.name_hint or "acc").values[0]
    element = tile.element_of(done)
    body = Block(arg_types=[i1, element, element])
    chosen = arith.SelectOp(*body.args)
    body.add_ops([chosen, tile.MapYieldOp(chosen)])
    total = scope.add(tile.MapOp([some, done, init], [[], [0, 1], [0, 1]], [done.type], body), "acc")
    for use in users:
        use.operation.operands[use.index] = total.outputs[0]
    return nothing


def _initial(loop: scf.ForOp, place: int) -> SSAValue:
    """What a sum starts from, in front of the first of the loops through which it goes."""
    value = loop.iter_args[place]
    while isinstance(value.owner, scf.ForOp):
        value = value.owner.iter_args[value.owner.results.index(value)]
    return value


def _nothing(scope: Before, like: SSAValue) -> SSAValue:
    type_ = like.type
    assert isinstance(type_, TensorType)
    zeros = arith.ConstantOp(DenseIntOrFPElementsAttr.from_list(type_, [0.0]), type_)  # type: ignore[arg-type]
    return scope.add(zeros, "nothing").result


def defer(role: Block) -> None:
    """Changes a consumer role whose steps have one sum each."""
    loops = [op for op in role.ops if isinstance(op, scf.ForOp) and is_role_step(op)]
    if len(loops) != len(role_steps(role)):
        raise AsyncUnsupportedError("its steps are in loops of loops")
    for loop in loops:
        round_alone(loop.body.block)
    nothing = _finish(loops[-1])
    left = _nothing(Before(loops[0]), _Last.of(loops[0].body.block).source)
    for loop in loops:
        new, (inner,) = extend_for(loop, [left], ["before"])
        yield_more(new.body.block, [_step(_Last.of(new.body.block), inner)])
        left = new.res[-1]
    nothing.replace_all_uses_with(left)


@dataclass(frozen=True)
class TileDeferProductPass(ModulePass):
    """Starts the last product of a step behind the first ones of the next step, so that arithmetic runs beside it.

    For steps with one sum, whose rings hold two of them. What its first operand is made of is carried to the next step, and the slots of a step are free one step
    later. The first step adds a product with zeros; that of the last one comes behind the loops.

    ```
    scf.for ... { %xp = dot(q, k); %x = wait 0, %xp; %ds = map(%x); %p = dot(%ds, k, %acc); wait 0, %p; release }
    ```
    becomes
    ```
    scf.for ... iter_args(%before = zeros) {
      %xp = dot(q, k); %p = dot(%before, k before, %acc)
      %x = wait 1, %xp; %ds = map(%x); wait 0, %p; release before
      yield %ds
    }
    dot(%ds, k)
    ```
    """

    name = "tile-defer-product"

    plan: str = "backward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for roles in roles_of(op, self.plan):
            consumer = roles.bodies[0].block
            if has_one_sum(consumer) and steps_meet(consumer):
                defer(consumer)
