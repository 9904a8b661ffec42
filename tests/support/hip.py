"""Helpers for tests of the HIP backend: parsing, skipping where clang is absent, emulated runs."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine.backends.backend import BACKENDS, Availability
from attn_engine.backends.hip.backend import BACKEND as HIP
from attn_engine.backends.hip.build import emulate
from attn_engine.backends.hip.toolchain import has_clang, has_compiler
from attn_engine.ir.schedule import KernelSchedule, Schedule
from attn_engine.universe import make_context

needs_clang = pytest.mark.skipif(not has_clang(), reason="no clang++-19 here; apt-get install clang-19 llvm-19 lld-19")
emulates = pytest.mark.skipif(
    not has_clang() or platform.machine() != "x86_64", reason="the emulation needs clang++-19 and x86-64"
)
needs_gfx950 = pytest.mark.skipif(not has_clang() or not has_compiler("gfx950"), reason="pip install ziglang")
FORWARD = Path(__file__).parent.parent / "filecheck" / "tile" / "hip_forward.mlir"

EMULATED = "hip_emulated"
SMALL = Schedule(
    KernelSchedule(64, 32, 4, 1),
    KernelSchedule(64, 64, 4, 1),
    KernelSchedule(64, 32, 4, 1),
    KernelSchedule(32, 64, 4, 1),
)


@contextmanager
def emulation() -> Iterator[None]:
    """HIP's text in its emulation, as the backend `EMULATED`."""
    BACKENDS[EMULATED] = lambda: replace(HIP, name=EMULATED, build=emulate, check=lambda: Availability(True))
    yield
    del BACKENDS[EMULATED]


def parse(text: str) -> ModuleOp:
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module
