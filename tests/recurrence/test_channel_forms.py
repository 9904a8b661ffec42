"""Decays per channel in chunks, on the tile interpreter in fp64: equal to the recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import logsigmoid

from attn_engine.backends.triton.interpret import interpret
from attn_engine.frontend.recurrence import Kind, build_recurrence
from attn_engine.interpreters.tile import run_plan
from attn_engine.runtime.recurrence_compile import Compiled, Request, Schedule, source_of, to_tile
from tests.recurrence.support import inputs, reference, watched_exponents

FORMS = [
    Schedule(chunk=16, value_block=16, part=8),
    Schedule(chunk=16, value_block=16, pieces=3, descriptors=True, turned=True),
    Schedule(chunk=32, pad=False),
    Schedule(chunk=16, value_block=16, pieces=2, chained=True),
]
KIND = Kind(torch.float32, 16, 24, "channel", weight=True, initial=True, final=True)
WRT = ("q", "k", "v", "decay", "weight", "initial")


def made(tokens, rate=0.1):
    """The inputs, and the operands of a plan."""
    x = inputs(tokens, batch=1, heads=2, shared=1)
    x["decay"] = rate * logsigmoid(torch.randn(1, tokens, 2, 16, generator=torch.Generator().manual_seed(1)))
    q, k, v, *rows = (x[n].transpose(1, 2) for n in ("q", "k", "v", "decay", "weight"))
    return x, [q, k, v, 0.5, *rows]


def empty(*shape):
    return torch.full(shape, torch.nan, dtype=torch.float64)


@pytest.mark.parametrize(
    ("tokens", "rate", "schedule"),
    [(0, 0.1, FORMS[0]), (1, 0.1, FORMS[0]), (40, 30.0, FORMS[0]), *((50, 0.1, form) for form in FORMS)],
)
def test_forward(tokens, rate, schedule):
    x, given = made(tokens, rate)
    right_o, right_final = reference(**{n: t.double() for n, t in x.items()}, scale=0.5)
    o, final = empty(1, 2, tokens, 24), empty(1, 2, 16, 24)
    tiles = to_tile(build_recurrence(KIND), Request(KIND, "triton", schedule))
    run_plan(tiles, "forward", [*given, x["initial_state"], o, final], exact=True)
    torch.testing.assert_close(o.transpose(1, 2), right_o, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(final, right_final, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schedule", FORMS, ids=Schedule.spec)
def test_backward(schedule):
    x, given = made(37)
    want = {n: t.double().requires_grad_() for n, t in x.items()}
    o, final = reference(**want, scale=0.5)
    d_o, d_final = torch.randn_like(o), torch.randn_like(final)
    gradients = torch.autograd.grad((o * d_o).sum() + (final * d_final).sum(), list(want.values()))
    request = Request(KIND, "triton", schedule, WRT)
    results = [empty(*t.shape) for t in (*given[:3], *given[4:], x["initial_state"])]
    states = [x["initial_state"].mT, d_o.transpose(1, 2), final.detach(), d_final, d_final.mT]
    run_plan(to_tile(Compiled(request).adjoint(True), request), "backward", [*given, *states, *results], exact=True)
    for name, got, right in zip(x, results, gradients, strict=True):
        right = right if name == "initial_state" else right.transpose(1, 2)
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def test_no_exponent_is_positive(monkeypatch):
    seen = watched_exponents(monkeypatch)
    x, given = made(40, rate=1.0)
    given[4] = given[4].clone()
    given[4][:, :, 7] = float("-inf")
    o, final = torch.zeros(1, 2, 40, 24), torch.zeros(1, 2, 16, 24)
    tiles = to_tile(build_recurrence(KIND), Request(KIND, "triton", FORMS[0]))
    run_plan(tiles, "forward", [*given, x["initial_state"], o, final])
    x["decay"] = given[4].transpose(1, 2)
    right_o, _ = reference(**{n: t.double() for n, t in x.items()}, scale=0.5)
    torch.testing.assert_close(o.transpose(1, 2).double(), right_o, rtol=1e-4, atol=1e-4)
    assert seen
    assert max(seen) <= 0


def test_text_for_triton():
    x, given = made(40)
    o, final = torch.full((1, 2, 40, 24), torch.nan), torch.full((1, 2, 16, 24), torch.nan)
    right_o, right_final = reference(**{n: t.double() for n, t in x.items()}, scale=0.5)
    interpret(source_of(Request(KIND, "triton", FORMS[1])))["forward"](*given, x["initial_state"], o, final)
    torch.testing.assert_close(o.transpose(1, 2).double(), right_o, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final.double(), right_final, rtol=1e-4, atol=1e-4)
