"""`backend="reference"` of recurrences: derivatives of any order, float64, and the same meaning as kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import logsigmoid

import attn_engine
from attn_engine import LinearAttentionEngine, errors, meta_tensor
from tests.recurrence.support import assert_near, exact, inputs, leaves, reference

KINDS = ("none", "head", "token", "channel", "delta", "weight")


def given(kind, tokens=7, dtype=torch.float64, **sizes):
    x = inputs(tokens, key=3, value=2, **{"batch": 1, "heads": 2, "shared": 1} | sizes)
    weight, decay = x.pop("weight"), x.pop("decay")
    if kind == "head":
        x["decay"] = decay[0, 0]
    if kind in ("token", "delta", "weight"):
        x["decay"] = decay
    if kind == "channel":
        x["decay"] = logsigmoid(torch.randn(*decay.shape, 3, generator=torch.Generator().manual_seed(1)))
    if kind in ("delta", "weight"):
        x["beta" if kind == "delta" else "weight"] = weight
    return {n: t.to(dtype) for n, t in x.items()}


def call(x, **more):
    return attn_engine.recurrence(**x, output_final_state=True, backend="reference", **more)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_any_order(kind):
    x = leaves(given(kind, tokens=3))
    run = lambda *tensors: call(dict(zip(x, tensors, strict=True)))  # noqa: E731
    assert torch.autograd.gradcheck(run, tuple(x.values()))
    assert torch.autograd.gradgradcheck(run, tuple(x.values()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_as_the_formula(kind, dtype):
    x = given(kind, batch=2) if dtype == torch.float64 else given(kind, dtype=torch.float32, batch=2)
    x |= {n: x[n].to(dtype) for n in "qkv"}
    right, final = reference(**exact(x))
    o, state = call(x)
    assert o.dtype == dtype and state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype]
    assert_near("o", o, right, tolerance)
    assert_near("state", state, final, min(tolerance, 1e-6))
    assert call(x, output_dtype=torch.float32)[0].dtype == torch.float32
    if dtype == torch.float32:
        kernel, last = attn_engine.recurrence(**x, output_final_state=True, backend="cpu")
        assert_near("kernels", kernel, o.double(), 1e-5)
        assert_near("kernels", last, state.double(), 1e-5)


def test_forward_mode_and_transforms():
    x = given("token")
    run = lambda v: call(x | {"v": v})[0]  # noqa: E731
    _, tangent = torch.func.jvp(run, (x["v"],), (torch.ones_like(x["v"]),))
    right, _ = reference(**{n: t for n, t in (x | {"v": torch.ones_like(x["v"])}).items() if n != "initial_state"})
    assert_near("tangent", tangent, right, 1e-12)
    gradient = torch.func.grad(lambda v: run(v).square().sum())(x["v"])
    leaf = x["v"].clone().requires_grad_()
    run(leaf).square().sum().backward()
    torch.testing.assert_close(gradient, leaf.grad)


@pytest.mark.parametrize("bounds", [[0, 3, 3, 5], [0, 9], [2], [1, 7]])
def test_packed_sequences(bounds):
    x = {n: t for n, t in given("channel").items() if n != "initial_state"}
    o, states = call(x, cu_seqlens=torch.tensor(bounds))
    kernel, final = attn_engine.recurrence(
        **{n: t.float() for n, t in x.items()}, cu_seqlens=torch.tensor(bounds), output_final_state=True, backend="cpu"
    )
    assert_near("o", kernel, o, 1e-5)
    assert_near("states", final, states, 1e-5)


def test_steps():
    x = given("delta")
    right, final = call(x)
    for dtype in (torch.float64, torch.float32):
        state = x["initial_state"].to(dtype).clone()
        y = {n: t.to(dtype) for n, t in x.items() if n != "initial_state"}
        steps = [
            attn_engine.recurrence_step(**{n: t[:, i : i + 1] for n, t in y.items()}, state=state, backend="reference")
            for i in range(7)
        ]
        assert_near("o", torch.cat(steps, 1), right, 1e-12 if dtype == torch.float64 else 1e-6)
        assert_near("state", state, final, 1e-12 if dtype == torch.float64 else 1e-6)


def test_an_engine():
    x = {n: t.transpose(1, 2) for n, t in given("token").items() if n != "initial_state"}
    metas = [meta_tensor(1, h, "S", d, dtype=torch.float64) for h, d in ((1, 3), (1, 3), (2, 2))]
    mods = {"q_mod": lambda q: 2 * q, "decay_mod": lambda decay: 3 * decay}
    engine = LinearAttentionEngine(metas, **mods, backend="reference")
    leaf = x["q"].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda q: engine(q, x["k"], x["v"], x["decay"]), (leaf,))
    right, _ = reference(*(x[n].transpose(1, 2) for n in "qkv"), decay=3 * x["decay"].transpose(1, 2), scale=2.0)
    assert_near("o", engine(*x.values()).transpose(1, 2), right, 1e-13)


def test_mistakes_and_the_environment(monkeypatch):
    x = given("token")
    with pytest.raises(errors.DtypeError, match='or in float64 with backend="reference"'):
        attn_engine.recurrence(**x, backend="cpu")
    with pytest.raises(errors.DecayError):
        call(x | {"decay": -x["decay"]})
    monkeypatch.setenv("ATTN_ENGINE_BACKEND", "reference")
    assert torch.equal(attn_engine.recurrence(**x)[0], call(x)[0])
