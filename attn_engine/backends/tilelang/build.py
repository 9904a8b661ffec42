"""Program text to callables. TileLang reads a function's source lines, so the text becomes a file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

from attn_engine.backends.backend import Availability, Plan
from attn_engine.backends.source_module import load_source
from attn_engine.backends.tilelang.barriers import barriers_of_some
from attn_engine.errors import EndlessKernelError


def load(source: str) -> ModuleType:
    """The module of a text; the same text gives the same module, and so one compilation."""
    return load_source(source, "tilelang")


def plans_of(module: ModuleType) -> dict[str, Plan]:
    """The host functions of a module: what is neither a helper nor the program of a kernel."""
    programs = [f"{name}_program" for name in vars(module)["KERNELS"]]
    own = {name: value for name, value in vars(module).items() if isinstance(value, FunctionType)}
    return {n: f for n, f in own.items() if f.__module__ == module.__name__ and n not in programs and n[0] != "_"}


def lower(source: str, arch: str) -> dict[str, str]:
    """The device source of each kernel of a text, for a device that need not be here: `sm_90a`, `gfx942`."""
    import tilelang
    from tilelang import tvm

    module: Any = load(source)
    module.CUDA, module.HOPPER = not arch.startswith("gfx"), arch.startswith("sm_90")
    language: Any = tvm
    compiler: Any = tilelang
    gpu = {"kind": "hip", "mcpu": arch} if arch.startswith("gfx") else {"kind": "cuda", "arch": arch}
    target = language.target.Target(gpu)

    def device_source(program: Any, tensors: int) -> str:
        *deep, last = module.DEPTHS
        for depth in deep:
            with suppress(TypeError):  # as when a kernel is built for the device that is here
                return lowered(program(*[True] * tensors, depth))
        return lowered(program(*[True] * tensors, last))

    def lowered(program: Any) -> str:
        with target, language.transform.PassContext(opt_level=3):
            return _ending(compiler.lower(program, target=target).kernel_source)

    return {name: device_source(*entry) for name, entry in module.KERNELS.items()}


def build(source: str) -> Mapping[str, Plan]:
    """One callable per plan. A kernel is compiled at its first launch, for the current device.

    Raises:
        EndlessKernelError: at that launch, if TileLang's kernel would never end.
    """
    module: Any = load(source)
    module.COMPILE = partial(_compile, module.FLAGS)
    return plans_of(module)


def _compile(flags: list[str], program: Any) -> Any:
    """A program as a callable, in place of what a text on its own takes."""
    import tilelang

    compiler: Any = tilelang
    kernel = compiler.compile(program, compile_flags=flags)
    _ending(kernel.get_kernel_source())
    return kernel


def _ending(source: str) -> str:
    """A kernel's source, all of whose threads come to its barriers."""
    lost = barriers_of_some(source)
    if lost:
        raise EndlessKernelError(
            f"TileLang generated a kernel that would never end ({lost[0]}); take another backend, for example"
            ' backend="triton", or other block sizes'
        )
    return source


def check() -> Availability:
    """TileLang must be installed, and torch see a GPU."""
    if find_spec("tilelang") is None:
        return Availability(False, "tilelang is not installed; pip install 'attn-engine[tilelang]'")
    import torch

    if not torch.cuda.is_available():
        return Availability(False, "torch finds no GPU")
    return Availability(True)
