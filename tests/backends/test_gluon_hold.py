"""Which tiles of diagonals are loaded and added in whole statements: a pass says it, by the layouts of their roles."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.backends.backend import get_backend
from attn_engine.dialects import tile
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Facts, Request
from attn_engine.runtime.inspect import View
from attn_engine.runtime.schedules import candidate_schedules

pytest.importorskip("triton")
TABLE = torch.zeros(4, 9).requires_grad_()


def test_tiles_beside_products_are_held():
    """A load in the forward, and a load and an addition of transposed ones in the gradients."""
    view, wrt = View(head_dim=64, backward=True), ("q", "k", "v", "0")
    attention = attn_engine.compile(
        score_mod=lambda s, b, h, q, kv: s + TABLE[h, (q - kv) % 9], mask_mod=library.causal
    )
    module = attention._traced(view)
    schedule = candidate_schedules(Target("gluon", "sm_90"), module)[0]
    request = Request(wrt, "gluon", schedule, Facts(True, True, exact=True, multiple=128), descriptors=True)
    parts = driver.to_parts(driver.to_attn(module, wrt), request)
    kinds = (tile.LoadDiagonalsOp, tile.AddDiagonalsOp)
    for part in parts:
        found = [op for op in part.tiles.walk() if isinstance(op, kinds)]
        assert found
        assert all(op.held is not None for op in found)
        assert "load_diagonals(" in part.source.partition("_role_0")[2]
        for op in found:
            del op.properties["held"]
        loads = get_backend("gluon").emit(part.tiles).partition("_role_0")[2]
        assert "load_diagonals(" not in loads and "gl.load(" in loads
