"""`tile-verify-lowered`: the end of a lowering, where nothing of a higher level may be left."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin, func
from xdsl.passes import ModulePass

from attn_engine.dialects import tile
from attn_engine.errors import PassError


@dataclass(frozen=True)
class TileVerifyLoweredPass(ModulePass):
    """Fails if an `attn` op, a `func` op or a launch of an unknown kernel is left in the module."""

    name = "tile-verify-lowered"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        kernels = {o.sym_name.data for o in op.body.block.ops if isinstance(o, tile.KernelOp)}
        for inner in op.walk():
            if inner.name.startswith("attn.") or isinstance(inner, func.FuncOp | func.ReturnOp):
                raise PassError("tile-verify-lowered", f"'{inner.name}' is left after the lowering to tile")
            if isinstance(inner, tile.LaunchOp) and inner.kernel.root_reference.data not in kernels:
                raise PassError(
                    "tile-verify-lowered", f"launch of '@{inner.kernel.root_reference.data}', which is no kernel here"
                )
