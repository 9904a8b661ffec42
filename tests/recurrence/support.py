"""Inputs of recurrences, and the token loop in fp64 that everything is compared with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from xdsl.dialects import math

from attn_engine.interpreters.scalar import SCALAR_OPS

NAMES = ("q", "k", "v", "decay", "weight", "initial_state")


def inputs(
    tokens: int,
    batch: int = 2,
    heads: int = 4,
    shared: int = 2,
    key: int = 16,
    value: int = 24,
    rate: float = 0.1,
    sequences: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Tensor]:
    """q, k, v, decay, weight and initial state; a chunk of 64 forgets all at rate 1 and little at 0.01."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q": randn(batch, tokens, shared, key).to(dtype),
        "k": randn(batch, tokens, shared, key).to(dtype),
        "v": randn(batch, tokens, heads, value).to(dtype),
        "decay": rate * logsigmoid(randn(batch, tokens, heads)),
        "weight": randn(batch, tokens, heads).sigmoid(),
        "initial_state": randn(batch if sequences is None else sequences, heads, key, value),
    }


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    weight: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o and the final state, token by token, in the dtype of q."""
    batch, tokens, heads, value = v.shape
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    state = q.new_zeros(batch, heads, q.shape[3], value) if initial_state is None else initial_state
    outputs: list[Tensor] = []
    for t in range(tokens):
        if decay is not None:
            g = decay[:, t] if decay.ndim > 1 else decay.expand(batch, -1)
            state = state * torch.exp(g if g.ndim == 3 else g[..., None])[..., None]
        written = v[:, t] if weight is None else weight[:, t, :, None] * v[:, t]
        if beta is not None:
            read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            written = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * written[:, :, None, :]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return (torch.stack(outputs, 1) if outputs else torch.zeros_like(v)), state


def exact(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in fp64, each a leaf that requires a gradient."""
    return {name: x.detach().double().requires_grad_() for name, x in given.items()}


def leaves(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone().requires_grad_() for name, x in given.items()}


def loss_weights(o: Tensor, state: Tensor, seed: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(o.shape, generator=generator), torch.randn(state.shape, generator=generator)


def assert_near(name: str, got: Tensor, want: Tensor, tolerance: float = 3e-5) -> None:
    """Equal up to `tolerance` times the largest right value, or times 1 if that is smaller."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert bool(got.isfinite().all()), f"{name} is not finite"
    if got.numel():
        error, size = (got.double() - want).abs().max().item(), max(1.0, want.abs().max().item())
        assert error <= tolerance * size, f"{name}: error {error:.2e} where values go up to {size:.2e}"


def watched_exponents(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The largest argument of every exp2 that is interpreted from here on."""
    seen: list[float] = []
    original = SCALAR_OPS[math.Exp2Op]

    def watched(op, args, dtype_of):
        seen.append(args[0].max().item())
        return original(op, args, dtype_of)

    monkeypatch.setitem(SCALAR_OPS, math.Exp2Op, watched)
    return seen
