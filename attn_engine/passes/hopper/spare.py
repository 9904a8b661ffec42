"""More slots for what consumers share."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects import arith
from xdsl.ir import SSAValue
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_types import BufferType
from attn_engine.passes.hopper.edit import Before
from attn_engine.passes.hopper.form import ring_bytes


def widen(
    kernel: tile.KernelOp, rings: Sequence[SSAValue], turns: Sequence[arith.RemSIOp], stages: int, room: int
) -> None:
    """One slot more in rings than steps in flight, if there are so many bytes; `turns` are the numbers of their slots."""
    types = [(ring, ring.type) for ring in rings if isinstance(ring.type, BufferType)]
    wide = [(ring, t, BufferType([stages + 1, *t.get_shape()[1:]], t.element_type)) for ring, t in types]
    more = sum(new.byte_size - old.byte_size for _, old, new in wide)
    if more <= 0 or ring_bytes(kernel) + more > room:
        return
    for ring, _, type_ in wide:
        Rewriter.replace_value_with_new_type(ring, type_)
    for turn in turns:
        turn.operands[1] = Before(turn).value(stages + 1)
