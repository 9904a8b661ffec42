"""The forward pass with its keys in parts: `combine` regions in kernels, for every kind of row function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attn_engine
from attn_engine.backends.backend import get_backend
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.ir.schedule import KernelSchedule
from attn_engine.passes.lowering import split_keys
from attn_engine.runtime import driver
from attn_engine.runtime.driver import Request
from tests.fuzz.check import function_of, inputs_of
from tests.fuzz.grammar import Case, captures_of
from tests.fuzz.rows import KNOWN
from tests.support.compare import assert_near, check, qkv, randn
from tests.support.eager import eager_attention
from tests.support.engines import INTERPRETED, ORACLE, SMALL, blocks, poisoned_memory

# 40 keys in three blocks of 16.
SIZES = {"b": 2, "h": 2, "hkv": 1, "sq": 17, "skv": 40, "d": 8, "dv": 4}
BLOCKS = replace(SMALL, forward=KernelSchedule(16, 16, 4, 1))
MASK = "    def mask_mod(b, h, q, kv):\n        return (kv <= q * 2) & (q != 3)\n\n"


def case_of(row: str) -> Case:
    body = KNOWN[row]
    arguments = "s, b, h, q, kv" if "kv" in body else "s, b, h, q"
    captures = captures_of(body)
    source = (
        f"def make({', '.join(captures)}):\n{MASK}    def row({arguments}):\n        {body}\n\n"
        '    return {"mask_mod": mask_mod, "row": row}\n'
    )
    return Case(1, source, captures, row, SIZES)


def assert_same(row: str, backend: str, parts: int) -> None:
    case = case_of(row)
    tensors, captures = inputs_of(case)
    functions = function_of(case)(**captures)
    want, _ = eager_attention(*tensors, functions, 0.4)
    with poisoned_memory(), blocks(replace(BLOCKS, parts=parts)):
        got = attn_engine.compile(**functions, backend=backend)(*tensors, scale=0.4)
    assert_near("o", got, want, 1e-5)


@pytest.mark.parametrize("row", KNOWN)
def test_every_row_function(row: str) -> None:
    """Two blocks and one; one each and two parts that are empty."""
    for parts in (2, 5):
        assert_same(row, "cpu", parts)


@pytest.mark.parametrize("row", ["softmax", "centred", "spread", "twice"])
def test_every_level(row: str) -> None:
    assert_same(row, ORACLE, 2)
    assert_same(row, INTERPRETED, 2)


def windowed() -> dict:
    def mask_mod(b, h, q, kv):
        return (q - kv < 30) & (kv <= q + 20) | (kv < 3)

    return {"mask_mod": mask_mod}


@pytest.mark.parametrize(("backend", "parts"), [("cpu", 2), ("cpu", 4), ("cpu", 7), (INTERPRETED, 3)])
def test_parts_of_several_runs_of_blocks(backend: str, parts: int) -> None:
    """Masked blocks on both sides of full ones, cut anywhere; parts of unequal numbers of blocks, and empty ones."""
    tensors = qkv(h=4, hkv=2, sq=70, skv=150, d=20, dv=24)
    check(windowed, tensors, backend=backend, schedule=replace(SMALL, parts=parts))


@pytest.mark.parametrize("programs", [3, 1000])
def test_as_many_parts_as_programs_ask_for(programs: int) -> None:
    tensors = qkv(h=2, sq=1, skv=200)
    bias = randn(200)
    check(
        lambda bias: {"score_mod": lambda s, b, h, q, kv: s + bias[kv]},
        tensors,
        {"bias": bias},
        schedule=replace(SMALL, programs=programs),
    )


def test_no_queries_and_no_keys() -> None:
    for sq, skv in ((0, 5), (3, 0)):
        check(windowed, qkv(sq=sq, skv=skv), schedule=replace(SMALL, parts=3))
        check(windowed, qkv(sq=sq, skv=skv), schedule=replace(SMALL, programs=3))


def test_mods_that_read_their_row_and_packed_sequences() -> None:
    """What other kernels do first is done in front of the parts too."""
    q, k, v = qkv(h=4, hkv=2, sq=5, skv=90, d=8)
    weights, ends = randn(8), torch.tensor([0, 2, 5], dtype=torch.int32)

    def norm(x, b, h, position, channel):
        return x * torch.rsqrt((x * x).mean(-1) + 1e-6) * weights[channel]

    def attended(parts: int) -> list[torch.Tensor]:
        with poisoned_memory(), blocks(replace(BLOCKS, parts=parts)):
            modified = attn_engine.compile(query_mod=norm, key_mod=norm, backend="cpu")(q, k, v)
            plain = attn_engine.compile(backend="cpu")
            return [modified, plain(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=torch.tensor([0, 50, 90]).int())]

    for got, want in zip(attended(4), attended(1), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_no_part_has_more_keys_than_combining_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program would do, but parts of about 30 keys are made."""
    monkeypatch.setattr(split_keys, "MOST_KEYS", 30)
    module = build(Definition(), dtype=torch.float32, head_dim=16, head_dim_v=16).module
    schedule = replace(BLOCKS, programs=1)
    lowered = driver.to_tile(driver.to_attn(module, ()), Request((), "cpu", schedule), get_backend("cpu"))
    assert "%least = arith.ceildivsi %skv" in str(lowered)
    q, k, v = qkv(h=1, sq=1, skv=200)
    with poisoned_memory(), blocks(schedule):
        got = attn_engine.compile(backend="cpu")(q, k, v)
    assert_near("o", got, torch.nn.functional.scaled_dot_product_attention(q, k, v), 1e-5)
