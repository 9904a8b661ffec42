"""Source text to callables: the generated module is executed, and its plans are taken out."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from attn_engine.backends.backend import Availability, Plan


def build(source: str) -> Mapping[str, Plan]:
    """The functions of a generated module, by name; those of kernels are there too, and take a batch of programs."""
    name = f"<attn_engine cpu {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    # Tracebacks into generated code show its lines.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {}
    exec(compile(source, name, "exec"), namespace)
    return {n: f for n, f in namespace.items() if isinstance(f, FunctionType) and f.__code__.co_filename == name}


def check() -> Availability:
    """torch is all that it needs."""
    return Availability(ok=True)
