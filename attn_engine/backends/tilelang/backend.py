"""The manifest of the TileLang backend: buffered level, NVIDIA and AMD."""

from attn_engine.backends.backend import Backend, Level, Overlap
from attn_engine.backends.tilelang.build import build, check
from attn_engine.backends.tilelang.emit import emit

MEMORY = ('tile-expand-math{keep="math.erf"}', "tile-assign-memory{one_pipeline=true}")
TILES = (
    "tilelang-flatten-loops",
    "tilelang-share-rows",
    "tilelang-share-vectors",
    "tilelang-share-operands",
    "tilelang-bounds",
    "tilelang-copies",
    "tilelang-overlap",
    "tilelang-keep-numbers",
)

BACKEND = Backend(
    name="tilelang",
    level=Level.BUFFERED,
    pipeline=(*MEMORY, *TILES),
    recurrences=(*MEMORY, "tilelang-widen-blocks", *TILES),
    part=32,
    emit=emit,
    build=build,
    check=check,
    one_loop=True,
    overlap=Overlap(0.4, "the second product runs beside the next weights", heads=(64, 128), gradients=False),
)
