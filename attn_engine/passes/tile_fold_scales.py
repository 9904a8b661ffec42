"""`tile-fold-scales`: factors of a whole tile meet in front of the subtraction of a vector."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.hopper.steps import step_maps


def _axes(op: tile.MapOp) -> dict[SSAValue, frozenset[int]]:
    """Along which axes of the map each of its scalars varies."""
    axes: dict[SSAValue, frozenset[int]] = {
        a: frozenset(found) for a, found in zip(op.body.block.args, tile.axes_of(op.axes), strict=True)
    }
    for inner in op.body.block.ops:
        joined = frozenset(axis for o in inner.operands for axis in axes[o])
        axes.update((result, joined) for result in inner.results)
    return axes


def _times(op: Operation, a: SSAValue, b: SSAValue) -> SSAValue:
    new = arith.MulfOp(a, b)
    Rewriter.insert_op(new, InsertPoint.before(op))
    new.result.name_hint = a.name_hint
    return new.result


def _distribute(op: arith.MulfOp, axes: dict[SSAValue, frozenset[int]]) -> bool:
    """(x - v) * c -> x * c - v * c, where only x varies along all axes that the result does, and c along none."""
    for difference, factor in ((op.lhs, op.rhs), (op.rhs, op.lhs)):
        owner = difference.owner
        if not isinstance(owner, arith.SubfOp) or axes[factor] or len(list(difference.uses)) > 1:
            continue
        if axes[owner.rhs] < axes[owner.lhs]:
            Rewriter.replace_op(op, arith.SubfOp(_times(op, owner.lhs, factor), _times(op, owner.rhs, factor)))
            Rewriter.erase_op(owner)
            return True
    return False


def _associate(op: arith.MulfOp, axes: dict[SSAValue, frozenset[int]]) -> bool:
    """(x * s) * c -> x * (s * c), where s and c vary along no axis."""
    for product, factor in ((op.lhs, op.rhs), (op.rhs, op.lhs)):
        owner = product.owner
        if isinstance(owner, arith.MulfOp) and not axes[factor] and len(list(product.uses)) == 1:
            for wide, scale in ((owner.lhs, owner.rhs), (owner.rhs, owner.lhs)):
                if axes[wide] and not axes[scale]:
                    Rewriter.replace_op(op, arith.MulfOp(wide, _times(op, scale, factor)))
                    Rewriter.erase_op(owner)
                    return True
    return False


def fold(op: tile.MapOp) -> None:
    """Rewrites the products of a map until nothing changes."""
    while True:
        axes = _axes(op)
        products = [o for o in op.body.block.ops if isinstance(o, arith.MulfOp)]
        if not any(_distribute(o, axes) or _associate(o, axes) for o in products):
            return


@dataclass(frozen=True)
class TileFoldScalesPass(ModulePass):
    """Multiplies vectors and scalars instead of tiles in the maps of steps: one multiply-add an element remains.

    What is added rounds once less; the results differ in the last bit of an exponent.

    ```
    %s = arith.mulf %x, %scale; %d = arith.subf %s, %row; %e = arith.mulf %d, %log2e
    ```
    becomes, with %row one number per row
    ```
    %c = arith.mulf %scale, %log2e; %r = arith.mulf %row, %log2e; %s = arith.mulf %x, %c; %e = arith.subf %s, %r
    ```
    """

    name = "tile-fold-scales"

    plan: str = "backward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for inner in step_maps(op, self.plan):
            fold(inner)
