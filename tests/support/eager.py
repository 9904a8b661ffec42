"""Dense attention in plain torch, float64, by calling the user's functions on tensors: independent of all IR.

Score functions and masks are called once with indices that broadcast; a row function of the user is called
row by row on the visible scores, so that `s.amax()` means what it says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Functions = dict[str, Callable[..., Any]]


def eager_attention(q: Tensor, k: Tensor, v: Tensor, functions: Functions, scale: float) -> tuple[Tensor, Tensor]:
    """(o, lse) in float64, differentiable; lse is that of the visible scores, whatever the row function."""
    q, k, v = (_modified(functions.get(f"{n}_mod"), t.double()) for n, t in (("query", q), ("key", k), ("value", v)))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    shape = (*q.shape[:3], k.shape[2])
    indices = _grid(*shape)
    s = scale * (q @ k.mT)
    if "score_mod" in functions:
        s = torch.as_tensor(functions["score_mod"](s, *indices)).double().expand(shape)
    visible = torch.ones(shape, dtype=torch.bool)
    if "mask_mod" in functions:
        visible = torch.as_tensor(functions["mask_mod"](*indices)).expand(shape)
    p, lse = softmax(s, visible)
    if functions.get("row") is not None:
        p = _by_row(functions["row"], s, visible)
    return p @ v, lse


def softmax(s: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and lse; a row without a finite visible score has weights 0 and lse -inf."""
    infinite = torch.tensor(float("-inf"), dtype=s.dtype)
    s = torch.where(visible, s, infinite)
    top = torch.cat([s.detach(), infinite.expand(*s.shape[:-1], 1)], -1).amax(-1, keepdim=True)
    dead = top == infinite
    e = torch.exp(torch.where(s == infinite, infinite, s - torch.where(dead, 0.0, top)))
    total = torch.where(dead, 1.0, e.sum(-1, keepdim=True))
    return e / total, torch.where(dead, infinite, top + total.log()).squeeze(-1)


def _grid(*sizes: int) -> list[Tensor]:
    return [torch.arange(n).view([n if a == axis else 1 for a in range(4)]) for axis, n in enumerate(sizes)]


def _modified(function: Callable[..., Any] | None, x: Tensor) -> Tensor:
    if function is None:
        return x
    arguments = [x, *_grid(*x.shape)][: len(inspect.signature(function).parameters)]
    return function(*arguments).expand(x.shape)


def _by_row(row: Callable[..., Any], s: Tensor, visible: Tensor) -> Tensor:
    arity = len(inspect.signature(row).parameters)
    weights = []
    for place in torch.cartesian_prod(*(torch.arange(n) for n in s.shape[:3])).tolist():
        keys = visible[tuple(place)].nonzero().squeeze(-1)
        weight = torch.zeros(s.shape[3], dtype=s.dtype)
        if len(keys):
            result = torch.as_tensor(row(*(s[tuple(place)][keys], *place, keys)[:arity])).to(s.dtype)
            weight = weight.index_put((keys,), result.expand(len(keys)))
        weights.append(weight)
    return torch.stack(weights).view(s.shape) if weights else torch.zeros_like(s)
