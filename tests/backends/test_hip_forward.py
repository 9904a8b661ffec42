"""The hand-written HIP forward: its text, its code objects, and its emulated results."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from attn_engine.backends.backend import Plan
from attn_engine.backends.hip.build import emulate
from attn_engine.backends.hip.emit import emit
from attn_engine.backends.hip.toolchain import inspect
from attn_engine.errors import BackendError
from tests.support.hip import FORWARD, emulates, needs_clang, parse

TEXT = FORWARD.read_text()
VARIANTS = {
    "f16": TEXT,
    "bf16": TEXT.replace("xf16", "xbf16").replace("x f16", "x bf16").replace("to f16", "to bf16").replace(": f32, f16", ": f32, bf16").replace("%half : f16", "%half : bf16"),
    "16x16x16": TEXT.replace("32x32x8", "16x16x16"),
}  # fmt: skip


def softmax(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ keys.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def run(
    plans: Mapping[str, Plan],
    causal: bool,
    sq: int,
    skv: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    result: torch.dtype | None = None,
) -> tuple[float, float]:
    """The largest errors of the output and of lse; NaN if anything was not written or came out wrong."""
    torch.manual_seed(sq + skv)
    q, k, v = (torch.randn(2, h, s, 64).to(dtype) for h, s in ((heads[0], sq), (heads[1], skv), (heads[1], skv)))
    o, lse = torch.full(q.shape, math.nan, dtype=result or dtype), torch.full(q.shape[:3], math.nan)
    plans["forward_causal" if causal else "forward_full"](q, k, v, o, lse, 1 / math.sqrt(64))
    want, want_lse = softmax(q, k, v, causal)
    return (o - want).abs().max().item(), (lse - want_lse).abs().max().item()


@pytest.mark.parametrize("name", VARIANTS)
def test_printed_text_gives_the_same_source(name: str):
    module = parse(VARIANTS[name])
    assert emit(parse(str(module))) == emit(module)
    assert "#if" not in emit(module)


def test_one_op_more_changes_the_kernel():
    faster = TEXT.replace(
        "%y = arith.mulf %x, %c : f32", "%z = arith.mulf %x, %c : f32\n      %y = arith.negf %z : f32"
    )
    changed = [
        a for a, b in zip(emit(parse(faster)).split("\n"), emit(parse(TEXT)).split("\n"), strict=False) if a != b
    ]
    assert changed[0].strip() == "const float z = x * c;"


@needs_clang
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
@pytest.mark.parametrize("name", VARIANTS)
def test_compiles_without_spills(name: str, arch: str):
    kernel = inspect(emit(parse(VARIANTS[name])), arch)["forward_kernel"]
    instruction = {
        "f16": r"v_mfma_f32_32x32x8_?f16",
        "bf16": r"v_mfma_f32_32x32x8_?bf16",
        "16x16x16": r"v_mfma_f32_16x16x16_?f16",
    }
    assert len(re.findall(instruction[name], kernel.machine)) == kernel.mfma == (32 if name != "16x16x16" else 64)
    assert kernel.spills == 0
    assert kernel.registers <= 256, "two waves per SIMD do not fit"
    assert kernel.shared <= 20 * 1024
    assert kernel.barriers == 2


@emulates
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (64, 64), (65, 65), (130, 130), (130, 65), (1, 130)])
def test_emulated(causal: bool, sq: int, skv: int):
    error, lse_error = run(emulate(emit(parse(TEXT))), causal, sq, skv, (2, 1), torch.float16)
    assert error < 2e-3
    assert lse_error < 1e-5


@emulates
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype", "limit"), [("bf16", torch.bfloat16, 2e-2), ("16x16x16", torch.float16, 2e-3)]
)
def test_emulated_variants(name: str, dtype: torch.dtype, limit: float, causal: bool):
    error, lse_error = run(emulate(emit(parse(VARIANTS[name]))), causal, 130, 130, (4, 2), dtype)
    assert error < limit
    assert lse_error < 1e-5


@emulates
def test_strides_of_the_caller():
    """Layouts are strides: channels first, and rows that are not aligned."""
    plans = emulate(emit(parse(TEXT)))
    torch.manual_seed(0)
    q = torch.randn(1, 2, 64, 70).half().mT
    k, v = (torch.randn(1, 1, 70, 65).half()[..., 1:] for _ in "kv")
    o, lse = torch.zeros(1, 70, 2, 64).half().transpose(1, 2), torch.zeros(1, 2, 70)
    plans["forward_full"](q, k, v, o, lse, 0.125)
    want, _ = softmax(q, k, v, causal=False)
    assert (o - want).abs().max().item() < 2e-3


@emulates
@pytest.mark.parametrize("place", [0, 1])
def test_a_missing_barrier_shows(place: int, monkeypatch: pytest.MonkeyPatch):
    """Waves that overtake each other read a tile too early, or find it overwritten."""
    head, *rest = TEXT.split("    tile.barrier\n")
    broken = head + rest[0] + ("    tile.barrier\n" + rest[1] if place == 0 else rest[1])
    if place == 1:
        broken = head + "    tile.barrier\n" + rest[0] + rest[1]
    plans = emulate(emit(parse(broken)))
    errors: list[float] = []
    for seed in range(3):
        monkeypatch.setenv("ATTN_EMULATION_SEED", str(seed))
        errors.append(run(plans, False, 64, 130, (1, 1), torch.float16)[0])
    assert any(not error < 2e-3 for error in errors)


@emulates
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(L::groups * run) + i % run", "(L::groups * run) + (i % run ^ 1)"),
        ("lane() / L::across * run)}", "(1 - lane() / L::across) * run)}"),
        ("start + lane() % SIZE", "start + (lane() % SIZE ^ 1)"),
    ],
)
def test_a_wrong_lane_map_shows(
    right: str, wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
):
    """A copy of the headers with one map changed; the matrix instruction stays as the device has it."""
    from attn_engine.backends.hip import toolchain

    headers = tmp_path_factory.mktemp("include")
    found = 0
    for header in toolchain.INCLUDE.glob("*.h"):
        text = header.read_text()
        found += text.count(right)
        (headers / header.name).write_text(text.replace(right, wrong))
    assert found == 1
    monkeypatch.setattr(toolchain, "INCLUDE", headers)
    plans = emulate(f"{emit(parse(TEXT))}// {wrong}\n")
    try:
        error = run(plans, True, 64, 64, (1, 1), torch.float16)[0]
    except BackendError as stopped:  # a map that leaves a tensor
        assert "beyond the end" in str(stopped)
    else:
        assert not error < 2e-3
