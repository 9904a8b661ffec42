"""Gradients of log decays over many tokens: what later tokens add cancels, and must not leave its rounding errors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import attn_engine
from attn_engine.errors import RecurrenceFormError
from attn_engine.frontend.recurrence import Kind
from attn_engine.runtime.recurrence_compile import Request, Schedule, source_of
from tests.recurrence.support import assert_near, exact, inputs, reference


def gradients(x, dtype, function=attn_engine.recurrence):
    given = {n: (t.to(dtype) if n in "qkv" or dtype == torch.float64 else t).requires_grad_() for n, t in x.items()}
    o, _ = function(**given)
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((o.to(d_o) * d_o).sum(), [given["decay"], *([given["weight"]] if "weight" in x else [])])


@pytest.mark.parametrize("rate", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_errors_of_half_types_do_not_add_up(rate, weighted):
    x = {n: t.detach() for n, t in inputs(1030, batch=1, heads=2, shared=1, key=32, value=32, rate=rate).items()}
    del x["initial_state"]
    if not weighted:
        del x["weight"]
    x |= {n: x[n].bfloat16().float() for n in "qkv"}
    exactly = gradients({n: t.double() for n, t in x.items()}, torch.float64, reference)
    for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float32, 1e-4)):
        found = gradients({n: t.clone() for n, t in x.items()}, dtype)
        for mine, right in zip(found, exactly, strict=True):
            assert (mine - right).norm() / right.norm() < tolerance
        error = ((found[0] - exactly[0]) * x["decay"]).sum(1).abs()
        assert (error < tolerance * (exactly[0] * x["decay"]).abs().sum(1)).all(), "the gradient of a rate"


@pytest.mark.parametrize("rate", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_errors_of_fast_decays_stay_where_they_are(rate, weighted):
    """Of what passes the end of a chunk that forgets no other knows: the error of a sum over all tokens stays small, too."""
    x = {n: t.detach() for n, t in inputs(1030, batch=1, heads=2, shared=1, key=32, value=32, rate=rate).items()}
    del x["initial_state"]
    if not weighted:
        del x["weight"]
    x |= {n: x[n].bfloat16().float() for n in "qkv"}
    right = gradients({n: t.double() for n, t in x.items()}, torch.float64, reference)[0]
    error = gradients({n: t.clone() for n, t in x.items()}, torch.bfloat16)[0] - right
    assert error.norm() < 3e-3 * right.norm()
    assert (error.sum(1).abs() < 0.03 * right.norm(dim=1)).all()


def test_a_chunk_divides_the_tokens_between_states():
    kind = Kind(torch.float32, 16, 16, "token")
    with pytest.raises(RecurrenceFormError, match="segments of 256 tokens has no chunk=48 form"):
        source_of(Request(kind, "triton", Schedule(chunk=48)), ("q", "k", "v", "decay"))


@pytest.mark.parametrize("channels", [False, True])
def test_segments_of_packed_sequences(channels):
    """Each sequence has its own, the last of which ends with it."""
    bounds = [0, 300, 300, 812, 1069, 1070]
    x = {n: t.detach() for n, t in inputs(1075, batch=1, heads=2, shared=1, sequences=5).items()}
    if channels:
        x["decay"] = x["decay"][..., None] * torch.rand(16, generator=torch.Generator().manual_seed(4))
    packed = {n: t.clone().requires_grad_() for n, t in x.items()}
    o, states = attn_engine.recurrence(**packed, cu_seqlens=torch.tensor(bounds), output_final_state=True)
    (o.square().sum() + states.square().sum()).backward()
    for n, (lo, hi) in enumerate(pairwise(bounds)):
        cut = {name: t[n : n + 1] if name == "initial_state" else t[:, lo:hi] for name, t in x.items()}
        alone = exact(cut)
        o, state = reference(**alone)
        (o.square().sum() + state.square().sum()).backward()
        if hi > lo:
            assert_near("d_decay", packed["decay"].grad[:, lo:hi], alone["decay"].grad, 1e-4)
    assert not packed["decay"].grad[:, 1070:].any()
