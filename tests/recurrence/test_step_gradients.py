"""A step of decoding has no gradients, and says so where one is asked for."""

import pytest
import torch

import attn_engine
from attn_engine.errors import NoGradientError, UnsupportedGradientError
from tests.recurrence.support import inputs

NAMES = ("q", "k", "v", "decay", "beta")


def token():
    x = inputs(1)
    x.pop("weight")
    return x | {"beta": torch.rand(2, 1, 4), "k": torch.nn.functional.normalize(x["k"], dim=-1)}


def step(x, state):
    return attn_engine.recurrence_step(**{n: x[n] for n in NAMES}, state=state, backend="cpu")


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_what_a_step_gives_are_refused(name):
    x = token()
    state, plain = x["initial_state"].clone(), x["initial_state"].clone()
    want = step(x, plain)
    x[name] = x[name].clone().requires_grad_()
    o = step(x, state)
    assert torch.equal(o, want)
    assert torch.equal(state, plain)
    assert not state.requires_grad
    with pytest.raises(UnsupportedGradientError, match="output_final_state=True"):
        o.sum().backward()


def test_a_state_that_requires_a_gradient_is_refused():
    x = token()
    q, k, v = (x[n].requires_grad_() for n in "qkv")
    _, state = attn_engine.recurrence(q, k, v, output_final_state=True, backend="cpu")
    before = state.detach().clone()
    with pytest.raises(NoGradientError, match=r"state\.detach\(\)"):
        step(x, state)
    assert torch.equal(state, before)
    o = step(x, state.detach())
    with torch.no_grad():
        assert torch.equal(step(x, before), o)


def test_without_gradients_nothing_is_kept():
    x = token()
    x["q"].requires_grad_()
    with torch.no_grad():
        assert step(x, x["initial_state"].clone()).grad_fn is None
    x["q"].requires_grad_(False)
    assert step(x, x["initial_state"].clone()).grad_fn is None


def test_what_torch_compiles_is_detached():
    x = token()
    x["q"].requires_grad_()
    compiled = torch.compile(lambda q, state: step(x | {"q": q}, state), backend="eager", fullgraph=True)
    state, plain = x["initial_state"].clone(), x["initial_state"].clone()
    o = compiled(x["q"], state)
    assert o.grad_fn is None
    assert torch.equal(o, step(x, plain))
    assert torch.equal(state, plain)
