"""The manifest of the HIP backend: buffered level, AMD."""

from attn_engine.backends.backend import Backend, Level
from attn_engine.backends.hip.build import build, check
from attn_engine.backends.hip.emit import emit

BACKEND = Backend(
    name="hip",
    level=Level.BUFFERED,
    pipeline=("tile-expand-math",),
    emit=emit,
    build=build,
    check=check,
    suffix=".hip",
)
