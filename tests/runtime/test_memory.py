"""Peak memory of the CPU backend grows with the length, not with its square."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

import attn_engine
from tests.runtime.attention_support import causal

LENGTHS = (1024, 2048, 4096)
HEADS, D = 2, 16


@pytest.fixture(autouse=True)
def one_thread():
    """The profiler sees allocations of the calling thread only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def allocations(call: Callable[[], object]) -> tuple[int, int]:
    """The most bytes that a call holds at once beyond what was there, and its largest allocation."""
    with profile(profile_memory=True) as record:
        call()
    results: Any = record.profiler
    sizes = [event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    return peak, max(sizes)


def inputs(length: int, kv_heads: int = HEADS) -> list[Tensor]:
    return [torch.randn(1, heads, length, D, requires_grad=True) for heads in (HEADS, kv_heads, kv_heads)]


def plain(length: int) -> Callable[[], Tensor]:
    tensors, attention = inputs(length), attn_engine.compile(mask_mod=causal)
    return lambda: attention(*tensors)


def grouped(length: int) -> Callable[[], Tensor]:
    tensors, attention = inputs(length, 1), attn_engine.compile(mask_mod=causal)
    return lambda: attention(*tensors)


def captured(length: int) -> Callable[[], Tensor]:
    tensors, slopes = inputs(length), torch.rand(HEADS, requires_grad=True)
    documents = torch.arange(length) // 300
    attention = attn_engine.compile(
        score_mod=lambda s, b, h, i, j: 20 * torch.tanh(s / 20) + slopes[h] * (j - i),
        mask_mod=lambda b, h, i, j: documents[i] == documents[j],
    )
    return lambda: attention(*tensors)


def sigmoid(length: int) -> Callable[[], Tensor]:
    tensors, attention = inputs(length), attn_engine.compile(row=attn_engine.sigmoid)
    return lambda: attention(*tensors)


@pytest.mark.parametrize("make", [plain, grouped, captured, sigmoid])
def test_memory_is_linear_in_the_length(make: Callable[[int], Callable[[], Tensor]]):
    peaks: list[int] = []
    for length in LENGTHS:
        call = make(length)
        call()

        def step(call: Callable[[], Tensor] = call) -> None:
            call().sum().backward()

        step()
        peak, largest = allocations(step)
        assert largest < length * length * 4 / 4, "a quarter of one head's scores"
        peaks.append(peak)
    first, second = peaks[1] - peaks[0], peaks[2] - peaks[1]
    assert second < 3 * max(first, 0) + 2**20
    assert peaks[2] < HEADS * LENGTHS[2] ** 2 * 4 / 8, "an eighth of all scores"


def test_the_measure_sees_quadratic_memory():
    def dense(length: int) -> Callable[[], Tensor]:
        q, k, v = inputs(length)
        return lambda: (q @ k.mT).softmax(-1) @ v

    with pytest.raises(AssertionError):
        test_memory_is_linear_in_the_length(dense)
