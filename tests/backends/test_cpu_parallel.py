"""Launches on several threads: same results, errors come through, torch's own number of threads stays."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

import pytest
import torch

import attn_engine
from attn_engine.backends.backend import get_backend
from attn_engine.backends.cpu import parallel, support


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def causal(b, h, q, kv):
    return q >= kv


def results(mode, slopes: torch.Tensor) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, 3, 300, 8, generator=generator).requires_grad_() for _ in range(3)]
    attention = attn_engine.compile(mask_mod=causal, score_mod=lambda s, b, h, i, j: s * slopes[h])
    with mode():
        o = attention(*leaves)
    if not o.requires_grad:
        return [o]
    return [o, *torch.autograd.grad(o.square().sum(), [*leaves, slopes])]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_threads_change_nothing(mode, monkeypatch: pytest.MonkeyPatch):
    slopes = torch.rand(3, requires_grad=True)
    workers: list[int] = []
    original = parallel.run
    monkeypatch.setattr(support, "run", lambda work, n: (workers.append(n), original(work, n)))
    found = results(mode, slopes)
    assert workers
    assert set(workers) == {2}
    assert torch.get_num_threads() == 2
    monkeypatch.setattr(support, "workers_for", lambda tasks: 1)
    for mine, alone in zip(found, results(mode, slopes), strict=True):
        assert torch.equal(mine, alone)


def test_an_error_on_a_thread_is_thrown_to_the_caller():
    def kernel(programs: support.Programs, x: torch.Tensor) -> None:
        raise IndexError(f"block {programs.id(0)}")

    with pytest.raises(IndexError, match="block"):
        support.launch(kernel, (5, 1, 1), (torch.zeros(1),))
    assert torch.get_num_threads() == 2


def test_every_program_runs_once():
    seen: list[tuple[int, ...]] = []

    def kernel(programs: support.Programs, x: torch.Tensor) -> None:
        block, y, z = (programs.id(axis) for axis in range(3))
        seen.extend((block, int(a), int(b)) for a in y.flatten() for b in z.flatten())

    support.launch(kernel, (3, 5, 2), (torch.zeros(1),))
    assert sorted(seen) == [(i, y, z) for i in range(3) for y in range(5) for z in range(2)]


def test_a_kernel_whose_programs_add_to_one_place_runs_in_order():
    slopes = torch.rand(3, requires_grad=True)
    results(torch.enable_grad, slopes)
    attention = attn_engine.compile(score_mod=lambda s, b, h, i, j: s * slopes[h])
    view = attn_engine.View(dtype=torch.float32, head_dim=8, backward=True, backend="cpu")
    source = attention.source("cpu", view)
    assert source.count("in_order=True") == 1
    assert get_backend("cpu").check().ok


def test_threads_of_the_caller():
    slopes = torch.rand(3)
    expected = results(torch.no_grad, slopes)[0]
    found: list[torch.Tensor] = []
    callers = [threading.Thread(target=lambda: found.append(results(torch.no_grad, slopes)[0])) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(torch.allclose(o, expected) for o in found)
    assert len(found) == 3


def _child(queue) -> None:
    torch.set_num_threads(2)
    queue.put(results(torch.no_grad, torch.ones(3))[0].sum().item())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    expected = results(torch.no_grad, torch.ones(3))[0].sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == pytest.approx(expected)
    child.join(timeout=60)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(parallel._pause() is None, reason="torch's OpenMP is not to be found, or cannot pause")
def test_threads_of_torch_do_not_spin_beside_ours():
    """Those that spin after an operation end before a long launch, and are there again at the next operation."""
    x = torch.randn(1 << 20)
    wanted = x.exp()
    before = _threads()
    parallel.dismiss_threads()
    deadline = time.monotonic() + 5
    while _threads() >= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _threads() < before
    assert torch.equal(x.exp(), wanted)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("positions", "dismissed"), [(1024, True), (64, False)])
def test_only_long_launches_dismiss_threads(positions: int, dismissed: bool, monkeypatch: pytest.MonkeyPatch):
    calls: list[None] = []
    monkeypatch.setattr(support, "dismiss_threads", lambda: calls.append(None))
    q, k, v = (torch.randn(1, 8, positions, 16) for _ in range(3))
    attn_engine.attention(q, k, v)
    assert bool(calls) == dismissed
