"""Gradients of captures and of wide heads in Gluon, ahead of time: no spills, no product waits for another."""

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
BIAS = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)


def pair(s: object, b: object, h: object, q: object, kv: object) -> object:
    return s + BIAS[b, h, q, kv]  # type: ignore[operator, index]


def shared(s: object, b: object, h: object, q: object, kv: object) -> object:
    return s + BIAS[0, h, q, kv]  # type: ignore[operator, index]


CASES = {
    "pair": (attn_engine.compile(score_mod=pair), View(head_dim=128, backward=True), "backward_dq"),
    "shared": (attn_engine.compile(score_mod=shared), View(head_dim=128, backward=True), "backward_dq"),
    "192 and 128": (
        attn_engine.compile(mask_mod=library.causal),
        View(head_dim=192, head_dim_v=128, backward=True),
        "backward_dk",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_without_spills(name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    from attn_engine.backends.triton.gluon_ahead import compile_ahead

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    attention, view, kernel = CASES[name]
    wrt = ("q", "k", "v", *(("0",) if name in ("pair", "shared") else ()))
    schedule = candidate_schedules(Target("gluon", "sm_90"), attention._traced(view))[0]
    facts = Facts(True, True, exact=True, few_batches=True, multiple=128)
    request = Request(wrt, "gluon", schedule, facts, descriptors=True)
    parts = driver.to_parts(driver.to_attn(attention._traced(view), wrt), request)
    assert [part.backend.name for part in parts] == ["gluon", "gluon"]
    assembly = compile_ahead(parts[1].source, kernel)
    assert assembly.products and not assembly.spilled_bytes and not assembly.warnings
    if name == "shared":
        assert (
            ".fill_(" not in parts[1].source and "reduce_add_out(" not in parts[1].source.partition("gl.constexpr")[2]
        )


def test_shorter_steps_where_longer_ones_do_not_come_out_as_they_mean():
    """Then plain kernels; steps of 32 positions leave registers for what scores compute."""
    attention, view, _ = CASES["pair"]
    wrt = ("q", "k", "v", "0")
    schedule = candidate_schedules(Target("gluon", "sm_90"), attention._traced(view))[0]
    request = Request(wrt, "gluon", schedule, Facts(covered=True))
    part = driver.to_parts(driver.to_attn(attention._traced(view), wrt), request)[1]
    found: list[tuple[str, set[str]]] = []
    while part.plain is not None:
        found.append((part.backend.name, set(re.findall(r"tensor<64x(\d+)xf32>", str(part.tiles)))))
        part = part.plain()
    assert [name for name, _ in found] == ["gluon", "gluon"] and part.backend.name == "triton"
    (_, long), (_, short) = found
    assert "32" not in long and "32" in short
