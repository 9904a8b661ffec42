"""Gradients of a recurrence with a log decay per key channel."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import logsigmoid

import attn_engine
from attn_engine.backends.triton.interpret import interpret
from attn_engine.compat import fla
from attn_engine.frontend.recurrence import Kind
from attn_engine.runtime.recurrence_compile import Request, Schedule, source_of
from tests.recurrence.support import assert_near, exact, inputs, leaves, loss_weights, reference


def given(tokens, shared=2, **options):
    x = inputs(tokens, shared=shared, **options)
    batch, _, heads, _ = x["v"].shape
    generator = torch.Generator().manual_seed(3)
    x["decay"] = 0.2 * logsigmoid(torch.randn(batch, tokens, heads, x["k"].shape[3], generator=generator))
    return x


@pytest.mark.parametrize(("tokens", "shared"), [(1, 2), (33, 4), (70, 1)])
@pytest.mark.parametrize("on_final", [0.0, 1.0])
def test_all_gradients(tokens, shared, on_final):
    x = given(tokens, shared)
    got, want = leaves(x), exact(x)
    o, final = attn_engine.recurrence(**got, output_final_state=True, backend="cpu")
    right_o, right_final = reference(**want)
    d_o, d_final = loss_weights(o, final)
    ((o * d_o).sum() + on_final * (final * d_final).sum()).backward()
    ((right_o * d_o).sum() + on_final * (right_final * d_final).sum()).backward()
    for name in x:
        assert_near(f"d_{name}", got[name].grad, want[name].grad)


def test_a_channel_that_forgets_gets_no_gradient():
    x = given(40)
    x["decay"][:, 20, :, :5] = float("-inf")
    got, want = leaves(x), exact(x)
    attn_engine.recurrence(**got, backend="cpu")[0].square().sum().backward()
    reference(**want)[0].square().sum().backward()
    assert (got["decay"].grad[:, 20, :, :5] == 0).all()
    for name in ("q", "k", "v", "initial_state", "decay"):
        assert_near(f"d_{name}", got[name].grad, torch.nan_to_num(want[name].grad))


def test_gla_by_its_name_trains():
    x = leaves({n: t for n, t in given(20, 4, dtype=torch.bfloat16).items() if n in ("q", "k", "v", "decay")})
    o, _ = fla.chunk_gla(x["q"], x["k"], x["v"], x["decay"])
    o.float().square().sum().backward()
    want = exact(x)
    reference(*want.values())[0].square().sum().backward()
    for name in x:
        assert_near(name, x[name].grad.float(), want[name].grad, 2e-2)


def test_tokens_of_a_chunk_weigh_each_other_in_more_than_16_bits():
    """With operands that are rounded once they have decayed, errors are 3e-3."""
    x = leaves({n: t for n, t in given(128, 4, key=64, value=64, dtype=torch.bfloat16).items() if n != "weight"})
    del x["initial_state"]
    o, _ = attn_engine.recurrence(**x, backend="cpu")
    want = exact(x)
    right, _ = reference(**want)
    d_o = loss_weights(o, o)[0].bfloat16()
    (found,) = torch.autograd.grad(o, [x["v"]], d_o)
    (wanted,) = torch.autograd.grad(right, [want["v"]], d_o.double())
    for got, sure in ((o, right), (found, wanted)):
        assert (got.double() - sure).norm() < 2.6e-3 * sure.norm()


@pytest.mark.parametrize("rate", [0.05, 1.0, 20.0])
def test_what_is_computed_is_multiplied_in_more_than_16_bits(rate):
    """Where it is rounded to 16 bits first, errors are 2.4e-3 to 2.9e-3, those of log decays 5e-3 to 1.7e-2."""
    x = given(320, 2, batch=1, heads=2, key=64, value=64, dtype=torch.bfloat16)
    x = leaves({n: rate * t if n == "decay" else t for n, t in x.items() if n not in ("weight", "initial_state")})
    o, _ = attn_engine.recurrence(**x, backend="cpu")
    want = exact(x)
    right, _ = reference(**want)
    d_o = loss_weights(o, o)[0].bfloat16()
    found = torch.autograd.grad(o, list(x.values()), d_o)
    wanted = torch.autograd.grad(right, list(want.values()), d_o.double())
    bounds = {"o": 2.75e-3, "q": 1.9e-3, "k": 1.9e-3, "v": 2.75e-3, "decay": 2e-3}
    for name, got, sure in zip(("o", *x), (o, *found), (right, *wanted), strict=True):
        error = (got.double() - sure).norm() / sure.norm()
        assert error < bounds[name], f"{name}: {error:.1e}"


def test_packed():
    x = given(50, batch=1, sequences=2)
    got, want = leaves(x), exact(x)
    o, _ = attn_engine.recurrence(**got, cu_seqlens=torch.tensor([0, 20, 45]), backend="cpu")
    o.square().sum().backward()
    for n, part in enumerate((slice(0, 20), slice(20, 45))):
        cut = {name: t[:, part] for name, t in want.items() if name != "initial_state"}
        reference(**cut, initial_state=want["initial_state"][n : n + 1])[0].square().sum().backward()
    for name in x:
        assert_near(f"d_{name}", got[name].grad, want[name].grad)


def test_in_the_triton_interpreter():
    x = given(5, 1, batch=1, heads=2)
    x.pop("weight")
    kind = Kind(torch.float32, 16, 24, "channel", initial=True)
    request = Request(kind, "triton", Schedule(chunk=1, value_block=16))
    want = exact(x)
    right_o, right_final = reference(**want, scale=0.5)
    d_o, d_final = loss_weights(right_o, right_final)
    right = torch.autograd.grad((right_o * d_o).sum() + (right_final * d_final).sum(), list(want.values()))
    q, k, v, decay = (x[n].transpose(1, 2) for n in ("q", "k", "v", "decay"))
    results = [torch.full(t.shape, torch.nan) for t in (q, k, v, decay, x["initial_state"])]
    plan = interpret(source_of(request, ("q", "k", "v", "decay", "initial"), d_final=True))["backward"]
    states = (right_final.detach().float(), d_final, d_final.transpose(2, 3))
    plan(q, k, v, 0.5, decay, x["initial_state"].transpose(2, 3), d_o.transpose(1, 2), *states, *results)
    for name, got, wanted in zip(x, results, right, strict=True):
        assert_near(name, got, wanted if name == "initial_state" else wanted.transpose(1, 2))
