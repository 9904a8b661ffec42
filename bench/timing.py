"""Timing on a GPU: contenders interleaved in rounds, medians of CUDA-event times."""

from __future__ import annotations

import fcntl
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

FLUSH_BYTES = 256 * 2**20
HIDING_CYCLES = 6_000_000
"""About three milliseconds of an idle kernel, behind which the host gets its launches out: a backward of autograd and several
kernels takes the host of a busy machine more than one."""


def _once(function: Callable[[], object], flush: torch.Tensor) -> float:
    """Milliseconds of the GPU for one call on cold L2; the host's own time is hidden."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(HIDING_CYCLES)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@contextmanager
def alone() -> Iterator[None]:
    """Benches that run side by side on one GPU, and build kernels meanwhile, measure one after the other."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    with (Path(tempfile.gettempdir()) / f"attn_engine_bench_{uuid}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int = 5, launches: int = 4, warm_ups: int = 2
) -> dict[str, float]:
    """Median milliseconds per contender; every round runs each of them, so that all see the same clock."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for function in contenders.values():
        for _ in range(warm_ups):
            function()
    torch.cuda.synchronize()
    with alone():
        for _ in range(rounds):
            for name, function in contenders.items():
                times[name] += [_once(function, flush) for _ in range(launches)]
    return {name: statistics.median(found) for name, found in times.items()}
