"""What scores compute, or read, by the distance of two positions: once for each distance, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from xdsl.dialects import arith, math, scf
from xdsl.dialects.builtin import ModuleOp, f32, i64
from xdsl.ir import Block, Operation, SSAValue

import attn_engine
from attn_engine import library
from attn_engine.backends.backend import get_backend
from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.distances import ByDistance, costly
from attn_engine.runtime import driver
from attn_engine.runtime.choice import consider
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Request
from attn_engine.runtime.inspect import View
from attn_engine.runtime.schedules import default_schedule, heads_of
from tests.support.compare import Make, check, qkv, randn
from tests.support.engines import ALL, ORACLE, SMALL

SQ, SKV, HEADS = 37, 51, 4
IDS = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 14, 1, 33]))
Functions = dict[str, Any]


def t5(table: Tensor) -> Functions:
    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        n = torch.clamp(q - kv, min=0)
        far = torch.clamp(4 + (torch.log(torch.clamp(n, min=1) / 4) * 2).to(torch.int32), max=11)
        return s + table[h, torch.where(n < 4, n, far)]

    return {"score_mod": score, "mask_mod": library.causal}


def relative(table: Tensor) -> Functions:
    return {"score_mod": lambda s, b, h, q, kv: s + table[h, q - kv + SKV - 1]}


def windowed(table: Tensor) -> Functions:
    """A factor, and a mask by the same distance; negative indices count from the end."""

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv - q < 9) & (q - kv < 20)

    return {"score_mod": lambda s, b, h, q, kv: s * torch.tanh(table[b, kv - q]), "mask_mod": mask}


def everywhere(table: Tensor) -> Functions:
    """No index of batch or head, a comparison of positions, and another function of the row."""

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s - torch.where(q >= kv + 3, torch.log1p(torch.abs(q - kv).float()), table[1]) * 0.3

    return {"score_mod": score, "row": library.sigmoid}


def twice(table: Tensor, slopes: Tensor) -> Functions:
    """Two parts, one of them inside of a function of the score, and documents."""

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        near = torch.exp(-torch.abs(q - kv) * slopes[h])
        return torch.tanh(s + table[h, torch.clamp(q - kv, -3, 3) + 3]) + near

    return {"score_mod": score, "mask_mod": library.document(IDS)}


def nothing_else(table: Tensor) -> Functions:
    """Scores of distances alone: their extremum, and how many attain it, are numbers of the row."""

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return table[h] + torch.log1p(torch.abs(q - kv).float())

    return {"score_mod": score, "row": lambda s: s - s.amax(), "mask_mod": library.causal}


CASES: dict[str, tuple[Make, dict[str, Tensor]]] = {
    "t5": (t5, {"table": randn(HEADS, 12)}),
    "relative": (relative, {"table": randn(HEADS, SQ + SKV - 1)}),
    "window": (windowed, {"table": randn(2, SQ + SKV)}),
    "everywhere": (everywhere, {"table": randn(3)}),
    "nothing else": (nothing_else, {"table": randn(HEADS)}),
    "twice": (twice, {"table": randn(HEADS, 7), "slopes": randn(HEADS).abs()}),
}


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("name", CASES)
def test_every_backend(name: str, backend: str):
    """Lengths that differ and are no multiples of blocks, two heads for each one of keys, two batches."""
    make, captures = CASES[name]
    check(make, qkv(b=2, h=HEADS, hkv=2, sq=SQ, skv=SKV), captures, backend, schedule=SMALL)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tables_of_half_precision(dtype: torch.dtype):
    """What is kept for a distance is the number itself, in f32."""
    make, captures = CASES["relative"]
    captures = {name: c.to(dtype) for name, c in captures.items()}
    check(make, qkv(h=HEADS, sq=SQ, skv=SKV, dtype=dtype), captures, "cpu", schedule=SMALL)


def lowered(score: Any, backward: bool = False) -> tuple[ModuleOp, tuple[str, ...]]:
    attention = attn_engine.compile(score_mod=score)
    view = View(torch.bfloat16, 64, backward=backward)
    return driver.to_attn(attention._traced(view), attention._wrt(view)), attention._wrt(view)


def tiles(score: Any, backend: str, backward: bool = False) -> ModuleOp:
    module, wrt = lowered(score, backward)
    schedule = default_schedule(Target("triton", "sm_90"), module)
    return driver.to_tile(module, Request(wrt, "triton", schedule), get_backend(backend))


TABLE, SLOPES, POSITIONS = torch.zeros(4, 9), torch.zeros(4), torch.zeros(64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("score", "parts"),
    [
        (lambda s, b, h, q, kv: s + TABLE[h, (q - kv) % 5], 1),
        (lambda s, b, h, q, kv: s + TABLE[h, (q - kv) % 5] * torch.exp((kv - q) * 0.1), 1),
        (lambda s, b, h, q, kv: torch.tanh(s + TABLE[h, (q - kv) % 5]) * torch.exp((kv - q) * 0.1) / 3, 2),
        (lambda s, b, h, q, kv: s + TABLE[q % 4, torch.exp((q - kv) * 0.1).to(torch.int32)], 1),
        (lambda s, b, h, q, kv: s + torch.where(q > kv + 2, TABLE[h, 0], TABLE[1, 3]) / (1 + abs(q - kv)), 1),
        # too cheap, of a position alone, or of more than the distance
        (lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q), 0),
        (lambda s, b, h, q, kv: s + TABLE[h, kv % 5] + TABLE[h, q % 5], 0),
        (lambda s, b, h, q, kv: s + TABLE[h, (2 * q - 2 * kv) % 5], 0),
        (lambda s, b, h, q, kv: s + TABLE[h, (POSITIONS[q] - POSITIONS[kv]) % 5], 0),
        (lambda s, b, h, q, kv: s + TABLE[h, (s.to(torch.int32) + q - kv) % 5], 0),
        (lambda s, b, h, q, kv: s + torch.where(q > 2 * kv, TABLE[h, 0], TABLE[1, 3]) / (1 + h), 0),
    ],
)
def test_parts_that_are_worth_it(score: Callable[..., Any], parts: int):
    module, _ = lowered(score)
    op = next(o for o in module.walk() if isinstance(o, attn.OnlineOp))
    assert op.score_mod is not None
    assert len(costly(op.score_mod.block)) == parts
    kernels = [o for o in tiles(score, "triton").ops if isinstance(o, tile.KernelOp)]
    assert len(kernels) == 1 + (parts > 0)


def test_reductions_of_a_row_are_not_of_distances():
    """Of what depends on distances alone, or on no position: which keys a row sees depends on its place."""
    x, steps = Block(arg_types=[i64] * 4), list[SSAValue]()
    makers: list[Callable[[], Operation]] = [
        lambda: arith.SubiOp(x.args[2], x.args[3]),
        lambda: arith.SIToFPOp(steps[0], f32),
        lambda: arith.SIToFPOp(x.args[1], f32),
        lambda: attn.RowReduceOp(attn.ReduceKind.SUM, steps[1]),
        lambda: attn.RowReduceOp(attn.ReduceKind.SUM, steps[2]),
        lambda: arith.MulfOp(steps[1], steps[2]),
        lambda: arith.MulfOp(steps[1], steps[4]),
    ]
    for make in makers:
        op = make()
        x.add_op(op)
        steps.append(op.results[0])
    distances = ByDistance(x)
    assert [distances.holds(value) for value in steps] == [True, True, True, False, False, True, False]


@pytest.mark.parametrize(
    ("backend", "read"),
    [("triton", tile.LoadDiagonalsOp), ("cpu", tile.LoadDiagonalsOp), (ORACLE, tile.GatherOp)],
)
def test_loops_compute_nothing_by_distance(backend: str, read: type[Operation]):
    score = t5(torch.zeros(4, 12))["score_mod"]
    kernels = [o for o in tiles(score, backend, backward=True).ops if isinstance(o, tile.KernelOp)]
    loops = [o for kernel in kernels for o in kernel.walk() if isinstance(o, scf.ForOp)]
    steps = [o for o in loops if any(isinstance(inner, tile.DotOp) for inner in o.body.block.ops)]
    assert len(steps) == 6
    for step in steps:
        assert sum(isinstance(o, read) for o in step.walk()) == 1
        assert not any(isinstance(o, math.Log2Op | math.LogOp | arith.DivfOp) for o in step.walk())


def test_asynchronous_kernels_take_them():
    """A table of all distances counts as one operation a score, and takes no shared memory, which it does in plain loops."""
    module = attn_engine.compile(score_mod=t5(torch.zeros(4, 12))["score_mod"])._traced(View())
    assert (heads_of(module, loads=True).gathered, heads_of(module).gathered) == (0, 4)
    assert consider(module, anywhere=True).ranked[0].backend == "gluon"
