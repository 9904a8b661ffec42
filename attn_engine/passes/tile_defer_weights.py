"""`tile-defer-weights`: half of the weights of a step are found under the product for the scores of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin, math, scf
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_product import AsyncDotOp, HoldBackOp
from attn_engine.passes.hopper.deferred import Weights, mask_apart
from attn_engine.passes.hopper.edit import After, Before, extend_for, yield_more, yields
from attn_engine.passes.hopper.pin import behind
from attn_engine.passes.hopper.role_steps import role_steps
from attn_engine.passes.hopper.steps import roles_of

_BOTH = (0, 1)
_PRODUCTS = 2
_SIMPLE = (math.AbsFOp, math.FmaOp, math.CopySignOp)


def _functions(op: tile.MapOp) -> list[Operation]:
    """What the unit for functions does of a map."""
    return [
        o
        for o in op.body.block.ops
        if isinstance(o, arith.DivfOp) or (o.name.startswith("math.") and not isinstance(o, _SIMPLE))
    ]


def _held(op: tile.MapOp) -> int | None:
    """The number of an input without axes on which all functions of a map depend."""
    functions, ops = _functions(op), list(op.body.block.ops)
    for n, axes in enumerate(tile.axes_of(op.axes)):
        if axes == () and op.inputs[n].type == f32 and {*functions} <= behind(ops, [op.body.block.args[n]]):
            return n
    return None


def _alike(a: Weights, b: Weights) -> bool:
    """Whether two steps make weights in the same way, so that one can go on where the other stopped."""
    pairs = zip(a.weights.inputs, b.weights.inputs, tile.axes_of(a.weights.axes), strict=False)
    same = tile.axes_of(a.weights.axes) == tile.axes_of(b.weights.axes)
    same = same and all(x is y or axes == _BOTH for x, y, axes in pairs)
    same = same and a.weights.outputs[0].type == b.weights.outputs[0].type
    return same and a.weights.body.is_structurally_equivalent(b.weights.body)


@dataclass
class _Deferral:
    """A loop whose steps multiply the weights of the step before, what makes these in front of it and in its body."""

    loop: scf.ForOp
    operand: int
    """Which carry the weights are."""
    before: Weights
    inside: Weights
    held: int
    """Which input of the weights is known late."""

    @classmethod
    def of(cls, body: Block) -> _Deferral | None:
        loop = body.parent_op()
        assert isinstance(loop, scf.ForOp)
        products = [op for op in body.ops if isinstance(op, AsyncDotOp)]
        if len(products) != _PRODUCTS:
            return None
        weights = products[1].a
        if not isinstance(weights, BlockArgument) or not isinstance(weights.type, TensorType):
            return None
        operand = weights.index - 1
        users = [type(use.operation) for value in (weights, loop.results[operand]) for use in value.uses]
        inside = Weights.of(yields(body).operands[operand])
        held = _held(inside.weights) if inside is not None and _functions(inside.weights) else None
        if inside is None or held is None or users != [AsyncDotOp, AsyncDotOp]:
            return None
        mask_apart(loop.iter_args[operand])
        before = Weights.of(loop.iter_args[operand])
        alike = before is not None and _alike(before, inside)
        return cls(loop, operand, before, inside, held) if before is not None and alike else None

    def run(self) -> None:
        late, first = self.before.late(), self.before.keep_first()
        moving = [n for n, axes in enumerate(tile.axes_of(self.inside.weights.axes)) if axes == _BOTH]
        loop, args = extend_for(self.loop, [first, *(late[n] for n in moving)], ["low", *("late" for _ in moving)])
        body = loop.body.block
        own, rounded = self.inside.late(), self.inside.keep_first()
        yield_more(body, [rounded, *(own[n] for n in moving)])
        scores, product = (op for op in body.ops if isinstance(op, AsyncDotOp))
        held = After(scores).add(HoldBackOp(late[self.held]), late[self.held].name_hint or "held")
        inputs: dict[int, SSAValue] = {**dict(zip(moving, args[1:], strict=True)), self.held: held.result}
        self._second(After(held), product, args[0], [inputs.get(n, value) for n, value in enumerate(late)])
        low, *results = loop.results[-1 - len(moving) :]
        product = next(use.operation for use in loop.results[self.operand].uses)
        left: dict[int, SSAValue] = dict(zip(moving, results, strict=True))
        self._second(Before(product), product, low, [left.get(n, value) for n, value in enumerate(late)])
        self._drop(loop)

    def _second(self, scope: Before, product: Operation, low: SSAValue, late: Sequence[SSAValue]) -> None:
        """The rest of the weights of the step before, in front of their product."""
        product.operands = [self.inside.second(scope, low, late), *product.operands[1:]]

    def _drop(self, loop: scf.ForOp) -> None:
        """The carry of whole weights."""
        body = loop.body.block
        kept = [n for n in range(len(loop.iter_args)) if n != self.operand]
        ends = yields(body)
        ends.operands = [ends.operands[n] for n in kept]
        body.erase_arg(body.args[self.operand + 1])
        inits = [loop.iter_args[n] for n in kept]
        new = Before(loop).add(scf.ForOp(loop.lb, loop.ub, loop.step, inits, loop.detach_region(loop.body)))
        for n, result in zip(kept, new.results, strict=True):
            result.name_hint = loop.results[n].name_hint
            loop.results[n].replace_all_uses_with(result)
        Rewriter.erase_op(loop)
        self.inside.erase()
        self.before.erase()


@dataclass(frozen=True)
class TileDeferWeightsPass(ModulePass):
    """Finds half of the weights of a step in the next one, between the starts of its two products.

    The product of weights reads them from registers: it does not start before the one for scores, which was started first,
    has ended, and until then the warps stand still. What they need of the step before is carried, scores of half of the keys.
    For weights of functions that read no number of their row: on an H200, sigmoid was 4 to 9 % faster with it, softmax, whose
    step reads a maximum, 2 to 9 % slower.

    ```
    %sp = dot(q, k); %op = dot(%p0, v0, %acc0); %s = wait 1, %sp; %p = weights(%s, %scale); yield %p
    ```
    becomes
    ```
    %sp = dot(q, k); %late = hold_back %scale; %p0 = join_columns %low, weights(%high, %late); %op = dot(%p0, v0, %acc0)
    %s = wait 1, %sp; %s0, %s1 = split_columns %s; %p = weights(%s0, %scale); yield %p, %s1
    ```
    """

    name = "tile-defer-weights"

    plan: str = "forward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for roles in roles_of(op, self.plan):
            for body in [body for role in roles.bodies for body in role_steps(role.block)]:
                found = _Deferral.of(body)
                if found is not None:
                    found.run()
