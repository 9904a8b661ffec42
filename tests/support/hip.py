"""Helpers for tests of the HIP backend: parsing, skipping where clang is absent, emulated runs."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine.backends.hip.toolchain import has_clang, has_compiler
from attn_engine.universe import make_context

needs_clang = pytest.mark.skipif(not has_clang(), reason="no clang++-19 here; apt-get install clang-19 llvm-19 lld-19")
emulates = pytest.mark.skipif(
    not has_clang() or platform.machine() != "x86_64", reason="the emulation needs clang++-19 and x86-64"
)
needs_gfx950 = pytest.mark.skipif(not has_clang() or not has_compiler("gfx950"), reason="pip install ziglang")
FORWARD = Path(__file__).parent.parent / "filecheck" / "tile" / "hip_forward.mlir"


def parse(text: str) -> ModuleOp:
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module
