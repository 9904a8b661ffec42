"""Block sizes for every kernel of an attention, as options of `convert-attn-to-tile`."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from attn_engine.dialects import attn, tile
from attn_engine.runtime.devices import Target

Blocks = tuple[int, int, int, int]
"""Queries per block, keys per block, warps, pipeline stages."""


@dataclass(frozen=True)
class Schedules:
    """One schedule per kernel; `pad` holds head dims in tiles of a power of two."""

    forward: Blocks
    rows: Blocks
    dq: Blocks
    dkdv: Blocks
    pad: bool = True

    def pass_spec(self, tf32: bool) -> str:
        """`convert-attn-to-tile{...}` with these numbers."""
        kernels = {"forward": self.forward, "rows": self.rows, "dq": self.dq, "dkdv": self.dkdv}
        options = [f"{name}={','.join(map(str, blocks))}" for name, blocks in kernels.items()]
        options += [f"pad={str(self.pad).lower()}", f"tf32={str(tf32).lower()}"]
        return f"convert-attn-to-tile{{{' '.join(options)}}}"


CPU = Schedules((256, 256, 1, 1), (256, 256, 1, 1), (256, 256, 1, 1), (256, 256, 1, 1), pad=False)
"""Large blocks: a CPU wants few and large products."""


def default_schedules(target: Target, module: ModuleOp) -> Schedules:
    """Schedules for the attention in a module, by what the target is known to like."""
    if target.backend == "cpu":
        return CPU
    op = next(o for o in module.walk() if isinstance(o, attn.AttentionOp | attn.OnlineOp))
    return _for_gpu(op)


def _for_gpu(op: Operation) -> Schedules:
    """By the larger head dim and the size of an element: tiles must fit shared memory and registers."""
    q, v = op.operands[0], op.operands[2]
    head = max(q.type.get_shape()[3], v.type.get_shape()[3])  # type: ignore[union-attr]
    wide = tile.element_of(q).bitwidth > 16  # type: ignore[union-attr]
    if wide:
        blocks = (32, 32, 4, 2) if head > 128 else (64, 32, 4, 2)
        return Schedules(blocks, (64, 32, 4, 1), blocks, (32, 32, 4, 1) if head > 64 else (32, 64, 4, 2))
    if head <= 64:
        return Schedules((128, 128, 4, 3), (64, 64, 4, 1), (128, 64, 4, 3), (64, 128, 8, 3))
    if head <= 128:
        return Schedules((128, 64, 8, 3), (64, 64, 4, 1), (128, 64, 8, 3), (64, 128, 8, 2))
    return Schedules((64, 32, 4, 2), (32, 32, 4, 1), (64, 32, 8, 2), (32, 64, 8, 1))
