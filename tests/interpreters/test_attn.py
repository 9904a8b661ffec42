"""The oracle against plain torch, and its gradients."""

import pytest
import torch
import torch.nn.functional as F

from attn_engine.interpreters.attn import run_attention
from tests.support.attn_cases import (
    MASKS,
    ROWS,
    SCORE_MODS,
    SHAPES,
    attention_module,
    captures_for,
    parse,
    random_inputs,
)

SCALE = 0.5


def dense(row, scores, visible, v):
    """The same rows in plain torch; every row has a visible key."""
    group = scores.shape[1] // v.shape[1]
    if row == "softmax":
        p = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
    elif row == "sigmoid":
        p = torch.sigmoid(scores) * visible
    elif row == "relu":
        p = torch.relu(scores) * visible
    elif row == "retention":
        p = scores * visible
        p = p / p.abs().sum(-1, keepdim=True).clamp(min=1)
    elif row == "cosine":
        p = scores * visible
        p = p / (p.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    else:
        p = visible.double() / visible.sum(-1, keepdim=True)
    return p.expand_as(scores) @ v.repeat_interleave(group, 1)


def scores_of(q, k, score_mod, captures):
    x = SCALE * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)
    position = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    match score_mod:
        case "alibi":
            return x + captures[0][:, None, None] * position
        case "softcap":
            return 2 * torch.tanh(x / 2)
        case "bias":
            return x + captures[0]
        case "temperature":
            return x * captures[0]
        case _:
            return x


def visible_of(q, k, mask):
    qi, kv = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    visible = {"causal": qi >= kv, "window": (qi >= kv) & (qi - kv < 4)}.get(mask, torch.ones(qi.shape[0], kv.shape[0]))
    return visible.bool().expand(q.shape[0], q.shape[1], -1, -1)


@pytest.mark.parametrize("row", ["softmax", "sigmoid", "relu", "retention", "cosine", "mean"])
@pytest.mark.parametrize(
    ("score_mod", "mask"),
    [(None, None), ("alibi", "causal"), ("softcap", "window"), ("bias", None), ("temperature", "causal")],
)
def test_equals_plain_torch_with_every_gradient(row, score_mod, mask):
    q, k, v = (x.requires_grad_() for x in random_inputs(b=2, hq=4, hkv=2, sq=7, dv=3))
    captures = [c.requires_grad_() for c in captures_for(q, k, row, score_mod, mask)]
    leaves = [q, k, v, *captures]
    o, *_ = run_attention(attention_module(row, score_mod, mask), q, k, v, SCALE, captures)
    expected = dense(row, scores_of(q, k, score_mod, captures), visible_of(q, k, mask), v)
    torch.testing.assert_close(o, expected, rtol=1e-6, atol=1e-6)
    d_o = torch.randn_like(o)
    got = torch.autograd.grad(o, leaves, d_o, allow_unused=True, materialize_grads=True)
    want = torch.autograd.grad(expected, leaves, d_o, allow_unused=True, materialize_grads=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mask", MASKS)
def test_everything_is_finite_on_hard_inputs(row, mask):
    for score_mod, kind in ((None, "large"), ("alibi", "low"), ("softcap", "large")):
        module = attention_module(row, score_mod, mask)
        for shape in SHAPES:
            q, k, v = (x.requires_grad_() for x in random_inputs(**shape, kind=kind))
            captures = captures_for(q, k, row, score_mod, mask)
            leaves = [q, k, v, *(c.requires_grad_() for c in captures if c.is_floating_point())]
            o, *rows = run_attention(module, q, k, v, SCALE, captures)
            assert torch.isfinite(o).all()
            assert all((torch.isfinite(r) | (r == float("-inf"))).all() for r in rows)
            loss = o.square().sum() + sum(r[torch.isfinite(r)].sum() for r in rows)
            for grad in torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True):
                assert torch.isfinite(grad).all()


def test_dead_rows_give_zero_and_no_gradient():
    q, k, v = (x.requires_grad_() for x in random_inputs(sq=6, skv=5))
    o, lse = run_attention(attention_module("softmax_lse", mask="holes"), q, k, v, SCALE)
    dead = torch.arange(6) % 3 == 1
    assert (o[:, :, dead] == 0).all() and (lse[:, :, dead] == float("-inf")).all()
    assert (o[:, :, ~dead] != 0).any() and torch.isfinite(lse[:, :, ~dead]).all()
    (dq,) = torch.autograd.grad(o.sum() + lse.nan_to_num(neginf=0).sum(), q)
    assert (dq[:, :, dead] == 0).all() and (dq[:, :, ~dead] != 0).any()


def test_a_row_whose_scores_are_all_minus_infinity_is_dead():
    q, k, v = random_inputs(sq=3)
    bias = torch.zeros(2, 3, 3)
    bias[:, 1] = float("-inf")
    bias[:, 2, 0] = float("-inf")
    bias.requires_grad_()
    o, lse = run_attention(attention_module("softmax_lse", "bias"), q, k, v, SCALE, [bias])
    assert (o[:, :, 1] == 0).all() and (lse[:, :, 1] == float("-inf")).all()
    expected = F.scaled_dot_product_attention(q, k, v, bias.double(), scale=SCALE)
    torch.testing.assert_close(o[:, :, [0, 2]], expected[:, :, [0, 2]])
    (grad,) = torch.autograd.grad(o.sum(), bias)
    assert torch.isfinite(grad).all() and (grad[:, 1] == 0).all()


@pytest.mark.parametrize("row", ["softmax_sink", "softmax_lse", "cosine"])
def test_gradients_are_differences(row):
    q, k, v = (x.requires_grad_() for x in random_inputs(hq=2, hkv=1, sq=3, skv=4, d=2))
    captures = [c.requires_grad_() for c in captures_for(q, k, row, "alibi", "causal")]
    module = attention_module(row, "alibi", "causal")
    assert torch.autograd.gradcheck(lambda *x: run_attention(module, *x[:3], SCALE, x[3:]), (q, k, v, *captures))


def test_second_derivatives_by_finite_differences():
    module, inputs = attention_module(), [x.requires_grad_() for x in random_inputs(sq=2, skv=3)]
    assert torch.autograd.gradgradcheck(lambda *x: run_attention(module, *x, SCALE)[0], inputs)


def test_no_keys_and_no_queries():
    q, k, v = random_inputs(sq=3, skv=0)
    o, lse = run_attention(attention_module("softmax_lse"), q, k, v, SCALE)
    assert o.shape == (1, 2, 3, 4) and (o == 0).all() and (lse == float("-inf")).all()
    q, k, v = random_inputs(sq=0, skv=3)
    o, lse = run_attention(attention_module("softmax_lse"), q, k, v, SCALE)
    assert o.shape == (1, 2, 0, 4) and lse.shape == (1, 2, 0)


def test_lse_and_lengths_per_batch():
    q, k, v = random_inputs(b=4, sq=3, skv=3)
    lengths = captures_for(q, k, mask="lengths")
    o, lse = run_attention(attention_module("softmax_lse", mask="lengths"), q, k, v, SCALE, lengths)
    x = SCALE * q @ k.transpose(2, 3)
    for b, n in enumerate(lengths[0].tolist()):
        torch.testing.assert_close(lse[b], torch.logsumexp(x[b, :, :, :n], -1))
        torch.testing.assert_close(o[b], torch.softmax(x[b, :, :, :n], -1) @ v[b, :, :n])


TIES = """
func.func @attention(%q: tensor<?x?x?x1xf32>, %k: tensor<?x?x?x1xf32>, %v: tensor<?x?x?x1xf32>, %scale: f32) -> tensor<?x?x?x1xf32> {{
  %o = attn.attention %q, %k, %v scale %scale : tensor<?x?x?x1xf32>, tensor<?x?x?x1xf32>, tensor<?x?x?x1xf32> -> tensor<?x?x?x1xf32>
  row {{
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64):
    %m = attn.row_reduce {kind} %s {ties}
    attn.yield %m : f32
  }}
  func.return %o : tensor<?x?x?x1xf32>
}}
"""


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize(
    ("ties", "expected"), [("", [1.5, 1.5, 0.0]), ("ties split", [1.5, 1.5, 0.0]), ("ties first", [3.0, 0.0, 0.0])]
)
def test_ties_follow_their_rule(kind, ties, expected):
    sign = 1.0 if kind == "max" else -1.0
    k = torch.tensor([2.0, 2.0, 1.0], dtype=torch.float64).mul(sign).reshape(1, 1, 3, 1).requires_grad_()
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    o, *_ = run_attention(parse(TIES.format(kind=kind, ties=ties)), one, k, one.expand(1, 1, 3, 1), 1.0)
    assert o.item() == 6.0 * sign
    assert torch.autograd.grad(o.sum(), k)[0].flatten().tolist() == expected


MODS = """
func.func @attention(%q: tensor<?x?x?x2xf32>, %k: tensor<?x?x?x2xf32>, %v: tensor<?x?x?x2xf32>, %scale: f32, %w: tensor<?x?xf32>) -> tensor<?x?x?x2xf32> {
  %o = attn.attention %q, %k, %v scale %scale captures %w : tensor<?x?x?x2xf32>, tensor<?x?x?x2xf32>, tensor<?x?x?x2xf32> captures tensor<?x?xf32> -> tensor<?x?x?x2xf32>
  query_mod {
  ^bb0(%e: f32, %b: i64, %h: i64, %p: i64, %c: i64, %w_: tensor<?x?xf32>):
    %i = arith.uitofp %p : i64 to f32
    %r = arith.mulf %e, %i : f32
    attn.yield %r : f32
  } key_mod {
  ^bb0(%e: f32, %b: i64, %h: i64, %p: i64, %c: i64, %w_: tensor<?x?xf32>):
    %i = attn.load %w_[%h, %c] : tensor<?x?xf32> -> f32
    %r = arith.mulf %e, %i : f32
    attn.yield %r : f32
  } value_mod {
  ^bb0(%e: f32, %b: i64, %h: i64, %p: i64, %c: i64, %w_: tensor<?x?xf32>):
    %i = arith.uitofp %h : i64 to f32
    %r = arith.addf %e, %i : f32
    attn.yield %r : f32
  } row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %w_: tensor<?x?xf32>):
    attn.yield %s : f32
  }
  func.return %o : tensor<?x?x?x2xf32>
}
"""


def test_mods_see_their_operands_own_head():
    q, k, v = random_inputs(hq=4, hkv=2, sq=3, d=2)
    w = torch.randn(2, 2, dtype=torch.float64)
    o, *_ = run_attention(parse(MODS), q, k, v, SCALE, [w])
    query = q * torch.arange(3)[:, None]
    key, value = k * w[:, None, :], v + torch.arange(2)[:, None, None]
    expected = SCALE * query @ key.repeat_interleave(2, 1).transpose(2, 3) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(o, expected)


def test_score_mods_all_have_a_reference():
    assert set(SCORE_MODS) == {None, "alibi", "softcap", "bias", "temperature"}
