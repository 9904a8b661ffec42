"""Every mask and score function of attn-gym, unchanged, forward and backward, against dense attention in float64.

The dense side evaluates the package's functions on plain 0-d indices, through torch.vmap: no code of ours.
`GYM` names all generators of `attn_gym.masks` and `attn_gym.mods`; docs/attn_gym.md is generated from it.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_create

import attn_engine
from attn_engine.flex import AuxRequest, create_block_mask, flex_attention
from attn_engine.runtime.block_mask import mask_of
from tests.flex.gym import EXCEPTIONS, GYM, PAGE, UNMASKED, Case, covered, dense, generators, page
from tests.support.engines import INTERPRETED, SMALL, blocks

pytest.importorskip("attn_gym")


def leaves(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    (sq, skv), shapes = case.lengths, ((2, 4), (2, 4), (2, 4))
    sizes = [(*shape, n, d) for shape, n, d in zip(shapes, (sq, skv, skv), (16, 16, 8), strict=True)]
    return [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("name", GYM)
def test_forward_and_backward_equal_the_dense_reference(name: str):
    case = GYM[name]()
    q, k, v = leaves(case, torch.float32)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    mask = None
    if case.mask_mod is not None:
        mask = create_block_mask(case.mask_mod, None, None, *case.lengths)
    o, aux = flex_attention(
        q, k, v, score_mod=case.score_mod, block_mask=mask, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    want = dense(*exact, case)
    for got, right in zip((o, aux.lse, aux.max_scores), want, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=2e-5, atol=2e-5)
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(4))
    got = torch.autograd.grad(o, [q, k, v, *case.parameters], d_o)
    right = torch.autograd.grad(want[0], [*exact, *case.parameters], d_o.double())
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["latent attention, rotary part", "video sparse attention"])
def test_triton_text_of_vectors_of_captures(name: str):
    case = GYM[name]()
    q, k, v = leaves(case, torch.float32)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = dense(*exact, case)[0]
    with blocks(SMALL):
        attend = attn_engine.compile(score_mod=case.score_mod, mask_mod=case.mask_mod, backend=INTERPRETED)
        o = attend(q, k, v)
        got = torch.autograd.grad(o.sum(), [q, k, v, *case.parameters])
    torch.testing.assert_close(o.double(), want, rtol=2e-5, atol=2e-5)
    right = torch.autograd.grad(want.sum(), [*exact, *case.parameters])
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [n for n in GYM if n not in UNMASKED])
def test_torch_block_masks_of_them_mean_the_same(name: str):
    case = GYM[name]()
    theirs = torch_create(case.mask_mod, None, None, *case.lengths, device="cpu", BLOCK_SIZE=16)
    ours = create_block_mask(case.mask_mod, None, None, *case.lengths, BLOCK_SIZE=16)
    assert torch.equal(theirs.to_dense(), ours.to_dense().to(torch.int32))
    assert mask_of(theirs) is case.mask_mod


@pytest.mark.parametrize("separate", [True, False])
def test_the_causal_block_mask_made_without_evaluation(separate: bool):
    from attn_gym.masks.causal import causal_mask, create_causal_block_mask_fast

    mask = create_causal_block_mask_fast(None, None, 48, 48, device="cpu", block_size=16, separate_full_blocks=separate)
    assert mask_of(mask) is causal_mask


@pytest.mark.parametrize("sizes", [None, [8, 8, 5, 8, 8, 3]])
def test_block_masks_whose_table_says_what_the_function_does_not(sizes: list[int] | None):
    """Video sparse attention: which tiles were selected stands in the table only."""
    from attn_gym.masks import create_vsa_block_mask

    generator = torch.Generator().manual_seed(1)
    selected = torch.rand((2, 4, 6, 6), generator=generator).argsort(-1)[..., :3].to(torch.int32)
    mask = create_vsa_block_mask(selected, 8, 6, None if sizes is None else torch.tensor(sizes))
    visible = torch.zeros(2, 4, 48, 48, dtype=torch.bool)
    for b, h, tile, rank in torch.cartesian_prod(*map(torch.arange, (2, 4, 6, 3))).tolist():
        first = 8 * int(selected[b, h, tile, rank])
        visible[b, h, 8 * tile : 8 * tile + 8, first : first + (8 if sizes is None else sizes[first // 8])] = True
    q, k, v = (torch.randn((2, 4, 48, 16), generator=generator).requires_grad_() for _ in range(3))
    o = flex_attention(q, k, v, block_mask=mask)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)
    for got, right in zip(*(torch.autograd.grad(x.square().sum(), [q, k, v]) for x in (o, want)), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_are_refused_with_their_reason(name: str):
    make, error, reason = EXCEPTIONS[name]
    q = torch.randn(1, 1, 16, 16)
    with pytest.raises(error) as caught:
        flex_attention(q, q, q, score_mod=make())
    assert reason in str(caught.value)


def test_no_generator_is_forgotten():
    assert generators() == covered()


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "write it: python -m tests.flex.gym"
