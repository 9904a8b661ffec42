"""Backends that tests add to the table: the tile interpreter, and Triton's text in Triton's interpreter.

With them the public API runs every path on CPU tensors: `attn_engine.compile(..., backend=ORACLE)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from xdsl.parser import Parser

from attn_engine.backends.backend import BACKENDS, Availability, Backend, Level, Plan
from attn_engine.backends.triton.backend import BACKEND as TRITON
from attn_engine.backends.triton.interpret import interpret
from attn_engine.interpreters.tile import run_plan
from attn_engine.ir.schedule import KernelSchedule, Schedule
from attn_engine.runtime import attention
from attn_engine.universe import make_context

ORACLE = "tile_interpreter"
INTERPRETED = "triton_interpreted"
ALL = ("cpu", ORACLE, INTERPRETED)

# Blocks of different sizes, all small: short sequences have several, and a tail.
SMALL = Schedule(
    KernelSchedule(16, 32, 4, 1),
    KernelSchedule(32, 16, 4, 1),
    KernelSchedule(32, 16, 4, 1),
    KernelSchedule(16, 32, 4, 1),
)


def _run_text(text: str) -> Mapping[str, Plan]:
    """The plans of printed tile IR, in the tile interpreter and in float64."""
    module = Parser(make_context(), text).parse_module()
    names = re.findall(r"tile\.plan @(\w+)", text)
    return {name: partial(_run_plan, module, name) for name in names}


def _run_plan(module, name, *arguments):
    run_plan(module, name, arguments, exact=True)


def _here() -> Availability:
    return Availability(True)


BACKENDS.setdefault(
    ORACLE, lambda: Backend(ORACLE, Level.VALUE, (), str, _run_text, _here, copies_blocks=True, knows_whole=True)
)
BACKENDS.setdefault(INTERPRETED, lambda: replace(TRITON, name=INTERPRETED, build=interpret, check=_here, overlap=None))


@contextmanager
def blocks(schedule: Schedule | None) -> Iterator[None]:
    """Compiles with this schedule in place of the default one."""
    if schedule is None:
        yield
        return
    with mock.patch.object(attention, "candidate_schedules", lambda *_: (schedule,)):
        yield


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that torch leaves uninitialised is NaN: what a kernel does not write shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


@contextmanager
def counted_compilations() -> Iterator[Callable[[], int]]:
    """How often the driver has compiled since."""
    from attn_engine.runtime import driver

    with mock.patch.object(driver, "_compile", wraps=driver._compile) as spy:
        yield lambda: spy.call_count
