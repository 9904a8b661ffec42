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
from tests.support.rows_of_more_loops import (
    TWO_LOOPS,
    centred,
    clamped_weight,
    foreign_stabiliser,
    hidden_exponential,
    high_power,
    maximum_of_signed,
    mean_stabilised,
    sparse_renormalised,
    temperature_per_key,
)
from tests.support.rows_of_one_loop import (
    ONE_LOOP,
    cosine,
    retention,
    sigmoid,
    signed,
    softmax,
    softmax_from_lse,
    unused,
)

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
