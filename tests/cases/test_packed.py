"""Packed sequences: short ones, empty ones, tails inside of blocks, tokens past the end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attn_engine
from attn_engine import library
from tests.support.compare import leaf, randn
from tests.support.engines import ALL, SMALL, blocks, poisoned_memory

Lengths = tuple[int, ...]


def offsets(lengths: Lengths) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def case(q_lens: Lengths, k_lens: Lengths, heads: tuple[int, int], d: int, past: int = 0) -> list[Tensor]:
    (h, hkv), sq, skv = heads, sum(q_lens) + past, sum(k_lens) + past
    shapes = [(1, h, sq, d), (1, hkv, skv, d), (1, hkv, skv, d)]
    return [randn(*shape, seed=n) for n, shape in enumerate(shapes)]


def found(tensors: list[Tensor], q_lens: Lengths, k_lens: Lengths, causal: bool, backend: str) -> list[Tensor]:
    """o, dq, dk and dv for the loss sum(o * weight), in poisoned memory."""
    leaves = [leaf(t) for t in tensors]
    attend = attn_engine.compile(mask_mod=library.causal if causal else None, backend=backend)
    with poisoned_memory(), blocks(SMALL):
        o = attend(*leaves, cu_seqlens_q=offsets(q_lens), cu_seqlens_k=offsets(k_lens))
        return [o.detach(), *torch.autograd.grad(o, leaves, randn(*o.shape, seed=9))]


def right(tensors: list[Tensor], q_lens: Lengths, k_lens: Lengths, causal: bool) -> list[Tensor]:
    """Each sequence apart, densely, in float64; tokens past the end give and get 0."""
    q, k, v = leaves = [leaf(t, torch.float64) for t in tensors]
    group, o = q.shape[1] // k.shape[1], torch.zeros(q.shape, dtype=torch.float64)
    for (i, m), (j, n) in zip(_spans(q_lens), _spans(k_lens), strict=True):
        if m and n:
            keys, values = (t[:, :, j : j + n].repeat_interleave(group, 1) for t in (k, v))
            s = q[:, :, i : i + m] @ keys.mT / q.shape[3] ** 0.5
            hidden = torch.arange(m)[:, None] < torch.arange(n) if causal else torch.zeros(m, n, dtype=torch.bool)
            part = s.masked_fill(hidden, -torch.inf).softmax(-1) @ values
            o = torch.cat([o[:, :, :i], part, o[:, :, i + m :]], 2)
    grads = torch.autograd.grad(o, leaves, randn(*o.shape, seed=9).double(), allow_unused=True)
    return [o.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True))]


def _spans(lengths: Lengths) -> list[tuple[int, int]]:
    return list(zip(offsets(lengths).tolist(), lengths, strict=False))


def check(q_lens: Lengths, k_lens: Lengths, heads: tuple[int, int], d: int, causal: bool, backend: str) -> list[Tensor]:
    tensors = case(q_lens, k_lens, heads, d)
    got = found(tensors, q_lens, k_lens, causal, backend)
    for mine, exact in zip(got, right(tensors, q_lens, k_lens, causal), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)
    return got


def test_b19_valid_tokens_of_64():
    """Of every 64 tokens 16 to 64 are real: sequences end inside of blocks, in the backward too."""
    lengths = (16, 64, 33, 48, 17, 63)
    check(lengths, lengths, (4, 4), 32, False, "cpu")


@pytest.mark.parametrize("backend", ALL)
def test_b28_sequences_of_one_token(backend: str):
    count = 64 if backend == "cpu" else 20
    check((1,) * count, (1,) * count, (1, 1), 16, False, backend)


def test_b31_keys_of_length_1():
    """Every query has one key or none: no gradient of q, but for the rounding of two equal products."""
    o, dq, _, _ = check((76, 34, 146), (1, 1, 1), (1, 1), 32, True, "cpu")
    assert o[:, :, 0].abs().max() > 0
    assert dq.abs().max() < 1e-5


@pytest.mark.parametrize("backend", ALL)
def test_b41_empty_sequences_and_single_queries(backend: str):
    o, *_ = check((0, 1, 0, 1), (0, 3, 0, 5), (9, 3), 16, True, backend)
    assert o.shape == (1, 9, 2, 16)


@pytest.mark.parametrize("backend", ALL)
def test_b44_tokens_past_the_last_offset(backend: str):
    """Two tokens more than the offsets say: their gradients are written, as 0."""
    lengths = (14, 28, 31)
    tensors = case(lengths, lengths, (2, 2), 16, past=2)
    got, want = found(tensors, lengths, lengths, True, backend), right(tensors, lengths, lengths, True)
    for mine, exact in zip(got, want, strict=True):
        assert (mine[:, :, -2:] == 0).all()
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


def test_b112_packed_sequences_in_a_batch_are_refused():
    q = randn(2, 1, 8, 16)
    with pytest.raises(attn_engine.errors.SequenceBoundsError, match="batch size is 2"):
        attn_engine.attention(q, q, q, cu_seqlens_q=offsets((4, 4)))
