"""Numbers of the row that are 0 or large in floating point, beside exponentials.

Weights times a number that may be 0: a gradient divides by it nowhere, 0 / 0 is no number. Squares of distances from large
ones: a gradient multiplies them out nowhere, little would be left.
"""

from __future__ import annotations

import math

import pytest
import torch

import attn_engine
from tests.passes.test_derive_backward import inputs
from tests.support.gradients import check_gradients
from tests.support.scalar_builder import attention


def gated(gate):
    def row(s, at):
        e = (s - s.max()).exp()
        return e / e.sum() * gate(s)

    return row


def sigmoid(x):
    """As it is traced: with an exponent that is never positive."""
    e = (x < 0.0).where(x, -x).exp()
    return (x < 0.0).where(e, 1.0) / (e + 1.0)


def opposite_sigmoid(x):
    """Of -x, where -(-x) has become x."""
    e = (-x < 0.0).where(-x, x).exp()
    return (-x < 0.0).where(e, 1.0) / (e + 1.0)


GATES = {
    "exp of the smallest": lambda s: s.min().exp(),
    "exp of a sum": lambda s: (-(s * s).sum()).exp(),
    "sigmoid of the smallest": lambda s: sigmoid(s.min()),
    "softplus of the smallest": lambda s: (s.min().exp() + 1.0).log(),
    "exp of the largest above 10^9": lambda s: (s > 1e9).where(s, -math.inf).max().exp(),
    "sigmoid of the largest above 10^9": lambda s: sigmoid((s > 1e9).where(s, -math.inf).max()),
    "sigmoid of the smallest, squared": lambda s: sigmoid(s.min()) * sigmoid(s.min()),
    "sigmoid of minus the largest": lambda s: sigmoid(-s.max()),
    "sigmoid of minus what is no value": lambda s: opposite_sigmoid((s < -1e9).where(s, math.inf).min()),
    "before the sum": lambda s: 1.0 / (s.min().exp() + 1.0),
}


def gated_by_the_log_sum(s, at):
    m = s.max()
    e = (s - m).exp()
    total = e.sum()
    return e / total * sigmoid(total.log() + m)


@pytest.mark.parametrize("size", [1.0, 40.0, 2000.0])
@pytest.mark.parametrize("name", GATES)
def test_gates_that_vanish(name: str, size: float) -> None:
    q, k, v = inputs()
    if name == "softplus of the smallest" and size > 1:
        size = 10.0  # its own logarithm of 1 + x loses small x
    check_gradients(attention(gated(GATES[name])), (q * size, k, v), block=2)


def test_what_cancels_needs_no_loop() -> None:
    _, backward = check_gradients(attention(gated_by_the_log_sum), inputs(), block=2)
    assert not backward.row_steps


@pytest.mark.parametrize("gate", [torch.exp, torch.sigmoid, torch.nn.functional.softplus])
def test_rows_without_a_score_above_a_threshold(gate) -> None:
    """The public way, in f32: the extremum of none is -inf, and its row has weights of 0 and gradients of 0."""

    def row(s):
        return torch.softmax(s, -1) * gate(torch.where(s > 1.5, s, -float("inf")).amax())

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 24, 8, generator=generator, requires_grad=True) for _ in range(3))
    found, expected = (
        torch.autograd.grad((o := attn_engine.attention(q, k, v, row=row, backend=backend)).square().sum(), (q, k, v))
        for backend in ("cpu", "reference")
    )
    assert (o == 0).all(-1).any() and (o != 0).any()
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5 * exact.abs().max().item())


@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_squares_of_distances_are_not_multiplied_out(offset: float) -> None:
    """Scores lie around a large number, and weights fall with their distance from the mean."""

    def row(s):
        e = torch.exp(-0.1 * (s - s.mean()) ** 2)
        return e / e.sum()

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 24, 8, generator=generator, requires_grad=True) for _ in range(3))
    found, expected = (
        torch.autograd.grad(
            attn_engine.attention(q, k, v, score_mod=lambda s, *_: s + offset, row=row, backend=backend).square().sum(),
            (q, k, v),
        )
        for backend in ("cpu", "reference")
    )
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0.0, atol=1e-3 * exact.abs().max().item())
