"""Compilation before timing: kernels are built in processes side by side, and found again in the compilers' caches."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def _pool(tasks: int, tasks_each: int | None = None) -> ProcessPoolExecutor:
    # Or each would start as many processes as there are cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    workers = max(1, min(tasks, len(os.sched_getaffinity(0)) - 2))
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), max_tasks_per_child=tasks_each)


def side_by_side(work: Callable[[T], object], tasks: Sequence[T]) -> None:
    """Runs each task in a process of its own; what one cannot build shows again, with its error, where it is timed."""
    with _pool(len(tasks)) as pool:
        for future in [pool.submit(_timed, work, task) for task in tasks]:
            future.exception()


def as_done(work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
    """What each task gives, in the order in which they end; a process has one task, and takes its errors of a device with it."""
    with _pool(len(tasks), tasks_each=1) as pool:
        for future in as_completed([pool.submit(work, task) for task in tasks]):
            yield future.result()


def _timed(work: Callable[[T], object], task: T) -> None:
    start = time.monotonic()
    work(task)
    print(f"    built {task} in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
