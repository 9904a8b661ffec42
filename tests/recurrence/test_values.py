"""What only the numbers of an argument tell: log decays above 0, offsets that are none; and arguments of other kinds."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine.errors import DecayError, DtypeError, NotATensorError, ScaleError, SequenceBoundsError
from attn_engine.runtime import recurrence_op
from tests.recurrence.support import inputs


def given(tokens=70, **more):
    x = inputs(tokens, batch=1)
    return {n: x[n] for n in ("q", "k", "v")} | more


@pytest.mark.parametrize("shape", [(4,), (1, 70, 4), (1, 70, 4, 16)])
def test_a_factor_in_the_place_of_its_logarithm_is_refused(shape):
    decay = torch.full(shape, -0.1)
    attn_engine.recurrence(**given(decay=decay))
    decay[(0,) * decay.ndim] = 0.9
    with pytest.raises(DecayError, match=r"up to 0.9, but a log decay is at most 0: .*logsigmoid"):
        attn_engine.recurrence(**given(decay=decay))
    x, one = given(1), decay[:, :1] if decay.ndim > 1 else decay
    with pytest.raises(DecayError, match=r"up to 0.9"):
        attn_engine.recurrence_step(**x, decay=one, state=torch.zeros(1, 4, 16, 24))


@pytest.mark.parametrize("bounds", [[0, 50, 20, 70], [70, 50], [-5, 70]])
def test_offsets_that_are_none_are_refused(bounds):
    with pytest.raises(SequenceBoundsError, match=rf"it is \[{bounds[0]}, .*ends before it begins"):
        attn_engine.recurrence(**given(), cu_seqlens=torch.tensor(bounds))


def test_sequences_may_begin_and_end_anywhere():
    x = given(decay=torch.full((4,), -0.1))
    o, states = attn_engine.recurrence(**x, cu_seqlens=torch.tensor([5, 5, 60]), output_final_state=True)
    part = {n: t[:, 5:60] if t.ndim > 1 else t for n, t in x.items()}
    right, final = attn_engine.recurrence(**part, output_final_state=True)
    assert not o[:, :5].any() and not o[:, 60:].any() and not states[0].any()
    torch.testing.assert_close(o[:, 5:60], right)
    torch.testing.assert_close(states[1:], final)


def test_where_a_device_would_be_waited_for_values_are_looked_at_once(monkeypatch):
    """As long as nothing is built; `device` is what decides it."""
    seen = []
    monkeypatch.setattr(recurrence_op, "check_values", seen.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    class There:
        device = torch.device("cuda")

    class X:
        q = There

    class Compiled:
        plans: dict[str, object] = {}

    for plans, looked in (({}, 1), ({"forward": None}, 1)):
        Compiled.plans = plans
        recurrence_op._look(Compiled, X)
        assert len(seen) == looked


def test_arguments_of_other_kinds():
    with pytest.raises(NotATensorError, match="decay is a float"):
        attn_engine.recurrence(**given(), decay=-0.1)
    with pytest.raises(DtypeError, match=r"decay is torch.complex64: .*real"):
        attn_engine.recurrence(**given(), decay=torch.zeros(1, 70, 4, dtype=torch.complex64))
    with pytest.raises(ScaleError, match="multiply q by a scale that is learned"):
        attn_engine.recurrence(**given(), scale=torch.tensor(0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_may_leave_its_result_in_float32(dtype):
    x = inputs(1, batch=2, dtype=dtype)
    state = x.pop("initial_state")
    right, _ = attn_engine.recurrence(**{n: t.float() for n, t in x.items()}, initial_state=state)
    o = attn_engine.recurrence_step(**x, state=state, output_dtype=torch.float32)
    assert o.dtype == torch.float32
    torch.testing.assert_close(o, right)
    with pytest.raises(DtypeError, match=r"output_dtype is torch.float64"):
        attn_engine.recurrence_step(**x, state=state, output_dtype=torch.float64)
