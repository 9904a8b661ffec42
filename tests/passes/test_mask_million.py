"""Closed forms of ranges at a million queries and keys: every end is where the mask itself turns, in no memory to speak of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_engine import masks
from attn_engine.dialects import attn
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.interpreters.scalar import oracle_dtypes, run_region
from attn_engine.runtime import driver

SIZE, BLOCK = 1_000_000, 1024

# Each shows a block of queries one run of keys.
RUNS = {
    "causal": masks.causal,
    "from the end": masks.causal(bottom_right=True),
    "window": masks.window(5000, 0),
    "both sides": masks.window(3000, 777),
    "generic": masks.generic(4096, 129),
    "window from the end": masks.window(100, 50, bottom_right=True),
    "prefix": masks.prefix(12345),
    "first keys": masks.sinks(77),
    "of the last": masks.causal & ~masks.sinks(500_000),
}


def ranges(function: masks.Mask, sq: int, skv: int) -> tuple[Tensor, Tensor]:
    """Starts of the blocks of queries, and of each the runs of keys [blocks, runs, 4]."""
    traced = build(Definition(mask_mod=function), dtype=torch.float32, head_dim=8, head_dim_v=8)
    op = next(o for o in driver.to_attn(traced.module, ()).walk() if isinstance(o, attn.OnlineOp))
    assert op.blocks is not None
    low = torch.arange(0, sq, BLOCK)
    sizes = [torch.tensor(n) for n in (0, 0, sq, skv)]
    found = run_region(op.blocks.block, [low, (low + BLOCK).clamp(max=sq), *sizes, *traced.captures], oracle_dtypes())
    return low, torch.stack([x.expand(len(low)) for x in found], 1).reshape(len(low), -1, 4)


def seen(function: masks.Mask, low: Tensor, sq: int, skv: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Whether any, and whether every query of each block sees its key; False where there is no such key."""
    rows = low[:, None] + torch.arange(BLOCK)
    zero = torch.zeros((), dtype=torch.int64)
    visible = function.of_lengths(sq, skv)(zero, zero, rows, keys[:, None]).expand(rows.shape)
    exists, inside = (keys >= 0) & (keys < skv), rows < sq
    return (visible & inside).any(1) & exists, (visible | ~inside).all(1) & exists


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("skv", [SIZE, SIZE - 300_001])
def test_ends_of_a_run(name: str, skv: int):
    mask = RUNS[name]
    low, found = ranges(_sized(mask, SIZE, skv), SIZE, skv)
    visible = found[:, :, 3] > found[:, :, 0]
    assert (visible.sum(1) <= 1).all() or name == "prefix"
    start = torch.where(visible, found[:, :, 0], skv).amin(1)
    stop = torch.where(visible, found[:, :, 3], 0).amax(1)
    some = start < stop
    assert some.any()
    for keys, want in ((start, some), (stop - 1, some), (start - 1, None), (stop, None)):
        any_of, _ = seen(mask, low, SIZE, skv, keys)
        assert torch.equal(any_of[some], torch.full_like(any_of[some], want is not None))
    full = found[:, :, 2] > found[:, :, 1]
    first = torch.where(full, found[:, :, 1], skv).amin(1)
    last = torch.where(full, found[:, :, 2], 0).amax(1)
    whole = first < last
    for keys in (first, last - 1):
        assert seen(mask, low, SIZE, skv, keys)[1][whole].all()
    assert not seen(mask, low, SIZE, skv, last)[1][whole].any()


def _sized(mask: masks.Mask, sq: int, skv: int) -> masks.Mask:
    return masks.as_mask(mask.of_lengths(sq, skv))


def test_a_union_keeps_both_runs():
    mask = masks.window(4000, 0) | masks.sinks(100)
    low, found = ranges(mask, SIZE, SIZE)
    far = low > 10_000
    assert found.shape[1] == 2
    assert (found[far, 0, 3] == 100).all() and torch.equal(found[far, 1, 0], low[far] - 4000)
    kept = (found[:, :, 3] - found[:, :, 0]).sum()
    assert kept < len(low) * (4000 + BLOCK + 100 + 2)
