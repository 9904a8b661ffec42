"""Scores that do not differ from key to key: numbers, and what is made of the query's place or of the head alone."""

from __future__ import annotations

import pytest
import torch

from attn_engine.passes.online_plan import plan_online
from tests.passes.test_derive_backward import ROW_FUNCTIONS, every_third_row_sees_nothing, inputs
from tests.support.gradients import check_gradients
from tests.support.scalar_builder import Value, attention

SCORES = {
    "zero": lambda x, at: Value(x.block, x.other(0.0)),
    "two": lambda x, at: Value(x.block, x.other(2.0)),
    "minus one": lambda x, at: Value(x.block, x.other(-1.0)),
    "of the query": lambda x, at: (at.q + 1).real() * 0.25,
    "of the head, trained": lambda x, at: at.c[0][at.h],
}
CASES = [
    (name, score) for name in ROW_FUNCTIONS for score in SCORES if score != "zero" or name not in ("cosine", "p norm")
]
"""Without those that are 0 / 0."""


@pytest.mark.parametrize(("name", "score"), CASES)
def test_scores_that_are_the_same_for_all_keys(name: str, score: str) -> None:
    module = attention(ROW_FUNCTIONS[name][0], SCORES[score], mask=every_third_row_sees_nothing, captures=[1])
    slopes = torch.tensor([0.5, -0.25, 1.5, 2.0], dtype=torch.float64)
    # Constants are folded in float32.
    forward, _ = check_gradients(module, inputs(), [slopes], ["q", "k", "v", 0], tolerance=1e-5)
    plan_online(forward.row.block)
