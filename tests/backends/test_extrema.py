"""An extremum of scores is one of the scores, whatever factors they have, in every loop that computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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
