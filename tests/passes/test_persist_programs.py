"""Programs for several blocks: the same gradients under random schedules, whatever the number of processors."""

from __future__ import annotations

import pytest
import torch
from xdsl.dialects import scf

from attn_engine.dialects import tile as dialect
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import BarrierArriveOp
from attn_engine.interpreters import tile, tile_async
from attn_engine.interpreters.tile_async_order import AsyncProtocolError
from attn_engine.interpreters.tile_async_state import DeadlockError
from attn_engine.runtime import driver
from tests.passes.test_tile_async_backward import Compiled, compiled, problem

PERSIST = "tile-persist-programs"


def persistent(name: str, fused: bool = True) -> Compiled:
    made = compiled(name, fused=fused)
    scheduled = made.scheduled.clone()
    driver.run_passes(scheduled, (PERSIST,))
    return Compiled(made.value, scheduled, made.captures)


def roles_of(made: Compiled, name: str) -> RolesOp:
    kernel = next(o for o in made.scheduled.ops if isinstance(o, dialect.KernelOp) and o.sym_name.data == name)
    return next(op for op in kernel.body.block.ops if isinstance(op, RolesOp))


def check(made: Compiled, heads: tuple[int, int, int], sizes: tuple[int, int], seeds: int = 2) -> None:
    given = problem(made, heads, sizes)
    want = given.gradients(tile.run_plan, made.value)
    for seed in range(seeds):
        got = given.gradients(tile_async.run_plan, made.scheduled, seed=seed)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["causal", "documents", "dead rows", "trained slopes", "first keys or document"])
def test_definitions(name: str):
    made = persistent(name)
    roles = roles_of(made, "backward_dkdv")
    assert [count for _, count, _, _ in roles.roles] == [2, 1, 1]
    assert all(sum(isinstance(op, scf.ForOp) for op in region.block.ops) == 1 for region in roles.bodies)
    check(made, (2, 2, 1), (150, 300))


@pytest.mark.parametrize("sizes", [(1, 1), (129, 130), (5, 0), (0, 5), (64, 400)])
def test_lengths(sizes: tuple[int, int]):
    check(persistent("causal"), (1, 4, 2), sizes)


def test_kernels_that_release_slots_a_step_later_stay_as_they_are():
    """Nothing would release those of a program's last step."""
    made = persistent("causal", fused=False)
    assert [len(roles_of(made, name).bodies) for name in ("backward_dq", "backward_dkdv")] == [2, 3]
    check(made, (1, 2, 2), (150, 300))


@pytest.mark.parametrize("last", [1, 2])
def test_missing_arrivals_are_found(last: int):
    """Without one of the arrivals behind the steps: at who brings the next blocks, or at who else reads them."""
    made = persistent("causal")
    (loop,) = (op for op in roles_of(made, "backward_dkdv").bodies[0].block.ops if isinstance(op, scf.ForOp))
    arrivals = [op for op in loop.walk() if isinstance(op, BarrierArriveOp)]
    op = arrivals[-last]
    op.detach()
    op.erase()
    with pytest.raises((AsyncProtocolError, DeadlockError)):
        check(made, (1, 2, 2), (150, 700), 4)
