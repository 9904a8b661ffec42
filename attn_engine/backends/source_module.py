"""Generated text as a Python module. Compilers of kernels read a function's source lines, so the text becomes a file."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from attn_engine.errors import BackendError


def source_path(source: str, backend: str) -> Path:
    """The file of a text: named by its hash, written once, in the user's own temporary directory."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:32]
    directory = Path(tempfile.gettempdir()) / f"attn_engine_{backend}_{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise BackendError(f"{directory} belongs to another user; set TMPDIR to a directory of your own")
    path = directory / f"kernels_{digest}.py"
    if not path.exists() or path.read_text() != source:
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(source)
        partial.replace(path)
    return path


def load_source(source: str, backend: str) -> ModuleType:
    """The module of a text; the same text gives the same module, and so one compilation."""
    path = source_path(source, backend)
    name = f"attn_engine_{backend}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BackendError(f"cannot load {path}")
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
