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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", [*DEFINITIONS, "twice"])
def test_numbers_of_distances(name: str, trained: bool, fused: bool):
    """Loaded in every kernel, and added up in one of them: that of all gradients, where queries are the columns of the scores."""
    wrt = ("q", "k", "v", *(["0"] if trained else []))
    option = f'distances="loaded" diagonals=true fused={str(fused).lower()} covered'
    made = compiled({**DEFINITIONS, "twice": TWICE}[name], wrt, option)
    kernels = {op.sym_name.data: op for op in made.scheduled.ops if isinstance(op, tile.KernelOp)}
    names = ("backward_dkdv", *([] if fused else ["backward_dq"]))
    assert fused != ("backward_dq" in kernels)
    for kernel in names:
        loads = [op for op in kernels[kernel].walk() if isinstance(op, tile.LoadDiagonalsOp)]
        adds = [op for op in kernels[kernel].walk() if isinstance(op, tile.AddDiagonalsOp)]
        assert loads
        assert bool(adds) == (trained and kernel == names[-1])
        assert all((op.turned is not None) == (kernel == "backward_dkdv") for op in [*loads, *adds])
    check(made, (2, 2, 1))
