"""Masks: block masks and their sizes, floor division and modulo, precedence, per-batch lengths."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import AttentionEngine, create_block_mask, errors, library, meta_tensor
from tests.support.compare import check, leaf, qkv
from tests.support.engines import ALL, INTERPRETED, SMALL, counted_compilations


def masked(mask):
    return lambda **_: {"mask_mod": mask}


def engine(tensors, **options) -> AttentionEngine:
    meta = [meta_tensor(*t.shape, dtype=t.dtype) for t in tensors]
    d = tensors[0].shape[3]
    return AttentionEngine(meta, score_mod=lambda s, b, h, i, j: s * d**-0.5, layout="bhsd", **options)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize(("sq", "skv"), [(40, 70), (33, 65), (17, 31)])
def test_b10_a_block_cut_by_the_edge_is_partial(backend: str, sq: int, skv: int):
    """A mask that shows everything, lengths of every remainder: keys past the end stay out."""
    check(masked(lambda b, h, i, j: j >= 0), qkv(sq=sq, skv=skv), backend=backend, schedule=SMALL)


def test_b10_one_compilation_for_both_lengths():
    """(256, 257), then (101, 129), with one compiled object."""
    attend = attn_engine.compile(mask_mod=lambda b, h, i, j: (i >= j) | (j < 128))
    for sq, skv in ((256, 257), (101, 129)):
        q, k, v = qkv(sq=sq, skv=skv)
        visible = (torch.arange(sq)[:, None] >= torch.arange(skv)) | (torch.arange(skv) < 128)
        right = (q.double() @ k.double().mT / 4).masked_fill(~visible, float("-inf")).softmax(-1) @ v.double()
        torch.testing.assert_close(attend(q, k, v).double(), right, rtol=1e-4, atol=1e-5)


def test_b11_a_block_mask_of_other_lengths():
    blocks = create_block_mask(library.causal, 1, 1, 1024, 1024)
    with pytest.raises(errors.MaskSizeError, match="512"):
        engine(qkv(sq=512), block_mask=blocks)(*qkv(sq=512))


def test_b11_blocks_of_the_size_that_was_asked_for():
    """48 and 8 positions per block: no power of two, and less than a kernel's smallest block."""
    tensors = qkv(sq=100)
    blocks = create_block_mask(library.causal, 1, 1, 100, 100, Qblk=48, KVblk=8)
    o = engine(tensors, block_mask=blocks, mask_mod=library.causal)(*tensors)
    right = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in tensors), is_causal=True)
    torch.testing.assert_close(o.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("b", "h"), [(2, 1), (1, 3), (3, 2), (4, 3)])
def test_b13_batch_and_heads_of_a_block_mask(b: int, h: int):
    blocks = torch.ones(b, h, 1, 1, dtype=torch.int8)
    with pytest.raises(errors.MaskSizeError, match=r"must be 1 or"):
        engine(qkv(b=4, h=2, sq=128, d=64), block_mask=blocks)


@pytest.mark.parametrize(("b", "h"), [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_b13_a_block_mask_is_broadcast(b: int, h: int):
    tensors = qkv(b=4, h=2, sq=130)
    blocks = torch.rand(b, h, 3, 3, generator=torch.Generator().manual_seed(1)).gt(0.4)
    blocks[..., 0] = True
    wide = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :130, :130]
    q, k, v = (t.double() for t in tensors)
    right = (q @ k.mT / 4).masked_fill(~wide, float("-inf")).softmax(-1) @ v
    o = engine(tensors, block_mask=blocks.to(torch.int8))(*tensors)
    torch.testing.assert_close(o.double(), right, rtol=1e-4, atol=1e-5)


def test_b14_a_mask_with_an_offset_in_decoding():
    """Each step of a causal sequence: its own mask, equal to the row of the whole; one compilation."""
    offset = torch.zeros((), dtype=torch.int64)
    q, k, v = qkv(b=2, sq=20)
    whole = attn_engine.attention(q, k, v, mask_mod=library.causal)
    attend = attn_engine.compile(mask_mod=lambda b, h, i, j: i + offset >= j)
    with counted_compilations() as count:
        for step in range(20):
            offset.fill_(step)
            one = attend(q[:, :, step : step + 1], k, v)
            torch.testing.assert_close(one, whole[:, :, step : step + 1], rtol=1e-4, atol=1e-5)
    assert count() == 1


@pytest.mark.parametrize("backend", ALL)
def test_b16_chunks_and_their_left_neighbour(backend: str):
    chunk = 64 if backend == "cpu" else 12
    mask = lambda b, h, i, j: (i // chunk == j // chunk) | (i // chunk == j // chunk + 1)  # noqa: E731
    check(masked(mask), qkv(sq=8 * chunk if backend == "cpu" else 70), backend=backend, schedule=SMALL)


def test_b17_causal_as_blocks_has_the_gradients_of_causal():
    """Block by block, and element by element on the diagonal: bitwise what causal gives is not asked, right is."""
    tensors = qkv(sq=512, d=64, dtype=torch.bfloat16)
    blocks = create_block_mask(library.causal, 1, 1, 512, 512, Qblk=128, KVblk=128)
    leaves = [leaf(t) for t in tensors]
    engine(tensors, block_mask=blocks, mask_mod=library.causal)(*leaves).float().square().sum().backward()
    exact = [leaf(t, torch.float64) for t in tensors]
    torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True).square().sum().backward()
    for mine, right in zip(leaves, exact, strict=True):
        size = right.grad.abs().max().item()
        torch.testing.assert_close(mine.grad.double(), right.grad, rtol=0, atol=2e-2 * size)


@pytest.mark.parametrize("backend", ALL)
def test_b20_segments_by_floor_division_and_modulo(backend: str):
    """Three segments of t tokens; queries at positions before their offset make negative numerators."""
    t, w, offset = (128, 4, 4) if backend == "cpu" else (16, 4, 4)

    def mask(b, h, i, j):
        segment = (i - offset) // t == (j - offset) // t
        near = ((i - offset) % t) // w >= ((j - offset) % t) // w
        return (segment & near) | (i == j)

    check(masked(mask), qkv(sq=3 * t), backend=backend, schedule=SMALL)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("divisor", [3, -3, 7])
def test_b20_signs_of_floor_division_and_modulo(backend: str, divisor: int):
    mask = lambda b, h, i, j: ((i - 20) // divisor + (j - 11) % divisor) % 2 == 0  # noqa: E731
    check(masked(mask), qkv(h=1, sq=33), backend=backend, schedule=SMALL)


def test_b38_fewer_keys_than_the_mask_was_made_for():
    for keys in (1, 2, 10, 17):
        tensors = qkv(h=4, sq=10, skv=20, d=8)
        attend = engine(tensors, mask_mod=lambda b, h, i, j: j < 20)
        with pytest.raises(errors.MetaMismatchError):
            attend(tensors[0], tensors[1][:, :, :keys], tensors[2][:, :, :keys])


@pytest.mark.parametrize("backend", ALL)
def test_b70_python_precedence(backend: str):
    """(q >= kv) & b % 2 == 0 is ((q >= kv) & (b % 2)) == 0: even items see all, odd ones what is ahead."""
    mask = lambda b, h, i, j: (i >= j) & b % 2 == 0  # noqa: E731
    with pytest.warns(errors.PrecedenceWarning):
        found = check(masked(mask), qkv(b=2, h=1, sq=4), backend=backend)
    assert found["lse"][1, 0, -1] == float("-inf") and found["lse"][0].isfinite().all()


def test_b73_lengths_changed_in_place():
    """Nested choices in the mask, and a vector of lengths written anew ten times: one compilation."""
    lengths = torch.full((4,), 60)
    generator = torch.Generator().manual_seed(2)

    def mask(b, h, i, j):
        return torch.where(i < lengths[b], torch.where(j < lengths[b], i >= j, False), j == 0)

    attend = attn_engine.compile(mask_mod=mask)
    q, k, v = qkv(b=4, h=2, sq=60, dtype=torch.bfloat16)
    with counted_compilations() as count:
        for _ in range(10):
            lengths.copy_(torch.randint(1, 61, (4,), generator=generator))
            at = torch.arange(60)
            inside = at < lengths[:, None]
            visible = torch.where(inside[:, :, None], inside[:, None] & (at[:, None] >= at), at == 0)[:, None]
            scores = (q.double() @ k.double().mT / 4).masked_fill(~visible, float("-inf"))
            torch.testing.assert_close(attend(q, k, v).double(), scores.softmax(-1) @ v.double(), rtol=0, atol=3e-2)
    assert count() == 1


@pytest.mark.parametrize("backend", ["cpu", INTERPRETED])
def test_b94_a_smaller_last_batch(backend: str):
    """cutoffs[b] for 8 items, then for 5, in a tensor of another size: no compilation of its own."""
    state = {"cutoffs": torch.tensor([3, 9, 17, 1, 33, 20, 8, 2])}

    def mask(b, h, i, j):
        return j < state["cutoffs"][b]

    attend = attn_engine.compile(mask_mod=mask, backend=backend)
    with counted_compilations() as count:
        for size in (8, 5):
            state["cutoffs"] = state["cutoffs"][:size].clone()
            q, k, v = qkv(b=size, h=1)
            visible = torch.arange(33) < state["cutoffs"][:, None, None, None]
            right = (q @ k.mT / 4).masked_fill(~visible, float("-inf")).softmax(-1) @ v
            torch.testing.assert_close(attend(q, k, v), right, rtol=1e-4, atol=1e-5)
    assert count() == 1


def test_b95_chunked_prefill():
    """128 queries against 128, 256 and 384 keys, the mask with the offset of the chunk."""
    q, k, v = qkv(sq=384)
    whole = attn_engine.attention(q, k, v, mask_mod=library.causal)
    for end in (128, 256, 384):
        mask = library.causal_bottom_right(128, end)
        chunk = attn_engine.attention(q[:, :, end - 128 : end], k[:, :, :end], v[:, :, :end], mask_mod=mask)
        torch.testing.assert_close(chunk, whole[:, :, end - 128 : end], rtol=1e-4, atol=1e-5)
