"""A launch on several threads: each takes batches of programs until none is left.

Torch's own threads meet after every operation, and a machine that is busy makes them wait there each time.
Threads that take whole batches meet once, and each keeps its temporaries in a cache of its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

WORKERS = 4
"""More would wait for Python's lock: what an operation costs in Python is a part of every trip."""

BATCHES = (8, 4)
"""Programs in a batch: many, for each step of a batch costs its calls; fewer where threads would have none to run.

Temporaries of one block of each should stay in the cache.
"""

LONG = 1 << 18
"""Elements of all tensors of a launch from which it takes longer than to make torch's threads again."""

_pools: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_pools.clear)


def batches_of(grid: Sequence[int], workers: int) -> list[tuple[int, range, range]]:
    """Positions on axis 0, and ranges of them on axes 1 and 2; one for each worker at least, if that can be."""
    blocks, heads, batches = grid
    programs = blocks * heads * batches
    size = next((size for size in BATCHES if size * workers <= programs), BATCHES[-1])
    ys = min(heads, size)
    zs = max(1, size // ys)
    return [
        (block, range(y, min(y + ys, heads)), range(z, min(z + zs, batches)))
        for z in range(0, batches, zs)
        for y in range(0, heads, ys)
        for block in range(blocks)
    ]


def _pool() -> ThreadPoolExecutor:
    if not _pools:
        _pools.append(ThreadPoolExecutor(WORKERS, "attn_engine"))
    return _pools[0]


def workers_for(tasks: int) -> int:
    """On how many threads so many tasks run; 1 is the calling thread."""
    return min(torch.get_num_threads(), WORKERS, tasks)


_PAUSE_SOFT = 1
"""`omp_pause_soft` of OpenMP 5.0: resources are released, settings stay."""


@cache
def _pause() -> Callable[[int], int] | None:
    """`omp_pause_resource_all` of the OpenMP that torch runs on, if that can be told."""
    loaded_only = getattr(os, "RTLD_NOLOAD", None)
    if loaded_only is None:
        return None
    for path in Path(torch.__file__).parent.glob("lib/lib*omp*.so*"):
        try:
            return ctypes.CDLL(str(path), mode=loaded_only | os.RTLD_NOW).omp_pause_resource_all
        except (OSError, AttributeError):
            continue
    return None


def dismiss_threads() -> None:
    """Ends torch's own threads, which spin for milliseconds after an operation, each on a core that ours need.

    The next operation that wants them makes them again, in a fraction of that.
    """
    pause = _pause()
    if pause is not None:
        pause(_PAUSE_SOFT)


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
