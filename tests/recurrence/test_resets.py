"""Log decays of -inf forget exactly, on every form: what comes after a reset loses no precision by it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

import attn_engine
from attn_engine.backends.triton.interpret import interpret
from attn_engine.frontend.recurrence import Kind, build_recurrence
from attn_engine.interpreters.tile import run_plan
from attn_engine.runtime.recurrence_compile import Request, Schedule, source_of, to_tile
from tests.recurrence.support import assert_near, exact, inputs, leaves, loss_weights, reference

KINDS = ("token", "channel", "delta", "channel delta")
FEW, HALF, ALL = (0, 5, 6, 40, 63, 64, 70, 71, 130), range(0, 150, 2), range(150)


def forgetting(kind, resets, tokens=150, **sizes):
    """Weak decays, and resets in all heads but the first; per channel also resets of some channels alone."""
    x = inputs(tokens, rate=0.02, **sizes)
    if kind.startswith("channel"):
        x["decay"] = x["decay"][..., None] * torch.rand(16, generator=torch.Generator().manual_seed(2))
        x["decay"][:, 20:22, :, 3:5] = float("-inf")
    if kind.endswith("delta"):
        x["beta"] = x.pop("weight")
        x["k"] = normalize(x["k"], dim=-1)
    x["decay"][:, [r for r in resets if r < tokens], 1:] = float("-inf")
    return x


@pytest.mark.parametrize("resets", [FEW, HALF, ALL], ids=["few", "half", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind, resets):
    x = forgetting(kind, resets, batch=1)
    got, want = leaves(x), exact(x)
    found, right = attn_engine.recurrence(**got, output_final_state=True), reference(**want)
    weights = loss_weights(*found)
    for results in (found, right):
        sum((r * w).sum() for r, w in zip(results, weights, strict=True)).backward()
    for name, mine, exactly in zip(("o", "final"), found, right, strict=True):
        assert_near(name, mine.detach(), exactly.detach(), 1e-6)
    for name in x:
        assert_near(f"d_{name}", got[name].grad, want[name].grad, 2e-6)
    assert not got["decay"].grad[x["decay"].isneginf()].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_forgets(kind):
    x = forgetting(kind, (0, 2), tokens=3, batch=1)
    state = x.pop("initial_state")
    right, final = reference(**{n: t.double() for n, t in x.items()}, initial_state=state.double())
    for t in range(3):
        o = attn_engine.recurrence_step(**{n: one[:, t : t + 1] for n, one in x.items()}, state=state)
        assert_near("o", o, right[:, t : t + 1], 1e-6)
    assert_near("state", state, final, 1e-6)


def test_documents_by_resets_equal_packed_documents():
    x = forgetting("token", (), tokens=130, batch=1)
    bounds = (0, 37, 64, 130)
    del x["initial_state"]
    packed, _ = attn_engine.recurrence(**x, cu_seqlens=torch.tensor(bounds))
    x["decay"][:, bounds[:-1]] = float("-inf")
    torch.testing.assert_close(attn_engine.recurrence(**x)[0], packed, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["token", "channel"])
@pytest.mark.parametrize("schedule", [{}, {"pieces": 3}, {"pieces": 3, "chained": True}, {"turned": True}])
def test_forms_in_fp64(kind, schedule):
    x = forgetting(kind, (0, 5, 6, 21, 40), tokens=50, batch=1, heads=2, shared=1)
    kind = Kind(torch.float32, 16, 24, kind, weight=True, initial=True, final=True)
    request = Request(kind, "triton", Schedule(chunk=16, value_block=16, **schedule))
    right_o, right_final = reference(**{n: t.double() for n, t in x.items()}, scale=0.5)
    o, final = (torch.full(s, torch.nan, dtype=torch.float64) for s in ((1, 2, 50, 24), (1, 2, 16, 24)))
    q, k, v, decay, weight = (x[n].transpose(1, 2) for n in ("q", "k", "v", "decay", "weight"))
    module = to_tile(build_recurrence(kind), request)
    run_plan(module, "forward", [q, k, v, 0.5, decay, weight, x["initial_state"], o, final], exact=True)
    torch.testing.assert_close(o.transpose(1, 2), right_o, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(final, right_final, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["token", "channel"])
def test_text_for_triton(kind):
    x = forgetting(kind, (0, 5, 6, 21, 40), tokens=70, batch=1, heads=2, shared=1)
    right, final = reference(**{n: t.double() for n, t in x.items()}, scale=0.5)
    source = source_of(
        Request(
            Kind(torch.float32, 16, 24, kind, weight=True, initial=True, final=True),
            "triton",
            Schedule(value_block=16, descriptors=True),
        )
    )
    o, state = torch.full((1, 2, 70, 24), torch.nan), torch.full((1, 2, 16, 24), torch.nan)
    q, k, v, decay, weight = (x[n].transpose(1, 2) for n in ("q", "k", "v", "decay", "weight"))
    interpret(source)["forward"](q, k, v, 0.5, decay, weight, x["initial_state"], o, state)
    assert_near("o", o.transpose(1, 2), right)
    assert_near("final", state, final)
