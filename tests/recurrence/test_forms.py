"""The forms of one recurrence on the tile interpreter, in fp64: chunks, pieces and steps are the same function."""

from __future__ import annotations

import pytest
import torch

from attn_engine.frontend.recurrence import Kind, build_recurrence
from attn_engine.interpreters.tile import run_plan
from attn_engine.runtime.driver import run_passes
from attn_engine.runtime.recurrence_compile import Compiled, Request, Schedule, to_tile
from tests.recurrence.support import inputs, reference, watched_exponents

FORMS = [
    Schedule(chunk=16, value_block=16),
    Schedule(chunk=64, value_block=32),
    Schedule(chunk=16, value_block=16, pieces=3),
    Schedule(chunk=1, value_block=16),
    Schedule(chunk=16, value_block=16, descriptors=True),
    Schedule(chunk=16, value_block=16, pieces=3, descriptors=True),
    Schedule(chunk=16, value_block=16, turned=True),
    Schedule(chunk=16, value_block=16, pieces=2, chained=True),
    Schedule(chunk=16, value_block=16, pieces=3, descriptors=True, turned=True),
    Schedule(chunk=16, pad=False),
]
KIND = Kind(torch.float32, 16, 24, "token", weight=True, initial=True, final=True)


def operands(tokens, rate=0.1):
    x = inputs(tokens, batch=1, heads=2, shared=1, rate=rate)
    turned = [x[n].transpose(1, 2) for n in ("q", "k", "v", "decay", "weight")]
    return x, [*turned[:3], 0.5, *turned[3:]]


def tiles(schedule, wrt=()):
    request = Request(KIND, "triton", schedule, wrt)
    module = Compiled(request).adjoint(True) if wrt else build_recurrence(KIND)
    return to_tile(module, request)


@pytest.mark.parametrize(("tokens", "schedule"), [(0, FORMS[0]), (1, FORMS[0]), *((50, form) for form in FORMS)])
def test_all_forms_agree(tokens, schedule):
    x, given = operands(tokens)
    right_o, right_final = reference(**{n: t.double() for n, t in x.items()}, scale=0.5)
    o = torch.full((1, 2, tokens, 24), torch.nan, dtype=torch.float64)
    final = torch.full((1, 2, 16, 24), torch.nan, dtype=torch.float64)
    run_plan(tiles(schedule), "forward", [*given[:4], *given[4:], x["initial_state"], o, final], exact=True)
    torch.testing.assert_close(o.transpose(1, 2), right_o, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(final, right_final, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backward", [False, True])
def test_no_exponent_is_positive(backward, monkeypatch):
    seen = watched_exponents(monkeypatch)
    x, given = operands(40, rate=1.0)
    given[4] = given[4].clone()
    given[4][:, :, 7] = float("-inf")
    o, state = torch.zeros(1, 2, 40, 24), torch.zeros(1, 2, 16, 24)
    if not backward:
        run_plan(tiles(FORMS[2]), "forward", [*given, x["initial_state"], o, state])
    else:
        results = [torch.empty_like(t) for t in (*given[:3], *given[4:], x["initial_state"])]
        states = [x["initial_state"].mT, torch.ones_like(o), state, state + 1, (state + 1).mT]
        wrt = ("q", "k", "v", "decay", "weight", "initial")
        run_plan(tiles(FORMS[5], wrt), "backward", [*given, *states, *results])
    assert seen
    assert max(seen) <= 0


def test_text_of_tile_ir_gives_the_same_source():
    from xdsl.parser import Parser

    from attn_engine.backends.backend import get_backend
    from attn_engine.universe import make_context

    module = tiles(FORMS[0])
    again = Parser(make_context(), str(module)).parse_module()
    emit = get_backend("triton").emit
    assert emit(again) == emit(module)


def test_every_stage_verifies():
    module = build_recurrence(KIND)
    run_passes(module, ("attn-derive-recurrence-backward{wrt=q,k,v,decay,weight,initial}", FORMS[0].spec()))
    module.verify()
