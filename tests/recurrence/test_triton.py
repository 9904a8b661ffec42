"""The text for Triton, run in its interpreter on the CPU: the same plans, other kernels."""

from __future__ import annotations

import pytest
import torch

from attn_engine.backends.triton.interpret import interpret
from attn_engine.frontend.recurrence import Kind
from attn_engine.runtime.recurrence_compile import Place, Request, Schedule, source_of
from tests.recurrence.support import assert_near, exact, inputs, loss_weights, reference

WRT = ("q", "k", "v", "decay", "weight", "initial")


def plans(kind, wrt=(), **schedule):
    request = Request(kind, "triton", Schedule(value_block=16, **schedule))
    return interpret(source_of(request, wrt))


def given_to_plan(x):
    """Heads before tokens, in the order of a plan's arguments."""
    turned = [x[n].transpose(1, 2) for n in ("q", "k", "v", "decay", "weight")]
    return [*turned[:3], 0.5, *turned[3:]], x["initial_state"]


def empty(*like):
    return [torch.full(t.shape, torch.nan) for t in like]


@pytest.mark.parametrize(
    ("tokens", "dtype", "value", "schedule"),
    [
        (70, torch.float32, 24, {}),
        (100, torch.float32, 24, {"pieces": 2}),
        (65, torch.float16, 24, {}),
        (100, torch.float32, 24, {"descriptors": True, "turned": True, "pieces": 2, "chained": True}),
        (100, torch.float16, 24, {"descriptors": True, "pieces": 2, "turned": True}),
        (300, torch.float32, 24, {"descriptors": True}),  # states are kept, and met: whole, or as threads hold them
        (300, torch.float32, 64, {"descriptors": True}),
    ],
)
def test_forward_and_backward(tokens, dtype, value, schedule):
    x = inputs(tokens, batch=1, heads=2, shared=1, value=value, dtype=dtype)
    kind = Kind(dtype, 16, value, "token", weight=True, initial=True, final=True)
    want = exact(x)
    right_o, right_final = reference(**want, scale=0.5)
    operands, initial = given_to_plan(x)
    o, final = empty(right_o.transpose(1, 2), right_final)
    o = o.to(dtype)
    plans(kind, **schedule)["forward"](*operands, initial, o, final)
    tolerance = 5e-5 if dtype == torch.float32 else 4e-3
    assert_near("o", o.float(), right_o.detach().transpose(1, 2), tolerance)
    assert_near("final", final, right_final.detach(), tolerance)
    d_o, d_final = loss_weights(right_o, right_final)
    gradients = torch.autograd.grad((right_o * d_o).sum() + (right_final * d_final).sum(), list(want.values()))
    results = [t.to(dtype) if n < 3 else t for n, t in enumerate(empty(*operands[:3], *operands[4:], initial))]
    kind = Kind(dtype, 16, value, "token", weight=True, initial=True)
    found = interpret(source_of_backward(kind, schedule))
    found["backward"](
        *operands,
        initial.transpose(2, 3),
        d_o.transpose(1, 2).to(dtype),
        final,
        d_final,
        d_final.transpose(2, 3),
        *results,
    )
    for name, got, right in zip(x, results, gradients, strict=True):
        right = right.transpose(1, 2) if name != "initial_state" else right
        assert_near(f"d_{name}", got.float(), right, tolerance)


def source_of_backward(kind, schedule):
    request = Request(kind, "triton", Schedule(value_block=16, **schedule))
    return source_of(request, WRT, d_final=True)


@pytest.mark.parametrize("beta", [False, True])
def test_steps(beta):
    x = inputs(5, batch=1, heads=2, shared=1)
    decay = -torch.rand(1, 5, 2, 16)
    kind = Kind(torch.float32, 16, 24, "channel", beta=beta, final=True)
    strength = x["weight"] if beta else None
    right_o, right_final = reference(
        x["q"].double(), x["k"].double(), x["v"].double(), decay.double(), scale=0.5,
        beta=None if strength is None else strength.double(),
    )  # fmt: skip
    o, final = empty(right_o.transpose(1, 2), right_final)
    q, k, v, *rows = (t.transpose(1, 2) for t in (x["q"], x["k"], x["v"], decay, *([strength] if beta else [])))
    plans(kind, chunk=1)["forward"](q, k, v, 0.5, *rows, o, final)
    assert_near("o", o, right_o.transpose(1, 2))
    assert_near("final", final, right_final)


def test_packed():
    x = inputs(100, batch=1, heads=2, shared=1)
    kind = Kind(torch.float32, 16, 24, "token", bounds=True, final=True)
    q, k, v, decay = (x[n].transpose(1, 2) for n in ("q", "k", "v", "decay"))
    bounds = torch.tensor([0, 70, 70, 90], dtype=torch.int32)
    o, final = torch.full(v.shape, torch.nan), torch.full((3, 2, 16, 24), torch.nan)
    plans(kind)["forward"](q, k, v, 0.5, decay, bounds, o, final)
    for n, (begin, end) in enumerate(((0, 70), (70, 70), (70, 90))):
        part = [x[m][:, begin:end].double() for m in ("q", "k", "v", "decay")]
        right_o, right_final = reference(*part, scale=0.5)
        assert_near("o", o[:, :, begin:end], right_o.transpose(1, 2))
        assert_near("final", final[n : n + 1], right_final)
    assert (o[:, :, 90:] == 0).all()


def test_what_the_assembler_gets_wrong_is_not_optimised():
    kind = Kind(torch.bfloat16, 256, 256, "token", beta=True)
    requests = [
        Request(kind, "triton", Schedule(), place=Place("sm_90", 64, 4096, True, careful=careful))
        for careful in (False, True)
    ]
    assert [source_of(r).count("ptx_options='--opt-level 0'") > 0 for r in requests] == [False, True]


@pytest.mark.parametrize("turned", [True, False])
def test_weights_of_tokens_are_in_16_bits_early_only_where_they_stay_in_registers(turned: bool):
    """And the scale is a factor of tokens, not of results."""
    schedule = Schedule(descriptors=True, turned=turned)
    text = source_of(Request(Kind(torch.bfloat16, 128, 64, "token", weight=True), "triton", schedule))
    sweep = text[text.index("def forward_o_sweep") :]
    rounded = sweep.index("tl.cast(s_", sweep.index("tl.where(inside"))
    assert (rounded < sweep.rindex("if some:")) is not turned
    assert sweep.count("* scale") == 2 and "w * scale" in sweep
