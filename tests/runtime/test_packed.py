"""Packed sequences (`cu_seqlens`) against the same attention, sequence by sequence."""

import pytest
import torch

import attn_engine
from attn_engine import errors, library, masks
from tests.support.engines import ALL, SMALL, blocks, counted_compilations

D, HEADS, KV_HEADS = 8, 4, 2
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
FREQUENCIES = 1.0 / 100 ** (torch.arange(D // 2) / (D // 2))
SCALES = torch.rand(6, HEADS, generator=torch.Generator().manual_seed(3)) + 0.5


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def rotary(x, b, h, pos, c):
    half = D // 2
    angle = pos * FREQUENCIES[c % half]
    return x * torch.cos(angle) + torch.where(c < half, -x[c + half], x[c - half]) * torch.sin(angle)


class Sunk(attn_engine.OnlineFunc):
    """A softmax whose denominator has one more term, which depends on the place of the query."""

    def __init__(self):
        super().__init__(
            {n: attn_engine.SymbolScalar(n, attn_engine.Var(v)) for n, v in (("m", "-inf"), ("r", 0.0))}, {}
        )

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        m, r = online_rowscales["m"], online_rowscales["r"]
        new = m.max(scores.get_reduce("max"))
        scale = (m - new).exp()
        scores = (scores - new).exp()
        return scores, {"m": new, "r": r * scale + scores.get_reduce("sum")}, scale

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / (online_rowscales["r"] * (q_idx + 1)), {}


DEFINITIONS = {
    "full": {},
    "causal": {"mask_mod": library.causal},
    "window and slopes": {
        "mask_mod": lambda b, h, q, kv: (q >= kv) & (q - kv < 9),
        "score_mod": library.alibi(SLOPES),
    },
    "rotary, a scale per sequence": {
        "query_mod": rotary,
        "key_mod": rotary,
        "score_mod": lambda s, b, h, q, kv: s * SCALES[b, h],
        "mask_mod": library.causal,
    },
    "rows of keys": {
        "row": lambda s, b, h, q, kv: torch.exp(s - s.amax()) / (q + kv + 1),
        "mask_mod": library.causal,
    },
    "rows in blocks": {"row": Sunk(), "mask_mod": library.causal},
    "rows": {"row": lambda s, b, h, q: torch.exp(s - s.amax()) / (q + 1), "mask_mod": library.causal},
}
LENGTHS = {
    "self": ((20, 1, 0, 17, 33), None, 0),
    "cross": ((20, 0, 5, 17), (7, 9, 0, 40), 0),
    "tokens past the end": ((20, 13, 30), (20, 13, 30), 20),
}


def run(ours, q, k, v, **options):
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    o = ours(*leaves, **options)
    weight = torch.arange(o.numel()).reshape(o.shape) % 7 - 3.0
    return [o.detach(), *torch.autograd.grad((o * weight).sum(), leaves)], weight


def one_by_one(definition, q, k, v, cu_q, cu_k, weight):
    """Every sequence apart, as a batch of its own number: functions see b through a shift."""
    results = [torch.zeros_like(t) for t in (q, q, k, v)]
    for n in range(len(cu_q) - 1):
        queries, keys = slice(int(cu_q[n]), int(cu_q[n + 1])), slice(int(cu_k[n]), int(cu_k[n + 1]))
        parts = [t[:, :, s].detach().clone().requires_grad_() for t, s in ((q, queries), (k, keys), (v, keys))]
        shifted = dict(definition)
        if "score_mod" in shifted:
            score, number = definition["score_mod"], torch.tensor(n)
            shifted["score_mod"] = lambda s, b, h, i, j, score=score, number=number: score(s, number, h, i, j)
        o = attn_engine.compile(**shifted, backend="cpu")(*parts)
        found = [o.detach(), *torch.autograd.grad((o * weight[:, :, queries]).sum(), parts)]
        for result, value, s in zip(results, found, (queries, queries, keys, keys), strict=True):
            result[:, :, s] = value
    return results


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("full", "cross"),
        ("causal", "self"),
        ("causal", "tokens past the end"),
        ("window and slopes", "cross"),
        ("rotary, a scale per sequence", "self"),
        ("rows", "tokens past the end"),
        ("rows of keys", "self"),
        ("rows in blocks", "tokens past the end"),
    ],
)
def test_as_one_by_one(name, lengths):
    check(name, lengths, "cpu")


def test_a_sequence_ends_with_the_tokens_for_masks_measured_from_its_last_key_too():
    q, k, v = (torch.randn(1, 2, n, D, generator=torch.Generator().manual_seed(n)) for n in (20, 30, 30))
    mask = masks.causal(bottom_right=True)
    o = attn_engine.attention(
        q, k, v, mask_mod=mask, cu_seqlens_q=offsets(8, 15), cu_seqlens_k=offsets(10, 50), backend="cpu"
    )
    for queries, keys in ((slice(8), slice(10)), (slice(8, 20), slice(10, 30))):
        alone = attn_engine.attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], mask_mod=mask, backend="cpu")
        torch.testing.assert_close(o[:, :, queries], alone)


@pytest.mark.parametrize("backend", [b for b in ALL if b != "cpu"])
def test_other_backends(backend):
    check("rotary, a scale per sequence", "tokens past the end", backend)


def check(name, lengths, backend):
    of_queries, of_keys, past = LENGTHS[lengths]
    cu_q, cu_k = offsets(*of_queries), None if of_keys is None else offsets(*of_keys)
    g = torch.Generator().manual_seed(0)
    sizes = (int(cu_q[-1]) + past, int((cu_q if cu_k is None else cu_k)[-1]) + past)
    q, k, v = (
        torch.randn(1, h, s, D, generator=g) for h, s in ((HEADS, sizes[0]), (KV_HEADS, sizes[1]), (KV_HEADS, sizes[1]))
    )
    with blocks(SMALL):
        ours = attn_engine.compile(**DEFINITIONS[name], backend=backend)
        got, weight = run(ours, q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    want = one_by_one(DEFINITIONS[name], q, k, v, cu_q, cu_q if cu_k is None else cu_k, weight)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    if past:
        assert all((t[:, :, -past:] == 0).all() for t in got)


def test_blocks_of_other_sequences_are_never_read():
    """NaN in all keys and values of the second sequence leaves the first as it is, and the other way round."""
    cu = offsets(64, 64)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 128, D, generator=g) for _ in range(3))
    bad = [t.clone() for t in (k, v)]
    for t in bad:
        t[:, :, 64:] = float("nan")
    with blocks(SMALL), torch.no_grad():
        o = attn_engine.attention(q, *bad, mask_mod=library.causal, cu_seqlens_q=cu, backend="cpu")
        want = attn_engine.attention(q, k, v, mask_mod=library.causal, cu_seqlens_q=cu, backend="cpu")
    assert torch.equal(o[:, :, :64], want[:, :, :64])
    assert o[:, :, 64:].isnan().all()


def test_new_offsets_compile_nothing():
    q, k, v = (torch.randn(1, 2, 70, D) for _ in range(3))

    def call(cu):
        return attn_engine.attention(q, k, v, mask_mod=library.causal, cu_seqlens_q=cu, return_lse=True, backend="cpu")

    call(offsets(30, 40))
    with counted_compilations() as count:
        o, lse = call(offsets(10, 20, 30))
        assert count() == 0, "other offsets of the same dtype compile again"
        call(offsets(10, 20, 30).long())
        assert count() <= 1
    assert (o[:, :, 60:] == 0).all() and (lse[:, :, 60:] == -torch.inf).all()
    assert lse[:, :, :60].isfinite().all()


@pytest.mark.parametrize(
    ("bounds", "batch", "match"),
    [
        ((torch.tensor([0.0, 4.0]), None), 1, "float32"),
        ((torch.tensor([[0, 4]]), None), 1, "shape"),
        ((torch.tensor([0, 4]), None), 2, "batch size is 2"),
        ((torch.tensor([0, 4]), torch.tensor([0, 2, 4])), 1, "2 offsets of queries and 3 of keys"),
        ((None, torch.tensor([0, 4])), 1, "without cu_seqlens_q"),
        (
            (torch.tensor([0, 3, 1, 4]), None),
            1,
            r"cu_seqlens_q is \[0, 3, 1, 4\], where a sequence ends before it begins",
        ),
        ((torch.tensor([0, 4]), torch.tensor([-1, 4])), 1, r"cu_seqlens_k is \[-1, 4\], .* or begins before 0"),
    ],
)
def test_mistakes(bounds, batch, match):
    q = torch.randn(batch, 2, 4, D)
    with pytest.raises(errors.SequenceBoundsError, match=match):
        attn_engine.attention(q, q, q, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], backend="cpu")
    with pytest.raises(errors.NotATensorError, match="cu_seqlens_q is a list"):
        attn_engine.attention(q, q, q, cu_seqlens_q=[0, 4], backend="cpu")
