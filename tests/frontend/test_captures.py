"""Captured tensors, custom inputs, and the elementwise functions of query, key and value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_engine import errors, library
from attn_engine.frontend import CustomIO, Definition, rebind
from attn_engine.interpreters.attn import run_attention
from tests.support.frontend_tracing import region_ops, trace

B, H, S, D = 2, 3, 6, 4


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(B, H, S, D, dtype=torch.float64, generator=generator) for _ in range(3)]


def grid() -> list[torch.Tensor]:
    sizes = (B, H, S, S)
    return [torch.arange(n).view([-1 if j == i else 1 for j in range(4)]) for i, n in enumerate(sizes)]


SLOPES = torch.tensor([0.5, 0.25, -1.0])
BIAS = torch.randn(B, H, S, S)
TEMPERATURE = torch.tensor(0.7)
ONE = torch.tensor([1.3])
BUCKETS = torch.arange(2 * S) // 2
TABLE = torch.randn(H, S)
FLAGS = torch.tensor([True, False, True])
COUNTS = torch.tensor([200, 1, 255], dtype=torch.uint8)
DOUBLE = torch.rand(H, dtype=torch.float64)

SCORES = {
    "slopes": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q),
    "bias": lambda s, b, h, q, kv: s + BIAS[b, h, q, kv],
    "constant index": lambda s, b, h, q, kv: s + BIAS[0, -1, q, kv] + BIAS[1][2][3, 4],
    "scalar tensor": lambda s, b, h, q, kv: s * TEMPERATURE,
    "scalar tensor left": lambda s, b, h, q, kv: TEMPERATURE - s / TEMPERATURE,
    "one element": lambda s, b, h, q, kv: ONE * s,
    "table of tables": lambda s, b, h, q, kv: s + TABLE[h, BUCKETS[q - kv]],
    "negative index": lambda s, b, h, q, kv: s + TABLE[h, -1 - q],
    "bools": lambda s, b, h, q, kv: torch.where(FLAGS[h], s, -s),
    "uint8": lambda s, b, h, q, kv: s + COUNTS[h] * 0.01,
    "float64": lambda s, b, h, q, kv: s * DOUBLE[h],
    "eager": lambda s, b, h, q, kv: s + (SLOPES * 2).exp()[h],
    "numpy": lambda s, b, h, q, kv: np.float32(2.0) * s + np.int64(3),
    "returns a tensor": lambda s, b, h, q, kv: TEMPERATURE,
    "returns a number": lambda s, b, h, q, kv: 1,
    "comparisons with tensors": lambda s, b, h, q, kv: (
        torch.where(s > TEMPERATURE, s, TEMPERATURE) + (TEMPERATURE == s)  # noqa: SIM300
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_captures_in_score_functions(name: str):
    function = SCORES[name]
    q, k, v = inputs()
    traced = trace(Definition(score_mod=function), head_dim=D, head_dim_v=D)
    (o,) = run_attention(traced.module, q, k, v, 1.0, traced.captures)
    scores = torch.as_tensor(function(q @ k.transpose(-1, -2), *grid())).expand(B, H, S, S).double()
    torch.testing.assert_close(o, torch.softmax(scores, -1) @ v, rtol=1e-6, atol=1e-6)


IDS = torch.tensor([0, 0, 1, 1, 1, 2])
BATCH_IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
MASKS = {
    "causal": library.causal,
    "bottom right": library.causal_bottom_right(S, S + 2),
    "window": library.sliding_window(2),
    "prefix": library.prefix_lm(3),
    "prefix per batch": library.prefix_lm(torch.tensor([2, 4])),
    "document": library.document(IDS),
    "documents": library.document(BATCH_IDS),
    "and": library.and_masks(library.causal, library.document(IDS)),
    "or": library.or_masks(library.sliding_window(2), library.prefix_lm(1)),
    "flags": lambda b, h, q, kv: FLAGS[h] | (q == kv),
    "constant": lambda b, h, q, kv: True,
    "where": lambda b, h, q, kv: torch.where(b == 0, q >= kv, q % 2 == kv % 2),
    "head": lambda b, h, q, kv: (h == 0) ^ (abs(q - kv) < 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str):
    q, k, v = inputs()
    traced = trace(Definition(mask_mod=MASKS[name]), head_dim=D, head_dim_v=D)
    (o,) = run_attention(traced.module, q, k, v, 1.0, traced.captures)
    visible = torch.as_tensor(MASKS[name](*grid())).expand(B, H, S, S)
    scores = (q @ k.transpose(-1, -2)).masked_fill(~visible, -float("inf"))
    torch.testing.assert_close(o, torch.softmax(scores, -1).nan_to_num() @ v)


def test_library_scores():
    q, k, v = inputs()
    plain = q @ k.transpose(-1, -2)
    _, _, qi, ki = grid()
    expected = {
        library.alibi(SLOPES): plain + SLOPES.view(-1, 1, 1) * (ki - qi),
        library.alibi(SLOPES, offset=2): plain + SLOPES.view(-1, 1, 1) * (ki - qi - 2),
        library.soft_cap(2.0): 2 * torch.tanh(plain / 2),
        library.bias(BIAS): plain + BIAS,
        library.bias(BIAS[:1, :1]): plain + BIAS[:1, :1],
        library.bias(BIAS[0]): plain + BIAS[0],
        library.bias(BIAS[0, 0]): plain + BIAS[0, 0],
    }
    for function, scores in expected.items():
        traced = trace(Definition(score_mod=function), head_dim=D, head_dim_v=D)
        (o,) = run_attention(traced.module, q, k, v, 1.0, traced.captures)
        torch.testing.assert_close(o, torch.softmax(scores.double(), -1) @ v, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="2 to 4 dimensions"):
        library.bias(SLOPES)


def test_a_tensor_is_captured_once_and_unread_ones_are_dropped():
    unused = torch.rand(4)

    def score_mod(score, b, h, q_idx, kv_idx):
        unused[h]
        return score * SLOPES[h] + SLOPES[0]

    traced = trace(Definition(score_mod=score_mod, mask_mod=lambda b, h, q, kv: BUCKETS[q] >= BUCKETS[kv]))
    assert traced.capture_names == ["SLOPES", "BUCKETS"]
    assert traced.captures[0] is SLOPES
    assert "tensor<?xf32>, %BUCKETS" in str(traced.module)


def test_names_do_not_clash():
    first = {"o": torch.rand(2)}
    q = torch.rand(3)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + first["o"][h] + q[h] + torch.rand(2)[h] + torch.rand(2)[b]

    names = trace(Definition(score_mod=score_mod)).capture_names
    assert names == ["first_o", "capture_q", "capture", "capture2"]


def test_gradients_flow_through_tensors_computed_inside():
    weight = torch.rand(H, requires_grad=True)
    traced = trace(Definition(score_mod=lambda s, b, h, q, kv: s * weight.exp()[h]))
    traced.captures[0].sum().backward()
    torch.testing.assert_close(weight.grad, weight.detach().exp())


def test_custom_inputs_by_their_declared_dimensions():
    custom = {
        "softmax_scale": torch.tensor([0.3]),
        "bias": torch.randn(B, 1, S, S),
        "per_head": torch.randn(H),
        "table": torch.randn(H, 5),
        "unused": torch.randn(2),
    }
    custom_io = CustomIO(
        {
            "softmax_scale": (1,),
            "bias": ("batch", 1, "seq_len", "seq_len_kv"),
            "per_head": ("heads",),
            "table": ("heads", 5),
            "unused": (2,),
        }
    )

    def score_mod(score, custom_fwd_inputs, b, h, q_idx, kv_idx):
        score = score * custom_fwd_inputs["softmax_scale"] + custom_fwd_inputs["bias"]
        return custom_fwd_inputs["per_head"] * score + custom_fwd_inputs["table"][h, 4]

    traced = trace(Definition(score_mod=score_mod, custom_io=custom_io), custom=custom, head_dim=D, head_dim_v=D)
    assert traced.capture_names == ["softmax_scale", "bias", "per_head", "table"]
    q, k, v = inputs()
    (o,) = run_attention(traced.module, q, k, v, 1.0, traced.captures)
    per_head, table = custom["per_head"].view(-1, 1, 1), custom["table"][:, 4].view(-1, 1, 1)
    scores = (q @ k.transpose(-1, -2) * 0.3 + custom["bias"]) * per_head + table
    torch.testing.assert_close(o, torch.softmax(scores, -1) @ v, rtol=1e-6, atol=1e-6)


def test_custom_inputs_that_coincide_in_one_call_are_told_apart_in_the_next():
    custom_io = CustomIO({"first": ("heads",), "second": ("heads",)})
    score_mod = lambda s, inputs, b, h, q, kv: s * inputs["first"] + inputs["second"] + SLOPES[h]  # noqa: E731
    definition = Definition(score_mod=score_mod, custom_io=custom_io)
    traced = trace(definition, custom={"first": SLOPES, "second": SLOPES})
    assert traced.capture_names == ["first", "second", "SLOPES"]
    other = {"first": torch.rand(H), "second": torch.rand(H)}
    assert str(trace(definition, custom=other).module) == str(traced.module)
    assert [id(t) for t in rebind(definition, traced, other)] == [id(other["first"]), id(other["second"]), id(SLOPES)]


def test_a_custom_input_of_a_fixed_size_needs_its_index():
    custom_io = CustomIO({"table": ("heads", 5)})
    with pytest.raises(errors.CustomInputError, match="2 indices"):
        trace(
            Definition(score_mod=lambda s, inputs, b, h, q, kv: s + inputs["table"], custom_io=custom_io),
            custom={"table": torch.zeros(3, 5)},
        )


def test_elementwise_functions_of_query_key_and_value():
    q, k, v = inputs()
    gain = torch.rand(D)
    definition = Definition(
        query_mod=lambda x: torch.relu(x) * 2,
        key_mod=lambda x, b, h, pos, channel: x * gain[channel] + pos,
        value_mod=lambda x, b, h, pos, channel: x + h - b,
    )
    traced = trace(definition, head_dim=D, head_dim_v=D)
    (o,) = run_attention(traced.module, q, k, v, 1.0, traced.captures)
    b, h, pos, _ = grid()
    keys = k * gain.double() + pos
    expected = torch.softmax((q.relu() * 2) @ keys.transpose(-1, -2), -1) @ (v + h - b)
    torch.testing.assert_close(o, expected, rtol=1e-6, atol=1e-6)


def test_both_traces_print_the_same():
    definition = Definition(score_mod=SCORES["table of tables"], mask_mod=library.document(IDS))
    assert str(trace(definition).module) == str(trace(definition).module)


def test_python_numbers_fold_before_they_meet_a_traced_value():
    ops = region_ops(trace(Definition(score_mod=lambda s, b, h, q, kv: s * (1 / 128**0.5) + (7 // 2))), "score_mod")
    assert ops == [
        "%0 = arith.constant 0.0883883461",
        "%1 = arith.mulf %score, %0",
        "%2 = arith.constant 3.000000e+00",
        "%3 = arith.addf %1, %2",
        "attn.yield %3",
    ]
