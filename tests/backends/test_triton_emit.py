"""Emitted Triton text, run in Triton's interpreter: against a dense reference and against the tile interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_engine.backends.triton.emit import emit
from attn_engine.backends.triton.interpret import interpret
from attn_engine.errors import InterpreterError, UnsupportedOpError, UnsupportedTileShapeError
from attn_engine.interpreters.tile import run_plan
from tests.backends.triton_support import map_kernel, parse, run, source_of

torch.set_num_threads(1)
FORWARD = (Path(__file__).parent.parent / "filecheck" / "dialects" / "tile_value_forward.mlir").read_text()
SCALE = 0.25
B, H, HK, SQ, SKV, D = 1, 4, 2, 100, 70, 16


def forward_inputs(dtype: torch.dtype, transposed: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(B, H, SQ, D), (B, HK, SKV, D), (B, HK, SKV, D), (B, H, SQ, D)]
    tensors = [torch.randn(s, dtype=torch.float32).to(dtype) for s in shapes]
    if transposed:
        tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    tensors[3].fill_(float("nan"))
    return [*tensors, torch.full((B, H, SQ), float("nan"))]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (t.double().repeat_interleave(H // HK, 1) for t in (k, v))
    scores = q.double() @ k.mT * SCALE
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def run_forward(text: str, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    tensors = forward_inputs(dtype)
    run(text, "plan", *tensors, SCALE)
    return torch.cat([tensors[3].float().reshape(-1), tensors[4].reshape(-1)])


def typed(dtype: torch.dtype) -> str:
    """The forward for another element type; casts to f32 from f32 do not exist."""
    if dtype == torch.float16:
        return FORWARD
    text = FORWARD.replace("f16", "f32")
    text = text.replace("%t = arith.truncf %e : f32 to f32", "%t = arith.addf %e, %zero : f32")
    text = text.replace("%r = arith.truncf %t : f32 to f32", "%r = arith.addf %t, %zero : f32")
    zero = "    %zero = arith.constant 0.0 : f32\n"
    return text.replace(
        "    %e = math.exp2 %d : f32\n      %t", f"{zero}    %e = math.exp2 %d : f32\n      %t"
    ).replace("    %t = arith.divf", f"{zero}    %t = arith.divf")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize("transposed", [False, True])
def test_forward_against_dense(dtype: torch.dtype, tolerance: float, transposed: bool):
    tensors = forward_inputs(dtype, transposed)
    run(typed(dtype), "plan", *tensors, SCALE)
    o, lse = dense(*tensors[:3])
    assert (tensors[3].double() - o).abs().max() < tolerance
    assert (tensors[4].double() - lse).abs().max() < 2e-6


def test_forward_against_the_tile_interpreter():
    mine, oracle = forward_inputs(torch.float16), forward_inputs(torch.float16)
    run(FORWARD, "plan", *mine, SCALE)
    run_plan(parse(FORWARD), "plan", [*oracle, SCALE])
    torch.testing.assert_close(mine[3], oracle[3], atol=1e-3, rtol=0)
    torch.testing.assert_close(mine[4], oracle[4], atol=1e-6, rtol=0)


def test_text_depends_on_the_module_alone():
    module = parse(FORWARD)
    assert emit(parse(str(module))) == emit(module)


MUTATIONS = {
    "a dense constant": ("%s0 = arith.constant dense<0.0>", "%s0 = arith.constant dense<1.0>"),
    "an op in a map": ("%d = arith.subf %a, %mx : f32", "%d = arith.addf %a, %mx : f32"),
    "operands in a map": ("%d = arith.subf %a, %c : f32", "%d = arith.subf %c, %a : f32"),
    "a predicate": ("arith.cmpi slt, %col, %lim", "arith.cmpi sle, %col, %lim"),
    "the step of the loop": ("to %skv step %n iter_args", "to %skv step %m iter_args"),
    "an operand of a product": ("%accn = tile.dot %ph, %vt, %accs", "%accn = tile.dot %ph, %vt, %acc"),
    "a reduction": ("%bl = tile.reduce sum", "%bl = tile.reduce max"),
    "a limit": (
        "%v[%b, %hk, %n0, %c0] dims [2, 3] bounded [0] limits(%skv)",
        "%v[%b, %hk, %n0, %c0] dims [2, 3] bounded [0] limits(%n)",
    ),
    "an index": ("tile.store %lt, %lse[%b, %h, %q0]", "tile.store %lt, %lse[%b, %h, %i]"),
    "a scalar": ("%group = arith.divsi %h, %hk : i32", "%group = arith.muli %h, %hk : i32"),
    "what a loop carries": ("scf.yield %mn, %ln, %accn", "scf.yield %mn, %li, %accn"),
    "the grid": ("grid(%nq, %h, %b)", "grid(%b, %h, %b)"),
}


@pytest.fixture(scope="module")
def intact() -> torch.Tensor:
    return run_forward(FORWARD)


@pytest.mark.parametrize("what", MUTATIONS)
def test_every_part_of_the_text_counts(what: str, intact: torch.Tensor):
    before, after = MUTATIONS[what]
    assert FORWARD.count(before) == 1
    assert not torch.equal(run_forward(FORWARD.replace(before, after)), intact)


def test_axis_of_a_reduction():
    text = """
    tile.kernel @kernel(%x: !tile.global<2 x f32>, %y: !tile.global<1 x f32>) {
      %c0 = arith.constant 0 : i32
      %t = tile.load %x[%c0, %c0] dims [0, 1] : !tile.global<2 x f32> -> tensor<16x16xf32>
      %r = tile.reduce sum %t, AXIS : tensor<16x16xf32> -> tensor<16xf32>
      tile.store %r, %y[%c0] dims [0] : tensor<16xf32>, !tile.global<1 x f32>
      tile.end
    }
    tile.plan @plan(%x: !tile.global<2 x f32>, %y: !tile.global<1 x f32>) {
      %one = arith.constant 1 : i32
      tile.launch @kernel grid(%one) args(%x, %y) : !tile.global<2 x f32>, !tile.global<1 x f32>
      tile.end
    }"""
    x, y = torch.randn(16, 16), torch.empty(16)
    for axis in (0, 1):
        run(text.replace("AXIS", str(axis)), "plan", x, y)
        torch.testing.assert_close(y, x.sum(axis))


def test_empty_tensors_launch_nothing():
    tensors = forward_inputs(torch.float16)
    empty = [t[:0] for t in tensors]
    run(FORWARD, "plan", *empty, SCALE)


def test_no_keys_gives_what_the_text_says():
    q, k, v, o, lse = forward_inputs(torch.float16)
    run(FORWARD, "plan", q, k[:, :, :0], v[:, :, :0], o, lse, SCALE)
    assert torch.isneginf(lse).all()


def test_bfloat16_is_refused_by_the_interpreter():
    with pytest.raises(InterpreterError, match="bfloat16"):
        interpret(source_of(FORWARD.replace("f16", "bf16")))


def test_unknown_op_names_op_and_backend():
    text = map_kernel("    %y = arith.ceildivui %a, %a : i32\n    tile.yield %y : i32", ["i32"], "i32")
    with pytest.raises(UnsupportedOpError, match=r"triton.*arith\.ceildivui"):
        source_of(text)


def test_sizes_are_powers_of_two():
    text = map_kernel("    %y = arith.addf %a, %a : f32\n    tile.yield %y : f32", ["f32"], "f32", 48)
    with pytest.raises(UnsupportedTileShapeError, match="48"):
        source_of(text)
