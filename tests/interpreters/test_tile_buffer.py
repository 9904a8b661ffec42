"""The buffered interpreter: the hand-written forward kernels of TileLang and HIP, and faults planted in them that must show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser
from xdsl.utils.exceptions import VerifyException

from attn_engine.dialects.tile_buffer_layout import WAVE, MfmaAttr, PaddedAttr, Part, SwizzledAttr, ownership
from attn_engine.interpreters.tile_buffer import MissingBarrierError, run_plan
from attn_engine.universe import make_context

FILES = Path(__file__).parents[1] / "filecheck"
SOURCES = {
    name: re.sub(r"^ *//.*\n", "", (FILES / "tile" / f"{name}_forward.mlir").read_text(), flags=re.MULTILINE)
    for name in ("tilelang", "hip")
}
SCALE = 64**-0.5


def parse(text: str) -> ModuleOp:
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module


MODULES = {name: parse(text) for name, text in SOURCES.items()}


def errors(
    module: ModuleOp, *, causal: bool, sq: int, skv: int, heads: tuple[int, int, int] = (1, 2, 1), exact: bool = False
) -> tuple[float, float]:
    """Largest errors of the output and of lse (NaN counts as infinite), against dense attention in float64."""
    batch, q_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(sq * 1000 + skv)
    q = torch.randn(batch, q_heads, sq, 64, generator=generator).half()
    k, v = (torch.randn(batch, kv_heads, skv, 64, generator=generator).half() for _ in range(2))
    o = torch.full(q.shape, torch.nan, dtype=torch.float64 if exact else torch.float16)
    lse = torch.full((batch, q_heads, sq), torch.nan, dtype=torch.float64 if exact else torch.float32)
    run_plan(module, f"forward_{'causal' if causal else 'full'}", [q, k, v, o, lse, SCALE], exact=exact)
    wide_k, wide_v = (x.double().repeat_interleave(q_heads // kv_heads, 1) for x in (k, v))
    s = q.double() @ wide_k.transpose(2, 3) * SCALE
    if causal:
        s = s.masked_fill(torch.arange(sq)[:, None] < torch.arange(skv), -torch.inf)
    wrong = [o.double() - s.softmax(-1) @ wide_v, lse.double() - s.logsumexp(-1)]
    out, statistics = (float(x.abs().nan_to_num(torch.inf).max()) for x in wrong)
    return out, statistics


@pytest.mark.parametrize(("sq", "skv"), [(1, 1), (64, 64), (65, 65), (130, 130), (65, 130), (130, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_forward(name: str, causal: bool, sq: int, skv: int):
    out, lse = errors(MODULES[name], causal=causal, sq=sq, skv=skv)
    assert out < 2e-3 and lse < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_groups_of_heads(name: str, causal: bool):
    out, lse = errors(MODULES[name], causal=causal, sq=70, skv=70, heads=(2, 6, 2))
    assert out < 2e-3 and lse < 1e-5


@pytest.mark.parametrize("name", SOURCES)
def test_exact(name: str):
    out, lse = errors(MODULES[name], causal=True, sq=130, skv=130, exact=True)
    assert out < 1e-7 and lse < 1e-7  # what remains are the f32 constants log2(e) and ln(2)


@pytest.mark.parametrize("name", SOURCES)
def test_printed_text_is_read_again(name: str):
    text = str(MODULES[name])
    assert str(parse(text)) == text


def plant(name: str, old: str, new: str) -> str:
    assert old in SOURCES[name]
    return SOURCES[name].replace(old, new, 1)


WRONG = {
    "carries swapped": ("into (%mn, %alpha)", "into (%alpha, %mn)"),
    "carry copied the wrong way": ("tile.copy %mn, %m :", "tile.copy %m, %mn :"),
    "accumulator scaled by the sum": ("(%acc, %alpha) axes", "(%acc, %bl) axes"),
    "sum not rescaled": ("(%l, %alpha, %bl) axes", "(%l, %l, %bl) axes"),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("name", SOURCES)
def test_planted_faults_give_wrong_results(name: str, fault: str):
    out, lse = errors(parse(plant(name, *WRONG[fault])), causal=True, sq=130, skv=130)
    assert out > 1e-2 or lse > 1e-2


@pytest.mark.parametrize("name", SOURCES)
def test_scores_that_are_not_cleared_in_the_loop(name: str):
    (fill,) = re.findall(r"    tile\.buffer_fill %s, .*\n", SOURCES[name])
    text = SOURCES[name].replace(fill, "").replace("  scf.for", f"{fill}  scf.for")
    out, _ = errors(parse(text), causal=True, sq=130, skv=130)
    assert out > 1e-2


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (
            "tilelang",
            "tile.gemm %p, %vs, %acc ieee split rows : !tile.buffer<64x64xf16, register>, !tile.buffer<64x64xf16, shared>",
            "tile.gemm %acc, %acc, %acc ieee split rows : !tile.buffer<64x64xf32, register>, !tile.buffer<64x64xf32, register>",
        ),
        (
            "hip",
            "tile.gemm %ks, %qt, %s ieee : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x128xf16, register>",
            "tile.gemm %s, %s, %s ieee : !tile.buffer<64x128xf32, register>, !tile.buffer<64x128xf32, register>",
        ),
    ],
)
def test_an_accumulator_used_twice(name: str, old: str, new: str):
    with pytest.raises(VerifyException, match="the accumulator of a product is also its operand"):
        parse(plant(name, old, new))


def test_reading_what_nothing_wrote():
    text = plant("tilelang", "  tile.buffer_fill %l, %nothing : !tile.buffer<64xf32, register>, f32\n", "")
    with pytest.raises(VerifyException, match="reads buffer %l, which may not have been written before"):
        parse(text)


@pytest.mark.parametrize(("place", "op"), [(0, "tile.copy_in touches %ks"), (1, "tile.gemm touches %ks")])
def test_a_missing_barrier(place: int, op: str):
    at = [match.start() for match in re.finditer(r"    tile\.barrier\n", SOURCES["hip"])][place]
    text = SOURCES["hip"][:at] + SOURCES["hip"][at:].replace("    tile.barrier\n", "", 1)
    with pytest.raises(MissingBarrierError, match=op):
        errors(parse(text), causal=False, sq=130, skv=130)


EVERY_OP = parse((FILES / "dialects" / "tile_buffer.mlir").read_text())


@pytest.mark.parametrize("exact", [False, True])
def test_every_op(exact: bool):
    torch.manual_seed(0)
    x = torch.randn(100, 32).half()
    y, m = torch.ones(100, 100), torch.zeros(100)
    run_plan(EVERY_OP, "run", [x, y, m], exact=exact)
    gram = (x.float() @ x.float().T).relu()
    torch.testing.assert_close(y, 1 + gram)
    torch.testing.assert_close(m, gram[:, 64:].amax(1))


def test_chain():
    torch.manual_seed(0)
    x, y, total = torch.randn(128, 64).half(), torch.zeros(128, 64), torch.zeros(128)
    run_plan(EVERY_OP, "run_chain", [x, y, total])
    s = x[:64].float() @ x.float().T
    torch.testing.assert_close(total, s.sum(0), atol=1e-3, rtol=1e-5)
    p = (s - s.sum(0)).half().float()
    torch.testing.assert_close(y, (s + x[:64].float().T @ p).T, atol=1e-1, rtol=1e-3)


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize("instruction", [(32, 32, 8), (16, 16, 16), (16, 16, 32), (32, 32, 2)])
def test_lanes_hold_every_element_of_a_block_once(instruction: tuple[int, int, int], part: Part):
    layout = MfmaAttr(instruction, part, (1, 1))
    places = [layout.place(lane, register) for lane in range(WAVE) for register in range(layout.registers)]
    height, width = layout.block
    assert sorted(places) == [(row, column) for row in range(height) for column in range(width)]


def test_which_products_chain():
    """The accumulator is the next right operand where four neighbours of a column lie in one lane."""
    for instruction, alike in (((32, 32, 8), True), ((16, 16, 32), True), ((32, 32, 2), False)):
        acc, b = (MfmaAttr(instruction, part, (1, 4)) for part in (Part.ACC, Part.B))
        assert (ownership(acc) == ownership(b)) is alike
    assert ownership(MfmaAttr((32, 32, 8), Part.ACC, (4, 1))) != ownership(MfmaAttr((32, 32, 8), Part.B, (4, 1)))


def test_swizzled_rows_are_permutations():
    layout = SwizzledAttr(8, 1, 8)
    rows = [[layout.column(row, column) for column in range(64)] for row in range(8)]
    assert all(sorted(row) == list(range(64)) for row in rows)
    assert len({row[0] for row in rows}) == 8
    assert str(PaddedAttr(8)) == "#tile.padded<8>"


@pytest.mark.parametrize(("depth", "size"), [(16, 32), (32, 16)])
def test_grouped_columns_lie_as_a_lane_multiplies_them(depth: int, size: int):
    """The elements along k of one lane lie side by side, in the order of its registers."""
    padded, layout = PaddedAttr(8, depth), MfmaAttr((size, size, depth), Part.A, (1, 1))
    assert sorted(map(padded.column, range(64))) == list(range(64))
    for lane in range(0, WAVE, size):
        places = [padded.column(layout.place(lane, register)[1]) for register in range(8)]
        assert places == list(range(places[0], places[0] + 8))
        assert places[0] % 8 == 0
