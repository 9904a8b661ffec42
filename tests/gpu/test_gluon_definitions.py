"""More definitions and heads on the Gluon backend, on a Hopper GPU, against dense attention in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_engine
from attn_engine import library
from attn_engine.backends.gluon.build import check
from tests.gpu.test_gluon_generated import dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not check().ok, reason=check().reason)]
DEVICE, BACKEND = "cuda", "gluon"
SHAPES = (((2, 4, 2), (1000, 777)), ((1, 4, 2), (129, 300)), ((1, 4, 1), (512, 512)))
"""Batch, heads of queries and of keys; queries and keys."""
LARGEST_ERROR = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
LARGEST_OF_GRADIENTS = 1e-2


@dataclass(frozen=True)
class Case:
    """A definition and how wide its heads are."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    row: Callable[..., Any] | None = None
    d: int = 128
    dv: int = 128
    dtype: torch.dtype = torch.bfloat16

    def attend(self, *tensors: Tensor, **options: Any) -> Any:
        functions = {"score_mod": self.score_mod, "mask_mod": self.mask_mod, "row": self.row}
        return attn_engine.attention(*tensors, **functions, backend=BACKEND, **options)

    def dense(self, *tensors: Tensor) -> Tensor:
        return dense(*(x.double() for x in tensors), self.score_mod, self.mask_mod, self.row)


def first_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 4


def table(dtype: torch.dtype) -> Callable[..., Any]:
    return library.bias(torch.randn(4, 1000, 784, device=DEVICE).to(dtype))


def slopes() -> Tensor:
    return 2.0 ** (-2.0 * torch.arange(1, 5, device=DEVICE))


def _logaddexp(of_head: Tensor) -> Callable[..., Any]:
    return lambda s, b, h, q, kv: torch.logaddexp(s, of_head[h])


def _some_below_zero(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    """All scores of every third row."""
    return torch.where(q % 3 == 0, s - 300.0, s)


CAUSAL = library.causal
SINKS = library.or_masks(library.sliding_window(200), library.and_masks(CAUSAL, first_keys))
FORWARD: dict[str, Callable[[], Case]] = {
    "causal f16": lambda: Case(mask_mod=CAUSAL, dtype=torch.float16),
    "prefix": lambda: Case(mask_mod=library.prefix_lm(150)),
    "alibi": lambda: Case(library.alibi(slopes()), CAUSAL),
    "sigmoid": lambda: Case(row=library.sigmoid, mask_mod=CAUSAL),
    "relu": lambda: Case(row=library.relu, mask_mod=CAUSAL),
    "first keys": lambda: Case(mask_mod=SINKS),
    "documents": lambda: Case(
        mask_mod=library.and_masks(CAUSAL, library.document(torch.arange(1000, device=DEVICE) // 130))
    ),
    "table bf16": lambda: Case(table(torch.bfloat16)),
    "table f32": lambda: Case(table(torch.float32), CAUSAL),
    "table D64": lambda: Case(table(torch.bfloat16), d=64, dv=64),
    "causal D96": lambda: Case(mask_mod=CAUSAL, d=96, dv=96),
    "causal D256": lambda: Case(mask_mod=CAUSAL, d=256, dv=256),
    "cap D256": lambda: Case(library.soft_cap(20.0), d=256, dv=256),
    "sine": lambda: Case(lambda s, b, h, q, kv: s + torch.sin(s), CAUSAL),
    "some below zero": lambda: Case(_some_below_zero),
    "some below zero D64": lambda: Case(_some_below_zero, CAUSAL, d=64, dv=64),
    "cosine of many turns": lambda: Case(lambda s, b, h, q, kv: s + torch.cos(200 * s)),
    "sum of exponentials": lambda: Case(_logaddexp(torch.randn(4, device=DEVICE)), CAUSAL),
    "to the last key": lambda: Case(mask_mod=lambda b, h, q, kv: (kv << 1) >= q - 4),
    "192 and 128": lambda: Case(mask_mod=CAUSAL, d=192),
    "128 and 256": lambda: Case(dv=256),
}
GRADIENTS: dict[str, Callable[[], Case]] = {
    "prefix": FORWARD["prefix"],
    "alibi": FORWARD["alibi"],
    "trained alibi": lambda: Case(library.alibi(slopes().requires_grad_()), CAUSAL),
    "sigmoid": FORWARD["sigmoid"],
    "documents": FORWARD["documents"],
    "table bf16": FORWARD["table bf16"],
    "table f32": FORWARD["table f32"],
    "sine": FORWARD["sine"],
    "sum of exponentials": FORWARD["sum of exponentials"],
}


def operands(case: Case, heads: tuple[int, int, int], sizes: tuple[int, int]) -> list[Tensor]:
    (batch, q_heads, kv_heads), (sq, skv) = heads, sizes
    shapes = ((q_heads, sq, case.d), (kv_heads, skv, case.d), (kv_heads, skv, case.dv))
    return [torch.randn(batch, *shape, device=DEVICE).to(case.dtype) for shape in shapes]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name: str):
    torch.manual_seed(0)
    case = FORWARD[name]()
    for heads, sizes in SHAPES:
        tensors = operands(case, heads, sizes)
        assert error(case.attend(*tensors), case.dense(*tensors)) < LARGEST_ERROR[case.dtype], sizes


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(name: str, deterministic: bool):
    """The same bits twice where they are asked for."""
    torch.manual_seed(0)
    case = GRADIENTS[name]()
    for heads, sizes in SHAPES:
        leaves = [x.requires_grad_() for x in operands(case, heads, sizes)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        o = case.attend(*leaves, deterministic=deterministic)
        weight = torch.randn_like(o)
        found = torch.autograd.grad(o, leaves, weight, retain_graph=True)
        wanted = torch.autograd.grad(case.dense(*exact), exact, weight.double())
        assert all(error(a, b) < LARGEST_OF_GRADIENTS for a, b in zip(found, wanted, strict=True)), sizes
        if deterministic:
            assert all(map(torch.equal, found, torch.autograd.grad(o, leaves, weight)))
