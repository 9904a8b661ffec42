"""Accumulators that are scaled where a factor is not 1: the same numbers, and a branch of a warp in the machine code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp, TensorType, f16, f32
from xdsl.ir import Block
from xdsl.utils.exceptions import VerifyException

from attn_engine import library, pipelines
from attn_engine.backends.backend import get_backend
from attn_engine.backends.gluon.emit import emit
from attn_engine.backends.gluon.legalize import PREPARE, SCHEDULE
from attn_engine.dialects.tile_async_product import ScaleRowsOp
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile_async
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.schedules import default_schedule

CAUSAL = Definition(mask_mod=library.causal)


def with_scales(names: tuple[str, ...]) -> tuple[str, ...]:
    """A pipeline with the pass behind the order of products."""
    place = names.index("tile-order-async") + 1
    return (*names[:place], "tile-skip-scales", *names[place:])


def scheduled(definition: Definition, lse: bool = True) -> ModuleOp:
    traced = build(definition, dtype=torch.float16, head_dim=96, head_dim_v=96, return_lse=lse)
    module = driver.to_attn(traced.module, ())
    convert = "convert-attn-to-tile{forward=128,64,8,2 channels=32 tables=false}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *PREPARE, *with_scales(SCHEDULE)))
    module.verify()
    return module


def test_steps_scale_what_products_are_added_to():
    """In both loops and the step between them; 96 channels are two parts. The last division is no step."""
    module = scheduled(CAUSAL)
    assert str(module).count("tile.scale_rows") == 4
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 96, generator=generator).double() for n in (200, 150, 150))
    seen = torch.arange(150) <= torch.arange(200)[:, None]
    s = (q @ k.transpose(2, 3) * 96**-0.5).masked_fill(~seen, -torch.inf)
    o, lse = torch.full((1, 2, 200, 96), torch.nan).double(), torch.full((1, 2, 200), torch.nan).double()
    tile_async.run_plan(module, "forward", [q, k, v, o, lse, 96**-0.5], seed=0, processors=2, exact=True)
    torch.testing.assert_close(o, s.softmax(-1) @ v, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse, s.logsumexp(-1), atol=2e-6, rtol=2e-6)


def test_what_is_not_scaled_is_left_alone():
    assert "tile.scale_rows" not in str(scheduled(Definition(row=library.sigmoid, mask_mod=library.causal), lse=False))


@pytest.mark.parametrize(("factors", "reason"), [((4, f32), "no factor for each row"), ((8, f16), "rows of f32")])
def test_every_row_has_a_factor_of_f32(factors: tuple[int, object], reason: str):
    size, element = factors
    block = Block(arg_types=[TensorType(f32, [8, 4]), TensorType(element, [size])])  # type: ignore[arg-type]
    op = ScaleRowsOp(*block.args)
    block.add_op(op)
    with pytest.raises(VerifyException, match=reason):
        op.verify()


def test_a_warp_skips_the_multiplications():
    """Of 32 values a thread each; nothing spills, and no product waits for another."""
    pytest.importorskip("triton")
    from attn_engine.backends.triton.gluon_ahead import compile_ahead

    traced = build(CAUSAL, dtype=torch.bfloat16, head_dim=128, head_dim_v=128, return_lse=True)
    backend = get_backend("gluon")
    backend = replace(backend, pipeline=with_scales(backend.pipeline))
    schedule = default_schedule(Target("gluon", "sm_90"), traced.module)
    request = driver.Request((), "gluon", schedule, driver.Facts(positive_scale=True))
    text = emit(driver.to_tile(driver.to_attn(traced.module, ()), request, backend))
    compiled = compile_ahead(text, "forward_kernel")
    assert compiled.warnings == () and compiled.spilled_bytes == 0
    assert [sum("VOTE" in line for line in loop) for loop in compiled.loops()[:2]] == [2, 2]
