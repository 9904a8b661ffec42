"""Source text to callables: the generated module is executed, and its plans are taken out."""

from __future__ import annotations

import ast
import hashlib
import linecache
from collections.abc import Mapping

from attn_engine.backends.backend import Availability, Plan


def build(source: str) -> Mapping[str, Plan]:
    """The functions of a generated module, by name; those of kernels are there too, and take a batch of programs."""
    name = f"<attn_engine cpu {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    # Tracebacks into generated code show its lines.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Plan] = {}
    exec(compile(source, name, "exec"), namespace)
    defined = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {function: namespace[function] for function in defined}


def check() -> Availability:
    """torch is all that it needs."""
    return Availability(ok=True)
