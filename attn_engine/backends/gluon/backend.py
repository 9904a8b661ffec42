"""The manifest of the Gluon backend: kernels with asynchronous copies and products, on Hopper."""

from attn_engine.backends.backend import Backend, Level, Overlap
from attn_engine.backends.gluon.build import build, check
from attn_engine.backends.gluon.emit import emit
from attn_engine.backends.gluon.examine import examine
from attn_engine.backends.gluon.guard import Guarded
from attn_engine.backends.gluon.legalize import CHANNELS, GRADIENTS, LATE, LEGALIZE, ORDERED, PREPARE, RELAX, SCHEDULE

BACKEND = Backend(
    name="gluon",
    level=Level.ASYNC,
    pipeline=(*PREPARE, *SCHEDULE, *LEGALIZE),
    emit=emit,
    build=build,
    check=check,
    examine=examine,
    rest="triton",
    gradients=(*RELAX, *GRADIENTS, *LEGALIZE),
    late=(*RELAX, *LATE, *LEGALIZE),
    ordered=(*RELAX, *ORDERED, *LEGALIZE),
    guard=Guarded,
    fuses=True,
    sums_diagonals=True,
    channels=CHANNELS,
    overlap=Overlap(0.55, "two groups of warps take turns, and products start before the weights before them are done"),
)
