"""What masked blocks cost after the lowering: comparisons and selects per element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from xdsl.dialects import arith, math, scf
from xdsl.ir import Operation

from attn_engine import library, pipelines
from attn_engine.dialects import tile
from attn_engine.frontend import Definition, build
from attn_engine.runtime import driver


def strict(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx > kv_idx


def per_element(definition: Definition, kind: type[Operation], dtype: torch.dtype = torch.float16) -> int:
    """How many ops of a kind the masked loop has per score."""
    traced = build(definition, dtype=dtype, head_dim=16, head_dim_v=16)
    module = driver.to_attn(traced.module, ())
    convert = "convert-attn-to-tile{forward=64,32,4,2 positive_scale=true}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP))
    loop = next(o for o in module.walk() if isinstance(o, scf.ForOp))
    maps = [o for o in loop.body.block.ops if isinstance(o, tile.MapOp) and tile.shape_of(o.outputs[0]) == (64, 32)]
    return sum(isinstance(o, kind) for m in maps for o in m.body.block.ops)


@pytest.mark.parametrize("mask", [library.causal, strict])
def test_the_bounds_of_keys_meet_in_one_comparison(mask: Any):
    """kv <= q and kv < skv is kv <= min(q, skv - 1)."""
    assert per_element(Definition(mask_mod=mask), arith.CmpiOp) == 1


def test_a_window_keeps_its_other_bound():
    assert per_element(Definition(mask_mod=library.sliding_window(7)), arith.CmpiOp) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["cast", "as it is"])
def test_softmax_selects_once(dtype: torch.dtype):
    """exp2 of -inf is 0: the weights need no select of their own."""
    assert per_element(Definition(mask_mod=library.causal), arith.SelectOp, dtype) == 1
    assert per_element(Definition(mask_mod=library.causal), math.Exp2Op, dtype) == 1
    mods = Definition(score_mod=library.alibi(torch.ones(4)), mask_mod=library.causal)
    assert per_element(mods, arith.SelectOp, dtype) == 1


def test_weights_that_do_not_vanish_are_selected():
    assert per_element(Definition(row=library.identity, mask_mod=library.causal), arith.SelectOp) == 1
    assert per_element(Definition(row=library.retention, mask_mod=library.causal), arith.SelectOp) == 2
