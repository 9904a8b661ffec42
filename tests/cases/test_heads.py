"""Head dims, groups of heads, many heads."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.backends.triton import interpret
from attn_engine.ir.schedule import KernelSchedule, Schedule
from tests.support.compare import check, plain, qkv
from tests.support.engines import ALL, INTERPRETED, SMALL, blocks

TINY = Schedule(*[KernelSchedule(16, 16, 4, 1)] * 4)


def causal():
    return {"mask_mod": library.causal}


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("d", [1, 8, 31, 72, 80, 96])
def test_b49_b52_head_dims_that_fill_no_tile(backend: str, d: int):
    check(causal, qkv(h=1, sq=20, skv=24, d=d), backend=backend, schedule=SMALL)


@pytest.mark.parametrize("backend", ALL)
def test_b49_a_short_sequence_of_a_vision_head(backend: str):
    check(plain, qkv(b=1, h=2, sq=4, d=31), backend=backend)


@pytest.mark.parametrize("backend", ALL)
def test_b50_head_dim_96_in_decoding(backend: str):
    check(plain, qkv(h=4 if backend == "cpu" else 1, sq=1, skv=256 if backend == "cpu" else 70, d=96), backend=backend)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize(("d", "dv"), [(64, 128), (128, 64), (16, 24), (40, 8), (31, 72)])
def test_b53_head_dims_of_keys_and_values_differ(backend: str, d: int, dv: int):
    check(causal, qkv(h=1, sq=128 if backend == "cpu" else 20, d=d, dv=dv), backend=backend, schedule=SMALL)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize(("h", "hkv", "sq", "skv"), [(9, 3, 5, 5), (12, 2, 1, 256), (6, 1, 3, 40)])
def test_b55_groups_of_3_and_6(backend: str, h: int, hkv: int, sq: int, skv: int):
    skv = skv if backend == "cpu" else min(skv, 40)
    check(plain, qkv(h=h, hkv=hkv, sq=sq, skv=skv, d=64), backend=backend, schedule=SMALL)


@pytest.mark.parametrize("backend", ALL)
def test_b56_gradients_of_keys_are_summed_over_the_group(backend: str):
    """dk and dv have the shape of k and v; also where the score depends on the query head."""

    def make(slopes):
        return {"score_mod": library.alibi(slopes), "mask_mod": lambda b, h, i, j: (h % 2 == 0) | (i >= j)}

    check(make, qkv(h=4, hkv=2, sq=16), {"slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}, backend, schedule=SMALL)


@pytest.mark.parametrize(("b", "h"), [(32769, 2)])
def test_b83_more_heads_than_65535(b: int, h: int):
    """Batch times heads on a grid axis that holds 65535."""
    q, k, v = qkv(b=b, h=h, hkv=h, sq=2, d=2)
    with blocks(TINY):
        o = attn_engine.compile()(q, k, v)
    right = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in (q, k, v)))
    torch.testing.assert_close(o.double(), right, rtol=1e-4, atol=1e-5)


def test_b83_grids_of_triton_fit_what_cuda_allows(monkeypatch: pytest.MonkeyPatch):
    """Batch times heads lie on the first grid axis, which holds 2 ** 31 - 1; y and z hold 65535."""
    grids: list[tuple[int, ...]] = []

    def launch(_, grid):
        grids.append(grid)
        return lambda *arguments, **options: None

    monkeypatch.setattr(interpret._Kernel, "__getitem__", launch)
    q, k, v = (torch.zeros(1, 1, 1, 16).expand(70000, 3, 40, 16).requires_grad_() for _ in range(3))
    with blocks(SMALL):
        o = attn_engine.compile(backend=INTERPRETED)(q, k, v)
    torch.autograd.grad(o, (q, k, v), torch.zeros(1, 1, 1, 1).expand(o.shape))
    assert len(grids) >= 3
    assert all(max(grid[1:], default=1) <= 65535 and grid[0] < 2**31 for grid in grids), grids


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_b49_half_types_of_odd_head_dims(dtype: torch.dtype):
    check(causal, qkv(sq=40, d=72, dv=31, dtype=dtype))


def test_b49_half_types_as_triton_runs_them():
    check(causal, qkv(h=1, sq=20, d=72, dv=31, dtype=torch.float16), backend=INTERPRETED, schedule=SMALL)
