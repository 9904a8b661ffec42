"""Gradients of tables with an element per score: stored as blocks where each has one score, added up elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_engine
from attn_engine.errors import CaptureSizeError

torch.set_num_threads(1)
BATCH, HEADS, SQ, SKV, D = 2, 3, 40, 56, 16
Score = Callable[..., Any]

CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Score], bool, bool]] = {
    "pair": ((BATCH, HEADS, SQ, SKV), lambda t: lambda s, b, h, q, kv: s + t[b, h, q, kv], False, True),
    "pair, causal": ((BATCH, HEADS, SQ, SKV), lambda t: lambda s, b, h, q, kv: s + t[b, h, q, kv], True, True),
    "heads first": ((HEADS, BATCH, SQ, SKV), lambda t: lambda s, b, h, q, kv: s * t[h, b, q, kv], False, True),
    "longer": ((BATCH, HEADS, SQ + 3, SKV + 5), lambda t: lambda s, b, h, q, kv: s + t[b, h, q, kv], False, False),
    "longer, of sums with 0": (
        (BATCH, HEADS, SQ + 3, SKV + 5),
        lambda t: lambda s, b, h, q, kv: s + t[b, h, q + 0, kv + 0],
        False,
        False,
    ),
    "twice": (
        (BATCH, HEADS, SQ, SKV),
        lambda t: lambda s, b, h, q, kv: s * t[b, h, q, kv] + t[b, h, q, 0],
        False,
        False,
    ),
    "of all batches": ((1, HEADS, SQ, SKV), lambda t: lambda s, b, h, q, kv: s + t[0, h, q, kv], False, False),
}


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def expected(score: Score, mask: Any, leaves: list[Tensor], d_o: Tensor) -> tuple[Tensor, ...]:
    q, k, v = leaves[:3]
    s = q @ k.mT * D**-0.5
    index = [torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate(s.shape)]
    s = score(s, *index)
    s = s.masked_fill(~mask(*index).expand_as(s), -torch.inf) if mask is not None else s
    return torch.autograd.grad(s.softmax(-1) @ v, leaves, d_o)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"])
def test_gradients(name: str, dtype: torch.dtype, tolerance: float):
    shape, make, masked, stored = CASES[name]
    torch.manual_seed(1)
    table = torch.randn(shape, dtype=dtype).requires_grad_()
    mask = causal if masked else None
    attend = attn_engine.compile(score_mod=make(table), mask_mod=mask, backend="cpu")
    q, k, v = (torch.randn(BATCH, HEADS, n, D, dtype=dtype).requires_grad_() for n in (SQ, SKV, SKV))
    o = attend(q, k, v)
    d_o = torch.randn_like(o)
    found = torch.autograd.grad(o, (q, k, v, table), d_o)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, table)]
    for got, want in zip(found, expected(make(exact[3]), mask, exact, d_o.double()), strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() < tolerance * want.norm()
    (compiled,) = attend._memory.compiled.values()
    assert bool(compiled.signature.stored) == (stored and dtype != torch.float32)


def test_a_head_that_a_trained_table_does_not_have():
    """Blocks of gradients leave where the number says."""
    table = torch.zeros(BATCH, 2, SQ, SKV)
    attend = attn_engine.compile(score_mod=lambda s, b, h, q, kv: s + table[b, 5, q, kv], backend="cpu")
    q, k, v = (torch.randn(BATCH, HEADS, n, D) for n in (SQ, SKV, SKV))
    attend(q, k, v)
    table.requires_grad_()
    with pytest.raises(CaptureSizeError, match="2 entries along axis 1, which is indexed by 5: give it 6 entries"):
        attend(q, k, v)


def test_batches_that_share_a_table_run_side_by_side():
    """A table of all batches is read, and its gradient added to, by programs that run together."""
    tables = {"shared": torch.zeros(1, HEADS, SQ, SKV), "own": torch.zeros(BATCH, HEADS, SQ, SKV)}
    order: dict[str, str] = {}
    for name, table in tables.items():
        score = CASES["of all batches" if name == "shared" else "pair"][1](table.requires_grad_())
        text = attn_engine.compile(score_mod=score).ir("tile", attn_engine.View(head_dim=D, backward=True))
        launch = next(line for line in text.splitlines() if "tile.launch @backward_dq " in line)
        order[name] = launch.partition("grid(")[2].partition(",")[0]
    assert order["shared"] == "%batch" != order["own"]
