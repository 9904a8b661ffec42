"""Captures indexed in part: chains of indices, vectors with dots and reductions, and what stays refused."""

from __future__ import annotations

import pytest
import torch

from attn_engine import errors
from attn_engine.frontend import Definition, build, rebind
from attn_engine.frontend.vectors import LONGEST
from attn_engine.interpreters.attn import run_attention
from tests.support.compare import check, qkv
from tests.support.frontend_tracing import trace

B, H, S, D = 2, 2, 6, 3


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TABLE, ROWS, KEYS, WEIGHTS = randn(H, S), randn(S, 4, seed=1), randn(S, 4, seed=2), randn(4, seed=3)
CUBE, IDS = randn(H, S, 3, seed=4), torch.tensor([0, 0, 1, 1, 2, 2])
BOUNDS = torch.tensor([[0, 2], [1, 4], [3, 6]])
INDEX = [torch.arange(n).view([-1 if a == i else 1 for a in range(4)]) for i, n in enumerate((B, H, S, S))]
DOTS = ROWS @ KEYS.T

CASES = {
    "chain": (lambda s, b, h, q, kv: s + TABLE[h][q], TABLE[:, :, None]),
    "chain of three": (lambda s, b, h, q, kv: s + CUBE[h][q][kv % 3], CUBE[:, :, torch.arange(S) % 3]),
    "chain of two and one": (lambda s, b, h, q, kv: s + CUBE[h, q][1], CUBE[:, :, 1:2]),
    "trailing slices": (lambda s, b, h, q, kv: s + TABLE[h, :][q] + TABLE[h, ...][kv], TABLE[:, :, None] + TABLE[:, None]),
    "dot": (lambda s, b, h, q, kv: s + torch.dot(ROWS[q], KEYS[kv]), DOTS),
    "matmul": (lambda s, b, h, q, kv: s + ROWS[q] @ KEYS[kv], DOTS),
    "inner": (lambda s, b, h, q, kv: s + torch.inner(ROWS[q], KEYS[kv]), DOTS),
    "sum of a product": (lambda s, b, h, q, kv: s + (ROWS[q] * KEYS[kv]).sum(-1), DOTS),
    "torch.sum": (lambda s, b, h, q, kv: s + torch.sum(ROWS[q] * KEYS[kv], dim=-1), DOTS),
    "weights": (lambda s, b, h, q, kv: s + torch.dot(ROWS[q], WEIGHTS), (ROWS @ WEIGHTS)[:, None]),
    "weights on the left": (lambda s, b, h, q, kv: s + WEIGHTS @ ROWS[q], (ROWS @ WEIGHTS)[:, None]),
    "slice of a row": (lambda s, b, h, q, kv: s + ROWS[q, 1:3].sum(), ROWS[:, 1:3].sum(-1, keepdim=True)),
    "slice of a part": (lambda s, b, h, q, kv: s + ROWS[q][::2].sum(), ROWS[:, ::2].sum(-1, keepdim=True)),
    "mean": (lambda s, b, h, q, kv: s + ROWS[q].mean(), ROWS.mean(-1, keepdim=True)),
    "largest": (lambda s, b, h, q, kv: s + ROWS[q].amax(), ROWS.amax(-1, keepdim=True)),
    "product": (lambda s, b, h, q, kv: s + ROWS[q].prod(), ROWS.prod(-1, keepdim=True)),
    "count": (lambda s, b, h, q, kv: s + (ROWS[q] > 0).sum(), (ROWS > 0).sum(-1, keepdim=True)),
    "share": (lambda s, b, h, q, kv: s + (ROWS[q] > KEYS[kv]).float().mean(), (ROWS[:, None] > KEYS).double().mean(-1)),
    "functions": (lambda s, b, h, q, kv: s + torch.tanh(2 * ROWS[q] - 1).sum(), torch.tanh(2 * ROWS - 1).sum(-1, keepdim=True)),
    "where": (lambda s, b, h, q, kv: s + torch.where(ROWS[q] > 0, KEYS[kv], 0.0).sum(),
              torch.where(ROWS[:, None] > 0, KEYS, 0.0).sum(-1)),
    "distance": (lambda s, b, h, q, kv: s - (ROWS[q] - KEYS[kv]).abs().amax(), -(ROWS[:, None] - KEYS).abs().amax(-1)),
    "loop": (lambda s, b, h, q, kv: s + sum(x * x for x in ROWS[q]), (ROWS * ROWS).sum(-1, keepdim=True)),
    "length": (lambda s, b, h, q, kv: s + len(ROWS[q]) + ROWS[q].shape[0], torch.tensor(8.0)),
    "any": (lambda s, b, h, q, kv: torch.where((BOUNDS[IDS[q]] == kv).any(), s, 0.0), None),
    "stacked": (lambda s, b, h, q, kv: s + torch.stack((q, kv)).amax(0), torch.maximum(INDEX[2], INDEX[3])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_and_vectors(name: str):
    function, bias = CASES[name]
    q, k, v = (randn(B, H, S, D, seed=n + 7).double() for n in range(3))
    traced = trace(Definition(score_mod=function), head_dim=D, head_dim_v=D)
    (o,) = run_attention(traced.module, q, k, v, 1.0, traced.captures)
    scores = q @ k.mT
    if bias is None:
        seen = (BOUNDS[IDS][:, None] == torch.arange(S)[:, None]).any(-1)
        scores = torch.where(seen, scores, 0.0)
    else:
        scores = scores + bias
    torch.testing.assert_close(o, torch.softmax(scores, -1) @ v, rtol=1e-6, atol=1e-6)


def test_intervals_in_a_mask():
    def mask(b, h, q_idx, kv_idx):
        interval = BOUNDS[IDS[kv_idx]]
        return (q_idx >= interval[0]) & (q_idx < interval[1])

    q, k, v = (randn(B, H, S, D, seed=n).double() for n in range(3))
    traced = trace(Definition(mask_mod=mask), head_dim=D, head_dim_v=D)
    (o,) = run_attention(traced.module, q, k, v, 1.0, traced.captures)
    place = torch.arange(S)[:, None]
    visible = (place >= BOUNDS[IDS][:, 0]) & (place < BOUNDS[IDS][:, 1])
    want = (q @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num() @ v
    torch.testing.assert_close(o, want)


def test_vectors_are_trained():
    def make(rows, weights):
        return {"score_mod": lambda s, b, h, q, kv: s + torch.dot(rows[q], rows[kv] * weights)}

    def dense(rows, weights):
        return {"score_mod": lambda s, b, h, q, kv: s + (rows[q] * (rows[kv] * weights)).sum(-1)}

    captures = {"rows": randn(13, 4), "weights": randn(4, seed=5)}
    check(make, qkv(sq=13), captures, reference=dense)


def test_a_vector_of_another_size_is_traced_anew():
    tables = [randn(S, 4), randn(S + 2, 4), randn(S, 5)]
    definitions = [Definition(score_mod=lambda s, b, h, q, kv, table=t: s + table[q].sum()) for t in tables]
    traced = build(definitions[0], dtype=torch.float32, head_dim=D, head_dim_v=D)
    assert traced.fixed_sizes == {(0, 1): 4}
    found = rebind(definitions[1], traced)
    assert found is not None and found[0] is tables[1]
    assert rebind(definitions[2], traced) is None


LONG = torch.zeros(S, LONGEST + 1)
REFUSED = {
    "too long": (lambda s, b, h, q, kv: s + LONG[q].sum(), errors.CaptureIndexError, str(LONGEST)),
    "several axes": (lambda s, b, h, q, kv: s + CUBE[h].sum(), errors.CaptureIndexError, "CUBE[h, i, j]"),
    "sizes": (lambda s, b, h, q, kv: s + (CUBE[h, q] * ROWS[q]).sum(), errors.CaptureIndexError, "same size"),
    "dot of sizes": (lambda s, b, h, q, kv: s + torch.dot(CUBE[h, q], ROWS[q]), errors.CaptureIndexError, "same size"),
    "returned": (lambda s, b, h, q, kv: ROWS[q] * s, errors.CaptureIndexError, "reduce"),
    "as a condition": (lambda s, b, h, q, kv: s if ROWS[q] else s + 1, errors.CaptureIndexError, "ROWS"),
    "as an index": (lambda s, b, h, q, kv: s + TABLE[h, IDS[:3]], errors.CaptureIndexError, ""),
    "another axis": (lambda s, b, h, q, kv: s + ROWS[q].sum(dim=1), errors.ReductionError, "leave dim out"),
    "unknown": (lambda s, b, h, q, kv: s + torch.cumsum(ROWS[q], 0)[0], errors.ReductionError, "cumsum"),
    "filled": (lambda s, b, h, q, kv: s + s.new_ones(3), errors.UnsupportedFunctionError, "new_ones(())"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str):
    function, error, fragment = REFUSED[name]
    with pytest.raises(error) as caught:
        trace(Definition(score_mod=function))
    assert fragment in str(caught.value) and __file__ in str(caught.value)


def test_tensors_made_inside_of_the_function():
    def score(s, b, h, q, kv):
        steps = torch.tensor([0.5, 1.5], device=s.device)
        one = s.new_ones((), dtype=torch.float32) + torch.zeros((), device=q.device) + torch.full((), 2.0)
        return s * one + steps[h]

    q, k, v = (randn(B, H, S, D, seed=n).double() for n in range(3))
    traced = trace(Definition(score_mod=score), head_dim=D, head_dim_v=D)
    (o,) = run_attention(traced.module, q, k, v, 1.0, traced.captures)
    torch.testing.assert_close(o, torch.softmax(3 * (q @ k.mT), -1) @ v)


def test_symbols_tell_the_device_of_the_call():
    seen = []

    def score(s, b, h, q, kv):
        seen.extend([s.device, ROWS[q].device, q.device])
        return s

    build(Definition(score_mod=score), dtype=torch.float32, head_dim=4, head_dim_v=4, device=torch.device("meta"))
    assert seen == [torch.device("meta")] * 3
