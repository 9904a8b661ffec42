"""Which states of a forward are summed in parts, and what its loops carry then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from xdsl.dialects import scf
from xdsl.dialects.builtin import ModuleOp

from attn_engine import library, pipelines
from attn_engine.frontend import Definition, build
from attn_engine.runtime import driver


def lowered(row: Any) -> ModuleOp:
    definition = Definition(row=row, mask_mod=library.causal)
    module = driver.to_attn(build(definition, dtype=torch.float16, head_dim=16, head_dim_v=16).module, ())
    convert = "convert-attn-to-tile{forward=64,64,4,2 tables=false}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, "tile-peel-block"))
    return module


def carried(module: ModuleOp) -> list[list[str]]:
    """The shapes that each loop carries."""
    loops = [o for o in module.walk() if isinstance(o, scf.ForOp)]
    return [[str(r.type).removeprefix("tensor<").removesuffix("xf32>") for r in loop.results] for loop in loops]


# A running maximum, or a mean that the next step reads, is a vector still.
ROWS = {
    "softmax": (None, ["64", "64x16", "64x4"]),
    "sigmoid": (library.sigmoid, ["64x16"]),
    "retention": (library.retention, ["64x16", "64x4"]),
    "cosine": (library.cosine, ["64", "64x16", "64x4"]),
    "centred": (library.softmax_centred, ["64", "64", "64", "64x16", "64x4"]),
    "log_cosh": (library.log_cosh_softmax, ["64", "64x16", "64x4", "64x4"]),
}


@pytest.mark.parametrize("name", ROWS)
def test_sums_are_in_parts(name: str):
    row, want = ROWS[name]
    module = lowered(row)
    driver.run_passes(module, ("tile-split-sums",))
    assert carried(module) == [want, want]
    parts = [shape for shape in want if shape == "64x4"]
    assert str(module).count("tile.reduce_partial sum") == 3 * len(parts)
