"""Generated Gluon kernels: what an assembler makes of them without a device, and texts of two levels in one."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine import library
from attn_engine.backends.backend import Examination, get_backend
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

pytest.importorskip("triton")
from triton.runtime.errors import PTXASError


def module(
    definition: Definition, wrt: tuple[str, ...] = (), d: int = 128, lse: bool = True, dv: int | None = None
) -> ModuleOp:
    """What the backend emits for bf16."""
    traced = build(definition, dtype=torch.bfloat16, head_dim=d, head_dim_v=dv or d, return_lse=lse)
    schedule = default_schedule(Target("gluon", "sm_90"), traced.module)
    request = Request(wrt, "gluon", schedule, Facts(positive_scale=True))
    return driver.to_tile(driver.to_attn(traced.module, wrt), request, get_backend("gluon"))


@cache
def assembly(definition: Definition, d: int, lse: bool = True, dv: int | None = None) -> Any:
    from attn_engine.backends.triton.gluon_ahead import compile_ahead

    return compile_ahead(emit(module(definition, d=d, lse=lse, dv=dv)), "forward_kernel")


def order(loop: list[str]) -> str:
    """A loop's products (H), exponentials (E) and waits for 1 or 0 products (1, 0), without repetition."""
    kinds = {"HGMMA": "H", "MUFU.EX2": "E", "WARPGROUP.DEPBAR": "W"}
    letters = [(kinds[name], text) for text in loop for name in kinds if name in text]
    names = [letter if letter != "W" else text.rsplit(",", 1)[1].strip()[-1] for letter, text in letters]
    return re.sub(r"(.)\1+", r"\1", "".join(names))


def check(compiled: Any, products: int, loops: int = 2, registers: int = 240, last: str = "H1E?0E") -> None:
    """Per consumer: a loop over masked blocks as they come, and the overlapped one, with exponentials behind the output."""
    assert compiled.products == products
    assert compiled.warnings == ()
    assert compiled.shared <= 227 * 1024
    assert f"setmaxnreg.inc.sync.aligned.u32 \t{registers}" in compiled.ptx
    # Of an output in two parts, both are in flight.
    found = [order(loop).replace("H2", "H1") for loop in compiled.loops()]
    assert re.fullmatch(" ".join(("H0EH0", last)[-loops:]), " ".join(found[:loops]))


def moves(compiled: Any) -> int:
    """Instructions of a loop that move spilled registers."""
    return max(sum("LDL" in text or "STL" in text for text in loop) for loop in compiled.loops())


# A step has D/16 products for the scores and 8 for the output of D columns; a consumer holds three steps.
@pytest.mark.parametrize(("name", "d"), [("causal", 128), ("causal", 64), ("window", 128)])
def test_softmax_is_scheduled_without_a_spill_in_the_loop(name: str, d: int):
    mask = library.causal if name == "causal" else library.sliding_window(1024)
    compiled = assembly(Definition(mask_mod=mask), d)
    check(compiled, products=72 if name == "window" else 2 * 3 * (d // 16 + 8))
    assert moves(compiled) == 0


def first_or_near(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & ((kv < 512) | (q - kv < 1024))


def test_two_ranges_of_blocks_have_the_code_of_one():
    """A loop over the masked blocks of both, and the overlapped one over all full blocks."""
    compiled = assembly(Definition(mask_mod=first_or_near), 128)
    check(compiled, products=72)
    assert moves(compiled) == 0 and compiled.spilled_bytes == 0


def test_a_row_function_without_states_is_pinned():
    """Half of a step's weights lie under the products for scores, half under the output; no division, one factor a score."""
    compiled = assembly(Definition(row=library.sigmoid, mask_mod=library.causal), 128, lse=False)
    assert compiled.products == 96 and compiled.warnings == () and compiled.spilled_bytes == 0
    assert any(len(step) < 460 for step in compiled.steps() if order(step) == "HEH1E0")


def test_a_soft_cap_costs_four_instructions_a_score():
    """Two of them on the unit for functions: an exponential and a reciprocal. The greatest score is scaled once."""
    compiled = assembly(Definition(score_mod=library.soft_cap(20.0), mask_mod=library.causal), 128)
    check(compiled, products=96)
    assert moves(compiled) < 16
    assert sum("MUFU.RCP" in text for text in compiled.loops()[1]) == 64
    assert len(compiled.loops()[1]) < 810


BIAS = torch.zeros(1, 4, 64, 64, dtype=torch.bfloat16)
IDS = torch.zeros(64, dtype=torch.int64)


@pytest.mark.parametrize("name", ["table", "documents"])
def test_captures_of_scores_and_keys_do_not_spill_in_the_loop(name: str):
    definition = (
        Definition(score_mod=library.bias(BIAS)) if name == "table" else Definition(mask_mod=library.document(IDS))
    )
    compiled = assembly(definition, 128)
    check(compiled, products=96 if name == "table" else 72)
    assert moves(compiled) < 24
    loops = [text for loop in compiled.loops() for text in loop]
    # Pairs of bf16 are widened without being taken apart. Numbers of queries stay where they were read; those of keys are
    # handed around in shared memory, in the masked loop of each consumer.
    assert name == "documents" or not any("PRMT" in text for text in loops)
    assert sum(text.startswith("STS") for text in loops) == (0 if name == "table" else 4)


SAME = library.document(IDS)


@pytest.mark.parametrize("mask", [SAME, library.or_masks(SAME, lambda b, h, q, kv: kv < 4)], ids=["one", "two runs"])
def test_tables_of_blocks_are_one_kernel(mask: Any):
    """Its vectors are rows and columns of tiles, also those that a loop carries."""
    text = emit(module(Definition(mask_mod=mask), d=64))
    (name,) = re.findall(r"^def (\w+_ranges_\w+)\(", text, re.MULTILINE)
    compiled = gluon_ahead.compile_ahead(text, name)
    assert compiled.spilled_bytes == 0 and compiled.warnings == ()


@pytest.mark.parametrize(("d", "dv", "products"), [(256, 256, 120), (96, 96, 132), (192, 128, 120), (128, 256, 72)])
def test_other_heads(d: int, dv: int, products: int):
    """Heads of 192 and more channels read queries from shared memory, through which the output leaves too.

    96 and 192 are sums of two powers of two: 6 and 12 products for the scores, 8 for each part of the output.
    """
    compiled = assembly(Definition(mask_mod=library.causal), d, dv=dv)
    check(compiled, products=products)
    assert moves(compiled) < (24 if d == 256 else 1)


def test_three_consumers_share_the_registers():
    """Heads of 64 channels without a mask: 192 queries of a block, 160 registers a thread."""
    compiled = assembly(Definition(), 64)
    check(compiled, products=108, registers=160)
    assert moves(compiled) == 0


def test_the_finding_is_kept_with_its_reason():
    from attn_engine.backends.gluon.examine import findings

    (found,) = findings(emit(module(Definition(mask_mod=library.causal))))
    assert (found.products, found.spilled_bytes, found.reason) == (96, 0, None)
    assert "no spills" in str(found)
    assert findings(emit(module(Definition(mask_mod=library.causal)))) == [found]
    assert "serialises" in str(Finding("k", 64, 0, 0, "wgmma").reason)
    assert "move spilled registers" in str(Finding("k", 64, 900, 99, "").reason)


GRADIENTS = ("q", "k", "v")


def parts(
    definition: Definition, wrt: tuple[str, ...] = GRADIENTS, d: int = 128, fused: bool = False
) -> list[driver.Part]:
    """Forward and backward for bf16, each at the level of the backend that has kernels for it."""
    traced = build(definition, dtype=torch.bfloat16, head_dim=d, head_dim_v=d)
    schedule = default_schedule(Target("gluon", "sm_90"), traced.module)
    request = Request(wrt, "gluon", schedule, Facts(positive_scale=True), deterministic=not fused)
    return driver.to_parts(driver.to_attn(traced.module, wrt), request)


@cache
def gradients(
    definition: Definition, d: int, kernel: str, wrt: tuple[str, ...] = GRADIENTS, fused: bool = False
) -> Any:
    from attn_engine.backends.triton.gluon_ahead import compile_ahead

    return compile_ahead(parts(definition, wrt, d, fused)[1].source, kernel)


def check_gradients(compiled: Any, shape: str) -> None:
    """Two loops in each consumer; exponentials run under the products that started before them."""
    assert compiled.warnings == ()
    assert compiled.shared <= 227 * 1024
    assert "setmaxnreg.inc.sync.aligned.u32 \t240" in compiled.ptx
    assert len(compiled.loops()) == 4
    assert all(re.fullmatch(shape, order(loop)) for loop in compiled.loops())
    assert not any("LDL" in text or "STL" in text for text in compiled.loops()[1])


# Scores and their gradients: D/16 products each; dq 4 of D columns, dk and dv 4 each. A consumer holds two loops of
# them, and the last product of dq, or the scores of the first step of dk and dv.
@pytest.mark.parametrize("d", [128, 64])
def test_dq_is_scheduled_without_a_spill(d: int):
    compiled = gradients(Definition(mask_mod=library.causal), d, "backward_dq")
    assert compiled.products == 2 * (2 * (2 * d // 16 + 4) + 4)
    assert compiled.spilled_bytes == 0
    check_gradients(compiled, "H2E?1E0")


def test_gradients_of_two_ranges_have_the_code_of_one():
    compiled = gradients(Definition(mask_mod=first_or_near), 64, "backward_dq")
    assert compiled.products == 88 - 2 * 2 * 8
    assert compiled.spilled_bytes == 0
    check_gradients(compiled, "H2E?1E0")


@pytest.mark.parametrize("d", [128, 64])
def test_dk_and_dv_are_scheduled_without_a_spill_in_the_loop(d: int):
    compiled = gradients(Definition(mask_mod=library.causal), d, "backward_dkdv")
    assert compiled.products == 2 * (2 * (2 * d // 16 + 8) + d // 16)
    assert compiled.spilled_bytes < 128
    check_gradients(compiled, "(HE)+H1H10")


# Five products: scores and their gradients D/16 each, dk and dv a sixteenth of the queries, dq 8 of 128 keys. A consumer
# holds two loops of them, and the scores of the first step; dq of the last step where it is a step late. With 64 channels
# a step has 128 queries, of two instructions each.
@pytest.mark.parametrize(("d", "queries"), [(128, 64), (64, 128)])
def test_fused_gradients_are_scheduled_with_few_spills_in_the_loop(d: int, queries: int):
    compiled = gradients(Definition(mask_mod=library.causal), d, "backward_dkdv", fused=True)
    late = int(d == 128)
    assert compiled.products == 2 * (2 * (2 * d // 16 + 2 * queries // 16 + 8) + d // 16 + 8 * late)
    assert compiled.warnings == ()
    assert compiled.shared <= 227 * 1024
    assert compiled.sass.count("UTMAREDG") == 2 * (2 + late)
    assert len(compiled.loops()) == 4
    assert compiled.spilled_bytes < (256 if d == 128 else 1024)
    moved = [sum("LDL" in text or "STL" in text for text in loop) for loop in compiled.loops()]
    assert max(moved) < (8 if d == 128 else 48) and max(moved[1::2]) < 16
    assert not any("FADD" in text for text in compiled.loops()[1])


def test_sums_of_dq_leave_in_pieces_of_sixteen_bytes():
    """As threads hold them: no thread gives anything away, and stores do not meet at banks."""
    loop = gradients(Definition(mask_mod=library.causal), 128, "backward_dkdv", fused=True).loops()[1]
    assert sum("STS.128" in text for text in loop) == 8
    assert not any("STS.64" in text or "SHFL" in text for text in loop)


def test_fused_gradients_fall_back_to_two_kernels():
    late = parts(Definition(), fused=True)[1]
    fused = late.plain() if late.plain is not None else late
    apart = fused.plain() if fused.plain is not None else fused
    assert str(late.tiles).count("async_reduce_add") > str(fused.tiles).count("async_reduce_add") > 0
    assert apart.backend.name == "gluon" and "@backward_dq(" in str(apart.tiles)
    shorter = apart.plain() if apart.plain is not None else apart
    assert shorter.plain is not None and shorter.plain().backend.name == "triton"


def test_a_trained_capture_costs_no_spill():
    """One with an index of queries, which the kernel of dq owns."""
    rows = torch.zeros(64)
    definition = Definition(score_mod=lambda s, b, h, q, kv: s * rows[q], mask_mod=library.causal)
    compiled = gradients(definition, 64, "backward_dq", (*GRADIENTS, "0"), fused=True)
    assert compiled.spilled_bytes == 0 and compiled.warnings == ()
    assert "atom" in compiled.ptx or "red" in compiled.ptx


def test_trained_slopes_stay_in_the_kernel_of_all_gradients():
    """Without their distances summed apart, what scores need beside the sums of dq moves through memory in every step."""
    slopes = torch.ones(4)
    definition = Definition(score_mod=library.alibi(slopes), mask_mod=library.sliding_window(1024))
    part = parts(definition, (*GRADIENTS, "0"), fused=True)[1]
    assert "@backward_dq(" not in str(part.tiles) and examine(part.source).reason is None
    assert part.plain is not None and part.plain().backend.name == "gluon"


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
