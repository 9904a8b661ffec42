"""A compiled library to callables on torch tensors, and what this machine lacks for that."""

from __future__ import annotations

import ctypes
import functools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attn_engine.backends.backend import Availability, Plan
from attn_engine.backends.hip import toolchain
from attn_engine.errors import BackendError

_SCALARS = {"f32": ctypes.c_float, "i32": ctypes.c_int, "i64": ctypes.c_longlong, "i1": ctypes.c_bool}
RUNTIME = "amdhip64"
WITHOUT_DEVICE = "gfx942"
"""What code objects are made for where no device says it."""
_SIGNATURE = re.compile(r"(\w+)\(([^)]*)\)")


class CTensor(ctypes.Structure):
    """`attn_tensor` of attn_tensor.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("size", ctypes.POINTER(ctypes.c_int64)),
        ("stride", ctypes.POINTER(ctypes.c_int64)),
    ]


def c_tensor(tensor: Tensor) -> CTensor:
    """A view of a tensor for a launcher; the tensor must outlive the call."""
    numbers = ctypes.c_int64 * max(1, tensor.dim())
    return CTensor(tensor.data_ptr(), numbers(*tensor.shape), numbers(*tensor.stride()))


def load_plans(path: Path, stream: Callable[[], int | None]) -> dict[str, Plan]:
    """One callable per plan of a library: tensors and numbers in the plan's order."""
    library = ctypes.CDLL(str(path))
    text = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "attn_plans"))).decode()
    plans: dict[str, Plan] = {}
    for name, kinds in _SIGNATURE.findall(text):
        plans[name] = functools.partial(_call, library, name, kinds.split(", "), stream)
    return plans


def _call(library: Any, name: str, kinds: Sequence[str], stream: Callable[[], int | None], *arguments: Any) -> None:
    values: list[Any] = []
    for kind, argument in zip(kinds, arguments, strict=True):
        values.append(ctypes.byref(c_tensor(argument)) if kind == "tensor" else _SCALARS[kind](argument))
    status = getattr(library, name)(*values, ctypes.c_void_p(stream()))
    if status:
        raise BackendError(f"hip plan '{name}' failed: {_message(library, status)}")


def _message(library: Any, status: int) -> str:
    if not hasattr(library, "attn_last_error"):
        return f"HIP runtime error {status}"
    library.attn_last_error.restype = ctypes.c_char_p
    return library.attn_last_error().decode()


@functools.cache
def emulate(source: str, checked: bool = False) -> Mapping[str, Plan]:
    """The plans of a text, run on the CPU by emulation: tensors are CPU tensors. `checked` as in `compile_emulated`."""
    with tempfile.TemporaryDirectory(prefix="attn_engine_hip_") as directory:
        # Once loaded, a library no longer needs its file.
        return load_plans(toolchain.compile_emulated(source, Path(directory), checked), lambda: None)


@functools.cache
def build(source: str) -> Mapping[str, Plan]:
    """The plans of a text on this machine's AMD GPU."""
    available = check()
    if not available.ok:
        raise BackendError(_at_the_code_object(source, available.reason))
    from attn_engine.runtime.devices import arch_of

    arch = arch_of(torch.device("cuda", torch.cuda.current_device()))
    ctypes.CDLL(_runtime(), mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory(prefix="attn_engine_hip_") as directory:
        path = toolchain.compile_library(source, arch, Path(directory))
        return load_plans(path, lambda: torch.cuda.current_stream().cuda_stream)


def _at_the_code_object(source: str, reason: str) -> str:
    """How far a build got where nothing can be launched."""
    if not toolchain.has_clang():
        return f"the hip backend builds no callables here: {reason}"
    kernels = toolchain.inspect(source, WITHOUT_DEVICE)
    made = ", ".join(f"{name}: {k.registers} registers, {k.shared} bytes of LDS" for name, k in kernels.items())
    return f"the hip backend stops at the code object here ({WITHOUT_DEVICE}; {made}): {reason}"


def _runtime() -> str | None:
    """The HIP runtime library: that of torch, which its streams belong to, or the system's."""
    own = sorted((Path(torch.__file__).parent / "lib").glob(f"lib{RUNTIME}.so*"))
    return str(own[0]) if own else find_library(RUNTIME)


def check() -> Availability:
    """hipcc or clang, the HIP runtime library, and a torch that sees an AMD GPU."""
    if not toolchain.has_clang() and toolchain.hipcc() is None:
        return Availability(False, "no clang++ here; apt-get install clang-19 llvm-19 lld-19")
    if torch.version.hip is None or not torch.cuda.is_available():
        return Availability(False, "no ROCm device here; text, code objects and the emulation work without one")
    if _runtime() is None:
        return Availability(False, "libamdhip64 is not on the library path; builds stop at the code object")
    return Availability(True)
