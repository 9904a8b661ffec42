"""The torch ops under torch's own checks, and errors before anything is built."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

import attn_engine
from attn_engine import errors
from attn_engine.frontend.recurrence import Kind
from attn_engine.runtime import recurrence_compile, recurrence_op
from attn_engine.runtime.devices import Target
from attn_engine.runtime.recurrence_compile import Compiled, Place, Request, Schedule, default_schedule
from attn_engine.runtime.recurrence_op import in_blocks
from tests.recurrence.support import assert_near, inputs, leaves


def operands(x, *names):
    named = {n: x[n].transpose(1, 2) if n in x else None for n in ("q", "k", "v", "decay", "beta", "weight")}
    return [named[n] if n in names else None for n in named]


def test_ops_keep_torchs_rules():
    x = leaves(inputs(66, batch=1, heads=2, shared=1))
    given = operands(x, "q", "k", "v", "decay", "weight")
    torch.library.opcheck(recurrence_op.recurrence, (*given, x["initial_state"], None, 0.5, True, False, "cpu", False))


def test_step_is_declared_to_write_the_state():
    x = inputs(1, batch=1)
    given = operands(x, "q", "k", "v", "decay")
    torch.library.opcheck(recurrence_op.recurrence_step, (*given, x["initial_state"], None, 0.5, "cpu", False))


def test_under_torch_compile():
    def loss(q, k, v, decay):
        o, final = attn_engine.recurrence(q, k, v, decay=decay, output_final_state=True, backend="cpu")
        return o.square().sum() + final.square().sum()

    got, want = leaves(inputs(66)), leaves(inputs(66))
    names = ("q", "k", "v", "decay")
    torch.compile(loss, backend="aot_eager", fullgraph=True)(*(got[n] for n in names)).backward()
    loss(*(want[n] for n in names)).backward()
    for name in names:
        assert_near(name, got[name].grad, want[name].grad.double(), 1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": lambda q: q[0]}, errors.RankError, "q has 3 dimensions"),
        ({"q": lambda q: q.double()}, errors.DtypeError, "pass all in one of float16, bfloat16, float32"),
        ({"k": lambda k: k[:, :-1]}, errors.KeyLengthError, "10, 9, 10 tokens"),
        ({"k": lambda k: k[..., :-1]}, errors.HeadDimError, "16, 15, 24 channels"),
        ({"v": lambda v: v[:, :, :3]}, errors.HeadCountError, "2, 2, 3 heads"),
        ({"v": lambda v: v[:1]}, errors.BatchError, "batch sizes 2, 2, 1"),
        ({"v": lambda v: v.repeat(1, 1, 1, 30)}, errors.HeadDimLimitError, "v has 720 channels"),
        (
            {"decay": lambda g: g[:, :5]},
            errors.StateShapeError,
            r"decay has shape \(2, 5, 4\), expected .* \(2, 10, 4\)",
        ),
        ({"weight": lambda w: w[..., None]}, errors.StateShapeError, "weight has shape"),
        ({"initial_state": lambda s: s.transpose(2, 3)}, errors.StateShapeError, "initial_state has shape"),
        ({"scale": lambda _: float("nan")}, errors.ScaleError, "scale is nan"),
        ({"decay": lambda g: g[0]}, errors.RankError, "decay has 2 dimensions"),
        ({"decay": lambda g: g[0, 0, 0]}, errors.RankError, "decay has 0 dimensions"),
        ({"weight": lambda w: w.tolist()}, errors.NotATensorError, "weight is a list"),
        ({"k": lambda _: None}, errors.NotATensorError, "k is a NoneType"),
    ],
)
def test_mistakes_are_named(change, error, message):
    given = dict(inputs(10)) | {"scale": 1.0}
    for name, make in change.items():
        given[name] = make(given[name])
    with pytest.raises(error, match=message):
        attn_engine.recurrence(**given, backend="cpu")


@pytest.mark.parametrize(
    ("arch", "bounds", "wanted"), [("sm_90", False, True), ("sm_90", True, False), ("sm_80", False, False)]
)
def test_blocks_are_copied_where_the_device_can(arch, bounds, wanted):
    kind, target = Kind(torch.bfloat16, 128, 128, "token", bounds=bounds), Target("triton", arch)
    schedule, place = default_schedule(target, kind, 128, 5000, False, False, blocks=True)
    assert schedule.descriptors is wanted
    assert replace(place, careful=False) == Place(arch, 128, 4096, wanted)
    assert default_schedule(target, kind, 1, 1, tf32=False, stepwise=True)[0].chunk == 1


@pytest.mark.parametrize(
    ("arch", "dtype", "key", "chunk"),
    [
        ("sm_90", torch.bfloat16, 256, 64),
        ("sm_90", torch.float32, 128, 64),
        ("sm_90", torch.float32, 256, 32),
        ("gfx942", torch.bfloat16, 64, 64),
        ("gfx942", torch.bfloat16, 80, 32),
    ],
)
def test_chunks_of_the_delta_rule_leave_room_for_its_gradients(arch, dtype, key, chunk):
    """Of 256 channels in float32, 64 tokens take 288 KiB as compiled for an H200, which has 227."""
    target = Target("hip" if arch.startswith("gfx") else "triton", arch)
    for beta, wanted in ((True, chunk), (False, 64)):
        kind = Kind(dtype, key, key, "token", beta=beta)
        assert default_schedule(target, kind, 128, 4096, False, False)[0].chunk == wanted


@pytest.mark.parametrize(("arch", "chunk"), [("sm_80", 32), ("sm_89", 32), ("sm_90", 64), ("gfx942", 64)])
def test_chunks_are_short_where_operands_of_products_take_registers(arch, chunk):
    target = Target("hip" if arch.startswith("gfx") else "triton", arch)
    assert default_schedule(target, Kind(torch.bfloat16, 64, 64, "token"), 128, 4096, False, False)[0].chunk == chunk


@pytest.mark.parametrize(
    ("arch", "version", "careful"),
    [("sm_90", (12, 8), True), ("sm_90", (13, 0), False), ("sm_90", (), True), ("sm_80", (12, 8), False)],
)
def test_an_old_assembler_asks_for_care_where_it_is_wrong(arch, version, careful, monkeypatch):
    monkeypatch.setattr(recurrence_compile, "assembler_version", lambda: version)
    kind = Kind(torch.bfloat16, 256, 256, "token", beta=True)
    assert default_schedule(Target("triton", arch), kind, 128, 4096, False, False, blocks=True)[1].careful is careful


def test_calls_of_one_form_share_a_plan():
    kind = Kind(torch.float32, 16, 16, "token")
    plans = {
        heads: Compiled(Request(kind, "triton", Schedule(), place=Place("sm_90", heads, 4096, False))).forward()
        for heads in (8, 200, 264)
    }
    assert plans[200] is plans[264]
    assert plans[8] is not plans[200]


def test_tensors_that_descriptors_can_be_made_of():
    x = torch.zeros(2, 4, 64, 64, dtype=torch.bfloat16)
    assert in_blocks([x, x.transpose(1, 2), x[:, :1].expand(-1, 1, -1, -1), x[..., 8:24]])
    for other in (
        x.mT,
        x[..., 4:12],
        x[..., :12],
        x[:, :1].expand(-1, 4, -1, -1),
        x[:, :, :0],
        x.flatten()[4:].view(-1)[:64].view(1, 64),
    ):
        assert not in_blocks([x, other])


def test_weight_beside_beta_is_refused():
    x = inputs(10)
    with pytest.raises(errors.UnsupportedOptionError, match="weight is not supported beside beta"):
        attn_engine.recurrence(**x, beta=x["weight"], backend="cpu")


def test_a_second_derivative_is_refused():
    x = leaves(inputs(10))
    o, _ = attn_engine.recurrence(**x, backend="cpu")
    (gradient,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(errors.SecondDerivativeError, match=r'a recurrence themselves .* backend="reference" has it'):
        gradient.sum().backward()


@pytest.mark.parametrize("trained", [False, True])
def test_transforms_without_a_rule_are_refused(trained):
    x = inputs(10)
    v = x["v"].requires_grad_(trained)

    def call(v, q=x["q"]):
        return attn_engine.recurrence(q, x["k"], v, backend="cpu")[0].sum()

    with pytest.raises(errors.ForwardModeError, match="a recurrence in forward mode"):
        torch.func.jvp(call, (v,), (v,))
    with forward_ad.dual_level(), pytest.raises(errors.ForwardModeError):
        call(forward_ad.make_dual(v, torch.ones_like(v)))
    for transform in (torch.func.grad, torch.func.jacrev):
        with pytest.raises(errors.FunctionTransformError, match=r"a recurrence in torch\.func\.grad"):
            transform(call)(v)


def test_steps_under_transforms_are_refused():
    x = inputs(1)

    def step(v):
        return attn_engine.recurrence_step(x["q"], x["k"], v, state=x["initial_state"].clone(), backend="cpu")

    with pytest.raises(errors.ForwardModeError):
        torch.func.jvp(step, (x["v"],), (x["v"],))
    with pytest.raises(errors.UnsupportedOptionError, match="a part of the batch"):
        torch.vmap(step)(x["v"][None])


def test_vmap_is_one_call_for_each_element():
    x = leaves(inputs(70))
    v, decay = (torch.stack([x[n], x[n] * 0.5]).detach().requires_grad_() for n in ("v", "decay"))

    def call(v, decay):
        return attn_engine.recurrence(x["q"], x["k"], v, decay=decay, output_final_state=True, backend="cpu")

    o, state = torch.vmap(call)(v, decay)
    each = [call(*one) for one in zip(v, decay, strict=True)]
    torch.testing.assert_close((o, state), tuple(torch.stack(column) for column in zip(*each, strict=True)))
    loss, wanted = (
        o.square().sum() + state.sum() for o, state in ((o, state), map(torch.stack, zip(*each, strict=True)))
    )
    for found, expected in zip(*(torch.autograd.grad(y, (v, decay, x["q"])) for y in (loss, wanted)), strict=True):
        torch.testing.assert_close(found, expected)


def test_states_that_are_updated_in_place_are_float32():
    x = inputs(1)
    with pytest.raises(errors.DtypeError, match="keep it in float32"):
        attn_engine.recurrence_step(x["q"], x["k"], x["v"], state=x["initial_state"].bfloat16())


def test_autocast_changes_nothing():
    x = inputs(70)
    want, _ = attn_engine.recurrence(**x, backend="cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = attn_engine.recurrence(**x, backend="cpu")
    torch.testing.assert_close(got, want, rtol=0, atol=0)
