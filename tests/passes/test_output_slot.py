"""Where the output leaves a forward kernel of roles: a slot of its own, that of the queries, or channels of that."""

from __future__ import annotations

import re

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp

from attn_engine import pipelines
from attn_engine.backends.gluon.legalize import PREPARE, SCHEDULE
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile_async
from attn_engine.runtime import driver

RINGS = 2 * 64 * (96 + 64) * 2 + 128 * 96 * 2
"""Two blocks of keys and values, and the queries, of 96 and 64 channels in 16 bits."""
OUTPUT = 128 * 64 * 2


def scheduled(d: int, dv: int, shared_bytes: int, without: str = "") -> ModuleOp:
    traced = build(Definition(), dtype=torch.float16, head_dim=d, head_dim_v=dv)
    module = driver.to_attn(traced.module, ())
    convert = "convert-attn-to-tile{forward=128,64,8,2 channels=32 tables=false}"
    pipeline = f'tile-pipeline{{queries="shared" shared_bytes={shared_bytes}}}'
    passes = [pipeline if name == "tile-pipeline" else name for name in SCHEDULE if name != without]
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *PREPARE, *passes))
    module.verify()
    return module


def rings(module: ModuleOp) -> list[str]:
    return re.findall(r"= tile.ring : !tile.buffer<([0-9x]+)xf16", str(module))


@pytest.mark.parametrize("without", ["", "tile-split-channels"])
@pytest.mark.parametrize("room", [0, OUTPUT])
def test_channels_of_the_queries_hold_the_output_where_room_is_short(room: int, without: str):
    """The first 64 of 96, which `tile-split-channels` holds in a ring of their own."""
    module = scheduled(96, 64, RINGS + room, without)
    assert len(rings(module)) == (3 if without else 5) + (room > 0)
    assert str(module).count("tile.part") == int(room == 0 and bool(without))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, c, generator=generator).double() for n, c in ((200, 96), (150, 96), (150, 64)))
    want = (q @ k.transpose(2, 3) * 96**-0.5).softmax(-1) @ v
    for seed in range(2):
        o = torch.full_like(want, torch.nan)
        tile_async.run_plan(module, "forward", [q, k, v, o, 96**-0.5], seed=seed, processors=2, exact=True)
        torch.testing.assert_close(o, want, atol=2e-6, rtol=2e-6)


def test_other_channels_are_no_part_of_the_queries():
    """32 of 96: parts are 64 and 32, and the first one holds more."""
    need = 2 * 64 * (96 + 32) * 2 + 128 * 96 * 2
    with pytest.raises(AsyncUnsupportedError, match="shared memory"):
        scheduled(96, 32, need)
    assert rings(scheduled(96, 32, need + OUTPUT // 2))
