"""Token by token: every kind of recurrence, and decoding with the state in place."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine.errors import NotATensorError, StateShapeError
from attn_engine.frontend.recurrence import Kind
from attn_engine.runtime.devices import Target
from attn_engine.runtime.recurrence_compile import Request, Schedule, default_schedule, source_of
from tests.recurrence.support import assert_near, inputs, reference


def given(kind, tokens=20, rate=0.3, **options):
    x = inputs(tokens, rate=rate, **options)
    x.pop("weight")
    if "channel" in kind:
        x["decay"] = rate * torch.nn.functional.logsigmoid(torch.randn(2, tokens, 4, x["k"].shape[3]))
    if "delta" in kind:
        x["beta"] = torch.randn(2, tokens, 4).sigmoid()
        x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    if "plain" in kind:
        x.pop("decay")
    return x


@pytest.mark.parametrize("kind", ["channel", "plain delta", "delta", "channel delta"])
@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_channel_decay_and_delta_rule(kind, tokens):
    x = given(kind, tokens)
    o, final = attn_engine.recurrence(**x, output_final_state=True, backend="cpu")
    right_o, right_final = reference(**{n: t.double() for n, t in x.items()})
    assert_near("o", o, right_o)
    assert_near("final", final, right_final)


def test_a_channel_that_forgets():
    x = given("channel delta")
    x["decay"][:, 7, :, :5] = float("-inf")
    o, _ = attn_engine.recurrence(**x, backend="cpu")
    assert_near("o", o, reference(**{n: t.double() for n, t in x.items()})[0])


def test_nearly_equal_keys_and_beta_near_1():
    x = given("plain delta", 64)
    x["k"] = torch.nn.functional.normalize(x["k"][:, :1] + 1e-3 * x["k"], dim=-1)
    x["beta"] = 1 - 1e-3 * x["beta"]
    o, _ = attn_engine.recurrence(**x, backend="cpu")
    assert_near("o", o, reference(**{n: t.double() for n, t in x.items()})[0], 1e-3)


@pytest.mark.parametrize("kind", ["scalar", "delta", "channel"])
def test_decoding_continues_a_prefill(kind):
    x = given(kind, 70)
    right, right_final = reference(**{n: t.double() for n, t in x.items()})
    prefill = {n: t[:, :66] for n, t in x.items() if n != "initial_state"}
    o, state = attn_engine.recurrence(
        **prefill, initial_state=x["initial_state"], output_final_state=True, backend="cpu"
    )
    assert_near("o", o, right[:, :66])
    for t in range(66, 70):
        token = {n: y[:, t : t + 1] for n, y in x.items() if n != "initial_state"}
        place = state.data_ptr()
        o = attn_engine.recurrence_step(**token, state=state, backend="cpu")
        assert state.data_ptr() == place
        assert_near("o", o, right[:, t : t + 1])
    assert_near("final", state, right_final)


def test_few_tokens_without_gradients_go_step_by_step():
    x = inputs(3)
    o, final = attn_engine.recurrence(**x, output_final_state=True, backend="cpu")
    right_o, right_final = reference(**{n: t.double() for n, t in x.items()})
    assert_near("o", o, right_o)
    assert_near("final", final, right_final)


@pytest.mark.parametrize("kind", ["channel", "delta"])
def test_packed_steps(kind):
    x = given(kind)
    x = {n: t[:1] if n != "initial_state" else t for n, t in x.items()}
    o, final = attn_engine.recurrence(**x, cu_seqlens=torch.tensor([0, 12, 17]), output_final_state=True, backend="cpu")
    for n, part in enumerate((slice(0, 12), slice(12, 17))):
        alone = {name: t[:, part].double() for name, t in x.items() if name != "initial_state"}
        right_o, right_final = reference(**alone, initial_state=x["initial_state"][n : n + 1].double())
        assert_near("o", o[:, part], right_o)
        assert_near("final", final[n : n + 1], right_final)
    assert (o[:, 17:] == 0).all()


def test_a_state_is_needed():
    x = given("token", tokens=1)
    x.pop("initial_state")
    with pytest.raises(NotATensorError, match="state is a NoneType"):
        attn_engine.recurrence_step(**x, state=None)


@pytest.mark.parametrize("axis", [0, 1])
def test_sequences_and_heads_do_not_share_a_state(axis):
    x = given("token", tokens=1)
    state = x.pop("initial_state")
    shared = state.narrow(axis, 0, 1)
    with pytest.raises(StateShapeError, match=r"expanded.*pass state.contiguous\(\)"):
        attn_engine.recurrence_step(**x, state=shared.expand_as(state))
    attn_engine.recurrence_step(**x, state=shared.expand_as(state).contiguous())


@pytest.mark.parametrize(("heads", "key", "block"), [(32, 128, 32), (34, 128, 64), (512, 128, 64), (8, 256, 32)])
def test_a_device_that_steps_would_leave_idle_gets_twice_as_many_programs(heads, key, block):
    kind = Kind(torch.bfloat16, key, 128, "token", initial=True, final=True)
    schedule, _ = default_schedule(Target("triton", "sm_90"), kind, heads, 1, tf32=False, stepwise=True)
    assert schedule.value_block == block


@pytest.mark.parametrize("strength", ["none", "beta", "weight"])
def test_all_of_a_token_is_loaded_before_anything_is_computed_of_it(strength: str):
    options = {} if strength == "none" else {strength: True}
    kind = Kind(torch.bfloat16, 64, 64, "token", initial=True, final=True, **options)
    source = source_of(Request(kind, "triton", Schedule(chunk=1)))
    token = source[source.index("for t in tl.range") :]
    token = token[: token.index("KERNELS = ")]
    assert token.count("tl.load(") == (4 if strength == "none" else 5)
    assert token.rindex("tl.load(") < token.index("tl.exp2(") < token.index("tl.reduce(")
