"""What a call with Triton gets on Hopper, compiled ahead of time."""

from __future__ import annotations

import pytest
import torch

from attn_engine import library
from attn_engine.arch import get_arch
from attn_engine.backends.triton.ahead import compile_ahead
from attn_engine.frontend import Definition, build
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.schedules import default_schedule

LIMITS = {"forward_kernel": 0, "backward_dq": 0, "backward_dkdv": 64}
"""Bytes that may be spilled."""


@pytest.mark.parametrize("definition", [Definition(), Definition(mask_mod=library.causal)], ids=["full", "causal"])
def test_it_hardly_spills(
    definition: Definition, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    """Heads of 128, operands through descriptors, lengths that are multiples of the blocks."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    traced = build(definition, dtype=torch.bfloat16, head_dim=128, head_dim_v=128)
    schedule = default_schedule(Target("triton", "sm_90"), traced.module)
    request = driver.Request(
        ("q", "k", "v"), "triton", schedule, driver.Facts(True, True, multiple=128), descriptors=True
    )
    (part,) = driver.to_parts(driver.to_attn(traced.module, request.wrt), request)
    for name, limit in LIMITS.items():
        kernel = compile_ahead(part.source, name, get_arch("sm_90"))
        assert kernel.wgmma > 0
        assert kernel.spills <= limit
