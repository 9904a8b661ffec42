"""The field's names: against plain references, with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import attn_engine
from attn_engine.compat import fla, mamba_ssm
from attn_engine.errors import UnsupportedOptionError
from attn_engine.library import causal, identity
from attn_engine.library_recurrence import (
    decay_score,
    gate_decay,
    mamba_decay,
    normalized_linear_attention,
    retention_decay,
)
from tests.recurrence.support import assert_near, inputs, reference


def qkv(tokens=70, heads=2):
    x = inputs(tokens, heads=heads, shared=heads)
    return x["q"], x["k"], x["v"], x["decay"]


def double(*tensors):
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def test_simple_gla():
    q, k, v, g = (x.requires_grad_() for x in qkv())
    gamma = torch.tensor([-0.1, -0.2])
    o, none = fla.chunk_simple_gla(q, k, v, g, gamma)
    wide = double(q, k, v, g)
    right, _ = reference(*wide[:3], decay=wide[3] + gamma.double())
    assert none is None
    assert_near("o", o.detach(), right.detach())
    o.square().sum().backward()
    right.square().sum().backward()
    for name, got, want in zip("qkvg", (q, k, v, g), wide, strict=True):
        assert_near(name, got.grad, want.grad)


def test_gamma_gets_its_gradient():
    q, k, v, _ = qkv()
    gamma = torch.tensor([-0.1, -0.2], requires_grad=True)
    o, _ = fla.chunk_simple_gla(q, k, v, None, gamma)
    o.square().sum().backward()
    (wide,) = double(gamma)
    reference(q.double(), k.double(), v.double(), decay=wide)[0].square().sum().backward()
    assert_near("gamma", gamma.grad, wide.grad)


def test_reversed_simple_gla():
    q, k, v, g = qkv()
    o, final = fla.fused_recurrent_simple_gla(q, k, v, g, reverse=True, output_final_state=True)
    right, state = reference(*(x.flip(1).double() for x in (q, k, v, g)))
    assert_near("o", o, right.flip(1))
    assert_near("final", final, state)


def test_gla_and_delta_rules():
    q, k, v, g = qkv(12)
    wide = [x.double() for x in (q, k, v, g)]
    channel = -torch.rand(2, 12, 2, 16)
    beta = torch.rand(2, 12, 2)
    for function in (fla.chunk_gla, fla.fused_recurrent_gla):
        assert_near("gla", function(q, k, v, channel)[0], reference(*wide[:3], decay=channel.double())[0])
    unit = [F.normalize(x, dim=-1) for x in wide[:2]]
    for function in (fla.chunk_delta_rule, fla.fused_recurrent_delta_rule):
        got, _ = function(q, k, v, beta, use_qk_l2norm_in_kernel=True)
        assert_near("delta", got, reference(*unit, wide[2], beta=beta.double())[0])
    got, final = fla.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
    right, state = reference(*unit, wide[2], decay=wide[3], beta=beta.double())
    assert_near("gated delta", got, right)
    assert_near("state", final, state)
    with pytest.raises(UnsupportedOptionError, match="gv is not supported"):
        fla.fused_recurrent_gla(q, k, v, gv=channel)


@pytest.mark.parametrize("tokens", [1, 70])
def test_retention_in_three_forms(tokens):
    q, k, v, _ = qkv(tokens, heads=4)
    log_decay = retention_decay(4)
    torch.testing.assert_close(log_decay, torch.log(1 - 2.0 ** (-5 - torch.arange(4.0))))
    chunked, _ = fla.chunk_retention(q, k, v)
    parallel = attn_engine.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), score_mod=decay_score(log_decay), mask_mod=causal, row=identity
    ).transpose(1, 2)
    state, steps = torch.zeros(2, 4, 16, 24), []
    for t in range(tokens):
        one = (x[:, t : t + 1] for x in (q, k, v))
        steps.append(attn_engine.recurrence_step(*one, state=state, decay=log_decay))
    right, final = reference(q.double(), k.double(), v.double(), decay=log_decay.double())
    for name, form in (("chunked", chunked), ("parallel", parallel), ("recurrent", torch.cat(steps, 1))):
        assert_near(name, form, right)
    assert_near("state", state, final)
    assert_near("fused", fla.fused_recurrent_retention(q, k, v)[0], right)


def test_the_gradients_of_retention_agree_between_forms():
    tensors = [x.requires_grad_() for x in qkv(66, heads=2)[:3]]
    log_decay = retention_decay(2)
    chunked, _ = fla.chunk_retention(*tensors)
    parallel = attn_engine.attention(
        *(x.transpose(1, 2) for x in tensors), score_mod=decay_score(log_decay), mask_mod=causal, row=identity
    ).transpose(1, 2)
    weights = torch.randn_like(chunked)
    for got, want in zip(*(torch.autograd.grad(o, tensors, weights) for o in (chunked, parallel)), strict=True):
        assert_near("gradient", got, want.double())


def mamba(x, dt, A, B, C, D, z, bias, initial):
    step = F.softplus(dt + bias)
    y, final = reference(C, B, x, decay=step * A, weight=step, scale=1.0, initial_state=initial.transpose(2, 3))
    return (y + x * D[:, None]) * F.silu(z), final.transpose(2, 3)


def mamba_inputs(tokens=70):
    generator = torch.Generator().manual_seed(1)
    randn = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    x, z = randn(2, tokens, 4, 8), randn(2, tokens, 4, 8)
    return [
        x,
        randn(2, tokens, 4),
        -torch.rand(4),
        randn(2, tokens, 1, 16),
        randn(2, tokens, 1, 16),
        randn(4),
        z,
        randn(4),
        randn(2, 4, 8, 16),
    ]


def call_mamba(x, dt, A, B, C, D, z, bias, initial, **options):
    return mamba_ssm.mamba_chunk_scan_combined(
        x, dt, A, B, C, 64, D=D, z=z, dt_bias=bias, initial_states=initial, dt_softplus=True, **options
    )


def test_mamba2_with_all_gradients():
    given = [x.requires_grad_() for x in mamba_inputs()]
    wide = double(*given)
    y, final = call_mamba(*given, return_final_states=True)
    right, state = mamba(*wide)
    assert_near("y", y.detach(), right.detach())
    assert_near("final", final.detach(), state.detach())
    torch.manual_seed(0)
    d_y, d_final = torch.randn_like(y), torch.randn_like(final)
    ((y * d_y).sum() + (final * d_final).sum()).backward()
    ((right * d_y).sum() + (state * d_final).sum()).backward()
    for name, got, want in zip(("x", "dt", "A", "B", "C", "D", "z", "bias", "initial"), given, wide, strict=True):
        assert_near(f"d{name}", got.grad, want.grad)


def test_seq_idx_forgets_where_it_changes():
    x, dt, A, B, C, D, z, bias, _ = mamba_inputs()
    ids = torch.tensor([0] * 30 + [1] * 40).expand(2, -1)
    y = call_mamba(x, dt, A, B, C, D, z, bias, None, seq_idx=ids)
    for part in (slice(0, 30), slice(30, 70)):
        cut = [t[:, part].double() for t in (x, dt)], [t[:, part].double() for t in (B, C)]
        zero = torch.zeros(2, 4, 8, 16).double()
        right, _ = mamba(*cut[0], A.double(), *cut[1], D.double(), z[:, part].double(), bias.double(), zero)
        assert_near("y", y[:, part], right, 1e-4)


def test_state_update_continues_a_scan():
    x, dt, A, B, C, D, z, bias, initial = mamba_inputs()
    right, _ = mamba(*(t.double() for t in (x, dt, A, B, C, D, z, bias, initial)))
    cut = [t[:, :69] for t in (x, dt)], [t[:, :69] for t in (B, C)]
    _, state = call_mamba(*cut[0], A, *cut[1], D, z[:, :69], bias, initial, return_final_states=True)
    state = state.contiguous()
    y = mamba_ssm.selective_state_update(
        state,
        x[:, 69],
        dt[:, 69, :, None].expand(-1, -1, 8),
        A[:, None, None].expand(-1, 8, 16),
        B[:, 69],
        C[:, 69],
        D=D[:, None].expand(-1, 8),
        z=z[:, 69],
        dt_bias=bias[:, None].expand(-1, 8),
        dt_softplus=True,
    )
    assert_near("y", y, right[:, 69])


def test_tail_of_softplus_keeps_a_decay():
    dt = torch.full((1, 8, 2), -18.0)
    decay, weight = mamba_decay(dt, torch.full((2,), 15.0))
    assert (weight > 1e-8).all()
    assert (decay < -0.02).all()


def test_normalized_linear_attention():
    q, k, v, g = qkv()
    q, k = (F.elu(x) + 1 for x in (q, k))
    given = [x.requires_grad_() for x in (q, k, v, g)]
    wide = double(*given)
    o = normalized_linear_attention(*given)
    total = wide[3].cumsum(1)
    weights = torch.exp(total[:, :, None] - total[:, None]) * torch.einsum("bihd,bjhd->bijh", *wide[:2])
    weights = weights * torch.ones(70, 70).tril()[:, :, None]
    right = torch.einsum("bijh,bjhv->bihv", weights / weights.sum(2, keepdim=True), wide[2])
    assert_near("o", o.detach(), right.detach())
    d_o = torch.randn_like(o)
    (o * d_o).sum().backward()
    (right * d_o).sum().backward()
    for name, got, want in zip("qkvg", given, wide, strict=True):
        assert_near(name, got.grad, want.grad)


def test_gates_are_log_decays():
    gate = torch.tensor([-1e4, 0.0, 1e4])
    torch.testing.assert_close(gate_decay(gate), torch.tensor([-625.0, -0.6931472 / 16, 0.0]))
