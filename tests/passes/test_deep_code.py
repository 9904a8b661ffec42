"""Functions whose code has exponentially more paths than values compile in a time that grows with their values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import attn_engine
from attn_engine.ir.walks import behind, bottom_up, operands_of
from tests.support.limits import limited

LEVELS = 32
"""2^32 paths."""
SECONDS = 120


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """What would take years fails."""
    with limited(SECONDS, "to visit more than the values of a function"):
        yield


def deep(x: Any) -> Any:
    for _ in range(LEVELS):
        x = x * 0.9 + x * x * 0.001
    return x


def far(x: Any) -> Any:
    for _ in range(LEVELS):
        x = (x + x // 2) % 60
    return x


def operands(row: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 1, 20, 16, requires_grad=True) for _ in range(3)]


def check(found: Callable[..., Any], wanted: Callable[..., Any], *leaves: torch.Tensor) -> None:
    """o and all gradients against the dense formula in float64."""
    exact = [x.detach().double().requires_grad_() for x in leaves]
    o, right = found(*leaves), wanted(*exact)
    d_o = torch.randn_like(o)
    mine = torch.autograd.grad(o, leaves, d_o)
    theirs = torch.autograd.grad(right, exact, d_o.double())
    for a, b in zip((o, *mine), (right, *theirs), strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.mT / 4


def test_scores_and_indices_and_masks():
    table = torch.randn(60, requires_grad=True)
    places = torch.arange(20)[:, None] - torch.arange(20)[None]

    def found(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return attn_engine.attention(
            q,
            k,
            v,
            score_mod=lambda s, b, h, i, j: deep(s) + table[far(i + j)],
            mask_mod=lambda b, h, i, j: (far(i - j) >= 3) | (i == j),
        )

    def wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        at = far(torch.arange(20)[:, None] + torch.arange(20)[None])
        visible = (far(places) >= 3) | (places == 0)
        return (deep(scores(q, k)) + table[at]).masked_fill(~visible, -torch.inf).softmax(-1) @ v

    check(found, wanted, *operands(), table)


def test_rows():
    def row(s: Any) -> Any:
        weights = deep(torch.relu(s))
        return weights / (1 + deep(weights.sum() * 0.01))

    def wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = deep(torch.relu(scores(q, k)))
        return weights / (1 + deep(weights.sum(-1, keepdim=True) * 0.01)) @ v

    check(lambda *qkv: attn_engine.attention(*qkv, row=row), wanted, *operands())


def test_mods_of_elements():
    own = attn_engine.compile(query_mod=deep, key_mod=lambda x: deep(x * torch.rsqrt((x * x).mean() + 1)))

    def wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        normed = k * torch.rsqrt((k * k).mean(-1, keepdim=True) + 1)
        return scores(deep(q), deep(normed)).softmax(-1) @ v

    check(own, wanted, *operands())


@pytest.mark.parametrize("backend", ["triton", "gluon", "tilelang", "hip"])
def test_text_of_every_backend(backend: str):
    compiled = attn_engine.compile(score_mod=lambda s, b, h, i, j: torch.where(far(i - j) > 3, deep(s), s))
    assert compiled.source(backend)


def test_every_value_once():
    from xdsl.dialects import arith
    from xdsl.dialects.builtin import f32
    from xdsl.ir import Block

    block = Block(arg_types=[f32])
    value = block.args[0]
    for _ in range(3000):  # deeper than Python's stack
        op = arith.AddfOp(value, value)
        block.add_op(op)
        value = op.result
    assert len(list(behind([value]))) == 3001
    depths: dict[Any, int] = {}
    assert (
        bottom_up(value, operands_of, lambda v: 1 + max((depths[o] for o in operands_of(v)), default=0), depths) == 3001
    )
