"""Recurrences on a GPU against the token loop in fp64, with weak decays: strong ones hide errors in old states."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import attn_engine
from attn_engine.backends.triton.build import check
from tests.recurrence.support import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not check().ok or not torch.cuda.is_available(), reason="needs a GPU that Triton compiles for"),
]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.fixture(autouse=True)
def exact_products():
    """float32 products of all bits; NaN in what the allocator hands out again."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.full((2**26,), torch.nan, device="cuda")
    yield
    torch.set_float32_matmul_precision(before)


def made(batch, tokens, heads, shared, key, value, dtype, kind="token", sequences=None):
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    rates = torch.where(torch.arange(heads, device="cuda") % 2 == 0, 0.01, 0.3)
    x = {"q": randn(batch, tokens, shared, key).to(dtype), "k": randn(batch, tokens, shared, key).to(dtype)}
    x["k"] = torch.nn.functional.normalize(x["k"].float(), dim=-1).to(dtype)
    x["v"] = randn(batch, tokens, heads, value).to(dtype)
    x["decay"] = rates * torch.nn.functional.logsigmoid(randn(batch, tokens, heads))
    if kind == "channel":
        x["decay"] = x["decay"][..., None] * torch.rand(key, generator=generator, device="cuda")
    x["beta" if kind == "delta" else "weight"] = randn(batch, tokens, heads).sigmoid()
    x["initial_state"] = randn(sequences or batch, heads, key, value)
    return x


def near(name, got, want, dtype):
    assert bool(got.isfinite().all()), f"{name} is not finite"
    error = ((got.double() - want).norm() / want.norm().clamp(min=1e-9)).item()
    assert error < TOLERANCE[dtype], f"{name}: relative error {error:.2e}"


def compare(x, dtype, right=reference, **options):
    got = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    want = {n: t.detach().double().requires_grad_() for n, t in x.items()}
    o, final = attn_engine.recurrence(**got, output_final_state=True, **options)
    right_o, right_final = right(**want)
    d_o, d_final = torch.randn_like(right_o), torch.randn_like(right_final)
    near("o", o.detach(), right_o.detach(), dtype)
    near("final", final.detach(), right_final.detach(), dtype)
    ((o.double() * d_o).sum() + (final * d_final).sum()).backward()
    ((right_o * d_o).sum() + (right_final * d_final).sum()).backward()
    for name in x:
        near(f"d_{name}", got[name].grad, want[name].grad, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "shared", "key", "value"),
    [
        (2, 257, 4, 4, 128, 128),
        (1, 1024, 2, 2, 128, 128),
        (2, 130, 8, 1, 128, 64),
        (1, 65, 3, 1, 48, 40),
        (1, 1, 2, 2, 64, 64),
    ],
)
def test_chunks(dtype, batch, tokens, heads, shared, key, value):
    compare(made(batch, tokens, heads, shared, key, value, dtype), dtype)


@pytest.mark.parametrize("kind", ["channel", "delta"])
@pytest.mark.parametrize("size", [64, 128])
def test_steps(kind, size):
    compare(made(2, 70, 4, 2, size, size, torch.bfloat16, kind), torch.bfloat16)


def test_packed():
    x = made(1, 700, 4, 2, 64, 64, torch.bfloat16, sequences=3)
    bounds = [0, 300, 300, 650]

    def one_by_one(**wide):
        state = wide.pop("initial_state")
        parts = [
            reference(**{n: t[:, lo:hi] for n, t in wide.items()}, initial_state=state[n : n + 1])
            for n, (lo, hi) in enumerate(pairwise(bounds))
        ]
        rest = wide["v"].new_zeros(1, 50, 4, 64)
        return torch.cat([*(o for o, _ in parts), rest], 1), torch.cat([s for _, s in parts])

    compare(x, torch.bfloat16, one_by_one, cu_seqlens=torch.tensor(bounds, device="cuda"))


@pytest.mark.parametrize("batch", [1, 3])
def test_decoding(batch):
    x = made(batch, 5, 4, 2, 128, 128, torch.bfloat16)
    state = x.pop("initial_state")
    want, final = reference(**{n: t.double() for n, t in x.items()}, initial_state=state.double())
    steps = [attn_engine.recurrence_step(**{n: t[:, i : i + 1] for n, t in x.items()}, state=state) for i in range(5)]
    near("o", torch.cat(steps, 1), want, torch.bfloat16)
    near("state", state, final, torch.bfloat16)


def test_strong_decay_and_resets():
    x = made(1, 192, 2, 2, 64, 64, torch.float32)
    x["decay"] = torch.linspace(0, -120, 64, device="cuda").repeat(3)[None, :, None].expand(1, -1, 2).clone()
    compare(x, torch.float32)
    x["decay"][:, 70] = float("-inf")
    o, _ = attn_engine.recurrence(**x)
    near("o", o, reference(**{n: t.double() for n, t in x.items()})[0], torch.float32)
