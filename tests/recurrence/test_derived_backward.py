"""The derived backward function, as the interpreter reads it, against autograd of the recurrence in fp64."""

import pytest
import torch

from attn_engine.frontend.recurrence import Kind, build_recurrence
from attn_engine.interpreters.attn_recurrence import run_recurrence
from attn_engine.interpreters.attn_sweep import run_sweeps
from attn_engine.runtime.driver import run_passes
from tests.recurrence.support import inputs

WRT = ("q", "k", "v", "decay", "weight", "initial")


@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("d_final", [True, False])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_equals_autograd_of_the_recurrence(shared, d_final, decay):
    kind = Kind(torch.float32, 3, 5, decay, weight=True, initial=True, final=True)
    module = build_recurrence(kind)
    run_passes(module, (f"attn-derive-recurrence-backward{{wrt={','.join(WRT)} d_final={str(d_final).lower()}}}",))
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
