"""Reported faults of linear attention and state space models, each with the right value (see README.md)."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize
from torch.utils.checkpoint import checkpoint

import attn_engine
from attn_engine.compat import fla, mamba_ssm
from attn_engine.library_recurrence import mamba_decay
from tests.recurrence.support import assert_near, exact, inputs, leaves, reference

DECAYS = ("token", "channel", "delta")


def of_kind(kind, tokens, **sizes):
    x = inputs(tokens, batch=1, heads=2, shared=2, rate=0.1, **sizes)
    del x["weight"]
    if kind == "channel":
        x["decay"] = x["decay"][..., None] * torch.rand(16, generator=torch.Generator().manual_seed(1))
    if kind == "delta":
        x["k"], x["beta"] = normalize(x["k"], dim=-1), x["decay"].exp()
    return x


def trained(x, loss, poison=True):
    """Gradients of a loss on (o, final state), and the right ones; memory handed out again holds NaN."""
    if poison:
        torch.full((2**20,), torch.nan)
    got, want = leaves(x), exact(x)
    loss(*attn_engine.recurrence(**got, output_final_state=True)).backward()
    loss(*reference(**want)).backward()
    zero = {name: torch.zeros_like(t) for name, t in want.items()}
    pairs = {name: (got[name].grad, want[name].grad) for name in x}
    return {n: (g, zero[n] if w is None else w) for n, (g, w) in pairs.items() if g is not None}


@pytest.mark.parametrize("tokens", [65, 79, 95, 96, 97, 111, 127])
@pytest.mark.parametrize("kind", DECAYS)
def test_b110_tails_of_a_chunk(kind, tokens):
    for name, (got, want) in trained(of_kind(kind, tokens), lambda o, s: (o * o).sum()).items():
        assert_near(name, got, want, 1e-4)


def test_b043_b044_b112_b121_packed_sequences():
    lengths = (85, 0, 83, 82, 85, 1, 60)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    x = of_kind("token", 400, sequences=len(lengths))
    got = leaves(x)
    o, states = attn_engine.recurrence(**got, cu_seqlens=bounds, output_final_state=True)
    torch.full((2**20,), torch.nan)
    ((o * o).sum() + states.sum()).backward()
    assert not o[:, 396:].any()
    for name in ("q", "k", "v", "decay"):
        assert not got[name].grad[:, 396:].any(), f"tokens past the end get a gradient of {name}"
    for n, (lo, hi) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        part = exact({name: t[n : n + 1] if name == "initial_state" else t[:, lo:hi] for name, t in x.items()})
        right, final = reference(**part)
        assert_near("o", o[:, lo:hi].detach(), right.detach())
        assert_near("state", states[n : n + 1].detach(), final.detach())
        if hi > lo:
            ((right * right).sum() + final.sum()).backward()
            for name in ("q", "k", "v", "decay"):
                assert_near(name, got[name].grad[:, lo:hi], part[name].grad, 1e-4)
    assert torch.equal(states[1], x["initial_state"][1])


@pytest.mark.parametrize("kind", DECAYS)
def test_b113_a_loss_on_the_final_state_alone(kind):
    found = trained(of_kind(kind, 70), lambda o, s: (s * s).sum())
    assert found["decay"][0].abs().max() > 0.1
    for name, (got, want) in found.items():
        assert_near(name, got, want, 1e-4)


@pytest.mark.parametrize("kind", DECAYS)
def test_b115_decays_down_to_120(kind):
    x = of_kind(kind, 192)
    steep = torch.linspace(0, -120, 64).repeat(3)[None, :, None]
    x["decay"] = (steep[..., None] if kind == "channel" else steep).expand(x["decay"].shape).clone()
    for name, (got, want) in trained(x, lambda o, s: (o * o).sum() + s.sum()).items():
        assert_near(name, got, want, 1e-4)


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("strong", [-30.0, -300.0, float("-inf")])
def test_b116_the_first_token_of_a_block_forgets(kind, strong):
    x = of_kind(kind, 130)
    x["decay"][:, ::16] = strong
    for name, (got, want) in trained(x, lambda o, s: (o * o).sum() + s.sum()).items():
        assert_near(name, got, want, 1e-4)


def test_b118_the_tail_of_softplus():
    dt = torch.full((1, 8, 2), -18.0, dtype=torch.float32)
    decay, weight = mamba_decay(dt, torch.full((2,), 15.0))
    right = torch.nn.functional.softplus(dt.double())
    torch.testing.assert_close(weight.double(), right, rtol=1e-6, atol=0)
    torch.testing.assert_close(decay.double(), -torch.exp(torch.tensor(15.0).double()) * right, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b119_keys_nearly_alike_and_written_whole(dtype):
    x = of_kind("delta", 128)
    x["k"] = normalize(x["k"][:, :1] + 1e-2 * x["k"], dim=-1)
    x["beta"] = torch.full_like(x["beta"], 0.999)
    x["decay"] = torch.zeros_like(x["decay"])
    x |= {name: x[name].to(dtype) for name in "qkv"}
    got, want = leaves(x), exact(x)
    o, _ = attn_engine.recurrence(**got)
    right, _ = reference(**want)
    assert_near("o", o.detach().float(), right.detach(), 1e-4 if dtype == torch.float32 else 3e-2)
    o.float().square().sum().backward()
    assert all(x.grad is None or bool(x.grad.isfinite().all()) for x in got.values())


@pytest.mark.parametrize("kind", DECAYS)
def test_b122_segments_go_on_from_the_state(kind):
    x = of_kind(kind, 256)
    whole, last = attn_engine.recurrence(**x, output_final_state=True)
    state, parts = x["initial_state"], []
    for start in range(0, 256, 64):
        cut = {name: t[:, start : start + 64] for name, t in x.items() if name != "initial_state"}
        o, state = attn_engine.recurrence(**cut, initial_state=state, output_final_state=True)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def test_b124_one_backward_for_each_option():
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    q, k, v = (randn(1, 20, 2, 16).requires_grad_() for _ in range(3))
    g, gk, beta = logsigmoid(randn(1, 20, 2)), logsigmoid(randn(1, 20, 2, 16)), randn(1, 20, 2).sigmoid()
    state, bounds = randn(1, 2, 16, 16), torch.tensor([0, 20])
    calls = [
        lambda: fla.chunk_simple_gla(q, k, v, g, scale=0.5, initial_state=state, output_final_state=True),
        lambda: fla.chunk_simple_gla(q, k, v, g, cu_seqlens=bounds),
        lambda: fla.fused_recurrent_simple_gla(q, k, v, g, reverse=True),
        lambda: fla.chunk_retention(q, k, v),
        lambda: fla.chunk_gla(q, k, v, gk, state_v_first=True, initial_state=state, output_final_state=True),
        lambda: fla.chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True),
        lambda: fla.chunk_gated_delta_rule(q, k, v, g, beta, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
        lambda: fla.fused_recurrent_gated_delta_rule(q, k, v, g, gk, use_qk_l2norm_in_kernel=True),
    ]
    x, dt, B, C = (t.detach().requires_grad_() for t in (v, beta, k[:, :, :1], q[:, :, :1]))
    A, more = -torch.rand(2), {"D": randn(2), "z": randn(1, 20, 2, 16), "dt_bias": randn(2)}
    ids = torch.tensor([[0] * 9 + [1] * 11])
    calls += [
        lambda o=options: mamba_ssm.mamba_chunk_scan_combined(x, dt, A, B, C, 16, **o)
        for options in ({}, more, {"dt_softplus": True}, {"dt_limit": (0.1, 0.5)}, {"seq_idx": ids})
    ]
    for call in calls:
        found = call()
        o = found[0] if isinstance(found, tuple) else found
        o.square().sum().backward()
    assert all(t.grad is not None and bool(t.grad.isfinite().all()) for t in (q, k, v, x, dt, B, C))


def test_b125_many_tokens_under_checkpointing():
    x = of_kind("channel", 4096, key=16, value=16)
    given = {n: t.requires_grad_() for n, t in x.items()}
    run = lambda q, k, v, decay, state: attn_engine.recurrence(q, k, v, decay=decay, initial_state=state)[0]  # noqa: E731
    o = checkpoint(run, *given.values(), use_reentrant=False)
    o.square().sum().backward()
    again = leaves(x)
    run(*again.values()).square().sum().backward()
    for name in x:
        torch.testing.assert_close(given[name].grad, again[name].grad)
