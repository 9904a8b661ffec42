"""After every pass to the async level a kernel means what it meant at the value level."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp

from attn_engine.backends.gluon.legalize import GRADIENTS, LATE
from attn_engine.backends.gluon.legalize import SCHEDULE as FORWARD
from attn_engine.interpreters import tile, tile_async
from attn_engine.runtime import driver
from tests.passes import test_tile_async_backward as backward
from tests.passes import test_tile_async_forward as forward


@cache
def forward_prefix(name: str, passes: int) -> ModuleOp:
    """After that many passes, the last of them on what those before it gave."""
    if passes == 0:
        return forward.compiled(name).scheduled(0)
    module = forward_prefix(name, passes - 1).clone()
    driver.run_passes(module, (FORWARD[passes - 1],))
    return module


@cache
def at_value_level(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Operands in half precision, and the results."""
    made, operands = forward.compiled(name), forward.inputs((1, 2, 1), (200, 300), torch.float16)
    results = forward.outputs(operands[0], made.rows)
    tile.run_plan(made.value, "forward", [*operands, *results, *made.captures, forward.D**-0.5])
    return operands, results


@pytest.mark.parametrize("name", ["causal", "sigmoid"])
@pytest.mark.parametrize("passes", range(1, len(FORWARD) + 1))
def test_forward(name: str, passes: int):
    """In half precision, against the value level: both round alike but for the order of blocks."""
    operands, want = at_value_level(name)
    got = forward.run(forward_prefix(name, passes), forward.compiled(name), operands, seed=passes)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


@cache
def causal(fused: bool) -> tuple[backward.Problem, list[Tensor]]:
    """A problem, and its gradients at the value level."""
    given = backward.problem(backward.compiled("causal", fused), (1, 2, 1), (200, 300))
    return given, given.gradients(tile.run_plan, given.made.value)


@pytest.mark.parametrize(
    ("passes", "fused"),
    [*((n, False) for n in range(1, len(GRADIENTS))), *((n, True) for n in range(5, len(LATE)))],
)
def test_gradients(passes: int, fused: bool):
    given, want = causal(fused)
    got = given.gradients(tile_async.run_plan, backward.prefix("causal", passes, fused), seed=passes)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
