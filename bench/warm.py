"""Compilation before timing: kernels are built in processes side by side, and found again in the compilers' caches."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def side_by_side(work: Callable[[T], object], tasks: Sequence[T]) -> None:
    """Runs each task in a process of its own; what one cannot build shows again, with its error, where it is timed."""
    workers = max(1, min(len(tasks), len(os.sched_getaffinity(0)) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(work, task) for task in tasks]:
            future.exception()
