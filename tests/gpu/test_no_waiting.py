"""The host waits for nothing: neither for tables of blocks of a mask, nor for offsets of packed sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import attn_engine
from attn_engine import library, masks
from attn_engine.backends.backend import get_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not get_backend("triton").check().ok, reason="no GPU works here")]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Torch raises where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["documents", "lengths", "packed", "from the end", "deterministic"])
def test_calls_after_the_first(name: str):
    ids = torch.arange(2048, device="cuda") // 300
    lengths = torch.tensor([2000, 1500], device="cuda")
    slopes = torch.rand(8, device="cuda", requires_grad=True)
    bounds = torch.tensor([0, 700, 1500, 2048], device="cuda", dtype=torch.int32)
    mask: Any = {
        "documents": library.and_masks(library.document(ids), library.causal),
        "lengths": lambda b, h, q, kv: kv < lengths[b],
        "from the end": masks.causal(bottom_right=True),
    }.get(name, library.causal)
    score = library.alibi(slopes) if name == "deterministic" else None
    attend = attn_engine.compile(mask_mod=mask, score_mod=score, deterministic=name == "deterministic")
    batch = 1 if name == "packed" else 2
    q, k, v = (
        torch.randn(batch, 8, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    leaves = [q, k, v, *([slopes] if score is not None else [])]
    options = {"cu_seqlens_q": bounds} if name == "packed" else {}

    def call() -> tuple[torch.Tensor, ...]:
        o = attend(q, k, v, **options)
        return torch.autograd.grad(o, leaves, torch.ones_like(o))

    call()
    torch.cuda.synchronize()
    with no_waiting():
        call()
