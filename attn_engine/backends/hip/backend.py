"""The manifest of the HIP backend: buffered level, AMD."""

from attn_engine.backends.backend import Backend, Level
from attn_engine.backends.hip.build import build, check
from attn_engine.backends.hip.emit import emit
from attn_engine.backends.hip.layouts import SIZES

PIPELINE = (
    'tile-join-loops{plan=""}',
    "tile-expand-math",
    "hip-transpose",
    "tile-assign-memory{warp_size=64}",
    "hip-choose-layouts",
    "hip-share-lds",
    "hip-place-barriers",
    "hip-prefetch",
)

BACKEND = Backend(
    name="hip",
    level=Level.BUFFERED,
    pipeline=PIPELINE,
    emit=emit,
    build=build,
    check=check,
    suffix=".hip",
    smallest_tile=min(SIZES),
)
