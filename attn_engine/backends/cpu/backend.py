"""The CPU backend: batched torch code from the value level; the default where there is no GPU."""

from __future__ import annotations

from attn_engine.backends.backend import Backend, Level
from attn_engine.backends.cpu.build import build, check
from attn_engine.backends.cpu.emit import BACKEND as NAME
from attn_engine.backends.cpu.emit import emit

BACKEND = Backend(
    name=NAME,
    level=Level.VALUE,
    pipeline=("cpu-legalize",),
    emit=emit,
    build=build,
    check=check,
    on_host=True,
    sums_diagonals=True,
)
