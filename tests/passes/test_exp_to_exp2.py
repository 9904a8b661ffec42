"""attn-exp-to-exp2 keeps every row's result, and leaves one multiply-add and one exp2 per element of a softmax."""

import pytest
import torch
from xdsl.dialects import arith, math

from attn_engine.dialects.attn import AttentionOp, BackwardOp, OnlineOp
from attn_engine.interpreters.attn import run_attention, run_online
from attn_engine.interpreters.attn_backward import run_backward
from attn_engine.ir.axes import axes_of
from attn_engine.passes.attn_derive_backward import AttnDeriveBackwardPass
from attn_engine.passes.attn_derive_online import AttnDeriveOnlinePass
from attn_engine.passes.attn_exp_to_exp2 import AttnExpToExp2Pass
from attn_engine.universe import make_context
from tests.support.row_functions import KEYS, attention, hard_rows, inputs

CONTEXT = make_context()
# What users add to a score to hide a key: the least f32. A row of nothing else is uniform.
LEAST = torch.finfo(torch.float32).min


def softmax(r, s):
    m = r.max(s)
    e = r.exp(s - m)
    total = r.sum(e)
    return e / total, m + r.log(total)


def scaled_softmax(r, s):
    return softmax(r, s * 3.0)


def sigmoid(r, s):
    return 1.0 / (1.0 + r.exp(-s)), r.sum(s)


def bell(r, s):
    return r.exp(s * -0.5 * s), r.sum(s)


def base_two(r, s):
    return r.op("math.powf", 2.0, s - r.max(s)), r.max(s)


def shifted(r, s):
    return r.exp(s - r.per_row), r.sum(r.exp(s - r.per_key))


FUNCTIONS = [softmax, scaled_softmax, sigmoid, bell, base_two, shifted]


def rows():
    extreme = torch.full((4, KEYS), LEAST, dtype=torch.float64)
    extreme[1, 3] = 0.0
    extreme[2] = -LEAST
    extreme[3, :2] = float("-inf")
    return torch.cat([hard_rows(), extreme])


def lowered(function, *passes):
    module = attention(function, outputs=1)
    for one in passes:
        one().apply(CONTEXT, module)
        module.verify()
    return module


def find(module, kind):
    return next(op for op in module.walk() if isinstance(op, kind))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forward_is_the_same(function, dtype):
    tensors, captures = inputs(rows())
    before = lowered(function, AttnDeriveOnlinePass)
    after = lowered(function, AttnDeriveOnlinePass, AttnExpToExp2Pass)
    assert not any(isinstance(op, math.ExpOp | math.LogOp) for op in after.walk())
    for block in (KEYS, 4):
        expected = run_online(before, *tensors, 1.0, captures, block=block, dtype=dtype)
        actual = run_online(after, *tensors, 1.0, captures, block=block, dtype=dtype)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_a_row_of_the_least_number_is_uniform_in_f32():
    tensors, captures = inputs(torch.full((1, KEYS), LEAST, dtype=torch.float64))
    after = lowered(softmax, AttnDeriveOnlinePass, AttnExpToExp2Pass)
    o, _ = run_online(after, *tensors, 1.0, captures, dtype=torch.float32)
    expected = run_attention(attention(softmax), *tensors, 1.0, captures)[0]
    torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_are_the_same(function):
    tensors, captures = inputs(hard_rows())
    before = lowered(function, AttnDeriveBackwardPass)
    o, output, *saved = run_attention(before, *tensors, 1.0, captures)
    after = before.clone()
    AttnExpToExp2Pass().apply(CONTEXT, after)
    after.verify()
    args = (*tensors, 1.0, o, torch.ones_like(o), saved, [torch.ones_like(output)], captures)
    expected, actual = run_backward(before, *args), run_backward(after, *args)
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-6, equal_nan=True)


def per_element(op, name):
    axes = axes_of(op, name)
    return sorted(o.name for o in axes_block(op, name).ops if o.results and "kv" in axes[o.results[0]])


def axes_block(op, name):
    region = getattr(op, name)
    return (region if hasattr(region, "block") else region[0]).block


def test_a_softmax_has_one_multiply_add_and_one_exponential_per_element():
    module = lowered(softmax, AttnDeriveOnlinePass, AttnExpToExp2Pass)
    assert per_element(find(module, OnlineOp), "steps") == ["arith.mulf", "arith.subf", "math.exp2"]


def test_a_factor_of_the_score_costs_nothing():
    module = lowered(scaled_softmax, AttnDeriveBackwardPass, AttnExpToExp2Pass)
    names = per_element(find(module, BackwardOp), "element")
    assert names.count("math.exp2") == 1 and names.count("arith.mulf") <= 4


def test_attentions_that_are_not_lowered_stay():
    module = lowered(softmax, AttnExpToExp2Pass)
    assert any(isinstance(op, math.ExpOp) for op in find(module, AttentionOp).walk())
    assert not any(isinstance(op, arith.SelectOp) for op in module.walk())
