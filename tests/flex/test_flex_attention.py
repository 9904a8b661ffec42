"""`flex_attention`: torch's signature, torch's and our own block masks, options, and what is refused."""

from __future__ import annotations

import inspect
import warnings
from functools import partial

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import attn_engine
from attn_engine import errors, masks
from attn_engine.flex import AuxOutput, AuxRequest, and_masks, create_block_mask, create_mask, flex_attention, or_masks
from attn_engine.runtime import block_mask
from attn_engine.runtime.block_mask import by_table, listed_states, mask_of
from attn_engine.runtime.kernel_options import read_kernel_options
from tests.support.engines import SMALL


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def near(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 6


def qkv(sq: int = 40, skv: int = 40, kv_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, sq, 16), (2, kv_heads, skv, 16), (2, kv_heads, skv, 8)]
    return [torch.randn(s, generator=generator) for s in shapes]


def dense(q, k, v, visible, scale=None):
    scores = (q.double() @ k.double().mT) * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v.double(), scores.logsumexp(-1), scores.amax(-1)


TRIANGLE = torch.ones(40, 40, dtype=torch.bool).tril()


def theirs(mask_mod, sizes=(None, None, 40, 40), block=16) -> torch_flex.BlockMask:
    return torch_flex.create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=block)


@pytest.mark.parametrize("create", [theirs, lambda m: create_block_mask(m, None, None, 40, 40)])
def test_results_come_as_torch_gives_them(create):
    q, k, v = qkv()
    mask = create(causal)
    o, lse, largest = dense(q, k, v, TRIANGLE)
    plain = flex_attention(q, k, v, None, mask)
    assert isinstance(plain, torch.Tensor)
    torch.testing.assert_close(plain.double(), o, rtol=1e-5, atol=1e-5)
    _, second = flex_attention(q, k, v, block_mask=mask, return_lse=True)
    torch.testing.assert_close(second.double(), lse, rtol=1e-5, atol=1e-5)
    for request in (AuxRequest(), AuxRequest(lse=True), AuxRequest(max_scores=True), AuxRequest(True, True)):
        _, aux = flex_attention(q, k, v, block_mask=mask, return_aux=request)
        assert isinstance(aux, AuxOutput)
        assert (aux.lse is not None, aux.max_scores is not None) == tuple(request)
        if aux.lse is not None:
            torch.testing.assert_close(aux.lse.double(), lse, rtol=1e-5, atol=1e-5)
        if aux.max_scores is not None:
            torch.testing.assert_close(aux.max_scores.double(), largest, rtol=1e-5, atol=1e-5)


def test_the_largest_score_costs_no_gradient_and_the_lse_has_one():
    q, k, v = (t.requires_grad_() for t in qkv())
    _, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True))
    assert not aux.max_scores.requires_grad
    (dq,) = torch.autograd.grad(aux.lse.sum(), q)
    (want,) = torch.autograd.grad((q @ k.mT * 0.25).logsumexp(-1).sum(), q)
    torch.testing.assert_close(dq, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", ["batch", "head"])
def test_a_table_for_any_batch_and_head_decides_for_all_of_them(axis: str):
    """It was made of the first: where the function shows others more, they see what the table shows, as in torch's kernels."""
    q, k, v = qkv()
    shift = 30 * torch.arange(2)

    def mask_mod(b, h, i, j):
        return i + shift[b if axis == "batch" else h] >= j

    visible = TRIANGLE.expand(2, 2, 40, 40).clone()
    place, blocks = torch.arange(40), torch.arange(40) // 16
    later = (place[:, None] + 30 >= place) & (blocks[:, None] >= blocks)
    later |= blocks[:, None] > blocks
    visible[(1,) if axis == "batch" else (slice(None), 1)] = later
    mask = torch_flex.create_block_mask(mask_mod, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    for _ in range(2):
        o = flex_attention(q, k, v, block_mask=mask)
        torch.testing.assert_close(o.double(), dense(q, k, v, visible)[0], rtol=1e-5, atol=1e-5)
        assert mask_of(mask, 2, 2) is mask_of(mask, 2, 2)
        alone = flex_attention(q[:1, :1], k[:1, :1], v[:1, :1], block_mask=mask)
        torch.testing.assert_close(alone, o[:1, :1])
        assert mask_of(mask, 1, 1) is mask_mod


def test_a_table_that_is_written_into_is_read_again():
    q, k, v = qkv()
    numbers, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 3, dtype=torch.int32)
    mask = torch_flex.BlockMask.from_kv_blocks(numbers, indices, BLOCK_SIZE=16, seq_lengths=(40, 40))
    for first in (0, 1):
        mask.kv_indices.fill_(first)
        visible = torch.zeros(40, 40, dtype=torch.bool)
        visible[:, 16 * first : 16 * first + 16] = True
        o = flex_attention(q, k, v, block_mask=mask)
        torch.testing.assert_close(o.double(), dense(q, k, v, visible)[0], rtol=1e-5, atol=1e-5)
    assert mask_of(mask) is mask_of(mask)


def test_keys_of_a_batch_of_one_are_those_of_every_batch():
    """As in torch only with a mask for each batch: pages, for one, which differ in which of them a batch reads."""
    q, k, v = (x.clone().requires_grad_() for x in qkv())
    one = [x[:1].detach().requires_grad_() for x in (k, v)]
    mask = theirs(lambda b, h, i, j: (i >= j) & (j >= b), (2, None, 40, 40))
    o = flex_attention(q, *one, block_mask=mask)
    want = flex_attention(q, *(x.expand(2, -1, -1, -1) for x in one), block_mask=mask)
    assert torch.equal(o, want)
    plain = torch_flex.flex_attention(*(x.detach() for x in (q, *one)), block_mask=mask)
    torch.testing.assert_close(o.detach(), plain)
    got, right = (torch.autograd.grad(x.square().sum(), [q, *one]) for x in (o, want))
    assert all(map(torch.equal, got, right))
    for keys, values, other in ((one[0], v, mask), (*one, theirs(causal)), (*one, None)):
        with pytest.raises(errors.BatchError):
            flex_attention(q, keys, values, block_mask=other)


@pytest.mark.parametrize(("combined", "visible"), [(and_masks(), True), (or_masks(), False)])
def test_of_no_masks(combined, visible):
    q, k, v = qkv()
    o = flex_attention(q, k, v, block_mask=create_block_mask(combined, None, None, 40, 40))
    want = dense(q, k, v, torch.ones(40, 40, dtype=torch.bool))[0] if visible else torch.zeros_like(o).double()
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=1e-5)


def test_scale_score_function_and_grouped_heads():
    q, k, v = qkv(kv_heads=1)
    o = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * 0.1, scale=0.5, enable_gqa=True)
    place = torch.arange(40)
    bias = (place[:, None] - place) * 0.1
    want = ((q @ k.mT) * 0.5 + bias).softmax(-1) @ v
    torch.testing.assert_close(o, want, rtol=1e-5, atol=1e-5)


def test_a_table_that_the_function_does_not_give_decides():
    """Blocks by hand: the second block of keys is full for the last queries, the first hidden."""
    q, k, v = qkv()
    numbers = torch.tensor([[[1, 1, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 0, 0], [1, 0, 0], [0, 0, 0]]]], dtype=torch.int32)
    full = torch.tensor([[[0, 0, 1]]], dtype=torch.int32), torch.tensor([[[[0] * 3, [0] * 3, [1, 0, 0]]]]).int()
    mask = torch_flex.BlockMask.from_kv_blocks(
        numbers, indices, *full, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(40, 40)
    )
    visible = torch.zeros(40, 40, dtype=torch.bool)
    visible[:16, :16] = TRIANGLE[:16, :16]
    visible[16:32, 16:32] = TRIANGLE[16:32, 16:32]
    visible[32:, 16:32] = True
    assert listed_states(mask).tolist() == [[[[1, 0, 0], [0, 1, 0], [0, 2, 0]]]]
    o = flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(o.double(), dense(q, k, v, visible)[0], rtol=1e-5, atol=1e-5)
    assert mask_of(mask) is not causal


def test_a_table_without_a_function_and_one_too_large_to_compare(monkeypatch: pytest.MonkeyPatch):
    q, k, v = qkv()
    numbers, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 3, dtype=torch.int32)
    first = torch_flex.BlockMask.from_kv_blocks(numbers, indices, BLOCK_SIZE=16, seq_lengths=(40, 40))
    visible = torch.zeros(40, 40, dtype=torch.bool)
    visible[:, :16] = True
    o = flex_attention(q, k, v, block_mask=first)
    torch.testing.assert_close(o.double(), dense(q, k, v, visible)[0], rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(block_mask, "MOST_CHECKED", 1)
    read = theirs(causal)
    o = flex_attention(q, k, v, block_mask=read)
    assert mask_of(read) is not causal
    torch.testing.assert_close(o.double(), dense(q, k, v, TRIANGLE)[0], rtol=1e-5, atol=1e-5)


def test_masks_that_hide_nothing_and_combinations():
    assert mask_of(theirs(torch_flex.noop_mask)) is None
    q, k, v = qkv()
    band = TRIANGLE & TRIANGLE.roll(0) & ((torch.arange(40)[:, None] - torch.arange(40)) < 6)
    for both in (and_masks, torch_flex.and_masks):
        o = flex_attention(q, k, v, block_mask=theirs(both(causal, near)))
        torch.testing.assert_close(o.double(), dense(q, k, v, band)[0], rtol=1e-5, atol=1e-5)
    either = TRIANGLE | ((torch.arange(40)[:, None] - torch.arange(40)).abs() < 6)
    for some in (or_masks, torch_flex.or_masks):
        o = flex_attention(q, k, v, block_mask=theirs(some(causal, near)))
        torch.testing.assert_close(o.double(), dense(q, k, v, either)[0], rtol=1e-5, atol=1e-5)


def test_our_block_masks_agree_with_torch_on_every_block():
    for lengths, block in (((40, 40), 16), ((33, 50), (16, 32)), ((16, 16), 16)):
        ours = create_block_mask(near, 2, None, *lengths, BLOCK_SIZE=block)
        other = theirs(near, (2, None, *lengths), block)
        assert ours.shape == other.shape
        assert torch.equal(ours.to_dense().int(), other.to_dense())
        full = listed_states(other) == 2
        assert bool((ours.states()[full] == 2).all())
    assert create_block_mask(causal, None, None, 40, 40, BLOCK_SIZE=16).sparsity() == pytest.approx(100 / 3)
    assert "sparsity=0.00%" in str(ours)


def test_tables_are_read_by_batch_and_head():
    states = torch.tensor([[[[0]], [[2]]], [[[2]], [[0]]]], dtype=torch.int8)
    q, k, v = (t[:, :, :8] for t in qkv())
    mask = create_block_mask(by_table(None, states, (16, 16)), 2, 2, 8, 8)
    o = flex_attention(q, k, v, block_mask=mask)
    assert bool((o[0, 0] == 0).all()) and bool((o[1, 1] == 0).all())
    torch.testing.assert_close(o[0, 1], ((q @ k.mT) * 0.25).softmax(-1)[0, 1] @ v[0, 1], rtol=1e-5, atol=1e-5)


def test_options_edit_the_schedule():
    options = read_kernel_options(
        {"BLOCK_M": 64, "fwd_BLOCK_N": 32, "bwd_BLOCK_M1": 16, "BLOCK_N2": 128, "num_warps": 2, "bwd_num_stages": 3}
        | {"PRESCALE_QK": True, "WRITE_DQ": False, "USE_TMA": True, "BACKEND": "TRITON"}
    )
    edited = options.apply(SMALL)
    assert tuple(edited.forward) == (64, 32, 2, 1)
    assert tuple(edited.dq) == (32, 128, 2, 3)
    assert tuple(edited.dkdv) == (16, 32, 2, 3)
    assert options.backend == "triton"
    assert read_kernel_options({"bwd_BLOCK_M": 64}).apply(SMALL).dq.block_m == 64
    q, k, v = qkv()
    o = flex_attention(q, k, v, kernel_options={"BLOCK_M": 16, "BLOCK_N": 16})
    torch.testing.assert_close(o, flex_attention(q, k, v), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"BLOCK_Q": 64}, "unknown"),
        ({"kpack": 2}, "unknown"),
        ({"BLOCK_M": 48}, "power of two"),
        ({"BLOCK_N": 8}, "power of two"),
        ({"num_warps": 0}, "positive"),
        ({"num_stages": True}, "positive"),
        ({"BACKEND": "FLASH"}, "AUTO"),
        ({"USE_TMA": 3}, "neither True nor False"),
    ],
)
def test_options_that_do_not_exist(options, fragment):
    with pytest.raises(errors.KernelOptionError, match=fragment):
        flex_attention(*qkv(), kernel_options=options)


def test_wrong_sizes_and_types():
    q, k, v = qkv()
    with pytest.raises(errors.BlockMaskError, match="create_block_mask"):
        flex_attention(q, k, v, block_mask=causal)
    for sizes in ((None, None, 41, 40), (None, None, 40, 48), (3, None, 40, 40), (None, 4, 40, 40)):
        for mask in (theirs(causal, sizes), create_block_mask(causal, *sizes)):
            with pytest.raises(errors.BlockMaskError, match="block_mask"):
                flex_attention(q, k, v, block_mask=mask)
    with pytest.raises(errors.HeadCountError, match="enable_gqa"):
        flex_attention(*qkv(kv_heads=1))
    with pytest.raises(errors.ArgumentError, match="exclude"):
        flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True))
    with pytest.raises(errors.BlockMaskError, match="positive"):
        create_block_mask(causal, None, None, 8, 8, BLOCK_SIZE=0)
    with pytest.raises(errors.BlockMaskError, match="function"):
        create_block_mask(torch.ones(2), None, None, 8, 8)


def test_the_same_functions_compile_once():
    from tests.support.engines import counted_compilations

    q, k, v = qkv()
    table = torch.arange(40)
    with counted_compilations() as count:
        for shift in (0, 1, 2):
            moved = table + shift

            def mask_mod(b, h, q_idx, kv_idx, moved=moved):
                return moved[q_idx] >= kv_idx

            for create in (theirs, lambda m: create_block_mask(m, None, None, 40, 40)):
                o = flex_attention(q, k, v, block_mask=create(torch_flex.and_masks(mask_mod, near)))
                place = torch.arange(40)
                visible = (moved[:, None] >= place) & ((place[:, None] - place).abs() < 6)
                torch.testing.assert_close(o.double(), dense(q, k, v, visible)[0], rtol=1e-5, atol=1e-5)
    assert count() == 1


def test_public_names():
    assert attn_engine.flex_attention is flex_attention
    assert attn_engine.flex.create_block_mask is create_block_mask


@pytest.mark.parametrize("name", torch_flex.__all__)
def test_every_name_of_torch_is_here_with_its_parameters(name: str):
    ours, theirs = getattr(attn_engine.flex, name), getattr(torch_flex, name)
    if inspect.isfunction(theirs):
        wanted = inspect.signature(theirs).parameters
        found = list(inspect.signature(ours).parameters.values())[: len(wanted)]
        if not any(p.kind is p.VAR_POSITIONAL for p in found):
            assert [(p.name, p.kind) for p in found] == [(p.name, p.kind) for p in wanted.values()]


def test_how_torch_makes_its_table_is_not_read():
    q, k, v = qkv()
    mask = create_block_mask(causal, None, None, 40, 40, "cpu", 16, _compile=True, separate_full_blocks=False)
    o = flex_attention(q, k, v, block_mask=mask.to(torch.device("cpu")))
    torch.testing.assert_close(o.double(), dense(q, k, v, TRIANGLE)[0], rtol=1e-5, atol=1e-5)
    assert mask.numel() == theirs(causal).numel() == 1600
    with pytest.raises(errors.BlockMaskError, match="q \\+ first"):
        mask[:, :, 0]


def test_masks_as_tensors():
    assert create_mask(causal, None, None, 40, 40).tolist() == [[TRIANGLE.tolist()]]
    last = create_mask(masks.causal(bottom_right=True), 1, 1, 8, 40)
    assert last.tolist() == [[TRIANGLE[32:].tolist()]]
    scores = create_mask(lambda s, b, h, i, j: torch.where(i >= j, s, -torch.inf), 1, 1, 40, 40)
    assert scores.tolist() == [[TRIANGLE.tolist()]]


def padded(b, h, q_idx, kv_idx, lengths):
    return (q_idx < lengths[b]) & (kv_idx < lengths[b])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_by_their_users(dynamic: bool):
    """As models do it: torch.compile of the functions themselves, with a mask that is made anew in each call."""
    attend, create = (
        torch.compile(f, backend="eager", dynamic=dynamic) for f in (flex_attention, attn_engine.flex.create_block_mask)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for lengths in (torch.tensor([7, 40]), torch.tensor([40, 0])):
            q, k, v = qkv()
            mask_mod = partial(padded, lengths=lengths)
            o = attend(q, k, v, block_mask=create(mask_mod, 2, None, 40, 40))
            visible = create_mask(mask_mod, 2, 1, 40, 40)
            torch.testing.assert_close(o.double(), dense(q, k, v, visible)[0], rtol=1e-5, atol=1e-5)
