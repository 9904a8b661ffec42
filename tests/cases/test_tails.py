"""Lengths that fill no block, and padded lanes in the backward's recomputation."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import library
from tests.support.compare import check, plain, qkv, randn
from tests.support.engines import ALL, INTERPRETED, ORACLE, SMALL


def causal():
    return {"mask_mod": library.causal}


def test_b22_192_in_blocks_of_128():
    check(plain, qkv(b=1, h=8, sq=192, d=16, dtype=torch.bfloat16))


def test_b22_192_as_triton_runs_it():
    check(plain, qkv(h=1, sq=192, d=16, dtype=torch.float16), backend=INTERPRETED)


def test_b23_137_equals_the_start_of_256():
    """A causal row does not depend on the length, tail rows among them."""
    q, k, v = qkv(sq=256)
    whole = attn_engine.attention(q, k, v, mask_mod=library.causal)
    part = attn_engine.attention(*(t[:, :, :137] for t in (q, k, v)), mask_mod=library.causal)
    torch.testing.assert_close(part, whole[:, :, :137], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("backend", "size", "dtype"), [
    ("cpu", 1025, torch.bfloat16), (ORACLE, 33, torch.float32), (INTERPRETED, 65, torch.float32),
])  # fmt: skip
def test_b25_distance_bias_with_a_tail(backend: str, size: int, dtype: torch.dtype):
    """score + (q - kv), causal: the farthest key, far up to 1024, takes the weight."""
    q, k, v = qkv(h=1, sq=size, d=64, dtype=dtype)

    def make():
        return {"score_mod": lambda s, b, h, i, j: s + (i - j), "mask_mod": library.causal}

    check(make, (q, k, v), backend=backend, tolerance=0.05 if dtype is torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize(
    ("size", "dtype"), [(704, torch.bfloat16), (17, torch.float32), (40, torch.float32), (65, torch.float16)]
)
@pytest.mark.parametrize("mask", [plain, causal])
def test_b26_negative_lse_with_a_tail(backend: str, size: int, dtype: torch.dtype, mask):
    """Every logit near -120: exp(0 - lse) of a padded key would be infinite."""
    if backend != "cpu" and size > 65:
        pytest.skip("minutes in an interpreter")
    q, k, v = (0.1 * t for t in qkv(h=1, sq=size, d=64))
    q[..., 0], k[..., 0] = 1.0, -120.0 * 8
    tensors = [t.to(dtype) for t in (q, k, v)]
    # dq is the difference of terms of 960: rounding of the weights is multiplied.
    found = check(mask, tensors, backend=backend, schedule=SMALL if size < 100 else None, tolerance=0.05)
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("sq", [1, 15, 16, 17, 24, 31, 33])
@pytest.mark.parametrize("skv", [1, 15, 16, 17, 24, 31, 33])
@pytest.mark.parametrize("row", [None, library.relu, library.sigmoid])
def test_tails_around_blocks_of_16(sq: int, skv: int, row):
    """Sizes 1, block - 1, block, block + 1 and block + half, of queries and keys."""
    check(lambda: {"row": row} if row else {}, qkv(h=1, sq=sq, skv=skv), schedule=SMALL)


@pytest.mark.parametrize("backend", [ORACLE, INTERPRETED])
@pytest.mark.parametrize(("sq", "skv"), [(1, 33), (24, 24), (33, 17)])
def test_tails_of_padded_kernels(backend: str, sq: int, skv: int):
    check(causal, qkv(h=1, sq=sq, skv=skv), backend=backend, schedule=SMALL)


@pytest.mark.parametrize("backend", ALL)
def test_tails_do_not_read_past_the_end(backend: str):
    """Tensors that are the front of larger ones: what lies behind is NaN."""
    wide = [torch.cat([t, torch.full_like(t, float("nan"))], 2) for t in qkv(sq=21)]
    tensors = [t[:, :, :21] for t in wide]
    found = check(causal, tensors, backend=backend, schedule=SMALL)
    assert all(found[f"d{n}"].isfinite().all() for n in "qkv")
    bias = torch.cat([randn(21, 21, seed=5), torch.full((21, 21), float("nan"))], 1)[:, :21]
    check(lambda bias: {"score_mod": library.bias(bias)}, tensors, {"bias": bias}, backend, schedule=SMALL)
