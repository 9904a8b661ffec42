"""Every row function gives what its offline form gives, in the expected number of loops."""

from __future__ import annotations

import pytest
import torch
from xdsl.context import Context

from attn_engine.dialects.attn import AttentionOp, OnlineOp
from attn_engine.errors import RowValueError
from attn_engine.interpreters.attn import run_attention, run_online
from attn_engine.passes.attn_derive_online import AttnDeriveOnlinePass, explain
from tests.support.row_functions import attention, hard_rows, inputs

LOG2E = 1.44269504


def softmax(r, s):
    e = r.exp(s - r.max(s))
    return e / r.sum(e)


def softmax_base_two(r, s):
    t = s * LOG2E
    e = r.exp2(t - r.max(t))
    return e / r.sum(e)


def softmax_from_lse(r, s):
    m = r.max(s)
    lse = m + r.log(r.sum(r.exp(s - m)))
    return r.exp(s - lse), lse


def softmax_from_lse_base_two(r, s):
    m = r.max(s)
    lse = m * LOG2E + r.log2(r.sum(r.exp2((s - m) * LOG2E)))
    return r.exp2(s * LOG2E - lse), lse / LOG2E


def softmax_guarded(r, s):
    m = r.max(s)
    m = r.select(m.equals(float("-inf")), 0.0, m)
    e = r.exp(s - m)
    total = r.sum(e)
    return e / r.select(total.equals(0.0), 1.0, total)


def softmax_then_select(r, s):
    e = r.exp(s - r.max(s))
    return r.select(r.per_key > 1.0, e / r.sum(e), 0.0)


def softmax_masked_by_select(r, s):
    e = r.select(r.per_key > 1.0, r.exp(s - r.max(s)), 0.0)
    return e / (r.sum(e) + 1e-3)


def softmax_one(r, s):
    m = r.max(s)
    e = r.exp(s - m)
    return e / (r.exp(-m) + r.sum(e))


def softmax_sink(r, s):
    sink = r.per_row
    m = r.maximum(sink, r.max(s))
    e = r.exp(s - m)
    return e / (r.sum(e) + r.exp(sink - m))


def softmax_sink_merged(r, s):
    m = r.max(s)
    e = r.exp(s - m)
    both = r.maximum(m, r.per_row)
    return e * r.exp(m - both) / (r.exp(m - both) * r.sum(e) + r.exp(r.per_row - both))


def two_way(r, s):
    both = r.maximum(s, 0.0)
    return r.exp(s - both) / (r.exp(s - both) + r.exp(-both)) / r.maximum(r.sum(r.abs(s)), 1.0)


def softmax_doubled(r, s):
    p = softmax(r, s)
    return 2.0 * p + p * 0.5


def softmax_temperature(r, s):
    e = r.exp((s - r.max(s)) * r.per_row)
    return e / r.sum(e)


def softmax_weighted(r, s):
    e = r.exp(s - r.max(s)) * r.per_key
    return e / r.sum(e)


def softmin(r, s):
    e = r.exp(r.min(s) - s)
    return e / r.sum(e)


def softmax_by_largest_size(r, s):
    e = r.exp(s - r.max(r.abs(s)))
    return e / r.sum(e)


def softmax_squared(r, s):
    e = r.exp(s - r.max(s)) ** 2.0
    return e / r.sqrt(r.sum(e * e))


def raw_exponential(r, s):
    e = r.exp(s * 0.01)
    return e / r.sum(e)


def entropy(r, s):
    m = r.max(s)
    e = r.exp(s - m)
    total = r.sum(e)
    return e / total, m + r.log(total) - r.sum(s * e) / total


def weighted_by_score(r, s):
    e = s * r.exp(s - r.max(s))
    return e / (r.sum(r.abs(e)) + 1.0)


def softmax_with_largest_size(r, s):
    return softmax(r, s), r.max(r.abs(s))


def scaled_by_maximum(r, s):
    return s / (r.max(s) + 1.0)


def sigmoid(r, s):
    return 1.0 / (1.0 + r.exp(-s))


def squared_relu(r, s):
    return r.maximum(s, 0.0) * r.maximum(s, 0.0)


def retention(r, s):
    return s / r.maximum(r.sum(r.abs(s)), 1.0)


def cosine(r, s):
    return s * r.rsqrt(r.sum(s * s))


def three_norm(r, s):
    return s / r.sum(r.abs(s) ** 3.0) ** (1.0 / 3.0)


def softplus(r, s):
    t = r.log1p(r.exp(s * 0.02))
    return t / r.sum(t)


def relu_of_scaled(r, s):
    t = r.maximum(s, 0.0)
    return r.maximum(s / (r.sum(t) + 1.0), 0.0)


def signed(r, s):
    return s / r.sum(s)


def mean(r, s):
    return 1.0 / r.count(s)


def unused(r, s):
    r.sum(r.exp(s - r.sum(s)))
    return softmax(r, s)


def maximum_of_shifted(r, s):
    m = r.max(s)
    again = r.max(s - m)
    return r.exp(s - m - again)


def maximum_of_weights(r, s):
    e = r.exp(s - r.max(s)) * r.per_key
    return e / r.max(e)


def softmax_from_clamped_maximum(r, s):
    m = r.max(s)
    m = r.select(r.compare("olt", m, -5.0), -5.0, m)
    e = r.exp(s - m)
    return e / r.sum(e)


def log_cosh(r, s):
    m = r.max(r.abs(s))
    c = m + r.log(r.sum(r.exp(s - m) + r.exp(-s - m)) * 0.5)
    return r.exp(s - c), c


def log_cosh_stabilised(r, s):
    m = r.max(r.abs(s))
    c = m + r.log(r.sum(r.exp(s - m) + r.exp(-s - m)))
    e = r.exp(s - c)
    return e / r.sum(e)


ONE_LOOP = [
    softmax_from_clamped_maximum,
    log_cosh,
    log_cosh_stabilised,
    softmax,
    softmax_base_two,
    softmax_from_lse,
    softmax_from_lse_base_two,
    softmax_guarded,
    softmax_then_select,
    softmax_masked_by_select,
    softmax_one,
    softmax_sink,
    softmax_sink_merged,
    two_way,
    softmax_doubled,
    softmax_temperature,
    softmax_weighted,
    softmin,
    softmax_by_largest_size,
    softmax_squared,
    raw_exponential,
    entropy,
    weighted_by_score,
    softmax_with_largest_size,
    scaled_by_maximum,
    sigmoid,
    squared_relu,
    retention,
    cosine,
    three_norm,
    softplus,
    relu_of_scaled,
    signed,
    mean,
    unused,
    maximum_of_shifted,
    maximum_of_weights,
]


def temperature_per_key(r, s):
    e = r.exp((s - r.max(s)) * r.per_key)
    return e / r.sum(e)


def centred(r, s):
    return s - r.sum(s) / r.count(s)


def clamped_difference(r, s):
    e = r.exp(r.maximum(s - r.max(s), -20.0))
    return e / r.sum(e)


def clamped_weight(r, s):
    e = r.maximum(r.exp(s - r.max(s)), 0.1)
    return e / r.sum(e)


def sparse(r, s):
    e = r.exp(s - r.max(s))
    return r.maximum(e / r.sum(e) - 0.1, 0.0)


def near_maximum(r, s):
    m = r.max(s)
    e = r.select(s > m - 1.0, r.exp(s - m), 0.0)
    return e / r.sum(e)


def relu_of_difference(r, s):
    e = r.maximum(s - r.max(s) + 1.0, 0.0)
    return e / r.sum(e)


def mean_stabilised(r, s):
    e = r.exp(s - r.sum(s) / r.count(s))
    return e / r.sum(e)


def maximum_of_signed(r, s):
    t = s / r.sum(s)
    return t, r.max(t)


def foreign_stabiliser(r, s):
    e = r.exp(s + r.per_key - r.max(0.5 * s))
    return e / r.sum(e)


def hidden_exponential(r, s):
    m = r.max(s)
    e = r.exp(s - m) + r.exp(-m)
    return e / r.sum(e)


def high_power(r, s):
    return (s / r.max(r.abs(s))) ** 64.0


def guarded_division(r, s):
    return r.select(s > 0.0, s / r.sum(r.maximum(s, 0.0)), 0.0)


def standardised(r, s):
    c = centred(r, s)
    return c / r.sqrt(r.sum(c * c) + 1.0)


def sum_that_cancels(r, s):
    """Term by term it would be one loop, and lose everything where the terms cancel."""
    m = r.max(s)
    return s / (1.0 + r.sum(r.exp(s - m) - r.exp(s * 2.0 - m * 2.0)) ** 2.0)


TWO_LOOPS = [
    sum_that_cancels,
    temperature_per_key,
    centred,
    clamped_difference,
    clamped_weight,
    sparse,
    near_maximum,
    relu_of_difference,
    mean_stabilised,
    maximum_of_signed,
    foreign_stabiliser,
    hidden_exponential,
    high_power,
    guarded_division,
    standardised,
]


def sparse_renormalised(r, s):
    p = sparse(r, s)
    return r.maximum(p / (r.sum(p) + 1e-3) - 0.05, 0.0)


CASES = [(f, 1) for f in ONE_LOOP] + [(f, 2) for f in TWO_LOOPS] + [(sparse_renormalised, 3)]
# Parts of four blocks: one, several, unequal and empty ones, the empty ones first, last and between.
SPLITS = [2, 3, 7, [1, 3], [3, 0, 1], [0, 4], [4, 0, 0], [0, 0, 1, 1, 0, 2]]
PARTS = [([11], None), ([3, 1, 5, 2], None), ([3, 1, 5, 2], [2, 0, 3, 1]), ([1] * 11, list(reversed(range(11))))]


def attention_of(module) -> AttentionOp:
    return next(op for op in module.walk() if isinstance(op, AttentionOp))


def online_of(module) -> OnlineOp:
    return next(op for op in module.walk() if isinstance(op, OnlineOp))


def assert_same(expected, actual, tolerance):
    """Equal where the formula has a value; where it overflows, or gives NaN, anything (row values: -inf if dead)."""
    for want, got in zip(expected, actual, strict=True):
        finite = want.isfinite()
        size = want[finite].abs().max().clamp(min=1e-30) if finite.any() else 1.0
        assert torch.allclose(got[finite], want[finite], rtol=tolerance, atol=tolerance * float(size))
        assert want.ndim == 4 or torch.equal(got[want.isinf()], want[want.isinf()])


@pytest.mark.parametrize(("function", "loops"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_equals_the_offline_form(function, loops):
    module = attention(function)
    tensors, captures = inputs(hard_rows())
    expected = {
        dtype: run_attention(module, *tensors, 1.0, captures, dtype=dtype) for dtype in (torch.float64, torch.float32)
    }
    AttnDeriveOnlinePass().apply(Context(), module)
    module.verify()
    assert len(online_of(module).steps) == loops
    for parts, order in PARTS:
        for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 2e-3)):
            actual = run_online(module, *tensors, 1.0, captures, block=parts, order=order, dtype=dtype)
            assert_same(expected[dtype], actual, tolerance)
    for splits in SPLITS:
        for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 2e-3)):
            options = {"block": [3, 1, 5, 2], "order": [2, 0, 3, 1], "dtype": dtype}
            actual = run_online(module, *tensors, 1.0, captures, num_splits=splits, **options)
            assert_same(expected[dtype], actual, tolerance)


def test_parts_must_cover_the_blocks():
    module = attention(softmax)
    tensors, captures = inputs(hard_rows())
    AttnDeriveOnlinePass().apply(Context(), module)
    with pytest.raises(ValueError, match="cover"):
        run_online(module, *tensors, 1.0, captures, block=4, num_splits=[1, 1])
    online_of(module).properties.pop("combine", None)
    for region in list(online_of(module).combine):
        online_of(module).detach_region(region)
    with pytest.raises(ValueError, match="combine"):
        run_online(module, *tensors, 1.0, captures, block=4, num_splits=2)


def test_equal_reductions_are_one_state():
    def twice(r, s):
        return r.exp(s - r.max(s)) / r.sum(r.exp(s - r.max(s)))

    module = attention(twice)
    AttnDeriveOnlinePass().apply(Context(), module)
    assert [len(i) for i in online_of(module).init] == [2]


def test_unused_reductions_are_dropped():
    module = attention(unused)
    AttnDeriveOnlinePass().apply(Context(), module)
    assert [len(i) for i in online_of(module).init] == [2]


@pytest.mark.parametrize(("function", "states"), [(sigmoid, 0), (retention, 1), (cosine, 2), (signed, 2)])
def test_a_count_is_carried_only_where_an_empty_row_would_show(function, states):
    module = attention(function)
    AttnDeriveOnlinePass().apply(Context(), module)
    assert [len(i) for i in online_of(module).init] == [states]


def test_row_values_need_to_know_empty_rows():
    module = attention(lambda r, s: (sigmoid(r, s), r.sum(s)))
    AttnDeriveOnlinePass().apply(Context(), module)
    assert [len(i) for i in online_of(module).init] == [2]


def test_a_row_value_must_not_depend_on_the_key():
    module = attention(lambda r, s: (sigmoid(r, s), s + r.sum(s)))
    with pytest.raises(RowValueError, match="depends on the key"):
        AttnDeriveOnlinePass().apply(Context(), module)


def test_saved_values_follow_outputs():
    module = attention(lambda r, s: (*softmax_from_lse(r, s), r.max(s)), outputs=1)
    AttnDeriveOnlinePass().apply(Context(), module)
    online = online_of(module)
    assert (len(online.outputs), len(online.saved)) == (1, 1)


REASONS = {
    temperature_per_key: "multiplies a running reduction in an exponent",
    centred: "a sum of both",
    clamped_weight: "maximumf of both",
    mean_stabilised: "no running maximum or minimum",
    maximum_of_signed: "not proved positive",
    foreign_stabiliser: "not bounded",
    hidden_exponential: "a sum of both",
    high_power: "power 64",
}


@pytest.mark.parametrize("function", REASONS, ids=lambda f: f.__name__)
def test_explain_says_why_not_one_loop(function):
    report = explain(attention_of(attention(function)))
    assert report.passes == 2
    refused = [v for v in report.verdicts if not v.one_pass]
    assert any(REASONS[function] in v.detail for v in refused), str(report)


def test_explain_names_the_users_values():
    report = explain(attention_of(attention(softmax)))
    assert (report.passes, len(report.reductions), len(report.rescale)) == (1, 2, 1)
    assert all(v.one_pass for v in report.verdicts)
