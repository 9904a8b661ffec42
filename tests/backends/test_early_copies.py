"""Copies of the next iteration go out early: in the text of a scheduled loop, and in what Triton makes of a sweep."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attn_engine.arch import get_arch
from attn_engine.backends.triton import early_copies
from attn_engine.backends.triton.ahead import compile_ahead
from attn_engine.frontend.recurrence import Kind
from attn_engine.runtime.recurrence_compile import Place, Request, Schedule, source_of

LATE, EARLY = "loop.cluster = 2 : i32, loop.stage = 0 : i32", "loop.cluster = 1 : i32, loop.stage = 1 : i32"
LOOP = f"""
    %r = scf.for %c = %c0 to %n step %c1 iter_args(%state = %zero) -> (tensor<64x64xf32>)  : i32 {{
      %t = arith.muli %c, %c64 {{{LATE}}} : i32
      %k = tt.descriptor_load %kd[%t] {{{LATE}}} : !tt.tensordesc<tensor<64x64xbf16>> -> tensor<64x64xbf16>
      %ks = ttg.local_alloc %k {{{EARLY}}} : (tensor<64x64xbf16>) -> !ttg.memdesc<64x64xbf16>
      %s = ttng.warp_group_dot %ks, %ks, %zero {{{EARLY}}} : !ttg.memdesc<64x64xbf16>
      %g = tt.load %gp {{{LATE}}} : tensor<64x!tt.ptr<f32>>
      %v = tt.descriptor_load %vd[%t] {{{LATE}}} : !tt.tensordesc<tensor<64x64xbf16>> -> tensor<64x64xbf16>
      %e = math.exp2 %g {{{EARLY}}} : tensor<64xf32>
      %vs = ttg.local_alloc %v {{{EARLY}}} : (tensor<64x64xbf16>) -> !ttg.memdesc<64x64xbf16>
      %w = arith.mulf %v, %e {{{EARLY}}} : tensor<64x64xbf16>
      %o = ttng.warp_group_dot %s, %vs, %zero {{{EARLY}}} : tensor<64x64xf32>
      %u = tt.load %up {{{LATE}}} : tensor<64x!tt.ptr<f32>>
      %x = arith.addf %o, %u {{{EARLY}}} : tensor<64x64xf32>
      %next = ttng.warp_group_dot %w, %ks, %state {{{EARLY}}} : tensor<64x64xf32>
      tt.store %op, %x {{{EARLY}}} : tensor<64x64x!tt.ptr<f32>>
      scf.yield %next : tensor<64x64xf32>
    }} {{{early_copies.MARK}, tt.scheduled_max_stage = 1 : i32}}
"""


DEEP = LOOP.replace(EARLY, EARLY.replace("stage = 1", "stage = 2")).replace("max_stage = 1", "max_stage = 2")


def clusters(text: str) -> dict[str, int]:
    return {name: int(n) for name, n in re.findall(r"%(\w+) = .*loop\.cluster = (\d+)", text)}


def test_copies_come_as_soon_as_their_place_is_free():
    found = clusters(early_copies.ordered(LOOP))
    assert found["s"] < found["k"] < found["o"], (
        "only products read it: two places, free once the first product is done"
    )
    assert found["t"] <= found["k"], "what a copy needs comes with it"
    assert found["e"] < found["g"] < found["o"], "registers hold it"
    assert found["o"] < found["v"] < found["next"], "the second product reads its only place"
    assert found["x"] < found["u"]
    assert found["k"] < found["x"] < found["next"], "what computes keeps its order"


def test_with_three_stages_what_has_two_places_anyway_goes_out_one_iteration_ahead_and_the_rest_two():
    found = {name: int(n) for name, n in re.findall(r"%(\w+) = .*loop\.stage = (\d+)", early_copies.ordered(DEEP))}
    assert {name for name, stage in found.items() if stage == 1} == {"k"}
    assert {name for name, stage in found.items() if stage == 0} == {"t", "g", "v", "u"}
    assert clusters(early_copies.ordered(DEEP)) == clusters(early_copies.ordered(LOOP))


@pytest.mark.parametrize(
    "other",
    [
        LOOP.replace(early_copies.MARK, "tt.other"),
        LOOP.replace("scheduled_max_stage = 1", "scheduled_max_stage = 3"),
        DEEP.replace("%u = tt.load %up {" + LATE, "%u = tt.load %up {" + EARLY),
        LOOP.replace("arith.mulf %v, %e", "arith.mulf %v, %s")
        .replace("warp_group_dot %s, %vs", "dot %s, %vs")
        .replace("warp_group_dot %w, %ks", "dot %w, %ks"),
    ],
    ids=["not marked", "deeper", "in between", "one product"],
)
def test_other_loops_stay_as_they_are(other: str):
    assert early_copies.ordered(other) == other


def sweep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A recurrence's sweep in Triton's own IR, as its cache keeps it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    place = Place("sm_90", 128, 4096, blocks=True)
    request = Request(Kind(torch.bfloat16, 64, 64, "token"), "triton", Schedule(descriptors=True), (), False, place)
    kernel = compile_ahead(
        source_of(request), "forward_o_sweep", get_arch("sm_90"), ones=("group", "group_1", "group_2")
    )
    assert kernel.spills == 0
    return next(tmp_path.rglob("forward_o_sweep.ttgir")).read_text()


def copies_among_products(text: str) -> int:
    first, last = text.index("ttng.warp_group_dot "), text.rindex("ttng.warp_group_dot ")
    return text[first:last].count("ttng.async_tma_copy_global_to_local")


def test_a_sweep_copies_while_it_computes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert copies_among_products(sweep(monkeypatch, tmp_path / "early")) == 3
    monkeypatch.setattr(early_copies, "ordered", lambda text: text)
    assert copies_among_products(sweep(monkeypatch, tmp_path / "late")) == 0


def test_other_hooks_and_other_threads_keep_theirs(monkeypatch: pytest.MonkeyPatch):
    from triton import knobs
    from triton.backends.nvidia import compiler

    called: list[int] = []
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *_: called.append(1))
    early_copies.order_copies()
    early_copies.order_copies()
    knobs.runtime.add_stages_inspection_hook(None, {"ttgir": lambda *_: None}, None, None, 90)
    knobs.runtime.add_stages_inspection_hook(None, {}, None, None, None)
    assert called == [1, 1]
    context, found = compiler.ir.context(), list[Any]()
    with early_copies._recording() as recorder:
        other = threading.Thread(target=lambda: found.append(compiler.ir.pass_manager(context)))
        other.start()
        other.join()
        assert compiler.ir.pass_manager(context) is recorder
        compiler.passes.common.add_cse(found[0])
    assert type(found[0]) is compiler.ir.pass_manager and not recorder.passes


def test_a_triton_whose_compiler_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    import triton
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    early_copies.order_copies()
    assert knobs.runtime.add_stages_inspection_hook is None
