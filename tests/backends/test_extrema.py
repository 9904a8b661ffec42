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


def test_weights_of_who_attains_it():
    check(of_heads, qkv(b=2, sq=60, d=24), {"factor": torch.tensor(0.3)}, "cpu")
