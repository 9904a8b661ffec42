"""What a forward should cost by its schedule: clocks of one multiprocessor per score, summed over its units.

Matrix units take the two products; vector and special-function units take the row function and the score_mod. How much
of the latter runs beside the products is a fact of how a backend schedules its loop (`Backend.overlap`). It ranks backends; it is
no time.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_engine.backends.backend import get_backend
from attn_engine.ir.schedule import Heads, padded

MULTIPLY_ADDS, VECTOR_OPS, SPECIAL_OPS = 1024, 128, 16
"""Per clock and multiprocessor of sm_90: of 16-bit operands in matrix units, of f32 elsewhere, and exponentials."""
ROW_OPS = 6
"""Per score of an online softmax: scale, maximum, difference, sum, rounding, and its share of rescaling."""
PRODUCT_SHARE = 0.9
"""Of the matrix units' rate that a loop of products alone reaches."""
MOST_HIDDEN = 0.5
"""Of the products' time at most, other work runs beside."""


@dataclass(frozen=True)
class Prediction:
    """Clocks of a multiprocessor for each score of a forward, and the reason."""

    backend: str
    clocks: float
    why: str

    def told(self, best: Prediction) -> str:
        return f"{self.backend}: {self.clocks:.3f} clocks a score ({self.clocks / best.clocks:.2f}): {self.why}"


def predict(backend: str, heads: Heads, score_ops: int) -> Prediction:
    """Of one backend, for heads of some size and a score_mod of so many operations."""
    overlap = get_backend(backend).overlap
    assert overlap is not None
    products = (padded(heads.qk) + padded(heads.v)) / MULTIPLY_ADDS / PRODUCT_SHARE
    others = (ROW_OPS + score_ops) / VECTOR_OPS + 1 / SPECIAL_OPS
    return Prediction(backend, products + others - min(overlap.share * others, MOST_HIDDEN * products), overlap.why)
