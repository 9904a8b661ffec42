"""Torch's PagedAttention, whose masks and score functions go from places in pages to places in sequences."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.experimental._paged_attention import PagedAttention

from attn_engine.flex import AuxRequest, flex_attention

LENGTHS, PAGE, PAGES, DIM = (50, 33, 1), 16, 16, 8


def paged(kv_heads: int) -> tuple[PagedAttention, list[torch.Tensor], list[torch.Tensor]]:
    """The pages, what they hold, and the same as one sequence behind the other would have it [B, H, S, D]."""
    generator = torch.Generator().manual_seed(0)
    table = PagedAttention(n_pages=PAGES, page_size=PAGE, max_batch_size=3, device="cpu")
    plain = [torch.randn(3, kv_heads, 64, DIM, generator=generator) for _ in "kv"]
    caches = [torch.zeros(1, kv_heads, PAGES * PAGE, DIM) for _ in "kv"]
    for b, length in enumerate(LENGTHS):
        table.reserve(torch.tensor(b), torch.tensor(length))
        parts = [x[b : b + 1, :, :length] for x in plain]
        table.assign(torch.tensor([b]), torch.arange(length)[None], *parts, *caches)
    return table, caches, plain


@pytest.mark.parametrize(("heads", "queries"), [(2, 1), (4, 1), (2, 5)])
def test_keys_in_pages(heads: int, queries: int):
    table, caches, plain = paged(2)
    lengths = torch.tensor(LENGTHS)
    q = torch.randn(3, heads, queries, DIM, generator=torch.Generator().manual_seed(1))

    def near(score, b, h, i, j):
        return score - 0.1 * (lengths[b] - j)

    logical = torch_flex.create_block_mask(
        lambda b, h, i, j: j < lengths[b] - (queries - 1 - i), 3, None, queries, 64, device="cpu", BLOCK_SIZE=PAGE
    )
    mask, score = table.convert_logical_block_mask(logical), table.get_score_mod(near)
    o, aux = flex_attention(
        q, *caches, score_mod=score, block_mask=mask, enable_gqa=heads > 2, return_aux=AuxRequest(lse=True)
    )
    want, right = flex_attention(
        q, *plain, score_mod=near, block_mask=logical, enable_gqa=heads > 2, return_aux=AuxRequest(lse=True)
    )
    torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.lse, right.lse, rtol=1e-5, atol=1e-5)
    exact = torch_flex.flex_attention(q, *plain, score_mod=near, block_mask=logical, enable_gqa=heads > 2)
    torch.testing.assert_close(o, exact, rtol=1e-5, atol=1e-5)


def test_a_page_that_is_given_to_another_sequence():
    """Masks are made anew for what the pages hold now; functions read the tables at each call."""
    table, caches, plain = paged(2)
    q = torch.randn(3, 2, 1, DIM, generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor(LENGTHS)
    table.erase(torch.tensor([1]))
    table.reserve(torch.tensor(2), torch.tensor(33))
    parts = [x[2:3, :, :33] for x in plain]
    table.assign(torch.tensor([2]), torch.arange(33)[None], *parts, *caches)
    lengths[1], lengths[2] = 0, 33
    logical = torch_flex.create_block_mask(
        lambda b, h, i, j: j < lengths[b], 3, None, 1, 64, device="cpu", BLOCK_SIZE=PAGE
    )
    o = flex_attention(q, *caches, block_mask=table.convert_logical_block_mask(logical))
    torch.testing.assert_close(o, flex_attention(q, *plain, block_mask=logical), rtol=1e-5, atol=1e-5)
    assert not o[1].any()
