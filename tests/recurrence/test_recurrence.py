"""`attn_engine.recurrence` on the CPU backend against the token loop in fp64: results and all gradients."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from tests.recurrence.support import assert_near, exact, inputs, leaves, loss_weights, reference


def run(given, of_o=1.0, of_final=1.0, **options):
    """Results and gradients of both, by name."""
    got, want = leaves(given), exact(given)
    o, final = attn_engine.recurrence(**got, output_final_state=True, backend="cpu", **options)
    right_o, right_final = reference(**want, **options)
    d_o, d_final = loss_weights(o, final)
    found = {"o": (o, right_o), "final": (final, right_final)}
    loss = sum([(o.float() * d_o).sum() * of_o] * bool(of_o) + [(final * d_final).sum() * of_final] * bool(of_final))
    right = of_o * (right_o * d_o).sum() + of_final * (right_final * d_final).sum()
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
        right.backward()
    for name, x in got.items():
        zero = torch.zeros_like(x)
        found[f"d_{name}"] = (
            zero if x.grad is None else x.grad,
            zero.double() if want[name].grad is None else want[name].grad,
        )
    return found


def check(given, tolerance=3e-5, **options):
    found = run(given, **options)
    for name, (got, want) in found.items():
        assert_near(name, got.detach(), want.detach(), tolerance)
    return found


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65, 66, 100, 127, 128, 130])
def test_any_length_with_gradients(tokens):
    check(inputs(tokens))


@pytest.mark.parametrize("rate", [0.0, 0.001, 1.0])
def test_weak_and_strong_decay(rate):
    check(inputs(150, batch=1, rate=rate))


def test_log_decay_from_0_to_minus_120_within_a_chunk():
    given = inputs(64)
    given["decay"] = (
        torch.linspace(0, -120, 64)[None, :, None].diff(dim=1, prepend=torch.zeros(1, 1, 1)).expand(2, -1, 4)
    )
    check(given)
    # All of it at once, in both orders.
    given["decay"] = torch.linspace(0, -120, 64)[None, :, None].expand(2, -1, 4)
    check(given)
    given["decay"] = given["decay"].flip(1)
    check(given)


def test_minus_infinity_is_a_reset():
    given = inputs(130)
    for t in (0, 5, 64, 100, 127):
        given["decay"][:, t, :2] = float("-inf")
    found = run(given)
    gradient = found["d_decay"][0]
    assert (gradient[given["decay"].isneginf()] == 0).all()
    for name, (got, want) in found.items():
        if name != "d_decay":
            assert_near(name, got.detach(), want.detach(), 1e-4)
    finite = ~given["decay"].isneginf()
    assert_near("d_decay", gradient[finite], found["d_decay"][1][finite], 1e-4)
    again = {n: x[:, 100:] for n, x in given.items() if n != "initial_state"}
    o, _ = attn_engine.recurrence(**again, backend="cpu")
    assert_near("o after the reset", o[:, :, :2], found["o"][1][:, 100:, :2].detach(), 1e-4)


def test_strong_decay_at_the_first_token_of_a_chunk():
    given = inputs(130)
    given["decay"][:, ::64] = -80.0
    check(given)


def test_a_loss_on_the_final_state_alone():
    found = check(inputs(70), of_o=0.0)
    assert found["d_decay"][0].abs().max() > 1e-3
    assert found["d_initial_state"][0].abs().max() > 1e-4
    assert (found["d_q"][0] == 0).all()


def test_a_loss_on_the_outputs_alone():
    found = check(inputs(70), of_final=0.0)
    assert found["d_initial_state"][0].abs().max() > 1e-4


@pytest.mark.parametrize("names", [("q", "k", "v"), ("q", "k", "v", "decay"), ("q", "k", "v", "weight")])
def test_operands_may_be_absent(names):
    given = {n: x for n, x in inputs(70).items() if n in names}
    check(given)
    got = leaves(given)
    o, none = attn_engine.recurrence(**got, backend="cpu")
    assert none is None
    o.sum().backward()
    assert all(x.grad is not None for x in got.values())


@pytest.mark.parametrize("alone", ["q", "k", "v", "decay", "weight", "initial_state"])
def test_one_gradient_alone(alone):
    given = inputs(70)
    got, want = {n: x.clone().requires_grad_(n == alone) for n, x in given.items()}, exact(given)
    o, _ = attn_engine.recurrence(**got, backend="cpu")
    d_o, _ = loss_weights(o, o)
    (gradient,) = torch.autograd.grad((o * d_o).sum(), got[alone])
    (right,) = torch.autograd.grad((reference(**want)[0] * d_o).sum(), want[alone])
    assert_near(alone, gradient, right)


def test_retention_has_one_decay_per_head():
    given = {n: x for n, x in inputs(100).items() if n in ("q", "k", "v")}
    given["decay"] = torch.log1p(-(2.0 ** -(5 + torch.arange(4.0))))
    check(given)


def test_a_state_carried_over_parts_equals_the_whole():
    given = inputs(256, batch=1, key=32, value=64)
    given.pop("initial_state")
    whole, last = attn_engine.recurrence(**given, output_final_state=True, backend="cpu")
    state, parts = None, []
    for start in range(0, 256, 64):
        part = {n: x[:, start : start + 64] for n, x in given.items()}
        o, state = attn_engine.recurrence(**part, initial_state=state, output_final_state=True, backend="cpu")
        parts.append(o)
    assert_near("o", torch.cat(parts, 1), whole.double(), 1e-5)
    assert_near("state", state, last.double(), 1e-5)


def test_gradients_flow_through_carried_states():
    given = inputs(130)
    got, want = leaves(given), exact(given)
    state, outputs = got["initial_state"], []
    for part in (slice(0, 70), slice(70, 130)):
        cut = {n: x[:, part] for n, x in got.items() if n != "initial_state"}
        o, state = attn_engine.recurrence(**cut, initial_state=state, output_final_state=True, backend="cpu")
        outputs.append(o)
    right, right_state = reference(**want)
    d_o, d_final = loss_weights(right, right_state)
    ((torch.cat(outputs, 1) * d_o).sum() + (state * d_final).sum()).backward()
    ((right * d_o).sum() + (right_state * d_final).sum()).backward()
    for name in given:
        assert_near(name, got[name].grad, want[name].grad)


@pytest.mark.parametrize("scale", [0.0, -2.0, 1.0])
def test_any_scale(scale):
    check(inputs(66), scale=scale)


@pytest.mark.parametrize(
    ("key", "value", "heads", "shared"), [(8, 40, 3, 1), (128, 64, 2, 2), (1, 1, 2, 1), (64, 200, 1, 1)]
)
def test_channels_and_heads(key, value, heads, shared):
    check(inputs(70, batch=1, key=key, value=value, heads=heads, shared=shared), tolerance=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_low_precision(dtype, tolerance):
    found = run(inputs(130, dtype=dtype, rate=0.02))
    assert found["o"][0].dtype == dtype
    assert found["final"][0].dtype == torch.float32
    for name, (got, want) in found.items():
        assert_near(name, got.detach().float(), want.detach(), tolerance)


def test_any_strides_and_no_batch():
    given = inputs(65)
    given["v"] = torch.randn(4, 24, 65, 2).permute(3, 2, 0, 1)
    given["decay"] = -torch.rand(2, 4, 65).transpose(1, 2)
    check(given)
    check({n: x[:0] for n, x in inputs(65).items()})


def test_an_operand_may_be_given_twice():
    x = torch.randn(2, 70, 2, 16, requires_grad=True)
    o, _ = attn_engine.recurrence(x, x, x, backend="cpu")
    exactly = x.detach().double().requires_grad_()
    right, _ = reference(exactly, exactly, exactly)
    o.sum().backward()
    right.sum().backward()
    assert_near("o", o.detach(), right.detach())
    assert_near("x", x.grad, exactly.grad)


def test_new_shapes_build_nothing():
    from attn_engine.runtime import recurrence_compile

    given = {n: x for n, x in inputs(70).items() if n != "initial_state"}
    attn_engine.recurrence(**given, backend="cpu")
    count = len(recurrence_compile._CACHE)
    attn_engine.recurrence(**{n: x[:1, :33] for n, x in given.items()}, backend="cpu")
    assert len(recurrence_compile._CACHE) == count
