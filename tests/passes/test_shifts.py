"""Shifts by a constant are products and divisions by powers of two: masks made of them have ranges of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attn_engine

torch.set_num_threads(1)
VIEW = attn_engine.View(torch.float32, head_dim=16)
Mask = Callable[[Any, Any, Any, Any], Any]
MASKS: dict[str, tuple[Mask, Mask]] = {
    "left": (lambda b, h, q, kv: (kv << 1) >= q - 4, lambda b, h, q, kv: kv * 2 >= q - 4),
    "right": (lambda b, h, q, kv: (q >> 3) == (kv >> 3), lambda b, h, q, kv: q // 8 == kv // 8),
}


@pytest.mark.parametrize("name", MASKS)
def test_ranges_of_blocks(name: str):
    shifted, plain = (attn_engine.compile(mask_mod=mask).ir("attn", VIEW) for mask in MASKS[name])
    assert shifted == plain
    assert "shli" not in shifted and "shrsi" not in shifted


def test_negative_numbers():
    """They round down, as torch does."""
    q, k, v = (torch.randn(1, 1, 30, 16) for _ in range(3))
    i, j = torch.arange(30)[:, None], torch.arange(30)[None]
    s = q @ k.mT / 4 + 0.1 * ((i - j) >> 2) + 0.01 * ((j - i) << 3)
    attend = attn_engine.compile(
        score_mod=lambda s, b, h, q, kv: s + 0.1 * ((q - kv) >> 2) + 0.01 * ((kv - q) << 3), backend="cpu"
    )
    torch.testing.assert_close(attend(q, k, v), s.softmax(-1) @ v, atol=1e-5, rtol=1e-5)
