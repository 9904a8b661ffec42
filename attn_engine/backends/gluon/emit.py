"""Tile IR to text: plans whose kernels have roles as Gluon, all others as Triton."""

from __future__ import annotations

from collections.abc import Iterable

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from attn_engine.backends.triton import emit as triton_emit
from attn_engine.backends.triton import emit_gluon
from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import RolesOp

SEPARATOR = "# --- kernels at the value level ---\n"
"""Between the two parts of the text, each a module of its own."""


def emit(module: ModuleOp) -> str:
    """The Gluon part, then, if there are other plans, the Triton part."""
    launched = {plan: _kernels(plan) for plan in module.ops if isinstance(plan, tile.PlanOp)}
    roles = {
        op.sym_name.data
        for op in module.ops
        if isinstance(op, tile.KernelOp) and isinstance(_last_but_end(op), RolesOp)
    }
    asynchronous = [plan for plan, kernels in launched.items() if kernels & roles]
    others = [plan for plan in launched if plan not in asynchronous]
    text = emit_gluon.emit(_part(module, asynchronous, launched))
    return text + SEPARATOR + triton_emit.emit(_part(module, others, launched)) if others else text


def _kernels(plan: tile.PlanOp) -> set[str]:
    return {op.kernel.root_reference.data for op in plan.body.block.ops if isinstance(op, tile.LaunchOp)}


def _last_but_end(kernel: tile.KernelOp) -> Operation | None:
    end = kernel.body.block.last_op
    return end.prev_op if end is not None else None


def _part(module: ModuleOp, plans: Iterable[tile.PlanOp], launched: dict[tile.PlanOp, set[str]]) -> ModuleOp:
    """A module of some plans and what they launch; an op that is neither plan nor kernel is in every part."""
    chosen = set(plans)
    names = {name for plan in chosen for name in launched[plan]}

    def belongs(op: Operation) -> bool:
        if isinstance(op, tile.KernelOp):
            return op.sym_name.data in names
        return op in chosen if isinstance(op, tile.PlanOp) else True

    return ModuleOp([op.clone() for op in module.ops if belongs(op)])
