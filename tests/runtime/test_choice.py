"""Which backend an attention gets by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_engine import library
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.ir.schedule import Heads
from attn_engine.runtime import choice, driver, predict
from attn_engine.runtime.captures import capture_rules
from attn_engine.runtime.devices import Target, target_of
from attn_engine.runtime.schedules import default_schedule

HOPPER = Target("triton", "sm_90")


@pytest.fixture(autouse=True)
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "is_usable", lambda name: True)


def chosen(definition: Definition, target: Target = HOPPER, dtype: torch.dtype = torch.bfloat16, dim: int = 128):
    module = build(definition, dtype=dtype, head_dim=dim, head_dim_v=dim).module
    return [t.backend for t in choice.choose(None, target, module)]


SLOPES, BIAS, IDS = torch.rand(4), torch.randn(4, 8, 8), torch.arange(8) // 3


@pytest.mark.parametrize(
    "definition",
    [
        Definition(mask_mod=library.causal),
        Definition(score_mod=library.alibi(SLOPES), mask_mod=library.sliding_window(5)),
        Definition(row=library.sigmoid),
        Definition(score_mod=library.soft_cap(20.0)),
        Definition(score_mod=lambda s, b, h, q, kv: s + BIAS[h, q, kv]),
        Definition(mask_mod=library.document(IDS)),
    ],
    ids=["softmax", "alibi", "sigmoid", "soft_cap", "bias", "documents"],
)
def test_forwards_are_asynchronous_on_hopper(definition: Definition):
    assert chosen(definition) == ["gluon", "tilelang", "triton"]


@pytest.mark.parametrize(
    "definition",
    [
        Definition(score_mod=lambda s, b, h, q, kv: s + BIAS[h, kv, q]),
        Definition(score_mod=lambda s, b, h, q, kv: s + SLOPES[(q + kv) // 4]),
        Definition(
            score_mod=lambda s, b, h, q, kv: torch.erf(torch.sin(s)) * torch.cosh(s) + torch.sinh(s) * torch.cos(s)
        ),
        Definition(key_mod=lambda x: 2 * x),
    ],
    ids=["turned", "gathered", "arithmetic", "key_mod"],
)
def test_others_are_plain(definition: Definition):
    assert chosen(definition) == ["triton"]


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, q, kv: s + SLOPES[(q + kv) % 4],
        lambda s, b, h, q, kv: s + SLOPES[-1 - (q & kv & 3)],
        lambda s, b, h, q, kv: s + BIAS[h, q % 4, (q - 2 * kv) % 64],
    ],
)
def test_small_tables_are_in_reach_of_threads(score: Callable[..., Any]):
    assert chosen(Definition(score_mod=score)) == ["gluon", "triton"]


def test_what_is_read_by_distance_goes_where_its_blocks_are_loaded():
    assert chosen(Definition(score_mod=lambda s, b, h, q, kv: s + SLOPES[(q - kv) % 4])) == ["gluon", "triton"]


def test_other_devices_types_and_names_are_plain():
    assert chosen(Definition(), Target("triton", "sm_80")) == ["triton"]
    assert chosen(Definition(), dtype=torch.float32) == ["triton"]
    assert chosen(Definition(), dim=72) == ["gluon", "triton"]
    assert chosen(Definition(), dim=256) == ["gluon", "triton"]
    assert chosen(Definition(), dim=32) == chosen(Definition(), dim=512) == ["triton"]
    module = build(Definition(), dtype=torch.bfloat16, head_dim=128, head_dim_v=128).module
    assert choice.choose("triton", HOPPER, module) == (HOPPER,)


def test_tensors_that_no_descriptor_takes_are_plain():
    module = build(Definition(), dtype=torch.bfloat16, head_dim=128, head_dim_v=128).module
    assert choice.choose(None, HOPPER, module, in_blocks=False) == (HOPPER,)


def test_tables_of_scores_alone_must_lie_in_blocks():
    """Rows of 63 numbers start where no descriptor takes them; by distance they are read number by number."""
    odd = torch.zeros(4, 63)

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + odd[h, q - kv + 31] + BIAS[h, q, kv]

    traced = build(Definition(score_mod=score), dtype=torch.bfloat16, head_dim=128, head_dim_v=128)
    found = capture_rules(traced.module, traced.capture_names).tables(traced.captures)
    assert [table.shape for table in found] == [BIAS.shape]


def test_predictions_rank_and_say_why():
    module = build(Definition(key_mod=lambda x: 2 * x), dtype=torch.bfloat16, head_dim=128, head_dim_v=128).module
    assert choice.consider(module).lines()[1:] == [
        "gluon: its loop does not run other work beside products here",
        "tilelang: its loop does not run other work beside products here",
    ]
    module = build(Definition(), dtype=torch.bfloat16, head_dim=128, head_dim_v=128).module
    lines = choice.consider(module).lines()
    assert [line.split(":")[0] for line in lines] == ["gluon", "tilelang", "triton"]
    assert "(1.00): two groups of warps take turns" in lines[0]


def test_a_backend_that_is_not_there_is_not_considered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "is_usable", lambda name: name != "tilelang")
    assert chosen(Definition(mask_mod=library.causal)) == ["gluon", "triton"]


def test_a_heavier_score_costs_more_everywhere():
    light, heavy = (predict.predict("triton", Heads(128, 128, "bf16"), ops).clocks for ops in (0, 60))
    assert heavy - light == pytest.approx(
        (60 / 128) - (min(0.15 * 66 / 128 + 0.15 / 16, 0.139) - 0.15 * 0.109375), abs=1e-3
    )


def test_gradients_of_another_backend():
    """Each plan is text of its own backend."""
    module = build(Definition(mask_mod=library.causal), dtype=torch.float16, head_dim=64, head_dim_v=64).module
    target = Target("tilelang", "sm_90")
    lowered = driver.to_attn(module, ("q", "k", "v"))
    request = driver.Request(("q", "k", "v"), "tilelang", default_schedule(target, module), gradients="triton")
    assert [(p.backend.name, "triton.jit" in p.source) for p in driver.to_parts(lowered, request)] == [
        ("tilelang", False),
        ("triton", True),
    ]


@pytest.mark.parametrize(
    ("environment", "backend", "is_open"),
    [
        ("", None, True),
        ("", "auto", True),
        ("auto", None, True),
        ("triton", None, False),
        ("triton", "auto", True),
        ("auto", "triton", False),
        ("", "triton", False),
    ],
)
def test_a_name_closes_the_choice_and_auto_opens_it(monkeypatch, environment: str, backend: str | None, is_open: bool):
    """A name in the environment counts as one in a call."""
    monkeypatch.setenv("ATTN_ENGINE_BACKEND", environment)
    assert choice.is_open(backend, HOPPER) == is_open


@pytest.mark.parametrize("environment", ["cpu", "auto"])
def test_auto_takes_the_backend_of_the_device(monkeypatch, environment: str):
    monkeypatch.setenv("ATTN_ENGINE_BACKEND", environment)
    assert target_of(torch.device("cpu"), "auto").backend == "cpu"
