"""Gradients of captures score by score, and of wide heads, at the async level, under random schedules: as at the value level."""

from __future__ import annotations

import pytest
import torch
from xdsl.dialects import scf

from attn_engine import library, pipelines
from attn_engine.backends.gluon.legalize import GRADIENTS
from attn_engine.dialects import tile as dialect
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_copy import AsyncReduceAddOp, AsyncStoreOp
from attn_engine.dialects.tile_async_product import AsyncDotOp
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile, tile_async
from attn_engine.passes.hopper.role_steps import slot_of
from attn_engine.runtime import driver
from tests.passes.test_tile_async_backward import Compiled, D, problem

SIZES = (130, 200)
TABLE = torch.linspace(-1, 1, 2 * sum(SIZES)).reshape(2, -1)
BIAS = torch.linspace(-1, 1, 2 * SIZES[0] * SIZES[1]).reshape(1, 2, *SIZES)
HALF = BIAS.half()


def blockwise(bias: torch.Tensor) -> dict[str, Definition]:
    return {
        "pair": Definition(score_mod=lambda s, b, h, q, kv: s + bias[b, h, q, kv]),
        "pair, causal": Definition(
            score_mod=lambda s, b, h, q, kv: s * bias[b, h, q, kv], mask_mod=lambda b, h, q, kv: q >= kv
        ),
        "heads share": Definition(score_mod=lambda s, b, h, q, kv: s + bias[b, 1, q, kv]),
    }


def shared(bias: torch.Tensor) -> dict[str, Definition]:
    return {
        "batches": Definition(score_mod=lambda s, b, h, q, kv: s + bias[0, h, q, kv]),
        "batches, causal": Definition(
            score_mod=lambda s, b, h, q, kv: s * bias[0, h, q, kv], mask_mod=lambda b, h, q, kv: q >= kv
        ),
        "batches, the second of two entries": Definition(
            score_mod=lambda s, b, h, q, kv: s + torch.cat([bias, bias])[1, h, q, kv],
            mask_mod=lambda b, h, q, kv: (kv + b) % 3 > 0,
        ),
    }


BLOCKWISE, SHARED = blockwise(BIAS), shared(BIAS)
DEFINITIONS = {
    "distances": Definition(score_mod=lambda s, b, h, q, kv: s + TABLE[h, q - kv + SIZES[1]]),
    "distances, causal": Definition(
        score_mod=lambda s, b, h, q, kv: s * TABLE[h, q - kv], mask_mod=lambda b, h, q, kv: q >= kv
    ),
}


def compiled(definition: Definition, wrt: tuple[str, ...], option: str) -> Compiled:
    traced = build(definition, dtype=torch.float16, head_dim=D, head_dim_v=D, return_lse=True)
    module = driver.to_attn(traced.module, wrt)
    convert = f"convert-attn-to-tile{{forward=64,64,4,2 dq=128,64,8,2 dkdv=64,128,8,2 {option}=true}}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP))
    scheduled = module.clone()
    driver.run_passes(scheduled, GRADIENTS)
    return Compiled(module, scheduled, list(traced.captures))


def check(made: Compiled, sizes: tuple[int, int, int] = (1, 2, 1)) -> None:
    module, scheduled = made.value, made.scheduled
    given = problem(made, sizes, SIZES)
    want = given.gradients(tile.run_plan, module)
    assert all(torch.isfinite(w).all() for w in want)
    for seed in range(2):
        got = given.gradients(tile_async.run_plan, scheduled, seed=seed)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", DEFINITIONS)
def test_distances(name: str):
    made = compiled(DEFINITIONS[name], ("q", "k", "v", "0"), "diagonals")
    assert any(isinstance(op, dialect.AddDiagonalsOp) for op in made.scheduled.walk())
    check(made)


@pytest.mark.parametrize("definition", [Definition(), Definition(mask_mod=library.causal)], ids=["full", "causal"])
def test_keys_and_values_apart(definition: Definition):
    """One loop in another, with one sum a step."""
    made = compiled(definition, ("q", "k", "v"), "apart")
    kernels = {op.sym_name.data for op in made.scheduled.ops if isinstance(op, dialect.KernelOp)}
    assert {"backward_dq", "backward_dk", "backward_dv"} <= kernels
    check(made)


@pytest.mark.parametrize("name", BLOCKWISE)
def test_blocks_of_scores(name: str):
    """Tables come in blocks beside keys and values, and their gradients leave in blocks: stored, or added up."""
    made = compiled(BLOCKWISE[name], ("q", "k", "v", "0"), "exact")
    kind = AsyncReduceAddOp if name == "heads share" else AsyncStoreOp
    kernels = [op for op in made.scheduled.ops if isinstance(op, dialect.KernelOp)]
    ops = [op for kernel in kernels if kernel.sym_name.data.startswith("backward") for op in kernel.walk()]
    bodies = [op.body.block for op in ops if isinstance(op, scf.ForOp)]
    assert any(isinstance(op, kind) for body in bodies for op in body.ops)
    assert not any(isinstance(op, dialect.GatherOp | dialect.ScatterAddOp) for op in ops)
    check(made)


@pytest.mark.parametrize("name", SHARED)
def test_parts_of_batches(name: str):
    """Stored by programs that share nothing, and added up: no step adds to memory, and nothing is set to zero before."""
    made = compiled(SHARED[name], ("q", "k", "v", "0"), "exact=true by_batch")
    assert not any(isinstance(op, AsyncReduceAddOp | dialect.FillOp) for op in made.scheduled.walk())
    check(made, (2, 2, 1))
    added = compiled(SHARED[name], ("q", "k", "v", "0"), "exact")
    given = [problem(m, (2, 2, 1), SIZES) for m in (made, added)]
    parts, sums = (g.gradients(tile.run_plan, m.value)[3] for g, m in zip(given, (made, added), strict=True))
    torch.testing.assert_close(parts, sums, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("option", ["", " by_batch=true", " by_batch=true rounded=true"])
@pytest.mark.parametrize("name", [*BLOCKWISE, *SHARED])
def test_blocks_that_leave_the_kernel_of_all_gradients(name: str, option: str):
    """There scores have keys along their rows: blocks leave turned, through the slot of dq's operand if they are that."""
    definition = {**blockwise(HALF), **shared(HALF)}[name]
    made = compiled(definition, ("q", "k", "v", "0"), f"fused=true{option} exact")
    kernels = [op for op in made.scheduled.ops if isinstance(op, dialect.KernelOp)]
    assert not any(op.sym_name.data == "backward_dq" for op in kernels)
    (kernel,) = (op for op in kernels if op.sym_name.data == "backward_dkdv")
    (roles,) = (op for op in kernel.body.block.ops if isinstance(op, RolesOp))
    consumer = list(roles.bodies[0].block.walk())
    bodies = [op.body.block for op in consumer if isinstance(op, scf.ForOp)]
    sends = [op for body in bodies for op in body.ops if isinstance(op, AsyncStoreOp | AsyncReduceAddOp)]
    sent, multiplied = (
        {slot.ring for value in values if (slot := slot_of(value)) is not None}
        for values in ([op.source for op in sends], [op.a for op in consumer if isinstance(op, AsyncDotOp)])
    )
    assert len({op.descriptor for op in sends}) == len(sent) == 2
    assert bool(sent & multiplied) == (
        name == "pair" or (name.startswith("batches") and "causal" not in name and bool(option))
    )
    check(made, (1 + (name in SHARED), 2, 1))


def test_two_blocks_of_one_table():
    """Each has a ring of its own."""
    check(
        compiled(
            Definition(score_mod=lambda s, b, h, q, kv: s + BIAS[b, 0, q, kv] * BIAS[b, h, q, kv]), ("q", "k"), "exact"
        )
    )


def test_of_a_table_without_those_of_queries():
    """No product comes behind the gradient of the table: the slots of a step are free behind the fence, not before it."""
    check(compiled(BLOCKWISE["pair, causal"], ("k", "0"), "exact"))
