"""`LinearAttentionEngine`: the definitions of the ancestors' examples, with gradients of every tensor."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from attn_engine import CustomIO, LinearAttentionEngine, meta_tensor
from attn_engine.errors import (
    CustomInputError,
    DecayError,
    ForwardModeError,
    FunctionTransformError,
    LayoutError,
    MetaMismatchError,
    NotATensorError,
    RankError,
    ReductionError,
    ReturnValueError,
    SecondDerivativeError,
    SignatureError,
)
from tests.recurrence.support import assert_near, exact, inputs, leaves, reference

TOKENS = 70


def metas(heads=4, shared=4, dtype=torch.float32):
    return [meta_tensor(2, h, "S", d, dtype=dtype) for h, d in ((shared, 16), (shared, 16), (heads, 24))]


def given(shared=4):
    x = inputs(TOKENS, shared=shared)
    return {n: x[n].transpose(1, 2).contiguous() for n in ("q", "k", "v", "decay")}


def expected(x, scale, k=None, v=None, decay=None):
    turned = [t.transpose(1, 2) for t in (x["q"], x["k"] if k is None else k, x["v"] if v is None else v)]
    return reference(*turned, decay=(x["decay"] if decay is None else decay).transpose(1, 2), scale=scale)


def compare(engine, got, want, right, *custom):
    o = engine(got["q"], got["k"], got["v"], got["decay"], *custom)
    assert_near("o", o.detach(), right.transpose(1, 2).detach())
    d_o = torch.randn_like(o)
    (o * d_o).sum().backward()
    (right.transpose(1, 2) * d_o).sum().backward()
    for name in got:
        assert_near(f"d_{name}", got[name].grad, want[name].grad)


def test_simple_gla():
    got, want = leaves(given()), exact(given())
    engine = LinearAttentionEngine(metas(), q_mod=lambda q: q * 0.25)
    compare(engine, got, want, expected(want, 0.25)[0])


def test_mamba2_with_one_group():
    x = given(shared=1) | {"A": -torch.rand(4), "dt": torch.rand(2, 4, TOKENS)}
    x["decay"] = x["dt"].clone()
    got, want = leaves(x), exact(x)
    engine = LinearAttentionEngine(
        metas(shared=1),
        v_mod=lambda v, inputs: v * inputs["dt"],
        decay_mod=lambda decay, inputs: decay * inputs["A"],
        custom_io=CustomIO({"A": (1, "heads"), "dt": ("batch", "heads", "seq_len")}),
    )
    decay = want["decay"] * want["A"][:, None]
    right, _ = expected(want, 1.0, v=want["v"] * want["dt"][..., None], decay=decay)
    compare(engine, {**got, "A": got["A"]}, want, right, got["A"][None], got["dt"])


def test_retention_and_other_layout():
    x = inputs(TOKENS, shared=4)
    gamma = 1 - 2.0 ** (-5 - torch.arange(4.0))
    engine = LinearAttentionEngine(metas(), q_mod=lambda q: q / 4, decay_mod=lambda d: torch.log(d), layout="bshd")
    decay = gamma.expand(2, TOKENS, 4)
    o, state = engine.with_state(x["q"], x["k"], x["v"], decay, initial_state=x["initial_state"])
    wide = {n: t.double() for n, t in x.items()}
    right, final = reference(
        wide["q"], wide["k"], wide["v"], gamma.double().log(), initial_state=wide["initial_state"], scale=0.25
    )
    assert_near("o", o, right)
    assert_near("state", state, final)


def test_an_input_with_channels():
    got, want = leaves(given()), exact(given())
    width = torch.rand(4, 16)
    engine = LinearAttentionEngine(
        metas(), k_mod=lambda k, inputs: torch.relu(k) * inputs["width"], custom_io=CustomIO({"width": ("heads", 16)})
    )
    compare(engine, got, want, expected(want, 1.0, k=torch.relu(want["k"]) * width[:, None])[0], width)


def test_mistakes():
    x = given()
    with pytest.raises(LayoutError, match="'bhds' is unknown"):
        LinearAttentionEngine(metas(), layout="bhds")
    with pytest.raises(MetaMismatchError, match="three: q, k and v"):
        LinearAttentionEngine(metas()[:2])
    with pytest.raises(MetaMismatchError, match=r"q: got \(2, 4, 70, 16\)"):
        LinearAttentionEngine(metas(shared=1))(*x.values())
    with pytest.raises(ReturnValueError, match=r"v_mod returns shape \(2, 4, 70\)"):
        LinearAttentionEngine(metas(), v_mod=lambda v: v.sum(-1))(*x.values())
    with pytest.raises(SignatureError, match="k_mod takes 3 arguments"):
        LinearAttentionEngine(metas(), k_mod=lambda k, b, h: k)(*x.values())
    with pytest.raises(MetaMismatchError, match="got 0 tensors, the engine was made for 1: dt"):
        LinearAttentionEngine(metas(), custom_io=CustomIO({"dt": ("batch",)}))(*x.values())
    with pytest.raises(CustomInputError, match="has a dimension 'seq_len_kv' at 0"):
        LinearAttentionEngine(metas(), custom_io=CustomIO({"dt": ("seq_len_kv",)}))(*x.values(), torch.rand(70))


@pytest.mark.parametrize("inside", [True, False])
def test_functions_that_make_log_decays_above_0_are_found_out(inside):
    """Whether kernels make them or torch; what is given to a function may be any number."""
    x = given()
    rise = {True: lambda decay: 0.1 - decay, False: lambda decay: (0.1 - decay).flip(2)}[inside]
    fall = {True: lambda decay: decay - 0.1, False: lambda decay: (decay - 0.1).flip(2)}[inside]
    with pytest.raises(DecayError, match="a log decay is at most 0"):
        LinearAttentionEngine(metas(), decay_mod=rise)(*x.values())
    o = LinearAttentionEngine(metas(), decay_mod=rise)(x["q"], x["k"], x["v"], -x["decay"] + 0.1)
    right = LinearAttentionEngine(metas(), decay_mod=fall)(x["q"], x["k"], x["v"], x["decay"] + 0.1)
    torch.testing.assert_close(o, right)


@pytest.mark.parametrize("dimension", ["batch", "heads", "seq_len"])
def test_an_input_may_have_one_number_for_all(dimension):
    """Whatever its name says of it: elements then read that one, and not what lies behind it in memory."""
    x = given(2) | {"a": torch.rand(2, 2, TOKENS)}
    one = x["a"].narrow({"batch": 0, "heads": 1, "seq_len": 2}[dimension], 1, 1).contiguous()
    x["a"] = one
    engine = LinearAttentionEngine(
        metas(shared=2),
        q_mod=lambda q, inputs: q * inputs["a"],
        custom_io=CustomIO({"a": ("batch", "heads", "seq_len")}),
    )
    got, want = leaves(x), exact(x)
    right = reference(
        *(t.transpose(1, 2) for t in (want["q"] * want["a"][..., None], want["k"], want["v"])),
        decay=want["decay"].transpose(1, 2), scale=1.0,
    )[0]  # fmt: skip
    compare(engine, got, want, right, got["a"])


def test_sizes_of_inputs_that_fit_nothing():
    x = given(2)
    names = {"batch": 0, "heads": 1, "seq_len": 2}
    for name, axis in names.items():
        engine = LinearAttentionEngine(
            metas(shared=2), q_mod=lambda q, inputs: q * inputs["a"], custom_io=CustomIO({"a": tuple(names)})
        )
        for size in (3, 99):
            shape = [2, 2, TOKENS]
            shape[axis] = size
            with pytest.raises(CustomInputError, match=f"input 'a' has {size} for '{name}'"):
                engine(*x.values(), torch.rand(shape))
    channels = LinearAttentionEngine(
        metas(shared=2), q_mod=lambda q, inputs: q * inputs["a"], custom_io=CustomIO({"a": (1, 1, 1, 4)})
    )
    with pytest.raises(RuntimeError, match=r"tensor a \(16\) must match the size of tensor b \(4\)"):
        channels(*x.values(), torch.rand(1, 1, 1, 4))


def test_arguments_that_are_no_tensors():
    x = given()
    engine = LinearAttentionEngine(metas())
    for name in x:
        with pytest.raises(NotATensorError, match=f"{name} is a list"):
            engine(*(x | {name: [1.0]}).values())
    with pytest.raises(RankError, match="decay has 1 dimensions"):
        engine(x["q"], x["k"], x["v"], torch.zeros(4))


def test_functions_of_single_elements_run_inside_of_the_kernels():
    x = given(shared=2)
    engine = LinearAttentionEngine(
        metas(shared=2), q_mod=lambda q: torch.nn.functional.elu(q) + 1, k_mod=lambda k: torch.exp(-k)
    )
    with mock.patch.object(engine, "_made", side_effect=AssertionError("torch made an operand")):
        o = engine(**x)
    made = {n: t.double() for n, t in x.items()}
    right, _ = expected(made | {"q": torch.nn.functional.elu(made["q"]) + 1}, 1.0, k=torch.exp(-made["k"]))
    assert_near("o", o, right.transpose(1, 2))


def test_functions_of_rows_run_before_the_kernels():
    got, want = leaves(given()), exact(given())
    engine = LinearAttentionEngine(metas(), k_mod=lambda k: k.softmax(-1), q_mod=lambda q: q * 2)
    compare(engine, got, want, expected(want, 2.0, k=want["k"].softmax(-1))[0])
    (why,) = engine._regions.values()
    assert isinstance(why, ReductionError)


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_refused(power):
    """Those of a sum too, whose own gradient is a number: what the gradients of q are made of needs one as well."""
    x, engine = leaves(given()), LinearAttentionEngine(metas(), q_mod=lambda q: q * 2)
    loss = engine(x["q"], x["k"], x["v"], x["decay"]).pow(power).sum()
    (gradient,) = torch.autograd.grad(loss, x["q"], create_graph=True)
    with pytest.raises(SecondDerivativeError, match="a recurrence"):
        (gradient.square().sum() + x["q"].sum()).backward()


def test_transforms():
    """vmap works, where functions run before the kernels; a derivative by a transform is refused."""
    x, engine = given(), LinearAttentionEngine(metas(), q_mod=lambda q: q * 2)

    def call(v):
        return engine(x["q"], x["k"], v, x["decay"])

    both = torch.stack([x["v"], x["v"] * 0.5])
    torch.testing.assert_close(torch.vmap(call)(both), torch.stack([call(v) for v in both]))
    with pytest.raises(ForwardModeError):
        torch.func.jvp(call, (x["v"],), (x["v"],))
    with pytest.raises(FunctionTransformError):
        torch.func.grad(lambda v: call(v).sum())(x["v"])
