"""What takes the place of Gluon's kernels where there are none, or where they come out badly, and why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from xdsl.parser import Parser

from attn_engine import library
from attn_engine.backends.backend import Examination
from attn_engine.backends.gluon import guard
from attn_engine.backends.gluon.emit import SEPARATOR, emit
from attn_engine.backends.gluon.examine import Finding, examine
from attn_engine.backends.gluon.guard import Guarded
from attn_engine.backends.triton import gluon_ahead
from attn_engine.backends.triton.emit import emit as emit_triton
from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_copy import AsyncReduceAddOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.frontend import Definition, build
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Facts, Request
from attn_engine.runtime.schedules import default_schedule
from tests.support.gluon import GRADIENTS, module, parts

pytest.importorskip("triton")
from triton.runtime.errors import PTXASError


def backends_in_turn(part: driver.Part | None) -> list[str]:
    """Of a plan, and of what takes its place if its kernels come out badly, and so on."""
    found: list[str] = []
    while part is not None:
        found.append(part.backend.name)
        part = None if part.plain is None else part.plain()
    return found


def test_forward_and_backward_are_texts_of_their_own():
    found = parts(Definition(mask_mod=library.causal))
    for part, plan in zip(found, ("forward", "backward"), strict=True):
        text = part.source
        assert part.backend.name == "gluon" and SEPARATOR not in text
        assert emit(Parser(driver.context(), str(part.tiles)).parse_module()) == text
        assert "warp_specialize" in text and f"def {plan}(" in text
    assert isinstance(found[1].build(found[1].source)["backward"], Guarded)
    assert backends_in_turn(found[1]) == ["gluon", "gluon", "triton"]


@pytest.mark.parametrize(
    ("ordered", "reason"),
    [
        (False, "it adds to a capture's gradient score by score"),
        (True, "gradients of captured tensors in a fixed order"),
    ],
)
def test_a_backward_that_stays_plain_says_why(ordered: bool, reason: str):
    table = torch.zeros(64)
    scores = Definition(score_mod=lambda s, b, h, q, kv: s + table[(q * kv) % 64])
    _, part = parts(scores, (*GRADIENTS, "0"), d=64, fused=not ordered)
    assert part.backend.name == "triton" and part.reason == reason
    assert f'plain = "{reason}"' in str(part.tiles)
    assert emit_triton(Parser(driver.context(), str(part.tiles)).parse_module()) == part.source


def test_a_gradient_that_is_the_same_for_all_scores_stays_plain():
    """These scores are all 2: what consumers share in a step, and what leaves in it, has no rows to share out."""
    _, part = parts(Definition(score_mod=lambda s, b, h, q, kv: s + (2.0 - s)), d=64, fused=True)
    assert (part.backend.name, part.reason) == (
        "triton",
        "no product of its kernel starts from a block that the program owns",
    )


@pytest.mark.parametrize(
    ("batch", "reason"), [("own", None), ("few", None), ("shared", "gradients of captured tensors in a fixed order")]
)
def test_gradients_in_a_fixed_order_are_stored_here_and_added_up_elsewhere(batch: str, reason: str | None):
    """A bias of the lengths of the call: each block of its gradient is one program's, unless many batches share it."""
    bias = torch.zeros(1, 4, 64, 64, dtype=torch.bfloat16)
    scores = Definition(score_mod=lambda s, b, h, q, kv: s + bias[b if batch == "own" else 0, h, q, kv])
    wrt = (*GRADIENTS, "0")
    traced = build(scores, dtype=torch.bfloat16, head_dim=64, head_dim_v=64)
    schedule = default_schedule(Target("gluon", "sm_90"), traced.module)
    facts = Facts(exact=True, few_batches=batch == "few")
    request = Request(wrt, "gluon", schedule, facts, deterministic=True)
    _, part = driver.to_parts(driver.to_attn(traced.module, wrt), request)
    assert (part.backend.name, part.reason) == ("triton" if reason else "gluon", reason)
    adds = (tile.AtomicAddOp, tile.ScatterAddOp, AsyncReduceAddOp)
    assert any(isinstance(op, adds) for op in part.tiles.walk()) == (reason is not None)


def refused(*_: object) -> None:
    raise PTXASError("-11")


@pytest.mark.parametrize(
    ("plan", "reason"), [("async", None), ("async", "k: moves"), ("refused", "a kernel does not assemble (PTXASError)")]
)
def test_kernels_that_came_out_badly_are_not_used(monkeypatch: pytest.MonkeyPatch, plan: str, reason: str | None):
    monkeypatch.setattr(guard, "examine", lambda source: Examination((source,), reason))
    calls: list[str] = []
    plans = {"async": lambda *_: calls.append("async"), "refused": refused}
    guarded = Guarded(plans[plan], "text", lambda: lambda *_: calls.append("plain"))
    guarded(1)
    guarded(2)
    first = ["async"] if plan == "async" else []
    assert calls == (["async"] * 2 if reason is None else [*first, "plain", "plain"])
    assert guarded.reason == reason


def test_plans_without_kernels_here_go_to_another_backend():
    """With all that it knows of a call: descriptors, and lengths that are multiples of the blocks."""
    traced = build(Definition(key_mod=lambda x: x + 1.0), dtype=torch.bfloat16, head_dim=64, head_dim_v=64)
    schedule = default_schedule(Target("gluon", "sm_90"), traced.module)
    request = Request(("q", "k", "v"), "gluon", schedule, Facts(True, True, multiple=128), descriptors=True)
    lowered = driver.to_attn(traced.module, request.wrt)
    with pytest.raises(AsyncUnsupportedError):
        driver.to_parts(lowered, request)
    forward, _ = driver.functions(lowered)
    lowered.body.block.erase_op(forward, safe_erase=False)
    (part,) = driver.to_parts(lowered, request)
    assert part.backend.name == "triton"
    assert "tile.load_block" in str(part.tiles) and "limits" not in str(part.tiles)
    compile(part.source, "text", "exec")


@pytest.mark.parametrize(
    ("kernel", "moves", "adds", "refused"),
    [
        ("forward_kernel", 24, False, False),
        ("forward_kernel", 25, False, True),
        ("backward_dkdv", 96, False, False),
        ("backward_dq", 97, False, True),
        ("backward_dkdv", 64, True, False),
        ("backward_dkdv", 65, True, True),
    ],
)
def test_gradients_may_spill_more(kernel: str, moves: int, adds: bool, refused: bool):
    """But for those that add up what another kernel can own."""
    assert (Finding(kernel, 96, 8 * moves, moves, "", adds).reason is not None) == refused


def test_a_tool_that_fails_refuses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The tools are those that Triton is told to use."""
    tool = tmp_path / "ptxas"
    version = 'if [ "$1" = --version ]; then echo "Cuda compilation tools, release 12.8, V12.8.93"; exit 0; fi'
    tool.write_text(f"#!/bin/sh\n{version}\necho unsupported version >&2\nexit 255\n")
    tool.chmod(0o755)
    monkeypatch.setattr(gluon_ahead, "compile_ahead", lambda *_: gluon_ahead.remarks_of(""))
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tool))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = examine(emit(module(Definition())))
    assert found.reason is None
    assert found.lines == ("not examined: `ptxas` failed: unsupported version",)
