"""Gradients of a maximum or minimum: one loop finds who attains it, and no other code compares scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_engine.interpreters.attn_backward import _Backward
from attn_engine.passes.lowering.key_gradients import compares_scores
from tests.passes.test_derive_backward import first_of_maxima, inputs, min_max, with_maximum, wrong_softmax_one
from tests.support.gradients import check_gradients, derive
from tests.support.scalar_builder import attention


def of_weights(s, at):
    """The largest weight of a softmax, as it is."""
    e = (s - s.max()).exp()
    p = e / e.sum()
    return (p >= p.max()).where(p, 0.0)


def two_largest(s, at):
    """The second largest score is one of those below the largest."""
    second = (s < s.max()).where(s, -float("inf")).max()
    return (s >= second).where((s - s.max()).exp(), 0.0)


FUNCTIONS = {
    "wrong softmax one": wrong_softmax_one,
    "with maximum": with_maximum,
    "first of maxima": first_of_maxima,
    "min max": min_max,
    "scaled by the maximum": lambda s, at: (s - s.max()).exp() * s.max().tanh(),
    "the largest alone": lambda s, at: (s >= s.max()).where(s, 0.0),
    "the smallest but for a fraction": lambda s, at: ((s - s.min()) > 0.0).where(s * s, 0.25 * s),
    "all but the largest": lambda s, at: (s < s.max()).where(s, 0.0),
    "no distance to the largest": lambda s, at: ((s.max() - s).exp() > 1.0).where(s * s, s),
    "distance but for the largest": lambda s, at: (s >= s.max()).where(0.0, (s - s.max()) / (s.sum().tanh() + 2.0)),
    "of weights": of_weights,
    "two largest": two_largest,
}


@pytest.fixture
def rounds_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single elements have scores and gradients of weights that differ from those of the row steps by one rounding."""
    elements = _Backward._elements

    def rounded(self, x, dp, *rest):
        signs = torch.where(torch.arange(x.numel()).view(x.shape) % 3 == 0, 1.0, -1.0).to(x.dtype)
        return elements(self, x * (1 + signs * 2.0**-52), dp * (1 - signs * 2.0**-52), *rest)

    monkeypatch.setattr(_Backward, "_elements", rounded)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("ties", [1, 2, 3, 5])
@pytest.mark.usefixtures("rounds_differently")
def test_scores_rounded_differently(name: str, ties: int) -> None:
    q, k, v = inputs()
    k[:, :, :ties] = 3 * k[:, :, :1]
    check_gradients(attention(FUNCTIONS[name]), (q, k, v), block=2)


FRAGILE = {
    "over the range": lambda s, at: (s - s.min()) / (s.max() - s.min() + 1e-13),
    "times a number over the range": lambda s, at: 3.0 * (s.max() - s) / (s.max() - s.min() + 1e-13),
    "from the other side": lambda s, at: -(s - s.max()) / (s.max() - s.min() + 1e-13),
    "plus a number": lambda s, at: ((s - s.min()) + 0.0 * s) / (s.max() - s.min() + 1e-13) + 1.0,
}


@pytest.mark.parametrize("name", FRAGILE)
@pytest.mark.usefixtures("rounds_differently")
def test_a_row_of_one_score_has_no_distances(name: str) -> None:
    """What is 0 there stays so, though one rounding of a score is much beside the number that it is divided by."""
    q, k, v = inputs()
    check_gradients(attention(FRAGILE[name]), (q, k[:, :, :1], v[:, :, :1]))
    check_gradients(attention(FRAGILE[name]), (q, k[:, :, :1], v[:, :, :1]), wrt=("v",))


@pytest.mark.parametrize("name", FRAGILE)
def test_distances_need_one_loop(name: str) -> None:
    _, backward = derive(attention(FRAGILE[name]), ["q", "k", "v"])
    assert len(backward.row_steps) == 1 + (name == "plus a number")
    assert not compares_scores(backward)


@pytest.mark.parametrize(
    "row",
    [
        lambda s, at: (s - s.max()).exp() / (s - s.max()).exp().sum(),
        lambda s, at: (s - s.max()).tanh() / 3.0,
        lambda s, at: (2.0 * (s.min() - s)).exp() * s,
    ],
)
def test_distances_that_lose_nothing_are_as_they_were(row: Callable[..., Any]) -> None:
    """An exponential of them, as in a softmax, is off by what the score is: no loop finds who attains the extremum."""
    _, backward = derive(attention(row), ["v"])
    assert len(backward.row_steps) == 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_loop_for_all_extrema(name: str) -> None:
    _, backward = derive(attention(FUNCTIONS[name]), ["q", "k", "v"])
    assert len(backward.row_steps) == 1 + (name in ("two largest", "distance but for the largest"))
    assert not compares_scores(backward)


def test_a_later_extremum_starts_the_count_again() -> None:
    """Ascending scores, of which every block has a new maximum; then equal ones across blocks."""
    q, k, v = inputs()
    q[:], k[:] = 0.5, torch.arange(k.shape[2], dtype=torch.float64).view(1, 1, -1, 1) // 3
    for block in (1, 2, 4, 16):
        check_gradients(attention(wrong_softmax_one), (q, k, v), block=block)
        check_gradients(attention(first_of_maxima), (q, k, v), block=block)


def test_weights_that_compare_scores_are_seen() -> None:
    _, backward = derive(attention(lambda s, at: s.equals(-(-s).min()).where(s, 0.0)), ["q", "k", "v"])
    assert compares_scores(backward)


def test_kinks_compare_scores_with_numbers() -> None:
    """The larger of a score and a number per query, before the softmax: equal or not, no row has to agree on it."""

    def larger(s, at):
        x = s.equals(0.5).where(0.25, s)
        return (x - x.max()).exp() / (x - x.max()).exp().sum()

    _, backward = derive(attention(larger), ["q", "k", "v"])
    assert any(op.name == "arith.cmpf" for op in backward.element.walk())
    assert not compares_scores(backward)
