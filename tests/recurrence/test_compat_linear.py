"""Linear and lightning attention by fla's names, and sequences from their last token to their first."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from attn_engine.compat import fla
from attn_engine.errors import StateShapeError
from tests.recurrence.support import assert_near, inputs, leaves, reference


def given(tokens=70, batch=2, dtype=torch.float32):
    x = inputs(tokens, heads=2, shared=2, batch=batch, dtype=dtype)
    return {"q": F.elu(x["q"]) + 1, "k": F.elu(x["k"]) + 1, "v": x["v"]}


def normalized(q, k, v, state, z, scale):
    """o_t = scale q_t S_t / (scale q_t z_t), from the formula; the state and the sum of keys after the last token."""
    o, final = reference(q, k, v, scale=scale, initial_state=state)
    sums = k.cumsum(1) + z
    return o / (scale * q * sums).sum(-1, keepdim=True), final, sums[:, -1:]


@pytest.mark.parametrize(
    "function", [fla.chunk_linear_attn, fla.fused_chunk_linear_attn, fla.fused_recurrent_linear_attn]
)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_linear_attention_with_all_gradients(function, scale):
    generator = torch.Generator().manual_seed(3)
    x = leaves(given() | {"state": torch.rand(2, 2, 16, 24, generator=generator), "z": torch.rand(2, 1, 2, 16)})
    want = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    right = normalized(**want, scale=0.25 if scale is None else scale)
    o, (state, z) = function(
        x["q"], x["k"], x["v"], scale, (x["state"], x["z"]), output_final_state=True, normalize=True
    )
    weights = [torch.randn(t.shape, generator=generator) for t in right]
    for name, got, exact in zip(("o", "state", "z"), (o, state, z), right, strict=True):
        assert_near(name, got.detach(), exact.detach())
    sum((t * w).sum() for t, w in zip((o, state, z), weights, strict=True)).backward()
    sum((t * w).sum() for t, w in zip(right, weights, strict=True)).backward()
    for name in x:
        assert_near(f"d_{name}", x[name].grad, want[name].grad, 1e-4)


def test_states_of_linear_attention_go_on():
    """With either part of them absent at first, and in packed sequences."""
    x = given()
    whole, (state, z) = fla.chunk_linear_attn(**x, output_final_state=True)
    first, kept = fla.chunk_linear_attn(**{n: t[:, :30] for n, t in x.items()}, output_final_state=True)
    second, last = fla.fused_recurrent_linear_attn(
        **{n: t[:, 30:] for n, t in x.items()}, initial_state=kept, output_final_state=True, normalize=True
    )
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(last, (state, z))
    flat = {n: t.flatten(0, 1)[None] for n, t in x.items()}
    bounds = torch.tensor([0, 70, 70, 140])
    packed, (states, sums) = fla.chunk_linear_attn(**flat, output_final_state=True, cu_seqlens=bounds)
    torch.testing.assert_close(packed.view_as(whole), whole)
    torch.testing.assert_close((states[[0, 2]], sums[[0, 2]]), (state, z))
    assert sums.shape == (3, 1, 2, 16) and not sums[1].any()
    assert fla.chunk_linear_attn(**x)[1] is None
    for start, other in ((kept[0], (kept[0], None)), ((None, kept[1]), (torch.zeros_like(kept[0]), kept[1]))):
        one, two = (fla.chunk_linear_attn(**x, initial_state=s)[0] for s in (start, other))
        assert torch.equal(one, two) and not torch.equal(one, whole)


def test_linear_attention_that_is_not_normalized():
    x = given()
    state = torch.randn(2, 2, 16, 24)
    right, final = reference(*(t.double() for t in x.values()), initial_state=state.double())
    for function in (fla.chunk_linear_attn, fla.fused_recurrent_linear_attn):
        o, got = function(**x, initial_state=state, output_final_state=True, normalize=False)
        assert_near("o", o, right)
        assert_near("final", got, final)
    with pytest.raises(StateShapeError, match="pass S alone"):
        fla.chunk_linear_attn(**x, initial_state=(state, state), normalize=False)
    for wrong in ((state, state), (state.mT, None)):
        with pytest.raises(StateShapeError, match="of initial_state has shape"):
            fla.chunk_linear_attn(**x, initial_state=wrong)


@pytest.mark.parametrize("function", [fla.chunk_lightning_attn, fla.fused_recurrent_lightning_attn])
def test_lightning_attention(function):
    x = given()
    decay = -(8 / 2) * (1 - 3 / 12) * torch.arange(2).double()
    right, final = reference(*(t.double() for t in x.values()), decay=decay)
    o, got = function(*x.values(), 3, 12, output_final_state=True)
    assert_near("o", o, right)
    assert_near("final", got, final)


def test_other_names():
    x, g = given(), -torch.rand(2, 70, 2)
    for one, other in (
        (fla.fused_chunk_simple_gla(**x, g=g)[0], fla.chunk_simple_gla(**x, g=g)[0]),
        (fla.parallel_simple_gla(**x, g=g)[0], fla.chunk_simple_gla(**x, g=g)[0]),
        (fla.fused_chunk_retention(**x)[0], fla.chunk_retention(**x)[0]),
        (fla.parallel_retention(**x)[0], fla.chunk_retention(**x)[0]),
    ):
        assert torch.equal(one, other)
    assert (
        fla.chunk_gdn is fla.chunk_gated_delta_rule and fla.fused_recurrent_gdn is fla.fused_recurrent_gated_delta_rule
    )


BOUNDS = [0, 1, 1, 40, 65]
"""Of 70 tokens: one alone, none, and some past the last."""


@pytest.mark.parametrize("kind", ["simple", "retention", "channels", "linear", "lightning"])
def test_packed_sequences_from_their_last_token_to_their_first(kind):
    x, generator = given(batch=1), torch.Generator().manual_seed(5)
    g = -torch.rand(1, 70, 2, generator=generator)
    state = torch.randn(4, 2, 16, 24, generator=generator)

    def call(x, g, **more):
        if kind == "simple":
            return fla.fused_recurrent_simple_gla(**x, g=g, reverse=True, **more)
        if kind == "channels":
            return fla.fused_recurrent_gla(**x, gk=g[..., None] * torch.linspace(0, 1, 16), reverse=True, **more)
        if kind == "linear":
            return fla.fused_recurrent_linear_attn(**x, reverse=True, **more)
        if kind == "lightning":
            return fla.fused_recurrent_lightning_attn(**x, layer_idx=0, num_layers=2, reverse=True, **more)
        return fla.fused_recurrent_retention(**x, reverse=True, **more)

    trained = leaves(x)
    o, final = call(trained, g, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor(BOUNDS))
    o.square().sum().backward()
    assert not o[:, 65:].any()
    for n, (begin, end) in enumerate(pairwise(BOUNDS)):
        part = leaves({name: t[:, begin:end] for name, t in x.items()})
        alone, last = call(part, g[:, begin:end], initial_state=state[n : n + 1], output_final_state=True)
        torch.testing.assert_close(o[:, begin:end], alone)
        torch.testing.assert_close(final[n : n + 1], last)
        alone.square().sum().backward()
        for name in x:
            torch.testing.assert_close(trained[name].grad[:, begin:end], part[name].grad)
    right, _ = reference(*(t[:, 1:40].flip(1).double() for t in x.values()), initial_state=state[2:3].double())
    if kind == "linear":
        assert_near("o", o[:, 1:40].detach(), right.flip(1))
