"""`tile-sink-waits`: blocks that a program owns are waited for where they are first read."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass

from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import AsyncLoadOp, BarrierWaitOp
from attn_engine.dialects.tile_async_view import SlotOp
from attn_engine.passes.hopper.role_steps import slot_of
from attn_engine.passes.hopper.steps import roles_of


def _place(value: SSAValue) -> int:
    """Of what roles share, among the arguments of each."""
    assert isinstance(value, BlockArgument)
    return value.index


def _filled(roles: RolesOp) -> dict[int, set[int]]:
    """The rings whose copies land on a barrier, by places among the arguments of roles."""
    found: dict[int, set[int]] = {}
    for load in [op for op in roles.walk() if isinstance(op, AsyncLoadOp)]:
        slot = slot_of(load.target)
        if slot is not None:
            found.setdefault(_place(load.barriers), set()).add(_place(slot.ring))
    return found


def _reads(op: Operation, rings: set[int], role: Block) -> bool:
    slots = [inner for inner in op.walk() if isinstance(inner, SlotOp)]
    return any(isinstance(s.ring, BlockArgument) and s.ring.block is role and s.ring.index in rings for s in slots)


def sink(role: Block, filled: dict[int, set[int]]) -> None:
    """Moves the waits that stand in a role itself, not in its loops, and in front of all slots of what they wait for."""
    for wait in [op for op in role.ops if isinstance(op, BarrierWaitOp)]:
        rings = filled.get(_place(wait.barriers), set())
        reader = next((op for op in role.ops if _reads(op, rings, role)), None)
        if reader is not None and wait.is_before_in_block(reader):
            wait.detach()
            role.insert_op_before(wait, reader)


@dataclass(frozen=True)
class TileSinkWaitsPass(ModulePass):
    """Moves the waits of consumers for blocks that their program owns down to the first use of their slots.

    What stands in between, loads of ranges of blocks and of captured values, then takes its time while the blocks come.

    ```
    barrier_wait %k_full; %lo = tile.load %ranges; %k = slot %ks; async_dot %k
    ```
    becomes
    ```
    %lo = tile.load %ranges; barrier_wait %k_full; %k = slot %ks; async_dot %k
    ```
    """

    name = "tile-sink-waits"

    plan: str = "backward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for roles in roles_of(op, self.plan):
            sink(roles.bodies[0].block, _filled(roles))
