"""`tile-start-products`: a vector that is added to a product is what the product starts from."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin
from xdsl.dialects.builtin import f32
from xdsl.ir import Block, BlockArgument, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.passes.hopper.edit import Before, drop_unread
from attn_engine.passes.hopper.form import is_zero
from attn_engine.passes.hopper.steps import step_maps


@dataclass(frozen=True)
class _Start:
    """`product + vector` or `product - vector` in a map, each element once."""

    dot: tile.DotOp
    vector: SSAValue
    axes: tuple[int, ...]
    op: arith.AddfOp | arith.SubfOp
    product: SSAValue
    """The product's element inside of the map."""


def _input(op: tile.MapOp, value: SSAValue) -> tuple[SSAValue, tuple[int, ...]] | None:
    """What of the map's inputs an argument of its body stands for, and its axes."""
    if not isinstance(value, BlockArgument):
        return None
    return op.inputs[value.index], tile.axes_of(op.axes)[value.index]


def _find(op: tile.MapOp) -> _Start | None:
    for inner in op.body.block.ops:
        if not isinstance(inner, arith.AddfOp | arith.SubfOp):
            continue
        pairs = [(inner.lhs, inner.rhs)] + ([(inner.rhs, inner.lhs)] if isinstance(inner, arith.AddfOp) else [])
        for product, vector in pairs:
            whole, part = _input(op, product), _input(op, vector)
            if whole is None or part is None or len(list(product.uses)) > 1 or len(part[1]) != 1:
                continue
            dot, load = whole[0].owner, part[0].owner
            if not isinstance(dot, tile.DotOp) or not isinstance(load, tile.LoadOp):
                continue
            if len(list(dot.result.uses)) == 1 and is_zero(dot.acc) and dot.parent is op.parent is load.parent:
                return _Start(dot, part[0], part[1], inner, product)
    return None


def start(op: tile.MapOp) -> bool:
    """Changes one product that a map reads; whether there was one."""
    found = _find(op)
    if found is None:
        return False
    body = Block(arg_types=[f32])
    value: SSAValue = body.args[0]
    if isinstance(found.op, arith.SubfOp):
        value = arith.NegfOp(value).result
        body.add_op(value.owner)
    body.add_op(tile.MapYieldOp(value))
    load = found.vector.owner
    assert isinstance(load, tile.LoadOp)
    if not load.is_before_in_block(found.dot):
        load.detach()
        Before(found.dot).add(load)
    begins = Before(found.dot).add(tile.MapOp([found.vector], [found.axes], [found.dot.result.type], body), "start")
    found.dot.operands[2] = begins.outputs[0]
    found.op.result.replace_all_uses_with(found.product)
    Rewriter.erase_op(found.op)
    drop_unread(op)
    return True


@dataclass(frozen=True)
class TileStartProductsPass(ModulePass):
    """Puts a vector of a step that is added to a product, or taken from it, where the product starts.

    The vector needs no registers beside the product's own then, and no arithmetic.

    ```
    %dp = tile.dot %v, %d_o, %zero; %ds = tile.map (%dp, %delta, %p) { (dp - delta) * p }
    ```
    becomes
    ```
    %start = tile.map (%delta) { -delta }; %dp = tile.dot %v, %d_o, %start; %ds = tile.map (%dp, %p) { dp * p }
    ```
    """

    name = "tile-start-products"

    plan: str = "backward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for inner in step_maps(op, self.plan):
            while start(inner):
                pass  # one product at a time
