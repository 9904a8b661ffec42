"""Measured schedules: a few candidates are timed on first use, and the best is kept, in a file too.

The file is JSON, `{key: {"forward": [block_m, block_n, num_warps, num_stages], ...}}`; where backends were compared, an
entry has their names too (`kept_choice`). A key says what was measured, on which device, and with which versions, so that
a file can be shared between machines.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from attn_engine.arch import ARCHES
from attn_engine.backends.backend import get_backend
from attn_engine.errors import ScheduleError
from attn_engine.ir.schedule import Heads, KernelSchedule, Kind, Schedule
from attn_engine.runtime.devices import Target
from attn_engine.runtime.tune_file import KERNELS, SCHEDULE, add_entry, read_entries

Measure = Callable[[Schedule], float]
"""Seconds that one call takes with a schedule."""

_CPU_BLOCKS = ((128, 128), (128, 256), (256, 512))
_TURNS = 3


@dataclass(frozen=True)
class Tuner:
    """Finds schedules: in its file, or with `measure` by trying candidates, else the default."""

    file: str = ""
    measure: bool = True

    def best(self, key: str, default: Schedule, target: Target, heads: Heads, measure: Measure) -> Schedule:
        known = self.known()
        if key in known:
            return schedule_of(known[key], default)
        if not self.measure:
            return default
        found = search(default, target, heads, measure)
        self.write(key, found)
        return found

    def known(self) -> dict[str, Any]:
        """The entries of the file, if there is one."""
        return read_entries(self.file, SCHEDULE) if self.file else {}

    def write(self, key: str, schedule: Schedule, names: Mapping[str, str] | None = None) -> None:
        """Adds an entry to the file, if there is one."""
        if self.file:
            write_file(self.file, key, schedule, names)


def tune_key(text: str, target: Target, request: object, device: torch.device) -> str:
    """Names a measurement: what is computed, where, and by which versions."""
    what = hashlib.sha256(f"{request!r}\n{text}".encode()).hexdigest()[:16]
    versions = "/".join(f"{name}-{_version(name)}" for name in ("attn_engine", "torch", "triton", "tilelang"))
    return f"{what}/{target.backend}/{_device_name(device)}/{versions}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} x{torch.get_num_threads()}"


def search(default: Schedule, target: Target, heads: Heads, measure: Measure) -> Schedule:
    """The fastest schedule, one kernel after the other; candidates that cannot be built are passed over."""
    best, best_time = default, measure(default)
    for kernel in ("forward", "dq", "dkdv"):
        for candidate in candidates(getattr(best, kernel), Kind(kernel), target, heads):
            schedule = replace(best, **{kernel: candidate})
            try:
                seconds = measure(schedule)
            except Exception:  # a device's compiler refuses in ways of its own: then this is no candidate
                continue
            if seconds < best_time:
                best, best_time = schedule, seconds
    return best


def candidates(start: KernelSchedule, kind: Kind, target: Target, heads: Heads) -> Iterator[KernelSchedule]:
    """A handful of schedules of one kernel that the device can hold, other than `start`."""
    if get_backend(target.backend).on_host:
        yield from (replace(start, block_m=m, block_n=n) for m, n in _CPU_BLOCKS)
        return
    m, n, warps, stages = start
    blocks = [(m, n), (m // 2, n), (m, n // 2), (2 * m, n), (m, 2 * n)]
    near = [(*b, w, stages) for b in blocks for w in (4, 8)]
    for sizes in (*near, (m, n, warps, max(1, stages - 1)), (m, n, warps, stages + 1)):
        candidate = KernelSchedule(*sizes)
        if candidate != start and _fits(candidate, kind, target, heads):
            yield candidate


def _fits(candidate: KernelSchedule, kind: Kind, target: Target, heads: Heads) -> bool:
    try:
        candidate.validate(kind, ARCHES.get(target.arch, ARCHES["sm_80"]), heads)
    except ScheduleError:
        return False
    return True


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few calls, after one that is not counted."""
    call()
    return min(_once(call, device) for _ in range(_TURNS))


def _once(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(torch.cuda.current_stream(device))
    call()
    end.record(torch.cuda.current_stream(device))
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


# The file


def write_file(file: str, key: str, schedule: Schedule, names: Mapping[str, str] | None = None) -> None:
    """Adds the entry of a schedule, and of the backends of its kernels where several were compared."""
    add_entry(file, SCHEDULE, key, {name: list(getattr(schedule, name)) for name in KERNELS} | dict(names or {}))


def schedule_of(entry: Mapping[str, list[int]], default: Schedule) -> Schedule:
    """The schedule of an entry; what an entry does not tell is that of `default`."""
    return replace(default, **{name: KernelSchedule(*entry[name]) for name in KERNELS})
