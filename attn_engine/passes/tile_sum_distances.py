"""`tile-sum-distances`: sums of multiples of distances as two sums, neither of which holds a distance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin
from xdsl.dialects.builtin import TensorType, f32, i32
from xdsl.ir import Block, BlockArgument, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.hopper.edit import After, erase_unused
from attn_engine.passes.hopper.steps import signatures, step_bodies
from attn_engine.passes.simplify_constants import constant_of


@dataclass
class _Sum:
    """A sum over an axis of a map's result: a factor times the distance of a position along it from one along the other."""

    reduce: tile.ReduceOp
    inside: tile.MapOp
    product: arith.MulfOp | arith.SelectOp
    """With the guard, if there is one."""
    factor: SSAValue
    along: BlockArgument
    """The position that the sum runs over."""
    other: BlockArgument
    positive: bool
    """Whether that comes first in the distance."""
    guard: arith.SelectOp | None
    """Zero where the factor does not count. Distances are finite."""

    @classmethod
    def of(cls, reduce: tile.ReduceOp) -> _Sum | None:
        """None for a sum of something else."""
        inside = reduce.value.owner
        alone = len(list(reduce.value.uses)) == 1 and reduce.kind.data is tile.Reduction.SUM
        if not isinstance(inside, tile.MapOp) or inside.parent is not reduce.parent or not alone:
            return None
        end = inside.body.block.last_op
        assert isinstance(end, tile.MapYieldOp)
        product, guard = end.values[inside.outputs.index(reduce.value)].owner, None
        if isinstance(product, arith.SelectOp) and constant_of(product.rhs) == 0.0:
            product, guard = product.lhs.owner, product
        if not isinstance(product, arith.MulfOp):
            return None
        for distance, factor in ((product.lhs, product.rhs), (product.rhs, product.lhs)):
            ends = _ends(inside, distance, reduce.axis.value.data)
            if ends is not None:
                return cls(reduce, inside, guard or product, factor, *ends, guard)
        return None

    def run(self) -> None:
        """The sum of the factor times the other position, minus that of the factor times each position."""
        block, position = self.inside.body.block, self.inside.inputs[self.other.index]
        place = arith.SIToFPOp(self.along, f32)
        if self.guard is not None:
            counted = arith.SelectOp(self.guard.cond, self.factor, self.guard.rhs)
            Rewriter.insert_op(counted, InsertPoint.before(self.product))
            self.factor = counted.result
        multiple = arith.MulfOp(self.factor, place.result)
        Rewriter.insert_op([place, multiple], InsertPoint.before(self.product))
        made = self._outputs(multiple.result)
        erase_unused(block)
        scope, axis = After(self.reduce), self.reduce.axis.value.data
        whole, multiples = (scope.add(tile.ReduceOp(tile.Reduction.SUM, v, axis), "d").result for v in made)
        body = Block(arg_types=[i32, f32, f32])
        number, factor, part = body.args
        far = arith.SIToFPOp(number, f32)
        product = arith.MulfOp(far.result, factor)
        sides = (product.result, part) if self.positive else (part, product.result)
        total = arith.SubfOp(*sides)
        body.add_ops([far, product, total, tile.MapYieldOp(total)])
        axes = [[0]] * len(body.args)
        sources = [position, whole, multiples]
        new = scope.add(tile.MapOp(sources, axes, [self.reduce.result.type], body), "d")
        Rewriter.replace_op(self.reduce, [], [new.outputs[0]])

    def _outputs(self, multiple: SSAValue) -> tuple[SSAValue, SSAValue]:
        """A map with the factor, and its multiple, in place of the result that was summed."""
        op = self.inside
        end = op.body.block.last_op
        assert isinstance(end, tile.MapYieldOp)
        gone = op.outputs.index(self.reduce.value)
        kept = [n for n in range(len(op.outputs)) if n != gone]
        ends = [*(end.values[n] for n in kept), self.factor, multiple]
        sources, axes = list(op.inputs), tile.axes_of(op.axes)
        types = [*(op.outputs[n].type for n in kept), *[TensorType(f32, tile.shape_of(self.reduce.value))] * 2]
        body = op.detach_region(0).detach_block(0)
        Rewriter.replace_op(end, tile.MapYieldOp(*ends))
        new = tile.MapOp(sources, axes, types, body)
        Rewriter.insert_op(new, InsertPoint.before(op))
        for n, output in zip(kept, new.outputs, strict=False):
            output.name_hint = op.outputs[n].name_hint
            op.outputs[n].replace_all_uses_with(output)
        self.reduce.operands[0] = new.outputs[-1]
        Rewriter.erase_op(op)
        return new.outputs[-2], new.outputs[-1]


def _ends(inside: tile.MapOp, value: SSAValue, axis: int) -> tuple[BlockArgument, BlockArgument, bool] | None:
    """The positions of a distance as a float: that along an axis, the other one, and whether the other one comes first."""
    if not isinstance(value.owner, arith.SIToFPOp) or not isinstance(value.owner.input.owner, arith.SubiOp):
        return None
    first, second = value.owner.input.owner.operands
    axes = [_axis(inside, v) for v in (first, second)]
    if sorted(axes) != [0, 1]:
        return None
    assert isinstance(first, BlockArgument) and isinstance(second, BlockArgument)
    return (second, first, True) if axes[1] == axis else (first, second, False)


def _axis(inside: tile.MapOp, value: SSAValue) -> int:
    """Along which a position runs; -1 for what is none."""
    if not isinstance(value, BlockArgument) or value.block is not inside.body.block:
        return -1
    axes = tile.axes_of(inside.axes)[value.index]
    return axes[0] if len(axes) == 1 and isinstance(inside.inputs[value.index].owner, tile.RangeOp) else -1


def _sums(body: Block) -> Iterator[_Sum]:
    found = [_Sum.of(op) for op in body.ops if isinstance(op, tile.ReduceOp)]
    yield from [s for s in found if s is not None]


@dataclass(frozen=True)
class TileSumDistancesPass(ModulePass):
    """Sums multiples of distances without a distance for each: that of one position from all others, minus those of the others.

    A step that finds a distance for scores and again for their gradient holds it in between, for which steps that add
    to sums in memory have no registers. Positions are as exact in f32 as distances are; the sums round by the size of a
    position, not of a distance.

    ```
    %v = tile.map (%w, %rows, %cols) { %w * float(%row - %col) }; %d = tile.reduce sum %v, 1
    ```
    becomes
    ```
    %u, %t = tile.map (%w, %cols) { %w, %w * float(%col) }
    %a = tile.reduce sum %u, 1; %b = tile.reduce sum %t, 1; %d = tile.map (%rows, %a, %b) { float(%row) * %a - %b }
    ```
    """

    name = "tile-sum-distances"

    plan: str = "backward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for signature in signatures(op, self.plan):
            for body in list(step_bodies(signature.kernel.body.block)):
                adds = any(isinstance(op, tile.AtomicAddOp) for op in body.ops)
                for found in _sums(body) if adds else ():
                    found.run()
