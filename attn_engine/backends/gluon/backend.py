"""The manifest of the Gluon backend: forward kernels with asynchronous copies and products, on Hopper."""

from attn_engine.backends.backend import Backend, Level
from attn_engine.backends.gluon.build import build, check
from attn_engine.backends.gluon.emit import emit
from attn_engine.backends.gluon.examine import examine
from attn_engine.backends.gluon.legalize import LEGALIZE, PREPARE, SCHEDULE

BACKEND = Backend(
    name="gluon",
    level=Level.ASYNC,
    pipeline=(*PREPARE, *SCHEDULE, *LEGALIZE),
    emit=emit,
    build=build,
    check=check,
    examine=examine,
    plans=("forward",),
    rest="triton",
)
