"""Source text to a module of callables. Triton reads a function's source lines, so the text becomes a file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

from attn_engine.backends.backend import Availability, Plan
from attn_engine.backends.source_module import load_source
from attn_engine.backends.triton.replay import replayed


def load(source: str) -> ModuleType:
    """The module of a text; the same text gives the same module, and so one compilation."""
    return load_source(source, "triton")


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
    return replayed(plans_of(load(source)))


def assembler_version() -> tuple[int, ...]:
    """Of the ptxas that Triton calls (its own, or that of TRITON_PTXAS_PATH); empty if there is none."""
    try:
        from triton import knobs

        return tuple(int(part) for part in knobs.nvidia.ptxas.version.split("."))
    except (ImportError, AttributeError, RuntimeError, ValueError):
        return ()


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
