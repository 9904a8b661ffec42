"""Source text to a module of callables. Triton reads a function's source lines, so the text becomes a file."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from attn_engine.backends.backend import Availability, Plan
from attn_engine.errors import BackendError


def source_path(source: str) -> Path:
    """The file of a text: named by its hash, written once, in the user's own temporary directory."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:32]
    directory = Path(tempfile.gettempdir()) / f"attn_engine_triton_{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise BackendError(f"{directory} belongs to another user; set TMPDIR to a directory of your own")
    path = directory / f"kernels_{digest}.py"
    if not path.exists() or path.read_text() != source:
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(source)
        partial.replace(path)
    return path


def load(source: str) -> ModuleType:
    """The module of a text; the same text gives the same module, and so one compilation."""
    path = source_path(source)
    name = f"attn_engine_triton_{path.stem}"
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


def plans_of(module: ModuleType) -> dict[str, Plan]:
    """The host functions of a module: its plain functions, for kernels are not."""
    own = {name: value for name, value in vars(module).items() if isinstance(value, FunctionType)}
    return {name: value for name, value in own.items() if value.__module__ == module.__name__}


def _interpreted() -> bool:
    """Triton's own switch (`TRITON_INTERPRET=1`): kernels run in its interpreter, on CPU tensors."""
    knobs: Any = import_module("triton.knobs")
    return bool(knobs.runtime.interpret)


def build(source: str) -> Mapping[str, Plan]:
    """One callable per plan. A kernel is compiled at its first launch, for the device of its tensors."""
    if _interpreted():
        from attn_engine.backends.triton.interpret import interpret

        return interpret(source)
    return plans_of(load(source))


def check() -> Availability:
    """Triton must be installed, and see a GPU or interpret."""
    if find_spec("triton") is None:
        return Availability(False, "triton is not installed; pip install 'attn-engine[triton]'")
    if _interpreted():
        return Availability(True)
    import torch
    import triton

    driver: Any = triton.runtime.driver
    try:
        target = driver.active.get_current_target()
    except RuntimeError as error:
        return Availability(False, f"triton finds no GPU driver ({error})")
    if not torch.cuda.is_available():
        return Availability(False, f"torch finds no device for {target.backend} {target.arch}")
    return Availability(True)
