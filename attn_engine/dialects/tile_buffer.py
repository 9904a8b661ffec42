"""The buffered level of the ``tile`` dialect: kernels over buffers with explicit copies.

A kernel at this level starts with `tile.buffer_alloc`s and has no tensors: every op reads and writes buffers
in place. Tiles that a loop carries lie in buffers written before it; carries that change places are copies. Numbers
are carried as results.
`scf.for` may have an attribute `stages = n : i64`: copies from global memory run up to n - 1 iterations ahead.
Kernel attributes: `threads` (of one program), and `explicit_barriers` where the target does not place
barriers itself. Memory is in `tile_buffer_memory`, computing in `tile_buffer_compute`, products that are not waited
for at once in `tile_buffer_pending`, layouts in `tile_buffer_layout`, rules for whole kernels in `tile_buffer_check`.
"""

from __future__ import annotations

from xdsl.ir import Attribute, Operation

from attn_engine.dialects.tile_buffer_compute import BUFFER_COMPUTE_ATTRIBUTES, BUFFER_COMPUTE_OPS
from attn_engine.dialects.tile_buffer_layout import MfmaAttr, PaddedAttr, SliceLayoutAttr, StagedAttr, SwizzledAttr
from attn_engine.dialects.tile_buffer_memory import BUFFER_MEMORY_OPS
from attn_engine.dialects.tile_buffer_pending import BUFFER_PENDING_OPS

BUFFER_OPS: list[type[Operation]] = [*BUFFER_MEMORY_OPS, *BUFFER_COMPUTE_OPS, *BUFFER_PENDING_OPS]
BUFFER_ATTRIBUTES: list[type[Attribute]] = [
    MfmaAttr,
    PaddedAttr,
    SliceLayoutAttr,
    StagedAttr,
    SwizzledAttr,
    *BUFFER_COMPUTE_ATTRIBUTES,
]
