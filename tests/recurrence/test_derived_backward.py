"""The derived backward function, as the interpreter reads it, against autograd of the recurrence in fp64."""

from dataclasses import replace

import pytest
import torch

from attn_engine.dialects import attn
from attn_engine.frontend.recurrence import Kind, build_recurrence
from attn_engine.interpreters.attn_recurrence import run_recurrence
from attn_engine.interpreters.attn_sweep import run_sweeps
from attn_engine.runtime.driver import run_passes
from tests.recurrence.support import inputs

WRT = ("q", "k", "v", "decay", "weight", "initial")


@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("d_final", [True, False])
@pytest.mark.parametrize("decay", ["token", "channel"])
@pytest.mark.parametrize("segment", [4, 256])
def test_equals_autograd_of_the_recurrence(shared, d_final, decay, segment):
    kind = Kind(torch.float32, 3, 5, decay, weight=True, initial=True, final=True)
    module = build_recurrence(kind)
    options = f"wrt={','.join(WRT)} d_final={str(d_final).lower()} segment={segment}"
    run_passes(module, (f"attn-derive-recurrence-backward{{{options}}}",))
    forward, backward = module.body.block.ops
    given = inputs(9, heads=4, shared=shared, key=3, value=5, rate=1.0)
    if decay == "channel":
        given["decay"] = -torch.rand(2, 9, 4, 3)
    q, k, v, g, w, s = (
        x.double().transpose(1, 2) if x.ndim == 4 and n != "initial_state" else x.double() for n, x in given.items()
    )
    g, w = g if decay == "channel" else g.transpose(1, 2), w.transpose(1, 2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, w, s)]
    o, final = run_recurrence(forward, *leaves[:3], 0.5, decay=leaves[3], weight=leaves[4], initial=leaves[5])
    d_o, d_state = torch.randn_like(o), torch.randn_like(final)
    loss = (o * d_o).sum() + (final * d_state).sum() * d_final
    want = torch.autograd.grad(loss, leaves)
    states = [final.detach(), d_state, d_state.transpose(2, 3)] if d_final else []
    got = run_sweeps(backward, [q, k, v, 0.5, g, w, s.transpose(2, 3), d_o, *states])
    for name, found, right in zip(WRT, got, want, strict=True):
        torch.testing.assert_close(found, right, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("decay", ["", "token", "channel"])
def test_the_delta_rule(decay):
    kind = Kind(torch.float64, 3, 5, decay, beta=True, initial=True, final=True)
    names = ("q", "k", "v", *(["decay"] if decay else []), "beta", "initial")
    module = build_recurrence(replace(kind, dtype=torch.float32))
    run_passes(module, (f"attn-derive-recurrence-backward{{wrt={','.join(names)} d_final=true}}",))
    forward, backward = module.body.block.ops
    randn = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    x = {"q": randn(2, 2, 9, 3), "k": randn(2, 2, 9, 3), "v": randn(2, 4, 9, 5), "beta": torch.rand(2, 4, 9).double()}
    x["initial"] = randn(2, 4, 3, 5)
    if decay:
        x["decay"] = -torch.rand(2, 4, 9, *([3] if decay == "channel" else [])).double()
    x = {name: x[name].requires_grad_() for name in names}
    o, final = run_recurrence(
        forward, x["q"], x["k"], x["v"], 0.5, decay=x.get("decay"), beta=x["beta"], initial=x["initial"]
    )
    d_o, d_state = torch.randn_like(o), torch.randn_like(final)
    want = torch.autograd.grad((o * d_o).sum() + (final * d_state).sum(), list(x.values()))
    plain = [t.detach() for t in x.values()]
    arguments = [*plain[:3], 0.5, *plain[3:], d_o, final.detach(), d_state, d_state.transpose(2, 3)]
    for name, found, right in zip(names, run_sweeps(backward, arguments), want, strict=True):
        torch.testing.assert_close(found, right, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("decay", ["", "token", "channel"])
def test_the_map_is_linear_in_each_operand_and_its_adjoints_are_the_same_map(decay):
    """<d, F(q, k, v)> = <q, F(d, v, k)> = <k, F'(v, d, q)> = <v, F'(k, q, d)>, and F scales with each of q, k, v."""
    module = build_recurrence(Kind(torch.float32, 3, 5, decay))
    run_passes(module, ("attn-derive-recurrence-backward{wrt=q,k,v grouped=false}",))
    forward, backward = module.body.block.ops
    sweeps = [op for op in backward.body.block.ops if isinstance(op, attn.SweepOp)]
    assert [s.reverse is not None for s in sweeps] == [False, True, True]
    q, k, v, d = (torch.randn(2, 4, 9, n, dtype=torch.float64) for n in (3, 3, 5, 5))
    g = {"decay": -torch.rand(2, 4, 9, *([3] if decay == "channel" else [])).double()} if decay else {}
    o = run_recurrence(forward, q, k, v, 0.5, **g)[0]
    gradients = run_sweeps(backward, [q, k, v, 0.5, *g.values(), d])
    for operand, gradient in zip((q, k, v), gradients, strict=True):
        torch.testing.assert_close((operand * gradient).sum(), (o * d).sum())
    for scaled in ((2 * q, k, v), (q, 2 * k, v), (q, k, 2 * v)):
        torch.testing.assert_close(run_recurrence(forward, *scaled, 0.5, **g)[0], 2 * o)
