"""Recurrences on a GPU."""

from __future__ import annotations

import pytest
import torch

from attn_engine.backends.triton.build import check
from tests.gpu.recurrence_cases import CASES, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not check().ok or not torch.cuda.is_available(), reason="needs a GPU that Triton compiles for"),
]


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    assert run(name) == ""
