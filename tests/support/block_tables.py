"""Attentions whose masks keep tables of blocks, on a backend: what they skip is never read, and nothing visible is skipped."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import attn_engine
from attn_engine.ir.schedule import Schedule
from tests.support.engines import blocks

TOLERANCE = {torch.float32: (1e-4, 1e-5), torch.float16: (2e-2, 2e-2)}
"""Relative and absolute, of results and gradients of which some are near 100."""


def documents(size: int, count: int, seed: int) -> Tensor:
    """Sorted ids."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, count, (size,), generator=g).sort().values


def reference(queries: Tensor, keys: Tensor, causal: bool = False, first: int = 0) -> Callable[..., Tensor]:
    """Same document, or one of the first keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = (queries[:, None] == keys[None]) | (torch.arange(len(keys)) < first)
        visible = visible.tril() if causal else visible
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    return attend


def gradients(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    o = attend(*leaves)
    weight = (torch.arange(o.numel()).reshape(o.shape) % 7 - 3.0).to(o.dtype)
    return [o, *torch.autograd.grad((o * weight).sum(), leaves)]


def agree(got: list[Tensor], want: list[Tensor]) -> None:
    for x, y in zip(got, want, strict=True):
        rtol, atol = TOLERANCE[x.dtype]
        torch.testing.assert_close(x.float(), y.float(), rtol=rtol, atol=atol)


def check_skipped(
    backend: str,
    schedule: Schedule,
    block: int = 32,
    first: int = 0,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
) -> None:
    """NaN in the keys and values of blocks that no query sees; `block` is as long as the longest block.

    With `first` keys for all, there are two runs of blocks, and what is between them is skipped.
    """
    queries = torch.tensor([1, 3]).repeat_interleave(block)
    keys = torch.arange(5).repeat_interleave(block)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, 16, generator=g).to(dtype) for n in (len(queries), len(keys), len(keys)))
    dead = ~torch.isin(keys, queries) & (torch.arange(len(keys)) >= block * bool(first))
    poisoned = [t.masked_fill(dead[:, None], float("nan")) for t in (k, v)]
    clean = [t.float().masked_fill(dead[:, None], 0.0) for t in (k, v)]

    def mask(b, h, i, j):
        same = queries[i] == keys[j]
        return same | (j < first) if first else same

    with blocks(schedule):
        got = gradients(q, *poisoned, attn_engine.compile(mask_mod=mask, backend=backend))
    agree(got, gradients(q.float(), *clean, reference(queries, keys, first=first)))


def check_documents(
    backend: str,
    schedule: Schedule,
    size: int,
    first: int = 0,
    heads: tuple[int, int] = (4, 2),
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Causal documents of any lengths, where all may see the first keys, too."""
    ids = documents(size, 4, 11)
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(batch, h, size, 16, generator=g).to(dtype) for h in (heads[0], heads[1], heads[1]))

    def mask(b, h, i, j):
        same = ids[i] == ids[j]
        return ((same | (j < first)) if first else same) & (i >= j)

    with blocks(schedule):
        got = gradients(q, k, v, attn_engine.compile(mask_mod=mask, backend=backend))
    agree(got, gradients(q.float(), k.float(), v.float(), reference(ids, ids, causal=True, first=first)))
