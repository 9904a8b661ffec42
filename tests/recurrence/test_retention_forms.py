"""Retention in three forms on the same inputs: in parallel by a mask of decays, in chunks, and token by token."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import attn_engine
from attn_engine.compat.attention_autotuner import RetNetAttnFunc
from attn_engine.compat.fla import chunk_retention
from attn_engine.errors import AttnEngineError
from attn_engine.library_recurrence import retention_decay
from tests.recurrence.support import assert_near, reference


def operands(tokens=70, heads=2, size=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, tokens, n, generator=generator) for n in (16, 16, 24))
    return size * q, k, v


def decays(tokens, heads):
    """D_ij = gamma^(i - j), 0 for later keys."""
    place = torch.arange(tokens)
    distance = (place[:, None] - place).clamp(min=0)
    return (torch.exp(retention_decay(heads)[:, None, None] * distance) * (place[:, None] >= place))[None]


def dense(q, k, v, mask):
    s = q @ k.mT * mask
    return s / s.abs().sum(-1, keepdim=True).clamp(min=1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
def test_all_three_are_the_same_where_no_row_is_divided(tokens, causal):
    q, k, v = operands(tokens, size=1e-3)
    heads_last = [x.transpose(1, 2) for x in (q, k, v)]
    assert (q @ k.mT * decays(tokens, 2)).abs().sum(-1).max() < 1
    parallel = RetNetAttnFunc(q, k, v, decays(tokens, 2), "cpu", causal).transpose(1, 2)
    chunked, _ = chunk_retention(*heads_last, scale=1.0)
    state, steps = torch.zeros(1, 2, 16, 24), []
    for t in range(tokens):
        one = (x[:, t : t + 1] for x in heads_last)
        steps.append(attn_engine.recurrence_step(*one, state=state, decay=retention_decay(2), scale=1.0))
    right, final = reference(*(x.double() for x in heads_last), decay=retention_decay(2).double(), scale=1.0)
    for name, form in (("parallel", parallel), ("chunked", chunked), ("recurrent", torch.cat(steps, 1))):
        assert_near(name, 1e3 * form, 1e3 * right)
    assert_near("state", state, final)


@pytest.mark.parametrize("shape", [(1, 2), (1, 1)])
def test_the_parallel_form_trains_its_mask(shape):
    given = [x.requires_grad_() for x in operands()]
    mask = decays(70, 2)[:, : shape[1]].clone().requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in (*given, mask)]
    o, right = RetNetAttnFunc(*given, mask), dense(*wide)
    assert_near("o", o.detach(), right.detach())
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(3))
    found = torch.autograd.grad(o, [*given, mask], d_o)
    for name, got, want in zip(
        ("q", "k", "v", "mask"), found, torch.autograd.grad(right, wide, d_o.double()), strict=True
    ):
        assert_near(f"d_{name}", got, want)


@pytest.mark.parametrize("shape", [(1, 3, 70, 70), (1, 2, 70, 60), (70, 70)])
def test_a_mask_of_other_tensors_is_refused(shape):
    with pytest.raises(AttnEngineError, match="mask"):
        RetNetAttnFunc(*operands(), torch.ones(shape))


def test_masks_of_earlier_calls_are_not_kept():
    q, masks = torch.randn(1, 2, 16, 16), list[weakref.ref[torch.Tensor]]()
    for _ in range(2):
        mask = torch.rand(1, 2, 16, 16)
        masks.append(weakref.ref(mask))
        RetNetAttnFunc(q, q, q, mask)
        del mask
    gc.collect()
    assert all(kept() is None for kept in masks)
