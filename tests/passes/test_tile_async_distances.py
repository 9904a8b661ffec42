"""What scores compute by the distance of two positions in gradients at the async level, under random schedules."""

from __future__ import annotations

import pytest
import torch

from attn_engine.dialects import tile
from attn_engine.frontend import Definition
from tests.passes.test_async_capture_gradients import DEFINITIONS, TABLE, check, compiled

TWICE = Definition(
    score_mod=lambda s, b, h, q, kv: torch.tanh(s + TABLE[h, q - kv]) / (2 + torch.abs(q - kv)),
    mask_mod=lambda b, h, q, kv: (q >= kv) & (kv > b),
)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", [*DEFINITIONS, "twice"])
def test_numbers_of_distances_are_loaded(name: str, trained: bool):
    """Untrained, by the kernel of all gradients, where queries are the columns of the scores; by two kernels otherwise."""
    option, wrt = ("diagonals", ("q", "k", "v", "0")) if trained else ("fused", ("q", "k", "v"))
    made = compiled({**DEFINITIONS, "twice": TWICE}[name], wrt, f'distances="loaded" {option}')
    kernels = {op.sym_name.data: op for op in made.scheduled.ops if isinstance(op, tile.KernelOp)}
    for kernel in ("backward_dkdv", *(["backward_dq"] if trained else [])):
        loads = [op for op in kernels[kernel].walk() if isinstance(op, tile.LoadDiagonalsOp)]
        assert loads
        assert all((op.turned is not None) == (kernel == "backward_dkdv") for op in loads)
    check(made, (2, 2, 1))
