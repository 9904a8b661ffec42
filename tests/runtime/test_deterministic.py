"""`deterministic=True`: the same bits in whatever order programs run, gradients of captured tensors included."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import attn_engine
from attn_engine import library
from attn_engine.backends.cpu import parallel, support
from attn_engine.backends.triton.interpret import interpreter
from attn_engine.errors import NondeterministicError
from attn_engine.flex import flex_attention
from attn_engine.runtime import driver
from attn_engine.runtime.inspect import View
from tests.support.compare import check, leaf, qkv, randn
from tests.support.engines import INTERPRETED, ORACLE, SMALL, blocks

SIZES = {"b": 3, "h": 2, "hkv": 1, "sq": 18, "skv": 33, "d": 16}


@contextmanager
def shuffled_batches(seed: int) -> Iterator[None]:
    """The cpu backend takes the programs of a launch in another order."""
    batches, rng = support.batches_of, random.Random(seed)

    def shuffled(grid: Any, workers: int) -> Any:
        found = batches(grid, workers)
        rng.shuffle(found)
        return found

    with mock.patch.object(support, "batches_of", shuffled), mock.patch.object(parallel, "BATCHES", (2,)):
        yield


@contextmanager
def shuffled_grid(seed: int) -> Iterator[None]:
    """Triton's interpreter takes the programs of a launch in another order."""
    builder, orders = interpreter.interpreter_builder, {}
    place = builder.set_grid_idx

    def elsewhere(x: int, y: int, z: int) -> None:
        nx, ny, nz = builder.grid_dim
        if (x, y, z) == (0, 0, 0) or (nx, ny, nz) not in orders:
            orders[nx, ny, nz] = list(range(nx * ny * nz))
            random.Random(seed).shuffle(orders[nx, ny, nz])
        number = orders[nx, ny, nz][(x * ny + y) * nz + z]
        place(number // (ny * nz), number // nz % ny, number % nz)

    with mock.patch.object(builder, "set_grid_idx", elsewhere):
        yield


SHUFFLED: dict[str, Callable[[int], Any]] = {"cpu": shuffled_batches, INTERPRETED: shuffled_grid}


def captures() -> dict[str, Tensor]:
    shapes = {"table": (2, 8), "slopes": (2,), "gain": (), "bias": (2, 18, 33), "rows": (3, 18), "weight": (16,)}
    return {name: randn(*shape, seed=40 + n) for n, (name, shape) in enumerate(shapes.items())}


def make(
    table: Tensor, slopes: Tensor, gain: Tensor, bias: Tensor, rows: Tensor, weight: Tensor
) -> dict[str, Callable[..., Any]]:
    """Gradients gathered by computed indices, of a head, of everything, over the batch, of a row, of a channel."""

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        distance = torch.clamp(torch.abs(q - kv), 0, 7)
        return s * gain + table[h, distance] + slopes[h] * (q - kv) * 0.1 + bias[h, q, kv] + rows[b, q] * rows[b, q]

    def query_mod(x: Any, b: Any, h: Any, position: Any, channel: Any) -> Any:
        return x * weight[channel]

    return {"score_mod": score_mod, "query_mod": query_mod, "row": library.softmax1}


def gradients(backend: str, deterministic: bool, order: int | None) -> list[Tensor]:
    tensors, read = [leaf(t) for t in qkv(**SIZES)], {n: leaf(c) for n, c in captures().items()}
    attend = attn_engine.compile(**make(**read), backend=backend, deterministic=deterministic)
    with blocks(SMALL):
        if order is None:
            o = attend(*tensors)
            return [o, *torch.autograd.grad(o, [*tensors, *read.values()], randn(*o.shape, seed=5))]
        with SHUFFLED[backend](order):
            o = attend(*tensors)
            return [o, *torch.autograd.grad(o, [*tensors, *read.values()], randn(*o.shape, seed=5))]


@pytest.mark.parametrize("backend", SHUFFLED)
def test_the_order_of_programs_changes_no_bit(backend: str):
    want, plain = gradients(backend, True, None), gradients("cpu", False, None)
    assert all(torch.allclose(got, right, rtol=1e-4, atol=1e-4) for got, right in zip(want, plain, strict=True))
    for order in (1, 2) if backend == "cpu" else (1,):
        for got, right in zip(gradients(backend, True, order), want, strict=True):
            assert torch.equal(got, right)


def test_it_would_otherwise():
    want = gradients("cpu", False, None)
    runs = [gradients("cpu", False, order) for order in range(1, 4)]
    assert any(not torch.equal(got, right) for run in runs for got, right in zip(run, want, strict=True))


@pytest.mark.parametrize("backend", ["cpu", ORACLE])
def test_the_gradients_are_right(backend: str, monkeypatch: pytest.MonkeyPatch):
    compiled = attn_engine.compile
    monkeypatch.setattr(attn_engine, "compile", lambda **options: compiled(**options, deterministic=True))
    check(make, qkv(**SIZES), captures(), backend, schedule=SMALL)


@pytest.mark.parametrize("exponent", [-60, 60])
def test_gradients_of_any_size(exponent: int):
    """Steps follow the largest contribution."""
    size, table = 2.0**exponent, leaf(randn(8, seed=1))
    q, k, v = qkv(b=2, sq=35, skv=50)

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + table[(q + kv) % 8]

    attend = attn_engine.compile(score_mod=score_mod, backend="cpu", deterministic=True)
    o = attend(q, k, v)
    cotangent = randn(*o.shape, seed=5)
    (want,) = torch.autograd.grad(o, table, cotangent, retain_graph=True)
    (got,) = torch.autograd.grad(o, table, cotangent * size)
    assert torch.allclose(got / size, want, rtol=1e-4, atol=1e-6)


def test_gradients_that_are_not_finite_stay_so():
    table = leaf(randn(8, seed=1))
    q, k, v = qkv(sq=35)
    attend = attn_engine.compile(
        score_mod=lambda s, b, h, q, kv: s + table[(q + kv) % 8], backend="cpu", deterministic=True
    )
    o = attend(q, k, v)
    (got,) = torch.autograd.grad(o, table, torch.full_like(o, float("inf")))
    assert got.isnan().all()


def test_adding_two_numbers_needs_no_order():
    """A bias of the batch, head, query and key has one contribution a place, of each of two loops at most."""
    bias = leaf(randn(2, 2, 40, 40, seed=2))
    tensors = [leaf(t) for t in qkv(b=2, sq=40)]
    own = attn_engine.compile(
        score_mod=lambda s, b, h, q, kv: s + bias[b, h, q, kv],
        mask_mod=library.causal,
        backend="cpu",
        deterministic=True,
    )
    before = set(driver._CACHE)
    own(*tensors)
    texts = [driver._CACHE[key].tile_ir for key in driver._CACHE if key not in before]
    assert texts and not any("atomic_max" in text for text in texts)


def test_two_numbers_added_to_what_an_earlier_kernel_left_need_one():
    """A table in the query_mod, and twice in the key_mod: three contributions a place, from two kernels."""
    table, tensors = leaf(randn(3, 3, 40, seed=1)), [leaf(t) for t in qkv(b=3, h=3, hkv=3, sq=40, skv=40)]

    def query_mod(x: Any, b: Any, h: Any, position: Any, channel: Any) -> Any:
        return x * table[b, h, position]

    def key_mod(x: Any, b: Any, h: Any, position: Any, channel: Any) -> Any:
        return x * table[b, h, position] * table[h, b, position]

    attend = attn_engine.compile(query_mod=query_mod, key_mod=key_mod, backend="cpu", deterministic=True)

    def gradient() -> Tensor:
        o = attend(*tensors)
        return torch.autograd.grad(o, table, randn(*o.shape, seed=5))[0]

    want = gradient()
    for order in range(3):
        with shuffled_batches(order):
            assert torch.equal(gradient(), want)


def test_backends_without_a_fixed_order_say_so():
    slopes = leaf(randn(2, seed=3))
    attend = attn_engine.compile(score_mod=library.alibi(slopes), backend="tilelang", deterministic=True)
    with pytest.raises(NondeterministicError, match="use backend 'triton' or 'cpu'"):
        attend.source("tilelang", View(backward=True))


def test_every_entry_point_takes_it():
    table = leaf(randn(8, seed=1))
    q, k, v = (leaf(t) for t in qkv(sq=20))

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + table[(q + kv) % 8]

    results = [
        attn_engine.attention(q, k, v, score_mod=score_mod, deterministic=True),
        flex_attention(q, k, v, score_mod=score_mod, deterministic=True),
    ]
    found = [torch.autograd.grad(o.sum(), table)[0] for o in results]
    assert torch.equal(*found)
    newest = driver._CACHE[next(reversed(driver._CACHE))]
    assert "atomic_max" in newest.tile_ir
