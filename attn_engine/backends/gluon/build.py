"""Text to callables: its Gluon part and its Triton part are modules of their own."""

from __future__ import annotations

from collections.abc import Mapping

from attn_engine.backends.backend import Plan
from attn_engine.backends.gluon.emit import SEPARATOR
from attn_engine.backends.triton import build as triton_build
from attn_engine.backends.triton import gluon_build
from attn_engine.backends.triton.gluon_build import check

__all__ = ["build", "check"]


def build(source: str) -> Mapping[str, Plan]:
    """One callable per plan of both parts."""
    asynchronous, _, others = source.partition(SEPARATOR)
    plans = dict(gluon_build.build(asynchronous))
    return plans | dict(triton_build.build(others)) if others else plans
