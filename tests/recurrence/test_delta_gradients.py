"""Gradients of the delta rule, with and without decay."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

import attn_engine
from attn_engine.backends.triton.interpret import interpret
from attn_engine.compat import fla
from attn_engine.frontend.recurrence import Kind
from attn_engine.runtime.recurrence_compile import Request, Schedule, source_of
from tests.recurrence.support import assert_near, exact, inputs, leaves, loss_weights, reference


def given(tokens, decay="token", shared=2, **options):
    x = inputs(tokens, shared=shared, rate=0.2, **options)
    batch, _, heads, _ = x["v"].shape
    generator = torch.Generator().manual_seed(3)
    if decay == "channel":
        x["decay"] = 0.2 * logsigmoid(torch.randn(batch, tokens, heads, x["k"].shape[3], generator=generator))
    if decay == "none":
        x.pop("decay")
    x["beta"] = x.pop("weight")
    x["k"] = normalize(x["k"].float(), dim=-1).to(x["k"].dtype)
    return x


@pytest.mark.parametrize("decay", ["none", "token", "channel"])
@pytest.mark.parametrize(("tokens", "shared"), [(1, 2), (32, 4), (33, 1), (70, 2)])
def test_all_gradients(decay, tokens, shared):
    x = given(tokens, decay, shared)
    got, want = leaves(x), exact(x)
    o, final = attn_engine.recurrence(**got, output_final_state=True, backend="cpu")
    right_o, right_final = reference(**want)
    d_o, d_final = loss_weights(o, final)
    ((o * d_o).sum() + (final * d_final).sum()).backward()
    ((right_o * d_o).sum() + (right_final * d_final).sum()).backward()
    for name in x:
        assert_near(f"d_{name}", got[name].grad, want[name].grad)


@pytest.mark.parametrize("decay", ["token", "channel"])
@pytest.mark.parametrize("alone", ["q", "k", "v", "decay", "beta", "initial_state"])
def test_one_gradient_alone(alone, decay):
    x = given(40, decay, batch=1)
    got = {n: t.clone().requires_grad_(n == alone) for n, t in x.items()}
    want = exact(x)
    attn_engine.recurrence(**got, backend="cpu")[0].square().sum().backward()
    reference(**want)[0].square().sum().backward()
    assert_near(alone, got[alone].grad, want[alone].grad)


def test_a_reset_and_nearly_equal_keys():
    x = given(70)
    x["decay"][:, 20, :2] = float("-inf")
    x["k"] = normalize(x["k"][:, :1] + 1e-3 * x["k"], dim=-1)
    x["beta"] = 1 - 1e-3 * x["beta"]
    got, want = leaves(x), exact(x)
    attn_engine.recurrence(**got, backend="cpu")[0].sum().backward()
    reference(**want)[0].sum().backward()
    assert (got["decay"].grad[:, 20, :2] == 0).all()
    for name in x:
        assert_near(f"d_{name}", got[name].grad, torch.nan_to_num(want[name].grad), 1e-3)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_packed(decay):
    x = given(100, decay, batch=1, sequences=3)
    got, want = leaves(x), exact(x)
    o, final = attn_engine.recurrence(
        **got, cu_seqlens=torch.tensor([0, 45, 45, 90]), output_final_state=True, backend="cpu"
    )
    (o.square().sum() + final.square().sum()).backward()
    for n, part in enumerate((slice(0, 45), slice(45, 45), slice(45, 90))):
        cut = {name: t[:, part] for name, t in want.items() if name != "initial_state"}
        right_o, right_final = reference(**cut, initial_state=want["initial_state"][n : n + 1])
        (right_o.square().sum() + right_final.square().sum()).backward()
    for name in x:
        assert_near(f"d_{name}", got[name].grad, want[name].grad)


@pytest.mark.parametrize("rate", [1e-3, 4.0])
def test_errors_of_half_types_do_not_add_up(rate):
    x = given(300, "channel", batch=1, dtype=torch.bfloat16)
    x["decay"] *= rate / 0.2
    del x["initial_state"]
    got, want = leaves(x), exact(x)
    o, right = attn_engine.recurrence(**got, backend="cpu")[0], reference(**want)[0]
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    (o * d_o).float().sum().backward()
    (right * d_o).sum().backward()
    for name in x:
        error = (got[name].grad - want[name].grad).norm() / want[name].grad.norm()
        assert error < 1e-2, f"d_{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("decay", "rate", "most"),
    [("token", 0.05, 3.8e-3), ("channel", 0.05, 4.35e-3), ("token", 5.0, 3.1e-3), ("channel", 5.0, 3.25e-3)],
)
def test_what_is_computed_is_multiplied_in_more_than_16_bits(decay, rate, most):
    """Where it is rounded to 16 bits first, the largest error is 4.4e-3, 4.8e-3, 3.4e-3 and 3.6e-3."""
    x = given(256, decay, 2, batch=1, heads=2, key=64, value=64, dtype=torch.bfloat16)
    x = leaves({n: rate * t if n == "decay" else t for n, t in x.items() if n != "initial_state"})
    want = exact(x)
    o, right = attn_engine.recurrence(**x, backend="cpu")[0], reference(**want)[0]
    d_o = loss_weights(o, o)[0].bfloat16()
    found = torch.autograd.grad(o, list(x.values()), d_o)
    wanted = torch.autograd.grad(right, list(want.values()), d_o.double())
    for name, got, sure in zip(("o", *x), (o, *found), (right, *wanted), strict=True):
        error = (got.double() - sure).norm() / sure.norm()
        assert error < most, f"{name}: {error:.1e}"


def test_gated_delta_rule_by_its_name_trains():
    x = {n: t for n, t in given(40, "token", 4, dtype=torch.bfloat16).items() if n != "initial_state"}
    got, want = leaves(x), exact(x)
    o, _ = fla.chunk_gated_delta_rule(got["q"], got["k"], got["v"], got["decay"], got["beta"])
    o.float().square().sum().backward()
    reference(**want)[0].square().sum().backward()
    for name in x:
        assert_near(name, got[name].grad.float(), want[name].grad, 2e-2)


@pytest.mark.parametrize(
    ("decay", "schedule"),
    [("token", Schedule(chunk=1)), ("channel", Schedule(chunk=16, value_block=16, descriptors=True))],
)
def test_in_the_triton_interpreter(decay, schedule):
    x = given(35, decay, 1, batch=1, heads=2)
    request = Request(Kind(torch.float32, 16, 24, decay, beta=True, initial=True), "triton", schedule)
    want = exact(x)
    right_o, right_final = reference(**want, scale=0.5)
    d_o, d_final = loss_weights(right_o, right_final)
    names = ("q", "k", "v", "decay", "beta", "initial_state")
    loss = (right_o * d_o).sum() + (right_final * d_final).sum()
    right = torch.autograd.grad(loss, [want[n] for n in names])
    q, k, v, decay, beta = (x[n].transpose(1, 2) for n in names[:5])
    results = [torch.full(t.shape, torch.nan) for t in (q, k, v, decay, beta, x["initial_state"])]
    plan = interpret(source_of(request, ("q", "k", "v", "decay", "beta", "initial"), d_final=True))["backward"]
    states = (right_final.detach().float(), d_final, d_final.transpose(2, 3))
    plan(q, k, v, 0.5, decay, beta, x["initial_state"], d_o.transpose(1, 2), *states, *results)
    for name, got, wanted in zip(names, results, right, strict=True):
        assert_near(name, got, wanted if name == "initial_state" else wanted.transpose(1, 2))


def test_packed_and_resets_in_the_triton_interpreter():
    """Sequences that begin inside of chunks, an empty one, and tokens past the last."""
    x = given(30, "channel", 1, batch=1, heads=2, sequences=4)
    x["decay"][:, [3, 10], 1] = x["decay"][:, 12, :, 3:6] = float("-inf")
    kind = Kind(torch.float32, 16, 24, "channel", beta=True, initial=True, bounds=True, final=True)
    request, names = Request(kind, "triton", Schedule(chunk=16, value_block=16)), ("q", "k", "v", "decay", "beta")
    bounds, want = [0, 5, 5, 24, 27], exact(x)
    parts = [
        reference(**{m: want[m][:, lo:hi] for m in names}, scale=0.5, initial_state=want["initial_state"][n : n + 1])
        for n, (lo, hi) in enumerate(pairwise(bounds))
    ]
    right_o, right_final = torch.cat([o for o, _ in parts], 1), torch.cat([state for _, state in parts])
    d_o, d_final = loss_weights(torch.empty(1, 30, 2, 24), right_final)
    ((right_o * d_o[:, :27]).sum() + (right_final * d_final).sum()).backward()
    q, k, v, decay, beta = (x[n].transpose(1, 2) for n in names)
    operands = [q, k, v, 0.5, decay, beta, x["initial_state"], torch.tensor(bounds, dtype=torch.int32)]
    o, final = torch.full(v.shape, torch.nan), torch.full(right_final.shape, torch.nan)
    interpret(source_of(request))["forward"](*operands, o, final)
    assert_near("o", o[:, :, :27], right_o.transpose(1, 2))
    assert_near("final", final, right_final)
    results = [torch.full(t.shape, torch.nan) for t in (q, k, v, decay, beta, x["initial_state"])]
    plan = interpret(source_of(request, ("q", "k", "v", "decay", "beta", "initial"), d_final=True))["backward"]
    plan(*operands, d_o.transpose(1, 2), right_final.detach().float(), d_final, d_final.transpose(2, 3), *results)
    for name, got in zip((*names, "initial_state"), results, strict=True):
        right = want[name].grad
        assert_near(f"d_{name}", got, right if name == "initial_state" else right.transpose(1, 2))
