"""TileLang's kernels on a GPU, forward and every gradient, beside Triton's; recurrences; the choice by measurement."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attn_engine
from attn_engine import AttentionEngine, library, meta_tensor
from attn_engine.backends.backend import get_backend
from attn_engine.frontend.build import build
from tests.gpu.recurrence_cases import compare, made
from tests.gpu.test_attention import NAMES, definition
from tests.gpu.test_attention import TOLERANCE as TOLERANCES

AVAILABLE = get_backend("tilelang").check()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not AVAILABLE.ok, reason=AVAILABLE.reason)]
TOLERANCE = TOLERANCES | {torch.float32: 2e-3}
"""Products of f32 operands round them to tf32."""
YARDSTICK = 1.5
"""How much further from fp32 results may be than Triton's; or they are within what a dtype is allowed."""
CASES = [(name, torch.float16, 64) for name in NAMES] + [(name, torch.bfloat16, 128) for name in NAMES]
CASES += [("causal", torch.float32, 64), ("causal", torch.float16, 40), ("alibi_window", torch.bfloat16, 256)]


def results(name: str, dtype: torch.dtype, dim: int, backend: str) -> list[Tensor]:
    """The output and all gradients, from the same numbers for all backends, rounded as in `dtype`."""
    torch.manual_seed(0)
    made = definition(name, dim)
    shapes = ((2, 4, 200, dim), (2, 2, 260, dim), (2, 2, 260, dim), (2, 4, 200, dim))
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    own = torch.float32 if backend == "reference" else dtype
    q, k, v, d_o = (x.to(own) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    captures = build(made, dtype=own, head_dim=dim, head_dim_v=dim).captures
    o = attn_engine.Attention(made, backend=backend)(*leaves, scale=0.1)
    return [o.detach(), *torch.autograd.grad(o, [*leaves, *(c for c in captures if c.requires_grad)], d_o)]


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, 64), (torch.bfloat16, 128)], ids=str)
@pytest.mark.parametrize("kind", ["token", "channel", "delta", "channel delta"])
def test_recurrence(kind: str, dtype: torch.dtype, dim: int):
    """The output, the last state and every gradient against the loop over tokens in fp64."""
    compare(made(1, 200, 4, 2, dim, dim, dtype, kind), dtype, backend="tilelang")


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("name", "dtype", "dim"), CASES)
def test_beside_triton(tf32, name: str, dtype: torch.dtype, dim: int):
    triton, found = (results(name, dtype, dim, b) for b in ("triton", "tilelang"))
    torch.set_float32_matmul_precision("highest")
    wanted = results(name, dtype, dim, "reference")
    for right, one, other in zip(wanted, triton, found, strict=True):
        size = right.norm().clamp(min=1e-6)
        by_triton, by_tilelang = (float((x.float() - right).norm() / size) for x in (one, other))
        assert by_tilelang < max(TOLERANCE[dtype], YARDSTICK * by_triton), f"{by_tilelang:.1e}, Triton {by_triton:.1e}"


def test_the_fastest_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """All backends of Hopper are measured once, forward and gradients, each in its schedule by default; the next engine
    finds the choice in the file."""
    monkeypatch.setattr("attn_engine.runtime.tune.search", lambda default, *_: default)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper has several backends to choose from")
    meta = [meta_tensor(1, 8, 1024, 128, dtype=torch.bfloat16)] * 3
    q, k, v = (torch.randn(1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    outputs: list[Tensor] = []
    told: list[str] = []
    for _ in range(2):
        engine = AttentionEngine(
            meta, mask_mod=library.causal, tune=True, tune_file=str(tmp_path / "t.json"), backend="auto", layout="bhsd"
        )
        outputs.append(engine(q, k, v))
        torch.autograd.grad(outputs[-1].sum(), (q, k, v))
        told.append("\n".join(engine.attention.choices()))
    print(told[0], told[1], sep="\n\n")
    assert all(f"{name} measured forward" in told[0] or f"not {name}" in told[0] for name in ("gluon", "triton"))
    assert "tilelang" in told[0] and "measured" in told[0]
    assert "measured before, in" in told[1]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=2e-2, atol=2e-2)
