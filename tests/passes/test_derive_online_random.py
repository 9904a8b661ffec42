"""Random compositions of row functions: what is derived equals the offline form, on rows that are hard."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from xdsl.context import Context
from xdsl.transforms.dead_code_elimination import dce

from attn_engine.dialects.attn import OnlineOp
from attn_engine.interpreters.attn import run_attention, run_online
from attn_engine.passes.attn_derive_online import AttnDeriveOnlinePass
from tests.support.row_functions import KEYS, attention, hard_rows, inputs

ELEMENT = {
    "difference": lambda r, x, y: x - y,
    "sum": lambda r, x, y: x + y,
    "product": lambda r, x, y: x * y,
    "ratio": lambda r, x, y: x / (r.abs(y) + 1.0),
    "exp of difference": lambda r, x, y: r.exp(x - y),
    "exp2 of difference": lambda r, x, y: r.exp2((x - y) * 1.44269504),
    "exp of product": lambda r, x, y: r.exp(r.minimum(x * 0.1 * r.tanh(y), 20.0)),
    "clamp": lambda r, x, y: r.maximum(x, y),
    # Apart from a tie, which rounding would break one way or the other.
    "select": lambda r, x, y: r.select(x > y + 0.0123, x, 0.0),
    "square": lambda r, x, y: x * x,
    "root": lambda r, x, y: r.sqrt(r.abs(x) + 0.5) - y,
    "logarithm": lambda r, x, y: r.log(r.abs(x) + 1.0) + y,
    "per key": lambda r, x, y: x * r.per_key,
    "per row": lambda r, x, y: x * r.per_row,
    "max": lambda r, x, y: r.max(x),
    "min": lambda r, x, y: r.min(x),
    "total": lambda r, x, y: r.sum(x),
    "mean": lambda r, x, y: r.sum(x) / r.count(x),
    "negative": lambda r, x, y: -x,
    "guard": lambda r, x, y: r.select(r.max(x).equals(float("-inf")), 0.0, r.max(x)),
}
STEP = st.tuples(st.sampled_from(sorted(ELEMENT)), st.integers(0, 7), st.integers(0, 7))
ORDERS = [([3, 1, 5, 2], [2, 0, 3, 1]), ([1] * KEYS, list(reversed(range(KEYS)))), ([KEYS], [0])]


def composed(steps):
    """A row function: each step applies an operation to two earlier values, counted from the last."""

    def function(r, s):
        values = [s]
        for name, i, j in steps:
            values.append(ELEMENT[name](r, values[-1 - i % len(values)], values[-1 - j % len(values)]))
        return values[-1], r.sum(values[-1])

    return function


def finite_rows(results):
    """Rows in which every result is finite and of moderate size, so that a comparison means something."""
    sizes = [
        t.abs().nan_to_num(float("inf")).amax(-1) if t.ndim == 4 else t.abs().nan_to_num(float("inf")) for t in results
    ]
    return torch.stack(sizes).amax(0) < 1e12


@settings(max_examples=120, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.lists(STEP, min_size=2, max_size=9), st.sampled_from(ORDERS))
def test_random_compositions(steps, parts):
    module = attention(composed(steps))
    dce(module)
    tensors, captures = inputs(hard_rows(magnitude=1.5))
    expected = run_attention(module, *tensors, 1.0, captures)
    AttnDeriveOnlinePass().apply(Context(), module)
    module.verify()
    blocks, order = parts
    actual = run_online(module, *tensors, 1.0, captures, block=blocks, order=order)
    apart = run_online(module, *tensors, 1.0, captures, block=blocks, order=order, num_splits=3)
    rows = finite_rows(expected)
    for want, got in zip([*expected, *expected], [*actual, *apart], strict=True):
        size = want[rows].abs().max().clamp(min=1.0) if rows.any() else 1.0
        assert torch.allclose(got[rows], want[rows], rtol=1e-5, atol=1e-6 * float(size))
        assert torch.equal(got[want == float("-inf")], want[want == float("-inf")])


@pytest.mark.parametrize("loops", [1, 2, 3])
def test_compositions_reach_several_loops(loops):
    """The generator is able to make what it is meant to test."""
    chain = [("max", 0, 0), ("difference", 1, 0), ("clamp", 0, 2)] * (loops - 1) + [("square", 0, 0)]
    module = attention(lambda r, s: composed(chain)(r, s)[0])
    AttnDeriveOnlinePass().apply(Context(), module)
    online = next(op for op in module.walk() if isinstance(op, OnlineOp))
    assert len(online.steps) == loops
