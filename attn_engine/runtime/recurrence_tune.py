"""Measured forms of recurrences: a few are timed on the first call of a kind, and the fastest is kept, in a file too.

Entries of the file are `{key: {"value_block": 64, "pieces": 2, ...}}` with options of `convert-recurrence-to-tile`, or `{}` where what
`attn-schedule-recurrence` says was fastest. A key says what was measured, on which device, and with which versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_engine.backends.backend import get_backend
from attn_engine.ir.schedule import padded
from attn_engine.passes.attn_schedule_recurrence import LARGEST_KEY, WARPGROUP_ROWS
from attn_engine.runtime.devices import Target
from attn_engine.runtime.recurrence_compile import Compiled, Request, compiled_for
from attn_engine.runtime.tune import seconds_of, tune_key
from attn_engine.runtime.tune_file import FORM, add_entry, read_entries

Change = dict[str, int | bool]
STEPS: tuple[tuple[Change, ...], ...] = (
    (
        {"pieces": 1, "chained": False},
        {"pieces": 2, "chained": True},
        {"pieces": 8, "chained": False},
        {"pieces": 32, "chained": False},
    ),
    ({"turned": True},),
    ({"value_block": 32}, {"value_block": 128}),
    ({"num_stages": 1}, {"num_stages": 3}),
    ({"num_warps": 8},),
)
"""What is tried, one after the other, with the best of what came before."""
CPU_STEPS: tuple[tuple[Change, ...], ...] = (({"chunk": 32}, {"chunk": 128}),)


@dataclass(frozen=True)
class RecurrenceTuner:
    """Finds forms: in its file, or with `measure` by trying some, else the default."""

    file: str = ""
    measure: bool = True

    def best(self, request: Request, run: Callable[[Request], object], device: torch.device) -> Request:
        """`run` makes a call in the form of a request."""
        key = tune_key("recurrence", Target(request.backend, ""), request, device)
        known = read_entries(self.file, FORM) if self.file else {}
        if key in known:
            return _changed(request, known[key])
        if not self.measure:
            return request
        found = search(request, lambda r: seconds_of(lambda: run(r), device))
        if self.file:
            add_entry(self.file, FORM, key, {} if found == request else vars(found.schedule))
        return found


def _changed(request: Request, change: Change) -> Request:
    """With another schedule no place decides."""
    if not change:
        return request
    values: Any = change
    return replace(request, schedule=replace(request.schedule, **values), place=None)


def search(start: Request, measure: Callable[[Request], float]) -> Request:
    """The fastest request, option after option; what cannot be built is passed over."""
    best, best_time = start, measure(start)
    for step in CPU_STEPS if get_backend(start.backend).on_host else STEPS:
        for candidate in [_changed(best, change) for change in step]:
            if (candidate.schedule == best.schedule and candidate.place == best.place) or not _allowed(
                start, candidate
            ):
                continue
            try:
                seconds = measure(candidate)
            except Exception:  # a form that a kind has not, or a compiler that refuses: then this is no candidate
                continue
            if seconds < best_time:
                best, best_time = candidate, seconds
    return best


def _allowed(start: Request, candidate: Request) -> bool:
    """Not what a place rules out for its device: chains, and narrow tiles that its assembler gets wrong."""
    place, kind, schedule = start.place, start.kind, candidate.schedule
    if place is None:
        return True
    if schedule.chained and not place.chains:
        return False
    narrow = min(schedule.value_block, padded(kind.value)) < WARPGROUP_ROWS and kind.beta
    return not (place.careful and (narrow or max(kind.key, kind.value) > LARGEST_KEY))


# --- which tuner a call has ----------------------------------------------------------------------------

_ACTIVE: ContextVar[RecurrenceTuner | None] = ContextVar("recurrence_tuner", default=None)
_FOUND: dict[tuple[RecurrenceTuner, Request], Request] = {}


@contextmanager
def tuning(tuner: RecurrenceTuner | None) -> Generator[None]:
    """Recurrences that are called inside have a tuner, and their gradients later: see `active_tuner`."""
    token = _ACTIVE.set(tuner)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active_tuner() -> str:
    """That of the calls that are made here, as a text that a graph of their gradients can hold; empty if there is none."""
    tuner = _ACTIVE.get()
    return "" if tuner is None else json.dumps(vars(tuner))


def tuned(tuner: str, compiled: Compiled, run: Callable[[Compiled], object], device: torch.device) -> Compiled:
    """The same compilation, or a faster one by an `active_tuner`; `run` makes the call that is waited for."""
    if not tuner or compiled.request.schedule.chunk == 1:
        return compiled
    request, finder = compiled.request, RecurrenceTuner(**json.loads(tuner))
    if (finder, request) not in _FOUND:
        _FOUND[finder, request] = finder.best(request, lambda other: run(compiled_for(other)), device)
    return compiled_for(_FOUND[finder, request])
