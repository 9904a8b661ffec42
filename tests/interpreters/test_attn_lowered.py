"""`attn.online` and `attn.backward` against the oracle, block by block."""

import pytest
import torch

from attn_engine.interpreters.attn import run_attention, run_online
from attn_engine.interpreters.attn_backward import run_backward
from attn_engine.interpreters.attn_steps import key_blocks
from tests.support.attn_cases import SHAPES, attention_module, parse, random_inputs
from tests.support.attn_lowered import SOFTMAX_BACKWARD, SOFTMAX_ONLINE, SOFTMAX_THREE_STEPS

SCALE = 0.5


@pytest.mark.parametrize("kind", ["normal", "large", "low"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_pass_softmax(shape, kind):
    q, k, v = random_inputs(**shape, kind=kind)
    o, lse = run_attention(attention_module("softmax_lse", mask="causal"), q, k, v, SCALE)
    online = parse(SOFTMAX_ONLINE)
    for block in (1, 4, 64):
        for got, want in zip(run_online(online, q, k, v, SCALE, block=block), (o, lse), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("text", [SOFTMAX_ONLINE, SOFTMAX_THREE_STEPS])
def test_any_blocks_in_any_order(text):
    q, k, v = random_inputs(sq=7, skv=9)
    expected = run_attention(attention_module(mask="causal"), q, k, v, SCALE)[0]
    for order in ([0, 1, 2], [2, 0, 1], [2, 1, 0]):
        o = run_online(parse(text), q, k, v, SCALE, block=[2, 6, 1], order=order)[0]
        torch.testing.assert_close(o, expected)


def test_blocks_come_in_the_order_given():
    assert key_blocks(9, [2, 6, 4], [2, 0, 1]) == [slice(8, 9), slice(0, 2), slice(2, 8)]
    assert key_blocks(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert key_blocks(0, 2) == []


def test_blocks_must_cover_the_keys_and_the_order_be_one():
    q, k, v = random_inputs(sq=2, skv=9)
    with pytest.raises(ValueError, match="blocks of 8 keys do not cover 9"):
        run_online(parse(SOFTMAX_ONLINE), q, k, v, SCALE, block=[4, 4])
    with pytest.raises(ValueError, match="not a permutation of 3 blocks"):
        run_online(parse(SOFTMAX_ONLINE), q, k, v, SCALE, block=4, order=[0, 0, 1])


FORWARD = """
func.func @attention(%q: tensor<?x?x?x?xf32>, %k: tensor<?x?x?x?xf32>, %v: tensor<?x?x?x?xf32>, %scale: f32, %slopes: tensor<?xf32>) -> (tensor<?x?x?x?xf32>, tensor<?x?x?xf32>) {
  %o, %lse = attn.attention %q, %k, %v scale %scale captures %slopes : tensor<?x?x?x?xf32>, tensor<?x?x?x?xf32>, tensor<?x?x?x?xf32> captures tensor<?xf32> -> tensor<?x?x?x?xf32> saved tensor<?x?x?xf32>
  score_mod {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %slopes_: tensor<?xf32>):
    %w = attn.load %slopes_[%h] : tensor<?xf32> -> f32
    %r = arith.mulf %s, %w : f32
    attn.yield %r : f32
  } mask {
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64, %slopes_: tensor<?xf32>):
    %c = arith.cmpi sge, %qi, %kv : i64
    attn.yield %c : i1
  } row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %slopes_: tensor<?xf32>):
    %m = attn.row_reduce max %s
    %x = arith.subf %s, %m : f32
    %e = math.exp %x : f32
    %l = attn.row_reduce sum %e
    %p = arith.divf %e, %l : f32
    %ll = math.log %l : f32
    %lse = arith.addf %m, %ll : f32
    attn.yield %p, %lse : f32, f32
  }
  func.return %o, %lse : tensor<?x?x?x?xf32>, tensor<?x?x?xf32>
}
"""


@pytest.mark.parametrize("kind", ["normal", "low"])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_equals_the_oracles_gradients(shape, kind):
    q, k, v = (x.requires_grad_() for x in random_inputs(**shape, kind=kind))
    slopes = torch.linspace(0.5, 1.5, q.shape[1], dtype=torch.float64).requires_grad_()
    o, lse = run_attention(parse(FORWARD), q, k, v, SCALE, [slopes])
    d_o = torch.randn_like(o)
    want = torch.autograd.grad(o, [q, k, v, slopes], d_o)
    with torch.no_grad():
        found = run_backward(parse(SOFTMAX_BACKWARD), q, k, v, SCALE, o, d_o, [lse], captures=[slopes])
    got = [found["dq"], found["dk"], found["dv"], *found["d_captures"]]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


# Weights p = s / (1 + max of dp over the row), to exercise a row step, vjps and an indexed capture: not a
# gradient of anything.
ODD = """
func.func @backward(%q: tensor<?x?x?x2xf32>, %k: tensor<?x?x?x2xf32>, %v: tensor<?x?x?x2xf32>, %scale: f32, %o: tensor<?x?x?x2xf32>, %do: tensor<?x?x?x2xf32>, %w: tensor<?x?xf32>, %t: tensor<f32>) -> (tensor<?x?x?x2xf32>, tensor<?x?xf32>, tensor<f32>) {
  %dk, %dw, %dt = attn.backward %q, %k, %v scale %scale o %o, %do captures %w, %t init [[0xFF800000 : f32]] grad_captures [0, 1] : tensor<?x?x?x2xf32>, tensor<?x?x?x2xf32>, tensor<?x?x?x2xf32>, tensor<?x?x?x2xf32>, tensor<?x?x?x2xf32> captures tensor<?x?xf32>, tensor<f32> -> dk tensor<?x?x?x2xf32> d_captures tensor<?x?xf32>, tensor<f32>
  mask {
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64, %w_: tensor<?x?xf32>, %t_: tensor<f32>):
    %c = arith.cmpi sge, %qi, %kv : i64
    attn.yield %c : i1
  } key_vjp {
  ^bb0(%g: f32, %e: f32, %b: i64, %h: i64, %p: i64, %c: i64, %w_: tensor<?x?xf32>, %t_: tensor<f32>):
    %i = arith.uitofp %h : i64 to f32
    %x = arith.mulf %g, %e : f32
    %r = arith.mulf %x, %i : f32
    attn.yield %r : f32
  } row_steps {
  ^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %delta: f32, %m0: f32, %w_: tensor<?x?xf32>, %t_: tensor<f32>):
    %bm = attn.row_reduce max %dp
    %m = arith.maximumf %m0, %bm : f32
    attn.step_yield states(%m)
  } rows {
  ^bb0(%b: i64, %h: i64, %qi: i64, %delta: f32, %m: f32, %w_: tensor<?x?xf32>, %t_: tensor<f32>):
    attn.accumulate_grad %m, %t_[] : tensor<f32>
    attn.yield %m : f32
  } element {
  ^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %m: f32, %w_: tensor<?x?xf32>, %t_: tensor<f32>):
    %minus = arith.constant -1 : i64
    %k1 = arith.muli %kv, %minus : i64
    %k2 = arith.addi %k1, %minus : i64
    %dx = arith.mulf %x, %m : f32
    attn.accumulate_grad %dx, %w_[%qi, %k2] : tensor<?x?xf32>
    attn.yield %dp, %dx : f32, f32
  }
  func.return %dk, %dw, %dt : tensor<?x?x?x2xf32>, tensor<?x?xf32>, tensor<f32>
}
"""


def test_row_steps_vjps_and_indexed_captures():
    q, k, v = random_inputs(b=2, hq=4, hkv=2, sq=5, d=2)
    d_o, w, t = torch.randn_like(q), torch.zeros(5, 5), torch.zeros(())
    found = run_backward(parse(ODD), q, k, v, SCALE, d_o, d_o, captures=[w, t], block=2, order=[1, 0, 2])
    key, value = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    visible = torch.ones(5, 5).tril().bool()
    x, dp = SCALE * q @ key.transpose(2, 3), d_o @ value.transpose(2, 3)
    m = dp.masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
    dx = x * m * visible
    dk = SCALE * dx.transpose(2, 3) @ q * key * (torch.arange(4) // 2)[:, None, None]
    assert set(found) == {"dk", "d_captures"}
    torch.testing.assert_close(found["dk"], dk.unflatten(1, (2, 2)).sum(2))
    torch.testing.assert_close(found["d_captures"][0], dx.sum((0, 1)).flip(1))
    torch.testing.assert_close(found["d_captures"][1], m.sum())
