"""Generated Gluon kernels: what an assembler makes of them without a device."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch

from attn_engine import library
from attn_engine.backends.gluon.emit import emit
from attn_engine.backends.gluon.examine import Finding, examine
from attn_engine.backends.triton import gluon_ahead
from attn_engine.frontend import Definition
from tests.support.gluon import GRADIENTS, module, parts

pytest.importorskip("triton")


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
