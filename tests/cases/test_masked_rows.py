"""Rows that see no key, -inf scores, causal masks of unequal lengths, windows, no keys at all."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import library
from tests.support.compare import check, plain, qkv, randn
from tests.support.engines import ALL, SMALL


def masked(mask):
    return lambda **_: {"mask_mod": mask}


def assert_dead(found, rows):
    """These rows give 0 and -inf, and no gradient."""
    for name in ("o", "dq"):
        assert torch.equal(found[name][:, :, rows], torch.zeros_like(found[name][:, :, rows])), name
    assert (found["lse"][:, :, rows] == float("-inf")).all()


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("case", [{"h": 1, "sq": 8, "d": 8}, {"sq": 40, "skv": 70}])
def test_b01_rows_without_keys(backend: str, case: dict[str, int]):
    found = check(masked(lambda b, h, q, kv: (q < 4) & (kv < 4)), qkv(**case), backend=backend, schedule=SMALL)
    assert_dead(found, slice(4, None))
    assert found["dk"][:, :, 4:].eq(0).all() and found["dv"][:, :, 4:].eq(0).all()


def test_b02_a_dead_row_does_not_poison_weights():
    """One head of dimension 1, a causal window of 2, the last two keys of the second batch item are padding."""
    length = torch.tensor([4, 2])
    x = randn(2, 4, 1)
    weights = [w.requires_grad_() for w in randn(3, 1, 1, seed=4)]
    q, k, v = ((x @ w).unsqueeze(1) for w in weights)
    o = attn_engine.attention(q, k, v, mask_mod=lambda b, h, i, j: (j <= i) & (i - j < 2) & (j < length[b]))
    o[:, :, :2].square().sum().backward()
    got = [w.grad.clone() for w in weights]
    for w in weights:
        w.grad = None
    q, k, v = ((x @ w).unsqueeze(1)[:, :, :2] for w in weights)
    attn_engine.attention(q, k, v, mask_mod=lambda b, h, i, j: j <= i).square().sum().backward()
    for w, gradient in zip(weights, got, strict=True):
        torch.testing.assert_close(gradient, w.grad)


@pytest.mark.parametrize("backend", ALL)
def test_b04_masked_keys_have_weight_exactly_zero(backend: str):
    """Real scores of -2e5: lower than many a sentinel. Their lse has a step of 1/64 in float32, so weights have 1 %."""
    q, k, v = torch.ones(1, 1, 4, 16), torch.full((1, 1, 40, 16), -12500.0), randn(1, 1, 40, 16)
    v[:, :, 3:] = 1e30
    found = check(masked(lambda b, h, i, j: j < 3), (q, k, v), backend=backend, scale=1.0, tolerance=1e-2)
    assert found["o"].abs().max() < 10


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("documents", [(3, 5), (70, 30, 64)])
def test_b05_minus_infinity_scores(backend: str, documents: tuple[int, ...]):
    """Packed documents by an additive -inf: blocks of a row in which every score is -inf, and rows of nothing else."""
    if backend != "cpu" and sum(documents) > 8:
        documents = (35, 13, 32)
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))

    def make(ids):
        def score_mod(s, b, h, q, kv):
            return torch.where((ids[q] == ids[kv]) & (ids[q] != 1), s, float("-inf"))

        return {"score_mod": score_mod}

    size = len(ids)
    found = check(make, qkv(sq=size), {"ids": ids}, backend, schedule=SMALL)
    assert_dead(found, ids == 1)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("bottom_right", [True, False])
@pytest.mark.parametrize(("sq", "skv"), [(64, 32), (40, 33), (33, 40), (16, 49), (1, 17)])
def test_b29_b32_causal_of_unequal_lengths(backend: str, bottom_right: bool, sq: int, skv: int):
    mask = library.causal_bottom_right(sq, skv) if bottom_right else library.causal
    found = check(masked(mask), qkv(sq=sq, skv=skv), backend=backend, schedule=SMALL)
    if bottom_right:
        assert_dead(found, slice(0, max(0, sq - skv)))


@pytest.mark.parametrize("sq", [76, 34, 146])
def test_b31_one_key(sq: int):
    """Every row sees none or one key: its weight is constant, so dq is exactly 0 (up to rounding of dp - delta)."""
    q, k, v = (3 * t for t in qkv(h=1, sq=sq, skv=1, d=32, dtype=torch.float16))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    attn_engine.attention(q, k, v, mask_mod=library.causal_bottom_right(sq, 1)).sum().backward()
    assert torch.equal(q.grad, torch.zeros_like(q))
    assert torch.equal(k.grad, torch.zeros_like(k))
    assert torch.equal(v.grad, torch.ones_like(v))


@pytest.mark.parametrize("backend", ALL)
def test_b34_window_counts_the_own_position(backend: str):
    q, k, v = torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8), torch.eye(8).view(1, 1, 8, 8)
    o = attn_engine.attention(q, k, v, mask_mod=library.sliding_window(4), backend=backend)
    assert (o[0, 0] > 0).sum(-1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("window", [1, 15, 16, 17, 33])
def test_b34_windows_across_blocks(window: int):
    check(masked(library.sliding_window(window)), qkv(sq=70), schedule=SMALL)


@pytest.mark.parametrize("backend", ALL)
def test_b35_two_sided_window_with_fewer_keys(backend: str):
    """Window (32, 64) about the bottom-right diagonal, 129 queries, 20 keys."""

    def window(b, h, q, kv):
        at = q + 20 - 129
        return (kv >= at - 32) & (kv <= at + 64)

    found = check(masked(window), qkv(h=1, sq=129, skv=20), backend=backend)
    assert_dead(found, slice(0, 129 - 20 - 64))


def test_b37_key_padding_hides_keys_only():
    keep = torch.tensor([5, 3])
    q, k, v = qkv(b=2, sq=32, skv=8)
    found = check(masked(lambda b, h, i, j: j < keep[b]), (q, k, v))
    assert (found["o"].abs().sum(-1) > 0).all()
    assert found["dk"][0, :, 5:].eq(0).all() and found["dk"][1, :, 3:].eq(0).all()


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("row", [None, library.sigmoid, library.softmax1])
@pytest.mark.parametrize("causal", [True, False])
def test_b40_no_keys(backend: str, row, causal: bool):
    def make():
        return ({"mask_mod": library.causal} if causal else {}) | ({"row": row} if row else {})

    found = check(make, qkv(b=2, sq=4, skv=0, d=64), backend=backend)
    assert found["o"].eq(0).all() and found["dq"].eq(0).all()
    if row is None:
        assert found["lse"].eq(float("-inf")).all()


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("case", [{"sq": 0, "skv": 5}, {"b": 0}, {"sq": 0, "skv": 0}])
def test_b40_no_queries(backend: str, case: dict[str, int]):
    check(plain, qkv(**case), backend=backend)
