"""The delta rule in chunks, on the tile interpreter in fp64: equal to the recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from attn_engine.backends.triton.interpret import interpret
from attn_engine.errors import RecurrenceFormError
from attn_engine.frontend.recurrence import Kind, build_recurrence
from attn_engine.interpreters.tile import run_plan
from attn_engine.runtime.recurrence_compile import Compiled, Request, Schedule, source_of, to_tile
from tests.recurrence.support import inputs, reference, watched_exponents

FORMS = [
    Schedule(chunk=16, value_block=16, part=8),
    Schedule(chunk=32, value_block=16, descriptors=True, turned=True),
    Schedule(chunk=16, pad=False),
    Schedule(chunk=16, value_block=16, pieces=2, chained=True),
]


STEPWISE = Schedule(chunk=1, value_block=16)


def kind_of(decay, key=16):
    return Kind(torch.float32, key, 24, decay, beta=True, initial=True, final=True)


def made(tokens, decay="token", rate=0.1, key=16):
    """The inputs in the order of a plan's operands."""
    given = inputs(tokens, batch=1, heads=2, shared=1, rate=rate, key=key)
    if decay == "channel":
        given["decay"] = rate * logsigmoid(torch.randn(1, tokens, 2, key, generator=torch.Generator().manual_seed(1)))
    x = {n: given[n] for n in ("q", "k", "v")} | ({"decay": given["decay"]} if decay else {})
    x |= {"beta": given["weight"], "initial_state": given["initial_state"]}
    x["k"] = normalize(x["k"], dim=-1)
    return x


def operands(x):
    q, k, v, *rows = (t.transpose(1, 2) for n, t in x.items() if n != "initial_state")
    return [q, k, v, 0.5, *rows, x["initial_state"]]


def empty(*shape):
    return torch.full(shape, torch.nan, dtype=torch.float64)


def forward(x, schedule, decay="token"):
    tokens, key = x["q"].shape[1], x["q"].shape[3]
    o, final = empty(1, 2, tokens, 24), empty(1, 2, key, 24)
    kind = kind_of(decay, key)
    tiles = to_tile(build_recurrence(kind), Request(kind, "triton", schedule))
    run_plan(tiles, "forward", [*operands(x), o, final], exact=True)
    right_o, right_final = reference(**{n: t.double() for n, t in x.items()}, scale=0.5)
    torch.testing.assert_close(o.transpose(1, 2), right_o, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(final, right_final, rtol=1e-6, atol=1e-6)


def backward(x, schedule, decay="token"):
    want = {n: t.double().requires_grad_() for n, t in x.items()}
    o, final = reference(**want, scale=0.5)
    d_o, d_final = torch.randn_like(o), torch.randn_like(final)
    gradients = torch.autograd.grad((o * d_o).sum() + (final * d_final).sum(), list(want.values()))
    wrt = ("q", "k", "v", *(["decay"] if decay else []), "beta", "initial")
    request = Request(kind_of(decay, x["q"].shape[3]), "triton", schedule, wrt)
    given = operands(x)
    results = [empty(*t.shape) for t in (*given[:3], *given[4:])]
    states = [d_o.transpose(1, 2), final.detach(), d_final, d_final.mT]
    run_plan(to_tile(Compiled(request).adjoint(True), request), "backward", [*given, *states, *results], exact=True)
    for name, got, right in zip(x, results, gradients, strict=True):
        right = right if name == "initial_state" else right.transpose(1, 2)
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"d_{name}: {text}")


@pytest.mark.parametrize(
    ("tokens", "decay", "rate", "schedule"),
    [
        (0, "", 0, FORMS[0]),
        (1, "token", 1.0, FORMS[0]),
        (50, "", 0, FORMS[0]),
        *((50, "token", 30.0 if n else 0.1, form) for n, form in enumerate(FORMS)),
        (0, "channel", 0.1, FORMS[0]),
        (1, "channel", 1.0, FORMS[0]),
        *((50, "channel", 0.01 if n else 30.0, form) for n, form in enumerate([*FORMS, STEPWISE])),
    ],
)
def test_forward(tokens, decay, rate, schedule):
    forward(made(tokens, decay, rate), schedule, decay)


@pytest.mark.parametrize("decay", ["", "channel"])
def test_keys_that_are_alike(decay):
    """Powers of the system grow like binomials there; its inverse does not."""
    x = made(64, decay, 1e-3)
    x["k"].copy_(x["k"][:, :1].expand_as(x["k"]))
    x["beta"].fill_(1.0)
    forward(x, Schedule(chunk=64, pad=False), decay)


@pytest.mark.parametrize(
    ("decay", "schedule"),
    [("", FORMS[0]), *((decay, form) for decay in ("token", "channel") for form in FORMS), ("channel", STEPWISE)],
)
def test_backward(decay, schedule):
    backward(made(37, decay), schedule, decay)


def test_more_channels_than_are_done_at_a_time():
    x = made(21, "channel", key=80)
    schedule = Schedule(chunk=16, value_block=32)
    forward(x, schedule, "channel")
    backward(x, schedule, "channel")


def test_channels_that_forget_at_any_speed(monkeypatch):
    """In 64 steps from 0 to -120, in another order for each channel, and resets of some: no exponent is positive."""
    seen = watched_exponents(monkeypatch)
    x, generator = made(75, "channel"), torch.Generator().manual_seed(5)
    steps = torch.linspace(0, -120, 64)
    for c in range(16):
        x["decay"][:, :, :, c] = steps[torch.randint(64, (75, 2), generator=generator)]
    x["decay"][:, :, :, :4] *= 1e-3
    x["decay"][:, [0, 20, 21, 63, 64], :, 2:6] = float("-inf")
    x["decay"][:, 40, 1] = float("-inf")
    for schedule in (FORMS[0], Schedule(chunk=64, pad=False)):
        forward(x, schedule, "channel")
        backward(x, schedule, "channel")
    assert seen
    assert max(seen) <= 0


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_text_for_triton(decay):
    x = made(40, decay)
    o, final = torch.full((1, 2, 40, 24), torch.nan), torch.full((1, 2, 16, 24), torch.nan)
    right_o, right_final = reference(**{n: t.double() for n, t in x.items()}, scale=0.5)
    schedule = Schedule(chunk=16, value_block=16, descriptors=True)
    interpret(source_of(Request(kind_of(decay), "triton", schedule)))["forward"](*operands(x), o, final)
    torch.testing.assert_close(o.transpose(1, 2).double(), right_o, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final.double(), right_final, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_forms_that_do_not_exist(decay):
    with pytest.raises(RecurrenceFormError, match="the delta rule"):
        to_tile(build_recurrence(kind_of(decay)), Request(kind_of(decay), "triton", Schedule(pieces=4)))


def test_gradients_in_forms_that_do_not_exist():
    request = Request(kind_of("token"), "triton", Schedule(pieces=4), ("q", "k", "v"))
    with pytest.raises(RecurrenceFormError, match="the delta rule"):
        to_tile(Compiled(request).adjoint(True), request)
