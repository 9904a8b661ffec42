"""Integers that maps pass to maps in 32 bits: the same gradients, and nothing of 64 bits crosses from map to map."""

from __future__ import annotations

import pytest
import torch
from xdsl.dialects import arith
from xdsl.dialects.builtin import i64

from attn_engine import library, pipelines
from attn_engine.backends.gluon.legalize import GRADIENTS
from attn_engine.dialects import tile as dialect
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile, tile_async
from attn_engine.runtime import driver
from tests.passes.test_tile_async_backward import DEFINITIONS, DOCUMENTS, Compiled, D, lower, problem

STAGE = GRADIENTS.index("tile-stage-maps")


def narrowed(name: str) -> Compiled:
    module, captures = lower(DEFINITIONS[name], torch.float16, fused=True)
    scheduled = module.clone()
    driver.run_passes(scheduled, ("tile-narrow-results",))
    value = scheduled.clone()
    driver.run_passes(scheduled, GRADIENTS[STAGE:] if name == "causal" else GRADIENTS)
    return Compiled(value, scheduled, captures)


@pytest.mark.parametrize("name", ["documents", "first keys or document", "causal"])
def test_gradients(name: str):
    made, (module, _) = narrowed(name), lower(DEFINITIONS[name], torch.float16, fused=True)
    given = problem(made, (1, 2, 1), (150, 300))
    want = given.gradients(tile.run_plan, module)
    runs = [(tile.run_plan, made.value, {}), (tile_async.run_plan, made.scheduled, {"seed": 0})]
    for run, found, options in runs:
        for a, b in zip(given.gradients(run, found, **options), want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_documents_are_compared_as_they_are_in_memory():
    documents = library.document(DOCUMENTS.int())
    traced = build(Definition(mask_mod=documents), dtype=torch.float16, head_dim=D, head_dim_v=D)
    module = driver.to_attn(traced.module, ("q", "k", "v"))
    convert = "convert-attn-to-tile{fused=true covered=true whole=true}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, "tile-narrow-results"))
    kernel = next(o for o in module.ops if isinstance(o, dialect.KernelOp) and o.sym_name.data == "backward_dkdv")
    maps = [op for op in kernel.walk() if isinstance(op, dialect.MapOp)]
    loaded = [op for op in maps if any(isinstance(o, dialect.GatherOp) for o in op.body.block.ops)]
    assert loaded and not any(dialect.element_of(output) == i64 for op in loaded for output in op.outputs)
    compares = [o for op in maps for o in op.body.block.ops if isinstance(o, arith.CmpiOp)]
    assert compares and not any(o.lhs.type == i64 for o in compares)
