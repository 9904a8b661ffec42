"""Which tiles of diagonals are loaded and added in whole statements: a pass says it, by the layouts of their roles."""

from __future__ import annotations

import pytest

from attn_engine.backends.backend import get_backend
from attn_engine.dialects import tile

pytest.importorskip("triton")
from tests.backends.test_gluon_distances import parts_by_distance


def test_tiles_beside_products_are_held():
    """A load in the forward, and a load and an addition of transposed ones in the gradients."""
    parts = parts_by_distance(64)
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
