"""Pass pipelines, readable top-down. Data only: specs as `attn-opt -p` takes them."""

from __future__ import annotations

ATTN_ANALYSIS = ("attn-simplify", "attn-analyze-mask")
"""Traced attention, cleaned, with the key and query ranges of its mask."""

ATTN_LOWERING = (
    "attn-derive-online",
    "attn-simplify",
    "attn-exp-to-exp2",
    "attn-hoist-rows",
    "attn-narrow-integers",
    "attn-simplify",
)
"""Row functions to loops; arithmetic in the form that kernels want."""

DETERMINISTIC = ("tile-fix-sums",)
"""Right after the conversion to kernels, where results must be the same in every run."""

TILE_CLEANUP = ("attn-simplify", "tile-hoist", "attn-simplify", "tile-verify-lowered")
"""After the conversion to kernels."""


def derive_backward(wrt: tuple[str, ...]) -> tuple[str, ...]:
    """Gradients with respect to q, k, v and capture positions; nothing for none."""
    return (f"attn-derive-backward{{wrt={','.join(wrt)}}}",) if wrt else ()
