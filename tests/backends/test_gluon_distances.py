"""What scores compute by distance in Gluon, ahead of time: loaded once for each diagonal of a thread, added once for each of a warp."""

from __future__ import annotations

import re

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Facts, Request
from attn_engine.runtime.inspect import View
from attn_engine.runtime.schedules import candidate_schedules

pytest.importorskip("triton")
TABLE = torch.zeros(4, 9).requires_grad_()
MOST_MOVES = 24


def parts_by_distance(head_dim: int) -> list[driver.Part]:
    """A causal attention with a table by distance, and all of its gradients, in whole blocks."""
    view, wrt = View(head_dim=head_dim, backward=True), ("q", "k", "v", "0")
    attention = attn_engine.compile(
        score_mod=lambda s, b, h, q, kv: s + TABLE[h, (q - kv) % 9], mask_mod=library.causal
    )
    module = attention._traced(view)
    schedule = candidate_schedules(Target("gluon", "sm_90"), module)[0]
    request = Request(wrt, "gluon", schedule, Facts(True, True, exact=True, multiple=128), descriptors=True)
    return driver.to_parts(driver.to_attn(module, wrt), request)


def test_by_the_kernels_that_multiply(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """A forward of 128 keys a step, and gradients of 64 queries a step, of all operands and the table in one kernel."""
    from attn_engine.backends.triton.gluon_ahead import compile_ahead

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    parts = parts_by_distance(128)
    assert [part.backend.name for part in parts] == ["gluon", "gluon"]
    for part, kernel, loads, adds in ((parts[0], "forward_kernel", 36, 0), (parts[1], "backward_dkdv", 18, 3)):
        assembly = compile_ahead(part.source, kernel)
        assert not assembly.warnings
        assert len(assembly.loops()) >= 2
        for loop in assembly.loops():
            assert loads <= sum("LDG" in text for text in loop) <= loads + 2
            assert sum(re.search(r"\bREDG", text) is not None for text in loop) == adds
            assert sum("LDL" in text or "STL" in text for text in loop) <= MOST_MOVES
