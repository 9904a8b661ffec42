"""Lengths and tensors at which 16 or 32 bits are too few."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import library, masks
from tests.support.compare import leaf, randn
from tests.support.engines import ALL


def test_b82_more_than_65536_positions():
    """A window of 3 over 70000 positions, against the three keys of each row."""
    size = 70_000
    q, k, v = (leaf(randn(1, 1, size, 8, seed=n)) for n in range(3))
    o = attn_engine.attention(q, k, v, mask_mod=library.sliding_window(3))
    scores = torch.stack([(q * k.roll(n, 2)).sum(-1) for n in range(3)], -1) * 8**-0.5
    place = torch.arange(size)[:, None] - torch.arange(3)
    weights = scores.masked_fill(place < 0, -torch.inf).softmax(-1)
    want = sum(weights[..., n, None] * v.roll(n, 2) for n in range(3))
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
    d_o = randn(*o.shape, seed=5)
    for mine, exact in zip(
        torch.autograd.grad(o, (q, k, v), d_o), torch.autograd.grad(want, (q, k, v), d_o), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ALL)
def test_b80_a_mask_tensor_of_more_than_31_bits(backend: str):
    """Batch entries of a mask so far apart that the offset of the last one passes 2 ** 31 elements."""
    far = 2**30
    storage = torch.empty(3 * far + 64, dtype=torch.bool)
    visible = storage.as_strided((4, 1, 8, 8), (far, 64, 8, 1))
    visible.copy_(torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)) > 0.4)
    q, k, v = (randn(4, 2, 8, 16, seed=n) for n in range(3))
    o = attn_engine.attention(q, k, v, mask_mod=masks.from_tensor(visible), backend=backend)
    near = visible.clone().contiguous()
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near.expand(4, 2, 8, 8)).nan_to_num(0.0)
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
