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
from tests.recurrence.support import inputs, reference

FORMS = [
    Schedule(chunk=16, value_block=16),
    Schedule(chunk=32, value_block=16, descriptors=True, turned=True),
    Schedule(chunk=16, pad=False),
    Schedule(chunk=16, value_block=16, pieces=2, chained=True),
]


def kind_of(decay):
    return Kind(torch.float32, 16, 24, decay, beta=True, initial=True, final=True)


def made(tokens, decay="token", rate=0.1, key=16):
    """The inputs in the order of a plan's operands, and these operands."""
    given = inputs(tokens, batch=1, heads=2, shared=1, rate=rate, key=key)
    if decay == "channel":
        given["decay"] = rate * logsigmoid(torch.randn(1, tokens, 2, key, generator=torch.Generator().manual_seed(1)))
    x = {n: given[n] for n in ("q", "k", "v")} | ({"decay": given["decay"]} if decay else {})
    x |= {"beta": given["weight"], "initial_state": given["initial_state"]}
    x["k"] = normalize(x["k"], dim=-1)
    q, k, v, *rows = (t.transpose(1, 2) for n, t in x.items() if n != "initial_state")
    return x, [q, k, v, 0.5, *rows]


def empty(*shape):
    return torch.full(shape, torch.nan, dtype=torch.float64)


def forward(x, given, schedule, decay="token"):
    tokens = x["q"].shape[1]
    o, final = empty(1, 2, tokens, 24), empty(1, 2, 16, 24)
    tiles = to_tile(build_recurrence(kind_of(decay)), Request(kind_of(decay), "triton", schedule))
    run_plan(tiles, "forward", [*given, x["initial_state"], o, final], exact=True)
    right_o, right_final = reference(**{n: t.double() for n, t in x.items()}, scale=0.5)
    torch.testing.assert_close(o.transpose(1, 2), right_o, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(final, right_final, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "decay", "rate", "schedule"),
    [
        (0, "", 0, FORMS[0]),
        (1, "token", 1.0, FORMS[0]),
        (50, "", 0, FORMS[0]),
        *((50, "token", 30.0 if n else 0.1, form) for n, form in enumerate(FORMS)),
        (1, "channel", 1.0, FORMS[0]),
        *((50, "channel", 0.1 if n else 30.0, form) for n, form in enumerate(FORMS)),
    ],
)
def test_forward(tokens, decay, rate, schedule):
    forward(*made(tokens, decay, rate), schedule, decay)


def test_keys_that_are_alike():
    """Powers of the system grow like binomials there; its inverse does not."""
    x, given = made(64, "")
    x["k"].copy_(x["k"][:, :1].expand_as(x["k"]))
    x["beta"].fill_(1.0)
    forward(x, given, Schedule(chunk=64, pad=False), "")


@pytest.mark.parametrize(
    ("decay", "schedule"), [("", FORMS[0]), *((decay, form) for decay in ("token", "channel") for form in FORMS)]
)
def test_backward(decay, schedule):
    x, given = made(37, decay)
    want = {n: t.double().requires_grad_() for n, t in x.items()}
    o, final = reference(**want, scale=0.5)
    d_o, d_final = torch.randn_like(o), torch.randn_like(final)
    gradients = torch.autograd.grad((o * d_o).sum() + (final * d_final).sum(), list(want.values()))
    wrt = ("q", "k", "v", *(["decay"] if decay else []), "beta", "initial")
    request = Request(kind_of(decay), "triton", schedule, wrt)
    results = [empty(*t.shape) for t in (*given[:3], *given[4:], x["initial_state"])]
    states = [x["initial_state"], d_o.transpose(1, 2), final.detach(), d_final, d_final.mT]
    run_plan(to_tile(Compiled(request).adjoint(True), request), "backward", [*given, *states, *results], exact=True)
    for name, got, right in zip(x, results, gradients, strict=True):
        right = right if name == "initial_state" else right.transpose(1, 2)
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def test_text_for_triton():
    x, given = made(40)
    o, final = torch.full((1, 2, 40, 24), torch.nan), torch.full((1, 2, 16, 24), torch.nan)
    right_o, right_final = reference(**{n: t.double() for n, t in x.items()}, scale=0.5)
    schedule = Schedule(chunk=16, value_block=16, descriptors=True)
    interpret(source_of(Request(kind_of("token"), "triton", schedule)))["forward"](*given, x["initial_state"], o, final)
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
