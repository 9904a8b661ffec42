"""Blocks of keys at the async level: smaller ones where few keys are visible, not where a range of them goes to an end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_engine import library
from attn_engine.frontend import Definition, build
from attn_engine.runtime.devices import Target
from attn_engine.runtime.schedules import default_schedule

MASKS: dict[str, tuple[Callable[..., Any], int]] = {
    "from the first key": (library.causal, 128),
    "to the last key": (lambda b, h, q, kv: kv * 2 >= q - 4, 128),
    "window": (library.sliding_window(100), 64),
    "two ranges": (lambda b, h, q, kv: (kv < 4) | ((kv <= q) & (kv > q - 100)), 64),
}


@pytest.mark.parametrize("name", MASKS)
def test_keys_of_a_block(name: str):
    mask, keys = MASKS[name]
    traced = build(Definition(mask_mod=mask), dtype=torch.bfloat16, head_dim=128, head_dim_v=128, return_lse=True)
    assert default_schedule(Target("gluon", "sm_90"), traced.module).forward.block_n == keys
