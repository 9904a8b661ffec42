"""The recurrent interpreter against closed forms."""

import pytest
import torch

from attn_engine.interpreters.attn_recurrence import run_recurrence
from tests.support.attn_cases import parse

SCALE = 0.5
T = "tensor<?x?x?x?xf32>"
PARTS = {"decay": "tensor<?x?x?xf32>", "channel_decay": T, "beta": "tensor<?x?x?xf32>", "initial": T}
MOD = """
  k_mod {
  ^bb0(%e: f32, %b: i64, %h: i64, %t: i64, %c: i64):
    %one = arith.constant 1.0 : f32
    %hf = arith.uitofp %h : i64 to f32
    %x = arith.addf %e, %one : f32
    %r = arith.addf %x, %hf : f32
    attn.yield %r : f32
  }"""


def recurrence(*parts, mods=""):
    """A function whose `attn.recurrence` has these optional operands, and a final state."""
    clause = " ".join(f"{p.removeprefix('channel_')} %{p}" for p in parts)
    types = " ".join(f"{p.removeprefix('channel_')} {PARTS[p]}" for p in parts)
    signature = "".join(f", %{p}: {PARTS[p]}" for p in parts)
    return parse(f"""
func.func @recurrence(%q: {T}, %k: {T}, %v: {T}, %scale: f32{signature}) -> ({T}, {T}) {{
  %o, %s = attn.recurrence %q, %k, %v scale %scale {clause} : {T}, {T}, {T} {types} -> {T} final {T} {mods}
  func.return %o, %s : {T}, {T}
}}""")


def inputs(tokens=6, heads=4, shared=2, key=3, value=5):
    generator = torch.Generator().manual_seed(tokens)
    shapes = {
        "q": (2, shared, tokens, key),
        "k": (2, shared, tokens, key),
        "v": (2, heads, tokens, value),
        "decay": (2, heads, tokens),
        "beta": (2, heads, tokens),
        "initial": (2, heads, key, value),
    }
    made = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    made["decay"], made["beta"] = -made["decay"].abs(), made["beta"].sigmoid()
    return made


def unrolled(q, k, v, decay):
    """The same as attention: weights q_i . k_j * exp(sum of the decays after j), j <= i."""
    q, k = q.repeat_interleave(2, 1), k.repeat_interleave(2, 1)
    total = decay.cumsum(2)
    weights = torch.exp(total[..., :, None] - total[..., None, :]).tril()
    return SCALE * (q @ k.transpose(2, 3) * weights) @ v


@pytest.mark.parametrize("tokens", [1, 6])
def test_decay_per_token(tokens):
    x = inputs(tokens)
    q, k, v, decay = x["q"], x["k"], x["v"], x["decay"].requires_grad_()
    o, _ = run_recurrence(recurrence("decay"), q, k, v, SCALE, decay=decay)
    expected = unrolled(q, k, v, decay)
    torch.testing.assert_close(o, expected)
    (got,), (want,) = (torch.autograd.grad(y.square().sum(), decay) for y in (o, expected))
    torch.testing.assert_close(got, want)


def test_no_decay_is_a_decay_of_zero_and_a_channel_decay_may_be_constant():
    x = inputs()
    q, k, v = x["q"], x["k"], x["v"]
    torch.testing.assert_close(run_recurrence(recurrence(), q, k, v, SCALE)[0], unrolled(q, k, v, 0 * x["decay"]))
    wide = x["decay"][..., None].expand(-1, -1, -1, 3)
    o, _ = run_recurrence(recurrence("channel_decay"), q, k, v, SCALE, decay=wide)
    torch.testing.assert_close(o, unrolled(q, k, v, x["decay"]))


def test_a_channel_decay_forgets_rows_of_the_state():
    x = inputs(tokens=2)
    decay = torch.zeros(2, 4, 2, 3, dtype=torch.float64)
    decay[:, :, 1, 0] = float("-inf")
    _, state = run_recurrence(recurrence("channel_decay"), x["q"], x["k"], x["v"], SCALE, decay=decay)
    k = x["k"].repeat_interleave(2, 1)
    torch.testing.assert_close(state[:, :, 0], k[:, :, 1, 0, None] * x["v"][:, :, 1])
    torch.testing.assert_close(state[:, :, 1:], (k.transpose(2, 3) @ x["v"])[:, :, 1:])


def test_state_goes_through_cuts_at_any_token():
    x = inputs(tokens=7)
    module = recurrence("decay", "beta", "initial")

    def run(part, state):
        cut = {n: x[n][:, :, part] for n in ("q", "k", "v", "decay", "beta")}
        return run_recurrence(
            module, cut["q"], cut["k"], cut["v"], SCALE, decay=cut["decay"], beta=cut["beta"], initial=state
        )

    o, final = run(slice(0, 7), x["initial"])
    first, middle = run(slice(0, 3), x["initial"])
    second, last = run(slice(3, 7), middle)
    torch.testing.assert_close(torch.cat([first, second], 2), o)
    torch.testing.assert_close(last, final)
    nothing, same = run(slice(0, 0), x["initial"])
    assert nothing.shape == (2, 4, 0, 5)
    torch.testing.assert_close(same, x["initial"])


def test_delta_rule_replaces_what_a_key_holds():
    x = inputs(tokens=3)
    k = torch.nn.functional.normalize(x["k"], dim=-1)
    o, state = run_recurrence(recurrence("beta"), k, k, x["v"], 1.0, beta=torch.ones_like(x["beta"]))
    # With unit keys and beta 1, the key just written reads back its own value.
    torch.testing.assert_close(o, x["v"])
    # And the state is a product of the matrices of the rule.
    identity, expected = torch.eye(3, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64)
    for t in range(3):
        key = k[1, 1, t]
        expected = (identity - torch.outer(key, key)) @ expected + torch.outer(key, x["v"][1, 3, t])
    torch.testing.assert_close(state[1, 3], expected)


def test_decay_comes_before_the_delta_rule():
    x = inputs(tokens=1)
    decay = -torch.rand(2, 4, 1, 3, dtype=torch.float64)
    module = recurrence("channel_decay", "beta", "initial")
    _, state = run_recurrence(module, x["q"], x["k"], x["v"], SCALE, decay=decay, beta=x["beta"], initial=x["initial"])
    key, beta = x["k"][0, 1, 0], x["beta"][0, 2, 0]
    rule = torch.eye(3, dtype=torch.float64) - beta * torch.outer(key, key)
    decayed = decay[0, 2, 0].exp()[:, None] * x["initial"][0, 2]
    torch.testing.assert_close(state[0, 2], rule @ decayed + beta * torch.outer(key, x["v"][0, 2, 0]))


def test_mods_see_their_operands_own_head():
    x = inputs()
    q, k, v = x["q"], x["k"], x["v"]
    o, _ = run_recurrence(recurrence(mods=MOD), q, k, v, SCALE)
    changed = k + 1 + torch.arange(2)[:, None, None]
    torch.testing.assert_close(o, unrolled(q, changed, v, 0 * x["decay"]))
