"""Sums of multiples of distances as two sums: the same gradients, at the value level and under random schedules."""

from __future__ import annotations

import pytest
import torch
from xdsl.dialects import arith, scf

from attn_engine.backends.gluon.legalize import GRADIENTS
from attn_engine.dialects import tile as dialect
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_product import AsyncDotOp
from attn_engine.frontend import Definition
from attn_engine.interpreters import tile, tile_async
from attn_engine.passes.hopper.role_steps import role_steps
from attn_engine.runtime import driver
from tests.passes.test_tile_async_backward import SLOPES, Compiled, lower, problem

STAGE = GRADIENTS.index("tile-stage-maps") + 1
EARLY = "tile-overlap-products{early_sums=true}"
AFTER = tuple(EARLY if spec.startswith("tile-overlap-products") else spec for spec in GRADIENTS[STAGE:])
DEFINITIONS = {
    "keys first": Definition(
        score_mod=lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q), mask_mod=lambda b, h, q, kv: q >= kv
    ),
    "queries first": Definition(score_mod=lambda s, b, h, q, kv: s - SLOPES[h] * (q - kv) * 0.5),
}


def summed(name: str) -> tuple[Compiled, Compiled]:
    """Before the pass, and behind it."""
    module, captures = lower(DEFINITIONS[name], torch.float16, ("q", "k", "v", "0"), fused=True)
    before = module.clone()
    driver.run_passes(before, tuple(s for s in GRADIENTS[:STAGE] if s != "tile-sum-distances"))
    after = before.clone()
    driver.run_passes(after, ("tile-sum-distances",))
    scheduled = after.clone()
    driver.run_passes(scheduled, AFTER)
    return Compiled(module, before, captures), Compiled(after, scheduled, captures)


def steps_of(made: Compiled) -> list[scf.ForOp]:
    kernel = next(o for o in made.value.ops if isinstance(o, dialect.KernelOp) and o.sym_name.data == "backward_dkdv")
    loops = [op for op in kernel.walk() if isinstance(op, scf.ForOp)]
    return [op for op in loops if any(isinstance(o, dialect.DotOp) for o in op.body.block.ops)]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_gradients(name: str):
    before, after = summed(name)
    given = problem(before, (1, 2, 1), (150, 200))
    want = given.gradients(tile.run_plan, before.value)
    runs = [(tile.run_plan, after.value, {}), *((tile_async.run_plan, after.scheduled, {"seed": n}) for n in range(2))]
    for run, module, options in runs:
        for a, b in zip(given.gradients(run, module, **options), want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-11)


def test_what_is_summed_holds_no_distance():
    _, after = summed("keys first")
    for loop in steps_of(after):
        ops = list(loop.body.block.ops)
        reduces = [op for op in ops if isinstance(op, dialect.ReduceOp)]
        assert len(reduces) == 2
        maps = {op.value.owner for op in reduces}
        inner = [o for op in maps for o in op.walk()]
        assert not any(isinstance(o, arith.SubiOp) for o in inner) and any(isinstance(o, arith.SIToFPOp) for o in inner)


def test_sums_come_before_products():
    """Of the same step: what is summed is not held beside them."""
    _, after = summed("keys first")
    kernel = next(
        o for o in after.scheduled.ops if isinstance(o, dialect.KernelOp) and o.sym_name.data == "backward_dkdv"
    )
    (roles,) = (op for op in kernel.body.block.ops if isinstance(op, RolesOp))
    for body in role_steps(roles.bodies[0].block):
        ops = list(body.ops)
        reduce = next(n for n, op in enumerate(ops) if isinstance(op, dialect.ReduceOp))
        source = ops.index(ops[reduce].operands[0].owner)  # type: ignore[arg-type]
        assert not any(isinstance(op, AsyncDotOp) for op in ops[source:reduce])
