"""Gradients of tables that are read by the distance of two positions: summed along diagonals of blocks, then added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

import attn_engine
from attn_engine.backends.backend import get_backend
from attn_engine.backends.triton.interpret import interpret
from attn_engine.dialects import attn, tile
from attn_engine.interpreters.tile import run_plan
from attn_engine.ir.schedule import KernelSchedule, Schedule
from attn_engine.passes.lowering.diagonals import by_distance
from attn_engine.runtime import driver
from attn_engine.runtime.driver import Request
from attn_engine.runtime.inspect import View
from attn_engine.universe import make_context

torch.set_num_threads(1)
BATCH, HEADS, KV_HEADS, SQ, SKV, D, SCALE = 2, 2, 1, 22, 35, 16, 0.3
Score = Callable[..., Any]


def t5(table: Tensor) -> Score:
    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        n = torch.clamp(q - kv, min=0)
        far = torch.clamp(4 + (torch.log(torch.clamp(n, min=1) / 4) * 2).to(torch.int32), max=11)
        return s + table[h, torch.where(n < 4, n, far)]

    return score


def relative(table: Tensor) -> Score:
    return lambda s, b, h, q, kv: s + table[h, q - kv + SKV - 1]


def shared_by_heads(table: Tensor) -> Score:
    """Negative indices count from the end; a factor, whose gradient is not the score's."""
    return lambda s, b, h, q, kv: s * table[kv - q]


def per_batch(table: Tensor) -> Score:
    return lambda s, b, h, q, kv: s + table[b, torch.clamp(kv - q, -3, 3) + 3]


CASES: dict[str, tuple[Callable[[Tensor], Score], tuple[int, ...]]] = {
    "t5": (t5, (HEADS, 12)),
    "relative": (relative, (HEADS, SQ + SKV - 1)),
    "shared by heads": (shared_by_heads, (SQ + SKV,)),
    "per batch": (per_batch, (BATCH, 7)),
}
BLOCKS = {"tall": (32, 16), "square": (16, 16), "wide": (16, 32)}


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def lowered(score: Score, mask: Any) -> tuple[attn_engine.Attention, ModuleOp, tuple[str, ...]]:
    attention = attn_engine.compile(score_mod=score, mask_mod=mask)
    view = View(torch.float32, D, backward=True)
    wrt = attention._wrt(view)
    return attention, driver.to_attn(attention._traced(view), wrt), wrt


def tiles(score: Score, mask: Any, blocks: tuple[int, int]) -> ModuleOp:
    _, module, wrt = lowered(score, mask)
    kernel = KernelSchedule(*blocks, 4, 1)
    return driver.to_tile(module, Request(wrt, "triton", Schedule(*[kernel] * 4)), get_backend("triton"))


def expected(score: Score, mask: Any, leaves: list[Tensor], d_o: Tensor) -> tuple[Tensor, ...]:
    q, k, v = leaves[:3]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    s = q @ k.mT * SCALE
    index = [torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate(s.shape)]
    s = score(s, *index)
    seen = mask(*index) if mask is not None else torch.ones((), dtype=torch.bool)
    p = s.masked_fill(~seen.expand_as(s), -torch.inf).softmax(-1)
    return torch.autograd.grad(p @ v, leaves, d_o)


def interpreted(module: ModuleOp) -> dict[str, Callable[..., None]]:
    return {name: lambda *args, name=name: run_plan(module, name, args) for name in ("forward", "backward")}


@pytest.mark.parametrize(
    ("name", "blocks"), [*((name, "tall") for name in CASES), *(("relative", b) for b in BLOCKS if b != "tall")]
)
def test_gradients(name: str, blocks: str):
    make, shape = CASES[name]
    torch.manual_seed(3)
    table = torch.randn(shape).requires_grad_()
    mask = causal if name == "t5" else None
    module = tiles(make(table), mask, BLOCKS[blocks])
    assert any(isinstance(op, tile.AddDiagonalsOp) for op in module.walk())
    again = Parser(make_context(), str(module)).parse_module()
    shapes = [(BATCH, HEADS, SQ, D), (BATCH, KV_HEADS, SKV, D), (BATCH, KV_HEADS, SKV, D)]
    q, k, v = (torch.randn(s) for s in shapes)
    d_o = torch.randn(shapes[0])
    exact = [x.double().requires_grad_() for x in (q, k, v, table.detach())]
    wanted = expected(make(exact[3]), mask, exact, d_o.double())
    plain = table.detach()
    for plans in (interpret(get_backend("triton").emit(module)), interpreted(again)):
        o = torch.full_like(q, torch.nan)
        saved = [torch.full((BATCH, HEADS, SQ), torch.nan)]
        plans["forward"](q, k, v, o, *saved, plain, SCALE)
        found = [torch.full_like(x, torch.nan) for x in (q, k, v, plain)]
        plans["backward"](q, k, v, o, d_o, *saved, plain, *found, SCALE)
        for gradient, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(gradient.double(), right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("score", "fits"),
    [
        (lambda w: lambda s, b, h, q, kv: s + w[h, (q - kv) % 5], True),
        (lambda w: lambda s, b, h, q, kv: s + w[h, (q // 2 - kv // 2) % 5], False),
        (lambda w: lambda s, b, h, q, kv: s + w[h, (q + kv) % 5], False),
        (lambda w: lambda s, b, h, q, kv: s + w[q % 4, (q - kv) % 5], False),
        (lambda w: lambda s, b, h, q, kv: s + w[h, ((q + 3) - (kv - h)) % 5], True),
        (lambda w: lambda s, b, h, q, kv: s + w[h, (2 * q - 2 * kv) % 5], False),
    ],
)
def test_what_depends_on_the_distance_alone(score: Callable[[Tensor], Score], fits: bool):
    """What is not recognised keeps its additions element by element."""
    _, module, _ = lowered(score(torch.zeros(4, 5).requires_grad_()), None)
    op = next(o for o in module.walk() if isinstance(o, attn.BackwardOp))
    assert bool(by_distance(op)) == fits
