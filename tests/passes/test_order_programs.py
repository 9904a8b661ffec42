"""Programs in another order: the same gradients, each block once."""

from __future__ import annotations

import pytest
import torch

from attn_engine.backends.gluon.legalize import GRADIENTS
from attn_engine.interpreters import tile_async
from attn_engine.runtime import driver
from tests.passes.test_tile_async_backward import DEFINITIONS, Compiled, lower, problem

LAST = tuple(f"{spec}{{last_first=true}}" if spec == "tile-order-programs" else spec for spec in GRADIENTS)


@pytest.mark.parametrize("fused", [True, False])
def test_last_heads_first(fused: bool):
    module, captures = lower(DEFINITIONS["causal"], torch.float16, fused=fused)
    found: list[list[torch.Tensor]] = []
    texts: list[str] = []
    for passes in (GRADIENTS, LAST):
        scheduled = module.clone()
        driver.run_passes(scheduled, passes)
        given = problem(Compiled(module, scheduled, captures), (3, 4, 2), (70, 200))
        found.append(given.gradients(tile_async.run_plan, scheduled, seed=0))
        texts.append(str(scheduled))
    assert texts[0] != texts[1]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
