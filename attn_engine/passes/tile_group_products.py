"""`tile-group-products`: the instructions of a product are issued one behind the other."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.ir import Operation
from xdsl.passes import ModulePass

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import BarrierWaitOp
from attn_engine.dialects.tile_async_product import AsyncDotOp, SchedBarrierOp, WaitOp
from attn_engine.passes.hopper.edit import After
from attn_engine.passes.hopper.role_steps import role_steps
from attn_engine.passes.hopper.steps import roles_of

_KEEP_APART = (AsyncDotOp, WaitOp, BarrierWaitOp)


def _is_mixed(product: AsyncDotOp) -> bool:
    """Whether arithmetic follows that nothing keeps behind the start of a product."""
    op: Operation | None = product.next_op
    while op is not None and not isinstance(op, _KEEP_APART):
        if isinstance(op, tile.MapOp):
            return True
        op = op.next_op
    return False


@dataclass(frozen=True)
class TileGroupProductsPass(ModulePass):
    """Keeps arithmetic that runs beside a product behind the last instruction of its start.

    A product is several instructions, and the assembler takes it for one of the same length in each: it issues them one
    by one between those of the arithmetic. The product then ends when the arithmetic does, not before it, and what
    is started next has to wait for it.

    ```
    %dpp = async_dot(v, do); %p = map(%x)
    ```
    becomes
    ```
    %dpp = async_dot(v, do); sched_barrier; %p = map(%x)
    ```
    """

    name = "tile-group-products"

    plan: str = "backward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for roles in roles_of(op, self.plan):
            for body in [body for role in roles.bodies for body in role_steps(role.block)]:
                for product in [op for op in body.ops if isinstance(op, AsyncDotOp) and _is_mixed(op)]:
                    After(product).add(SchedBarrierOp())
