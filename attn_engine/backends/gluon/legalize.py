"""What the Gluon backend can take, and the passes that lead from the value level to its text.

The forward kernel becomes a kernel of roles at the async level, and so do those of the backward that multiply blocks.
"""

from __future__ import annotations

from xdsl.dialects.builtin import ModuleOp

from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.hopper.form import read_forward

SCHEDULE = (
    "tile-peel-block",
    "tile-split-sums",
    "tile-schedule-grid",
    "tile-pipeline",
    "tile-specialize-warps",
    "tile-order-async",
    "tile-reduce-in-trees",
    "tile-advance-waits",
    "tile-defer-weights",
    "tile-split-channels",
)
"""The forward kernel to the async level."""

CHANNELS = 32
"""Channels of the smallest part that `tile-split-channels` makes of a head."""

RELAX = ("tile-relax-functions", "tile-relax-tanh", "attn-simplify", "tile-relax-divide", "attn-simplify")
"""Functions of scores as exact as 16-bit kernels need them."""

PREPARE = (
    "tile-relax-functions",
    "tile-relax-tanh",
    "tile-load-tables",
    "attn-simplify",
    "tile-relax-divide",
    "attn-simplify",
    "tile-fold-scales{plan=forward}",
    "tile-join-loops",
    "attn-simplify",
    "tile-split-distances{plan=forward}",
    "attn-simplify",
)
"""Before the schedule: functions of scores as exact as 16-bit kernels need them; tables in blocks; one factor a score;
two loops for any number of ranges of blocks."""

GRADIENTS = (
    "tile-load-tables{plan=backward}",
    "tile-join-loops{plan=backward}",
    "tile-narrow-results",
    "tile-stage-maps",
    "tile-sum-distances",
    "tile-fold-scales",
    "tile-start-products",
    "tile-hoist-factors",
    "tile-order-programs",
    "tile-pipeline-steps",
    "tile-split-roles",
    "tile-overlap-products",
    "tile-rotate-steps",
    "tile-defer-product",
    "tile-fragment-sums",
    "tile-sink-waits",
)
"""The kernels of the backward to the async level."""

_LATE = {
    "tile-pipeline-steps": ("tile-pipeline-steps{stages=2 spare=true}",),
    "tile-overlap-products": ("tile-overlap-products{late_sums=true in_flight=0}",),
    "tile-rotate-steps": ("tile-rotate-steps{last=true}",),
    "tile-fragment-sums": ("tile-defer-sums", "tile-fragment-sums"),
    "tile-sink-waits": ("tile-sink-waits", "tile-persist-roles"),
}
LATE = tuple(spec for each in GRADIENTS for spec in _LATE.get(each, (each,)))
"""Those of a kernel of all gradients: a step multiplies, and adds, the sums of dq of the step before; programs take further tiles."""

ORDERED = tuple(
    spec for each in GRADIENTS for spec in ((each, "tile-order-sums") if each == "tile-fragment-sums" else (each,))
)
"""The same where sums must have an order."""

LEGALIZE = (
    'tile-expand-math{keep="math.erf" approximate=true}',
    "tile-relax-divide",
    "triton-pass-sizes",
    "gluon-hold-diagonals",
)
"""What all kernels need before they are printed, as for Triton, divisions that the hardware is quick at, and how tiles of
diagonals are held."""


def supports(module: ModuleOp) -> str | None:
    """Why the forward plan of a module at the value level has no async kernel; None if it has one."""
    try:
        read_forward(module, "forward")
    except AsyncUnsupportedError as error:
        return error.reason
    return None
