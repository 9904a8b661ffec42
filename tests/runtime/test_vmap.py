"""torch.vmap over an attention: the same as the attention of each element, with captures mapped or shared."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.runtime.layouts import in_blocks


def operands(*lead: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*lead, 2, 4, 40, 16) for _ in range(3)]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attn_engine.attention(q, k, v, mask_mod=library.causal)


@pytest.mark.parametrize("axis", [0, 2, 4])
def test_any_axis(axis: int):
    q, k, v = operands(3)
    mapped = torch.vmap(causal, in_dims=axis)(*(x.movedim(0, axis) for x in (q, k, v)))
    assert torch.equal(mapped, torch.stack([causal(*one) for one in zip(q, k, v, strict=True)]))


def test_an_axis_without_elements():
    q, k, v = operands(0)
    slopes = torch.rand(0, 4, requires_grad=True)
    mapped = torch.vmap(lambda own, *qkv: attn_engine.attention(*qkv, score_mod=library.alibi(own)))(slopes, q, k, v)
    assert mapped.shape == q.shape
    assert torch.autograd.grad(mapped.sum(), slopes)[0].shape == slopes.shape


def test_an_operand_that_all_share():
    q, k, v = operands(3)
    mapped = torch.vmap(causal, in_dims=(0, None, None))(q, k[0], v[0])
    assert torch.equal(mapped, torch.stack([causal(one, k[0], v[0]) for one in q]))


def test_mapped_captures_and_their_gradients():
    """The mapped axis is not the batch: what a function sees as b goes from 0 for every element."""
    q, k, v = operands(3)
    slopes = torch.rand(3, 2, requires_grad=True)

    def scaled(slopes: torch.Tensor, *qkv: torch.Tensor) -> torch.Tensor:
        return attn_engine.attention(*qkv, score_mod=lambda s, b, h, q_idx, kv_idx: s * slopes[b])

    one_by_one = torch.stack([scaled(*each) for each in zip(slopes, q, k, v, strict=True)])
    (wanted,) = torch.autograd.grad(one_by_one.square().sum(), slopes)
    mapped = torch.vmap(scaled)(slopes, q, k, v)
    (found,) = torch.autograd.grad(mapped.square().sum(), slopes)
    assert torch.equal(mapped, one_by_one)
    assert torch.allclose(found, wanted)


def test_a_tensor_without_storage_is_asked_for_no_address():
    found = []
    torch.vmap(lambda x: (found.append(in_blocks([x])), x)[1])(torch.randn(2, 8, 16))
    assert found == [True]
