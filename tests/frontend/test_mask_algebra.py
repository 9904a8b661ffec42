"""Masks that compose: each rule against its definition, element by element, in kernels and in pictures."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_engine
from attn_engine import errors, masks
from attn_engine.flex import create_block_mask, flex_attention
from attn_engine.frontend import create_block_mask as block_tensor
from tests.support.compare import leaf, qkv
from tests.support.eager import eager_attention
from tests.support.engines import counted_compilations

LENGTHS = [(7, 7), (5, 9), (9, 5), (1, 6)]


def dense(mask: masks.Mask, sq: int, skv: int) -> Tensor:
    b, h = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    q, kv = torch.arange(sq)[:, None], torch.arange(skv)[None]
    return mask.of_lengths(sq, skv)(b, h, q, kv).expand(sq, skv)


def ck(y: int, x: int, sq: int, skv: int) -> Tensor:
    """CK's generic coordinates, row by row as written there."""
    seen = torch.zeros(sq, skv, dtype=torch.bool)
    for i in range(sq):
        seen[i, max(0, i - y + 1) : max(0, min(i + x, skv))] = True
    return seen


def coordinates(left: int, right: int, bottom_right: bool, sq: int, skv: int) -> tuple[int, int]:
    """(y, x) of a window, by CK's rule; a side without a bound reaches the end."""
    o = skv - sq if bottom_right else 0
    y = 1 + left - o if left >= 0 else max(sq, skv) + abs(o) + 1
    x = 1 + right + o if right >= 0 else max(sq, skv) + abs(o) + 1
    return y, x


@pytest.mark.parametrize(("sq", "skv"), LENGTHS)
@pytest.mark.parametrize("bottom_right", [False, True])
def test_windows_are_those_of_ck(sq: int, skv: int, bottom_right: bool):
    side = "b" if bottom_right else "t"
    for left, right in itertools.product((-1, 0, 1, 3), repeat=2):
        y, x = coordinates(left, right, bottom_right, sq, skv)
        want = ck(y, x, sq, skv)
        assert torch.equal(dense(masks.window(left, right, bottom_right), sq, skv), want)
        assert torch.equal(dense(masks.parse(f"{side}:{left},{right}"), sq, skv), want)
        if x + y > 1:
            assert torch.equal(dense(masks.generic(y, x), sq, skv), want)


@pytest.mark.parametrize(("sq", "skv"), LENGTHS)
def test_causal_from_either_end(sq: int, skv: int):
    q, kv = torch.arange(sq)[:, None], torch.arange(skv)[None]
    assert torch.equal(dense(masks.causal, sq, skv), q >= kv)
    for mask in (masks.causal(bottom_right=True), masks.parse("2"), masks.parse("b")):
        assert torch.equal(dense(mask, sq, skv), q + skv - sq >= kv)
    for rule in ("1", "t"):
        assert torch.equal(dense(masks.parse(rule), sq, skv), q >= kv)
    assert dense(masks.parse("0"), sq, skv).all()
    assert dense(masks.causal(bottom_right=True), 9, 5)[:4].sum() == 0


def test_other_rules():
    q, kv = torch.arange(8)[:, None], torch.arange(8)[None]
    assert torch.equal(dense(masks.prefix(3), 8, 8), (kv < 3) | (q >= kv))
    assert torch.equal(dense(masks.sinks(2), 8, 8), (kv < 2).expand(8, 8))
    ids = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
    assert torch.equal(dense(masks.document(ids), 8, 8), ids[:, None] == ids[None])
    for visible in (torch.rand(8, 8) > 0.5, torch.randint(0, 2, (1, 8, 8)), torch.rand(1, 1, 8, 8) > 0.5):
        assert torch.equal(dense(masks.from_tensor(visible), 8, 8), visible.reshape(8, 8).bool())
    with_sinks = dense(masks.parse("t:1,0,3"), 8, 8)
    assert torch.equal(with_sinks, (kv <= q) & ((kv >= q - 1) | (kv < 3)))
    assert torch.equal(dense(masks.parse("xt:4"), 8, 8), (kv >= q - 2) & (kv <= q + 1))
    assert torch.equal(dense(masks.parse("xb:0"), 5, 8), torch.arange(5)[:, None] + 3 >= kv)


def test_composition_with_any_function():
    def even(b, h, q_idx, kv_idx):
        return kv_idx % 2 == 0

    q, kv = torch.arange(6)[:, None], torch.arange(9)[None]
    tail = masks.causal(bottom_right=True)
    mask = (masks.causal | even) & ~masks.sinks(1) & tail
    want = ((q >= kv) | (kv % 2 == 0)) & (kv >= 1) & (q + 3 >= kv)
    assert torch.equal(dense(mask, 6, 9), want.expand(6, 9))
    assert torch.equal(dense(masks.as_mask(even) & masks.causal, 6, 9), dense(masks.causal & even, 6, 9))
    assert str(mask) == "(((causal | even) & ~sinks(1)) & causal(bottom_right))" and mask.uses_lengths


@pytest.mark.parametrize("mask", [
    masks.causal & masks.window(4, 0) | masks.sinks(2), masks.window(6, 2, bottom_right=True), ~masks.generic(3, 2),
    masks.causal(bottom_right=True) & ~masks.sinks(1),
], ids=str)  # fmt: skip
def test_in_kernels(mask: masks.Mask):
    for sq, skv in ((20, 33), (33, 20)):
        tensors = [leaf(t) for t in qkv(sq=sq, skv=skv)]
        exact = [leaf(t, torch.float64) for t in tensors]
        want = eager_attention(*exact, {"mask_mod": mask.of_lengths(sq, skv)}, 0.25)[0]
        got = attn_engine.attention(*tensors, mask_mod=mask, scale=0.25)
        assert torch.allclose(got.double(), want, atol=1e-5)
        found, right = torch.autograd.grad(got.sum(), tensors), torch.autograd.grad(want.sum(), exact)
        assert all(torch.allclose(a.double(), b, atol=1e-4) for a, b in zip(found, right, strict=True))


def test_other_lengths_compile_nothing():
    mask = masks.window(5, 0, bottom_right=True)
    attend = attn_engine.compile(mask_mod=mask)
    attend(*qkv(sq=17, skv=29))
    with counted_compilations() as count:
        attend(*qkv(sq=19, skv=31))
        attn_engine.attention(*qkv(sq=17, skv=29), mask_mod=mask)
        first = count()
        attn_engine.attention(*qkv(sq=19, skv=31), mask_mod=mask)
    assert first == count() == 0


def test_other_lengths_trace_nothing():
    attend = attn_engine.compile(mask_mod=~(~masks.causal(bottom_right=True) & ~masks.sinks(2)))
    for sq, skv in ((40, 50), (50, 40), (7, 90), (40, 50)):
        attend(*qkv(sq=sq, skv=skv))
    assert len(attend._memory.traces) == 1


REACH = 3


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx >= q_idx - REACH


COMPOSED = masks.causal & near


def through_a_global(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return COMPOSED(b, h, q_idx, kv_idx)


@pytest.mark.parametrize(
    "mask", [COMPOSED, through_a_global, ~(near | ~masks.causal), masks.causal(bottom_right=True) & near]
)
def test_what_a_composed_function_reads_is_read_at_each_call(mask: Any, monkeypatch: pytest.MonkeyPatch):
    attend, tensors = attn_engine.compile(mask_mod=mask), qkv(sq=40, skv=40)
    first = attend(*tensors)
    monkeypatch.setattr(sys.modules[__name__], "REACH", 30)
    fresh = attn_engine.compile(mask_mod=mask)(*tensors)
    assert torch.equal(attend(*tensors), fresh) and not torch.allclose(fresh, first)


def test_packed_sequences_each_have_their_own_end():
    """Bottom-right is of each sequence's own lengths; keys are packed in another way."""
    q_lens, k_lens = [5, 3, 0, 9], [7, 3, 4, 2]
    q_bounds, k_bounds = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (q_lens, k_lens))
    q, k, v = (t for t in qkv(sq=sum(q_lens) + 2, skv=sum(k_lens)))
    mask = masks.causal(bottom_right=True)
    got = attn_engine.attention(q, k, v, mask_mod=mask, cu_seqlens_q=q_bounds, cu_seqlens_k=k_bounds)
    for n in range(4):
        rows, keys = slice(q_bounds[n], q_bounds[n + 1]), slice(k_bounds[n], k_bounds[n + 1])
        want = attn_engine.attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask_mod=mask)
        assert torch.allclose(got[:, :, rows], want, atol=1e-6)
    assert (got[:, :, sum(q_lens) :] == 0).all()


def test_in_block_masks_and_engines():
    mask = masks.causal(bottom_right=True) | masks.sinks(1)
    q, k, v = qkv(sq=20, skv=33)
    want = attn_engine.attention(q, k, v, mask_mod=mask)
    block_mask = create_block_mask(mask, None, None, 20, 33)
    assert torch.allclose(flex_attention(q, k, v, block_mask=block_mask), want)
    meta = [attn_engine.meta_tensor(*t.shape, dtype=torch.float32) for t in (q, k, v)]
    blocks = block_tensor(mask, None, None, 20, 33, Qblk=16, KVblk=16)
    scale = q.shape[3] ** -0.5
    engine = attn_engine.AttentionEngine(
        meta, score_mod=lambda s, b, h, q, kv: s * scale, mask_mod=mask, block_mask=blocks, layout="bhsd"
    )
    assert torch.allclose(engine(q, k, v), want, atol=1e-6)
    assert "attn.attention" in attn_engine.compile(mask_mod=mask).ir("traced")


def test_mistakes():
    index = [torch.zeros((), dtype=torch.int64)] * 4
    with pytest.raises(errors.MaskLengthsError, match="of_lengths"):
        masks.causal(bottom_right=True)(*index)
    for rule in ("", "c", "t:1", "t:1,x", "g:0,1", "b:1,2,3,4", "xt:"):
        with pytest.raises(errors.MaskRuleError):
            masks.parse(rule)
    with pytest.raises(errors.MaskRuleError, match="2 to 4 dimensions"):
        masks.from_tensor(torch.ones(3))
    for other in (None, torch.ones(3, 3, dtype=torch.bool)):
        for compose in (lambda x: masks.causal & x, lambda x: masks.causal | x, lambda x: x & masks.causal):
            with pytest.raises(errors.ArgumentError, match="from_tensor"):
                compose(other)


PICTURE = """\
BlockMask(shape=(1, 1, 8, 8), sparsity=37.50%, density=56.25%)
░░
██░░
████░░
██████░░"""


def test_a_mask_prints_its_density_and_its_blocks():
    block_mask = create_block_mask(masks.causal, None, None, 8, 8, BLOCK_SIZE=2)
    assert str(block_mask) == PICTURE
    assert block_mask.density() == 56.25
    many = create_block_mask(masks.window(100, 0), None, None, 4000, 4000, BLOCK_SIZE=16)
    lines = many.picture().split("\n")
    assert (
        len(lines) == 32 and max(map(len, lines)) == 64 and lines[-1].endswith("░░") and lines[-1].startswith(" " * 50)
    )


def test_a_mask_of_nothing_hides_nothing():
    for lengths in ((0, 5), (5, 0)):
        block_mask = create_block_mask(masks.causal, None, None, *lengths)
        assert str(block_mask).startswith(
            f"BlockMask(shape=(1, 1, {lengths[0]}, {lengths[1]}), sparsity=0.00%, density=0"
        )


def test_a_mask_is_saved_as_an_image(tmp_path: Path):
    pytest.importorskip("matplotlib")
    block_mask = create_block_mask(masks.causal, None, None, 64, 96, BLOCK_SIZE=16)
    for name, start in (("mask.png", b"\x89PNG"), ("mask.svg", b"<?xml")):
        block_mask.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: masks.window(1.5, 0), "left is 1.5"),
        (lambda: masks.window(1, None), "right is None"),
        (lambda: masks.prefix(2.5), "length is 2.5"),
        (lambda: masks.sinks(2.5), "count is 2.5"),
        (lambda: masks.sinks(True), "count is True"),
        (lambda: masks.generic(1, "x"), "x is 'x'"),
    ],
)
def test_sizes_of_masks_are_whole_numbers(make, told):
    with pytest.raises(errors.MaskRuleError, match=f"{told}: give a whole number"):
        make()
    with pytest.raises(errors.NotATensorError):
        masks.document([0, 1])
    with pytest.raises(errors.NotATensorError):
        masks.from_tensor([[True]])
