"""Recurrences on a GPU; the cases run side by side, for nearly all of their time is compilation."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from attn_engine.backends.triton.build import check
from tests.gpu.recurrence_cases import CASES, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not check().ok or not torch.cuda.is_available(), reason="needs a GPU that Triton compiles for"),
]


@pytest.fixture(scope="module")
def running(request):
    """A future for each case that this session asks for."""
    wanted = [i.callspec.params["name"] for i in request.session.items if i.function is test_case]
    workers = max(1, min(len(wanted), (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield {name: pool.submit(run, name) for name in wanted}


@pytest.mark.parametrize("name", CASES)
def test_case(running, name):
    assert running[name].result() == ""
