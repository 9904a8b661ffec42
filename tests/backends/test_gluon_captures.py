"""Gradients of captures and of wide heads in Gluon, ahead of time: hardly a spill, no product waits for another."""

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
    "pair": (attn_engine.compile(score_mod=pair), View(head_dim=128, backward=True), "backward_dkdv"),
    "shared": (attn_engine.compile(score_mod=shared), View(head_dim=128, backward=True), "backward_dkdv"),
    "192 and 128": (
        attn_engine.compile(mask_mod=library.causal),
        View(head_dim=192, head_dim_v=128, backward=True),
        "backward_dk",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_scheduled(name: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
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
    moves = [sum("LDL" in text or "STL" in text for text in loop) for loop in assembly.loops()]
    assert assembly.products and not assembly.warnings and max(moves) <= (2 if kernel == "backward_dkdv" else 0)
    assert kernel == "backward_dkdv" or not assembly.spilled_bytes
    sends = re.findall(r"(copy_out|reduce_add_out)\(d_\w+_copies", parts[1].source)
    assert set(sends) == {"pair": {"copy_out"}, "shared": {"reduce_add_out"}}.get(name, set())


@pytest.mark.parametrize("name", ["pair", "shared"])
def test_in_a_fixed_order(name: str):
    """In two kernels, which store parts of batches: nothing is added to memory, nor set to zero before."""
    attention, view, _ = CASES[name]
    wrt = ("q", "k", "v", "0")
    schedule = candidate_schedules(Target("gluon", "sm_90"), attention._traced(view))[0]
    facts = Facts(True, True, exact=True, few_batches=True, multiple=128)
    request = Request(wrt, "gluon", schedule, facts, descriptors=True, deterministic=True)
    source = driver.to_parts(driver.to_attn(attention._traced(view), wrt), request)[1].source
    assert "def backward_dq(" in source and "def backward_dkdv(" in source
    assert ".fill_(" not in source and "reduce_add_out(" not in source.partition("gl.constexpr")[2]


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
