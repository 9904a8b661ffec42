"""`deterministic=True` on a GPU: the same bits in twenty runs, the gradients of captured tensors included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_engine
from attn_engine import library
from attn_engine.backends.backend import get_backend

BACKENDS = [name for name in ("triton", "gluon") if get_backend(name).check().ok]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not BACKENDS, reason="no GPU backend works here")]
RUNS = 20


def captures() -> dict[str, Tensor]:
    shapes = {"table": (8, 32), "slopes": (8,), "gain": (), "bias": (1024, 1024)}
    return {name: torch.randn(shape, device="cuda").mul(0.1).requires_grad_() for name, shape in shapes.items()}


def definition(name: str, read: dict[str, Tensor]) -> dict[str, Callable[..., Any]]:
    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = torch.clamp(torch.abs(q - kv), 0, 31)
        return s * read["gain"] + read["table"][h, distance] + read["slopes"][h] * (q - kv) + read["bias"][q, kv]

    return {"mask_mod": library.causal} | ({"score_mod": score_mod} if name == "captures" else {})


def run(attend: attn_engine.Attention, tensors: list[Tensor], leaves: list[Tensor], d_o: Tensor) -> list[Tensor]:
    o = attend(*tensors)
    return [o, *torch.autograd.grad(o, leaves, d_o)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["plain", "captures"])
def test_twenty_runs_have_the_same_bits(name: str, backend: str):
    torch.manual_seed(0)
    read = captures()
    tensors = [torch.randn(3, h, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (8, 2, 2)]
    d_o = torch.randn(3, 8, 1024, 64, device="cuda", dtype=torch.bfloat16)
    leaves = [*tensors, *(read.values() if name == "captures" else ())]
    steady = attn_engine.compile(**definition(name, read), backend=backend, deterministic=True)
    plain = attn_engine.compile(**definition(name, read), backend=backend)
    want = run(steady, tensors, leaves, d_o)
    for _ in range(RUNS):
        assert all(map(torch.equal, run(steady, tensors, leaves, d_o), want))
    for got, other in zip(want, run(plain, tensors, leaves, d_o), strict=True):
        size = other.float().abs().max()
        assert (got.float() - other.float()).abs().max() <= 1e-2 * size
