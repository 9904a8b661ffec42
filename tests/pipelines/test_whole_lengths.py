"""Lengths that are multiples of every block: kernels without remainders, and only there."""

from __future__ import annotations

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.ir.schedule import KernelSchedule, Schedule
from attn_engine.runtime import driver
from tests.support.compare import check, plain, qkv, randn
from tests.support.engines import INTERPRETED, ORACLE, SMALL, blocks, counted_compilations

CAUSAL = library.causal


def bias(bias):
    return {"score_mod": lambda s, b, h, q, kv: s + bias[h, q, kv], "mask_mod": CAUSAL}


def slopes(slopes):
    return {"score_mod": lambda s, b, h, q, kv: s + slopes[h] * (kv - q), "mask_mod": library.sliding_window(21)}


MAKES = {
    "full": (plain, {}),
    "causal": (lambda: {"mask_mod": CAUSAL}, {}),
    "data": (lambda: {"mask_mod": lambda b, h, q, kv: (q * 7 + kv * 5) % 3 != 0}, {}),
    "bias": (bias, {"bias": (2, 64, 128)}),
    "slopes": (slopes, {"slopes": (2,)}),
    "sigmoid": (lambda: {"row": library.sigmoid}, {}),
    "two passes": (lambda: {"row": lambda s: torch.relu(torch.softmax(s, -1) - 0.02)}, {}),
}


@pytest.mark.parametrize("backend", [ORACLE, INTERPRETED])
@pytest.mark.parametrize("name", list(MAKES))
def test_equals_eager(name: str, backend: str):
    make, shapes = MAKES[name]
    captures = {n: randn(*shape, seed=7) for n, shape in shapes.items()}
    check(make, qkv(hkv=1, sq=64, skv=128), captures, backend=backend, schedule=SMALL)


def texts(definition: Definition, multiple: int, schedule: Schedule = SMALL) -> str:
    traced = build(definition, dtype=torch.float32, head_dim=16, head_dim_v=16)
    request = driver.Request(("q", "k", "v"), ORACLE, schedule, driver.Facts(True, True, multiple=multiple))
    return driver.compile_traced(traced.module, str(traced.module), request).tile_ir


def test_no_bound_is_left_without_a_mask():
    whole, any_length = (texts(Definition(), multiple) for multiple in (64, 1))
    assert "limits" not in whole and "limits" in any_length
    loops = [text.count("scf.for") for text in (whole, any_length)]
    assert loops == [1 + 1 + 2, 2 + 2 + 3]  # forward, dq, and dk/dv with its loop over heads


def test_a_multiple_that_some_block_does_not_divide_is_no_promise():
    larger = Schedule(*[KernelSchedule(16, 128, 4, 1)] * 4)
    assert texts(Definition(), 64, larger) == texts(Definition(), 1, larger)


def test_other_lengths_keep_their_remainder():
    attend = attn_engine.compile(backend=ORACLE)
    with blocks(SMALL), counted_compilations() as count:
        for sq, skv in ((64, 64), (128, 192), (64, 65), (63, 64), (1, 1)):
            q, k, v = qkv(sq=sq, skv=skv, d=48)  # of no other test: what is compiled is counted
            wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            torch.testing.assert_close(attend(q, k, v), wanted)
        assert count() == 2
