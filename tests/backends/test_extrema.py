"""An extremum of scores is one of the scores, whatever factors they have, in every loop that computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attn_engine
from attn_engine import library
from tests.support.compare import check, qkv, randn
from tests.support.engines import INTERPRETED, SMALL

Functions = dict[str, Any]


def of_captures(table: Tensor, factor: Tensor) -> Functions:
    """Factors whose signs are unknown, then one that is positive."""

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return factor * table[b, kv] * 0.3

    return {"score_mod": score, "row": lambda s: s - s.amax(), "mask_mod": library.causal}


def of_heads(factor: Tensor) -> Functions:
    """The whole weight depends on which score is the largest."""

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * (h + factor) * 0.7

    return {"score_mod": score, "row": lambda s: torch.where(s >= s.amax(), 1.0, 0.0), "mask_mod": library.causal}


@pytest.mark.parametrize("backend", ["cpu", INTERPRETED])
def test_gradients_of_who_attains_it(backend: str):
    captures = {"table": randn(2, 37), "factor": torch.tensor(0.7)}
    check(of_captures, qkv(b=2, sq=37, skv=37), captures, backend, schedule=SMALL)


@pytest.mark.parametrize("backend", ["cpu", INTERPRETED])
def test_weights_of_who_attains_it(backend: str):
    """Blocks of different shapes add up the products of a score in different orders."""
    check(of_heads, qkv(b=2, sq=60, d=24), {"factor": torch.tensor(0.3)}, backend)


def largest_weight(s):
    p = torch.softmax(s, -1)
    return torch.where(p >= p.amax(), p, 0.0)


def exponential_of_one(s):
    e = torch.exp(s - s.amax())
    return torch.where(e >= 1, s, 0.0)


@pytest.mark.parametrize("row", [largest_weight, exponential_of_one], ids=lambda row: row.__name__)
@pytest.mark.parametrize("backend", ["cpu", INTERPRETED])
def test_weights_that_are_the_largest(row: Any, backend: str):
    check(lambda: {"row": row, "mask_mod": library.causal}, qkv(sq=60, d=24), backend=backend)


def between(s):
    return (s - s.amin()) / (s.amax() - s.amin() + 1e-6)


def below(s):
    return (s.amax() - s) * 1.0 / (torch.relu(s.amax() - s.amin()) + 1e-6)


def steep(s):
    return torch.sqrt(s - s.amin() + 1e-2)


@pytest.mark.parametrize("row", [between, below, steep], ids=lambda row: row.__name__)
@pytest.mark.parametrize("sees", ["one key", "some keys"])
@pytest.mark.parametrize("backend", ["cpu", INTERPRETED])
def test_distances_from_an_extremum_that_small_numbers_divide(row: Any, sees: str, backend: str):
    """Of a row of one score nothing is left, in gradients too, however scores and gradients of weights are rounded there."""
    mask = (lambda b, h, q, kv: q == kv) if sees == "one key" else library.causal
    check(lambda: {"row": row, "mask_mod": mask}, qkv(sq=60, d=24), backend=backend)


def two_largest(s):
    """The weights of the two largest scores; a row of one has no second."""
    m = s.amax()
    second = torch.where(s < m, s, float("-inf")).amax()
    e = torch.where(s >= second, torch.exp(s - m), 0.0)
    return e / e.sum()


def first_keys(s, b, h, q, kv):
    """Scores that are at least the largest of the keys 9 to 20, if there are any."""
    return torch.where(s >= torch.where((kv > 8) & (kv < 21), s, float("-inf")).amax(), 1.0, 0.25)


def twice_without_late_keys(s, b, h, q, kv):
    late = torch.where(kv > 20, s, float("-inf")).amax()
    m = torch.maximum(torch.where(kv > 20, float("-inf"), s).amax(), late)
    return torch.where(late == float("-inf"), 2.0, 1.0) * torch.exp(s - m)


def smallest_above(s):
    return torch.where(s >= torch.where(s > 1, s, float("inf")).amin(), s, 0.25)


def of_large(s):
    """log(sum(exp)) of the scores above 1: -inf where there are none."""
    return torch.logsumexp(torch.where(s > 1, s, float("-inf")), -1)


def beside_large(s):
    return torch.exp(s) / (1 + torch.exp(of_large(s)))


def above_large(s):
    return torch.sigmoid(s - of_large(s))


def no_less_than_large(s):
    return torch.maximum(s, of_large(s) - 0.5)


def below_small(s):
    return torch.sigmoid(s - torch.logsumexp(torch.where(s > 1, -float("inf"), -s), -1))


@pytest.mark.parametrize(
    "row",
    [
        *(two_largest, first_keys, twice_without_late_keys, smallest_above),
        *(beside_large, above_large, no_less_than_large, below_small),
    ],
    ids=lambda row: row.__name__,
)
@pytest.mark.parametrize("backend", ["cpu", INTERPRETED, "reference"])
def test_an_extremum_of_no_score_in_a_row_that_has_some(row: Any, backend: str):
    """The infinity that it is then says nothing of the row."""
    check(lambda: {"row": row, "mask_mod": library.causal}, qkv(sq=30, d=24), backend=backend)


def softmax(x):
    return torch.softmax(x, -1)


def by_log_softmax(x):
    return torch.exp(torch.log_softmax(x, -1))


def by_logsumexp(x):
    return torch.exp(x - torch.logsumexp(x, -1))


def by_guarded_maximum(x):
    m = x.amax()
    e = torch.exp(x - torch.where(m == float("-inf"), 0.0, m))
    return torch.exp(x - (m + torch.log(e.sum())))


@pytest.mark.parametrize(
    "spelling", [softmax, by_log_softmax, by_logsumexp, by_guarded_maximum], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("backend", ["cpu", INTERPRETED, "reference"])
def test_a_softmax_of_none_of_its_scores(spelling: Any, backend: str):
    """A row that hides all of its scores from its softmax is 0, and one loop finds it."""

    def row(s: Any) -> Any:
        return spelling(torch.where(s > 1, s, float("-inf")))

    def right(s: Tensor) -> Tensor:
        return torch.softmax(torch.where(s > 1, s, float("-inf")), -1) if (s > 1).any() else torch.zeros_like(s)

    tensors = qkv(sq=30, d=24)
    check(lambda: {"row": row}, tensors, backend=backend, reference=lambda: {"row": right})
    online = attn_engine.compile(row=row).ir("attn", attn_engine.View(torch.float32, head_dim=24))
    assert "], [" not in online.split(" init ")[1].split(" : tensor")[0]
