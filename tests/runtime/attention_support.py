"""Tensors for small attentions, and the dense formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_engine.runtime import driver


def qkv(
    batch: int = 2, heads: int = 2, sq: int = 20, skv: int = 20, d: int = 8, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Leaves that need gradients."""
    generator = torch.Generator().manual_seed(batch + heads + sq + skv + d)
    shapes = [(batch, heads, sq, d), (batch, heads, skv, d), (batch, heads, skv, d)]
    return [torch.randn(*s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float = 0.0, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v in float64; rows without a visible key give 0."""
    s = q.double() @ k.double().mT / q.shape[3] ** 0.5 + bias
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
    return s.softmax(-1).nan_to_num(0.0) @ v.double()


def triangle(sq: int, skv: int) -> Tensor:
    return torch.ones(sq, skv, dtype=torch.bool).tril()


class Compilations:
    """Counts what the compiler builds while it is entered."""

    def __init__(self, monkeypatch: Any):
        self.count = 0
        original: Callable[..., Any] = driver._compile

        def counting(*args: Any) -> Any:
            self.count += 1
            return original(*args)

        monkeypatch.setattr(driver, "_compile", counting)
