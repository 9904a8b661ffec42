"""The manifest of the Triton backend: value level, NVIDIA and AMD."""

from attn_engine.backends.backend import Backend, Level, Overlap
from attn_engine.backends.triton.build import build, check
from attn_engine.backends.triton.emit import emit

BACKEND = Backend(
    name="triton",
    level=Level.VALUE,
    pipeline=('tile-expand-math{keep="math.erf"}', "triton-pass-sizes"),
    emit=emit,
    build=build,
    check=check,
    copies_blocks=True,
    knows_whole=True,
    sums_diagonals=True,
    masks_once=False,  # with one mask its assembler spills nearly three times as much in dk/dv of causal heads of 128
    overlap=Overlap(0.15, "weights are computed between the products"),
)
