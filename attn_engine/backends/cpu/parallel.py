"""A launch on several threads: each takes batches of programs until none is left.

Torch's own threads meet after every operation, and a machine that is busy makes them wait there each time.
Threads that take whole batches meet once, and each keeps its temporaries in a cache of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

WORKERS = 4
"""More would wait for Python's lock: what an operation costs in Python is a part of every trip."""

_pools: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_pools.clear)


def _pool() -> ThreadPoolExecutor:
    if not _pools:
        _pools.append(ThreadPoolExecutor(WORKERS, "attn_engine"))
    return _pools[0]


def workers_for(tasks: int) -> int:
    """On how many threads so many tasks run; 1 is the calling thread."""
    return min(torch.get_num_threads(), WORKERS, tasks)


def run(work: Callable[[], None], workers: int) -> None:
    """Runs `work` on each of several threads, which share torch's threads among them, until all return.

    What was thrown first is thrown again.
    """
    threads = torch.get_num_threads()
    futures = [_pool().submit(_on_worker, work, max(1, threads // workers)) for _ in range(workers)]
    try:
        for future in futures:
            future.result()
    finally:
        # Threads that start later inherit the number that was set last, on whatever thread.
        torch.set_num_threads(threads)


def _on_worker(work: Callable[[], None], threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    # The mode of the caller is not inherited; this one may write to tensors of any.
    with torch.inference_mode():
        work()
