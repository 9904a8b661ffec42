"""The row functions of the library: one loop each, the same offline and online, the same as in plain torch."""

from __future__ import annotations

import pytest
import torch

from attn_engine import library
from attn_engine.dialects.attn import AttentionOp, RowReduceOp
from attn_engine.frontend import Definition
from attn_engine.interpreters.attn import run_attention, run_online
from attn_engine.passes.attn_derive_online import derive_online, explain
from tests.support.compare import check, qkv
from tests.support.frontend_tracing import trace
from tests.support.row_functions import hard_rows, inputs

SCORES = hard_rows()
(Q, K, V), (TABLE, VISIBLE, KEYS, ROWS) = inputs(SCORES)


def score(s, b, h, q_idx, kv_idx):
    return TABLE[q_idx, kv_idx]


def mask(b, h, q_idx, kv_idx):
    return VISIBLE[q_idx, kv_idx]


LENGTHS = torch.tensor([40, 17])
ONE_LOOP = {
    "softmax": library.softmax,
    "temperature": library.softmax_with_temperature(1.7),
    "temperature per head": library.softmax_with_temperature(torch.tensor([1.7])),
    "temperature per query": library.softmax_with_temperature(ROWS[None].float(), per="query"),
    "softmax1": library.softmax1,
    "sink": library.softmax_with_sink(0.3),
    "sink per head": library.softmax_with_sink(torch.tensor([0.3])),
    "centred": library.softmax_centred,
    "log-cosh": library.log_cosh_softmax,
    "sigmoid": library.sigmoid,
    "sigmoid of length": library.sigmoid_of_length(100),
    "sigmoid of lengths": library.sigmoid_of_length(LENGTHS),
    "relu": library.relu,
    "squared relu": library.squared_relu,
    "relu by length": library.relu_by_length,
    "identity": library.identity,
    "retention": library.retention,
    "cosine": library.cosine,
    "3-norm": library.p_norm(3),
    "2.5-norm": library.p_norm(2.5),
    "softplus": library.softplus_normalised,
}
PARTS = [([11], None), ([3, 1, 5, 2], [2, 0, 3, 1]), ([1] * 11, list(reversed(range(11))))]


def attention_of(row) -> tuple[AttentionOp, list[torch.Tensor]]:
    traced = trace(Definition(score_mod=score, mask_mod=mask, row=row), dtype=torch.float32, head_dim=1, head_dim_v=2)
    return next(op for op in traced.module.walk() if isinstance(op, AttentionOp)), traced.captures


def check_loops(row, loops: int) -> None:
    op, captures = attention_of(row)
    report = explain(op)
    assert report.passes == loops, str(report)
    want = run_attention(op, Q, K, V, 1.0, captures)[0]
    online = derive_online(op)
    for block, order in PARTS:
        got = run_online(online, Q, K, V, 1.0, captures, block=block, order=order)[0]
        close = torch.isclose(got, want, rtol=1e-5, atol=1e-6) | ~want.isfinite()
        assert bool(close.all()), f"{block}: rows {sorted(set((~close).nonzero()[:, 2].tolist()))}"


@pytest.mark.parametrize("name", ONE_LOOP)
def test_one_loop(name: str):
    check_loops(ONE_LOOP[name], 1)


def temperature_per_key(s, b, h, q_idx, kv_idx):
    e = torch.exp((s - s.amax()) * KEYS[kv_idx])
    return e / e.sum()


def centred(s):
    return s - s.mean()


def clamped_weight(s):
    e = torch.clamp(torch.exp(s - s.amax()), min=0.1)
    return e / e.sum()


def sparse(s):
    e = torch.exp(s - s.amax())
    return torch.relu(e / e.sum() - 0.1)


def near_maximum(s):
    m = s.amax()
    e = torch.where(s > m - 1, torch.exp(s - m), 0.0)
    return e / e.sum()


def clamped_difference(s):
    e = torch.exp(torch.clamp(s - s.amax(), min=-20.0))
    return e / e.sum()


def relu_of_difference(s):
    e = torch.relu(s - s.amax() + 1)
    return e / e.sum()


def sigmoid_of_visible_length(s):
    return torch.sigmoid(s - torch.log(torch.ones_like(s).sum()))


def mean_stabilised(s):
    e = torch.exp(s - s.mean())
    return e / e.sum()


def standardised(s):
    return (s - s.mean()) / (s.std(correction=0) + 1.0)


def by_variance(s):
    return s / (1 + s.var(unbiased=False))


TWO_LOOPS = [
    temperature_per_key,
    centred,
    clamped_weight,
    sparse,
    near_maximum,
    clamped_difference,
    relu_of_difference,
    sigmoid_of_visible_length,
    mean_stabilised,
    standardised,
    by_variance,
]


@pytest.mark.parametrize("row", TWO_LOOPS, ids=lambda f: f.__name__)
def test_what_looks_like_one_loop_takes_two(row):
    check_loops(row, 2)


@pytest.mark.parametrize("correction", [0, 1, 2])
def test_variance_and_deviation_are_those_of_torch(correction: int):
    op, captures = attention_of(
        lambda s: s * 0.0 + s.var(correction=correction) + 10.0 * s.std(dim=-1, correction=correction)
    )
    got = run_attention(op, Q, torch.zeros_like(K), torch.ones_like(V), 1.0, captures)[0][0, 0, :, 0]
    finite = SCORES.isfinite().all(-1)
    scores = SCORES[finite]
    want = scores.shape[1] * (scores.var(-1, correction=correction) + 10.0 * scores.std(-1, correction=correction))
    torch.testing.assert_close(got[: len(SCORES)][finite], want, rtol=1e-5, atol=1e-5)


def test_a_clamped_maximum_stabilises():
    for clamped in (
        lambda m: m.clamp(min=-5.0),
        lambda m: torch.where(m < -5.0, -5.0, m),
        lambda m: torch.maximum(m, torch.tensor(-5.0)),
    ):

        def row(s, clamped=clamped):
            e = torch.exp(s - clamped(s.amax()))
            return e / e.sum()

        check_loops(row, 1)


def test_no_reduction_is_doubled():
    """The maximum and the sum of softmax1 are one of each."""
    op, _ = attention_of(library.softmax1)
    assert sum(isinstance(o, RowReduceOp) for o in op.row.block.ops) == 2


TRAINED = {
    "temperature": lambda t: library.softmax_with_temperature(t[0, 0]),
    "temperature per head": lambda t: library.softmax_with_temperature(t[:, 0]),
    "temperature per query": lambda t: library.softmax_with_temperature(t, per="query"),
    "sink": lambda t: library.softmax_with_sink(t[:, 0]),
}


@pytest.mark.parametrize("name", TRAINED)
def test_parameters_of_the_row_are_trained(name: str):
    values = torch.rand(2, 21, generator=torch.Generator().manual_seed(2)) + 0.5

    def make(table):
        return {"row": TRAINED[name](table), "mask_mod": library.causal}

    check(make, qkv(sq=21), {"table": values})


@pytest.mark.parametrize("name", ["centred", "log-cosh", "squared relu", "relu by length", "softplus", "3-norm"])
def test_gradients_through_the_api(name: str):
    check(lambda: {"row": ONE_LOOP[name], "mask_mod": library.causal}, qkv(sq=21), tolerance=1e-4)


def test_bad_parameters():
    with pytest.raises(ValueError, match="per"):
        library.softmax_with_temperature(1.0, per="key")
    with pytest.raises(ValueError, match="at least 1"):
        library.p_norm(0.5)
