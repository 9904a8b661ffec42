"""Half of the weights of a step under the next one's product: the same numbers, later; and masks that hide scores for it."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp

from attn_engine import library, pipelines
from attn_engine.backends.gluon.emit import emit
from attn_engine.backends.gluon.legalize import LEGALIZE, PREPARE, SCHEDULE
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile_async
from attn_engine.runtime import driver

TABLE = torch.linspace(-1.0, 1.0, 400)
PASS = "tile-defer-weights"


def normalized(s: Tensor) -> Tensor:
    """Weights of one function, and their sum, which steps add up."""
    return torch.sigmoid(s) / torch.sigmoid(s).sum(-1, keepdim=True)


def early(b: object, h: object, q: Tensor, kv: Tensor) -> Tensor:
    """The first rows see nothing."""
    return kv + 70 <= q


CASES = {
    "sigmoid": Definition(row=library.sigmoid),
    "causal": Definition(row=library.sigmoid, mask_mod=library.causal),
    "rows that see nothing": Definition(row=library.sigmoid, mask_mod=early),
    "of a length": Definition(row=library.sigmoid_of_length(300), mask_mod=library.causal),
    "normalized": Definition(row=normalized, mask_mod=library.causal),
    "biased": Definition(row=library.sigmoid, score_mod=lambda s, b, h, q, kv: s + TABLE[kv], mask_mod=library.causal),
    "softmax": Definition(mask_mod=library.causal),
    "relu": Definition(row=library.relu, mask_mod=library.causal),
}
DEFERRED = ("sigmoid", "causal", "rows that see nothing", "of a length")


@cache
def scheduled(name: str, passes: tuple[str, ...] = SCHEDULE, positive: bool = True) -> tuple[ModuleOp, list[Tensor]]:
    definition = CASES[name]
    lse = definition.row is None
    traced = build(definition, dtype=torch.float16, head_dim=32, head_dim_v=32, return_lse=lse)
    module = driver.to_attn(traced.module, ())
    convert = f"convert-attn-to-tile{{forward=128,64,8,2 tables=false positive_scale={str(positive).lower()}}}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *PREPARE, *passes))
    module.verify()
    return module, list(traced.captures)


WITHOUT = tuple(name for name in SCHEDULE if name != PASS)


def run(name: str, sizes: tuple[int, int], seed: int, passes: tuple[str, ...] = SCHEDULE) -> list[Tensor]:
    module, captures = scheduled(name, passes)
    generator = torch.Generator().manual_seed(0)
    sq, skv = sizes
    q, k, v = (3 * torch.randn(1, 2, n, 32, generator=generator).double() for n in (sq, skv, skv))
    results = [torch.full_like(q, torch.nan)]
    results += [torch.full(q.shape[:3], torch.nan).double()] if CASES[name].row is None else []
    arguments = [q, k, v, *results, *(c.double() for c in captures), 32**-0.5]
    tile_async.run_plan(module, "forward", arguments, seed=seed, processors=2, exact=True)
    return results


@pytest.mark.parametrize("sizes", [(200, 300), (1, 129), (130, 64), (256, 256)])
@pytest.mark.parametrize("name", DEFERRED)
def test_it_means_the_same(name: str, sizes: tuple[int, int]):
    want = run(name, sizes, 0, WITHOUT)
    for seed in range(2):
        for got, expected in zip(run(name, sizes, seed), want, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12, equal_nan=True)


def consumer(name: str, positive: bool = True) -> str:
    return str(scheduled(name, SCHEDULE, positive)[0]).partition("role count 1")[0]


@pytest.mark.parametrize("name", DEFERRED)
def test_half_of_the_weights_stand_between_two_products(name: str):
    """Behind what holds them back; the other half behind the scores, as ever."""
    text = consumer(name)
    assert text.count("tile.hold_back") == 1 and text.count("tile.join_columns") == 2
    step = text.partition("tile.hold_back")[2]
    first, _, rest = step.partition("tile.async_dot")
    assert first.count("math.exp2") == 1 and "tile.join_columns" in first
    assert rest.partition("scf.yield")[0].count("math.exp2") == 1


@pytest.mark.parametrize("name", ["softmax", "relu", "biased", "normalized"])
def test_other_weights_are_made_at_once(name: str):
    """With numbers of rows, without functions, where a mask cannot hide their scores, or with a sum."""
    assert "tile.hold_back" not in consumer(name)


def test_a_scale_of_any_sign_hides_no_scores():
    """What a score of minus infinity makes of them is not known then."""
    assert "tile.hold_back" not in consumer("causal", positive=False)


def test_functions_are_not_between_the_instructions_of_a_product(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("triton")
    from attn_engine.backends.triton.gluon_ahead import compile_ahead

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    traced = build(CASES["sigmoid"], dtype=torch.bfloat16, head_dim=128, head_dim_v=128).module
    module = driver.to_attn(traced, ())
    convert = "convert-attn-to-tile{forward=128,128,8,2 tables=false positive_scale=true}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *PREPARE, *SCHEDULE, *LEGALIZE))
    assembly = compile_ahead(emit(module), "forward_kernel")
    assert not assembly.warnings and not assembly.spilled_bytes
    found = re.findall(r"\b(HGMMA|MUFU)\b.*?(gsb0)?\s*;", assembly.sass)
    inside, between = False, list[str]()
    for kind, last in found:
        if kind == "HGMMA":
            inside = not last
        elif inside:
            between.append(kind)
    assert sum(kind == "HGMMA" for kind, _ in found) > 64
    assert not between
