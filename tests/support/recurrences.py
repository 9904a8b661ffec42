"""Recurrences of every kind with all their gradients, on one backend beside another."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import attn_engine

TOKENS, KEY, HEADS = 70, 32, 2
"""Two chunks, the second of them not whole."""
SHAPES = {
    "q": (1, TOKENS, 1, KEY),
    "k": (1, TOKENS, 1, KEY),
    "v": (1, TOKENS, HEADS, KEY),
    "initial_state": (1, HEADS, KEY, KEY),
    "token": (1, TOKENS, HEADS),
    "channel": (1, TOKENS, HEADS, KEY),
}
KINDS: dict[str, dict[str, str]] = {
    "per token, weighted": {"decay": "token", "weight": "token"},
    "per channel": {"decay": "channel"},
    "delta": {"beta": "token"},
    "delta per token": {"beta": "token", "decay": "token"},
    "delta per channel": {"beta": "token", "decay": "channel"},
}
"""What a recurrence has beside q, k, v and an initial state, and of which shape."""


def operands(kind: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = {n: torch.randn(SHAPES[n], generator=generator) for n in ("q", "k", "v", "initial_state")}
    made = {n: x if n == "initial_state" else x.to(dtype) for n, x in made.items()}
    made["k"] = normalize(made["k"], dim=-1)
    for name, shape in KINDS[kind].items():
        x = torch.randn(SHAPES[shape], generator=generator)
        made[name] = logsigmoid(x) if name == "decay" else x.sigmoid()
    return made


def results(given: dict[str, Tensor], backend: str, **more: Tensor) -> list[Tensor]:
    """The output, the state, and the gradients of all that is given."""
    tensors = {n: x.requires_grad_() for n, x in given.items()}
    rest = dict(tensors)
    q, k, v = (rest.pop(n) for n in "qkv")
    o, state = attn_engine.recurrence(q, k, v, output_final_state=True, backend=backend, **rest, **more)
    assert state is not None
    slope = torch.linspace(0, 1, state.numel()).view_as(state)
    loss = (o.float() ** 2).sum() + (state * slope).sum()
    return [o.detach(), state.detach(), *torch.autograd.grad(loss, list(tensors.values()))]


def check(given: dict[str, Tensor], backend: str, tolerance: float = 1e-4, **more: Tensor) -> None:
    """Raises if a backend's results differ from those of the CPU backend by more than a part of their largest."""
    want, got = (results(given, name, **more) for name in ("cpu", backend))
    for name, theirs, mine in zip(("o", "state", *given), want, got, strict=True):
        limit = tolerance * max(1.0, theirs.abs().max().item())
        assert (theirs.float() - mine.float()).abs().max().item() < limit, name
