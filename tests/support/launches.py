"""Triton without a device: its own compiler and launchers for Hopper, and a driver that notes what is launched."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

_SOURCE = Path(__file__).parent / "fake_cuda_driver.c"
_SIZES = {"i1": "b", "i32": "i", "i64": "q", "fp32": "f"}
_WORDS, _START = 16, 0
"""Of a descriptor, and where it tells the start of its tensor."""
STREAM = 7


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
    )


_TOLD = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))


@dataclass
class Launches:
    """What was launched: for each the grid, the stream, the function, and its arguments as the device would see them."""

    signatures: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    """By function, the types of its arguments."""
    seen: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])

    def of(self, call: Callable[[], object], tensors: dict[str, torch.Tensor]) -> list[tuple[Any, ...]]:
        """The launches of a call, with the names of tensors for their addresses, and "scratch" for others."""
        self.seen.clear()
        call()
        names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
        return [(*head, [self._named(a, names) for a in arguments]) for *head, arguments in self.seen]

    def _named(self, argument: Any, names: dict[int, str]) -> Any:
        kind, value = argument
        if kind == "pointer":
            return names.get(value, "scratch")
        return (names.get(value[_START], "scratch"), *value[1:]) if kind == "map" else repr(value)

    def note(self, config: Any, function: int, arguments: Any) -> None:
        of = config.contents
        found = [_read(kind, arguments[n]) for n, kind in enumerate(self.signatures[function])]
        self.seen.append((tuple(of.grid), of.stream, function, found))


def _read(kind: str, address: int) -> tuple[str, Any]:
    if kind.startswith("*"):
        return "pointer", ctypes.c_uint64.from_address(address).value
    if kind == "map":
        return "map", struct.unpack(f"{_WORDS}Q", ctypes.string_at(address, 8 * _WORDS))
    format_ = _SIZES[kind]
    return "number", struct.unpack(format_, ctypes.string_at(address, struct.calcsize(format_)))[0]


def _expanded(signature: dict[Any, str]) -> list[str]:
    """Types of what a launcher hands to the device: descriptors bring their sizes and strides, constants nothing."""
    found: list[str] = []
    for kind in signature.values():
        if kind.startswith("tensordesc"):
            rank = kind.split("[")[1].split("]")[0].count(",") + 1
            found += ["map", *["i32"] * rank, *["i64"] * rank]
        elif kind != "constexpr":
            found.append(kind)
    return found


@contextmanager
def pretended(folder: Path) -> Generator[Launches]:
    """A Hopper GPU for Triton; tensors are on the CPU."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if torch.cuda.is_available() or compiler is None:
        pytest.skip("a driver is here" if compiler else "no C compiler is here")
    library = folder / "libcuda.so.1"
    subprocess.run(
        [compiler, "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(_SOURCE), "-o", str(library)], check=True
    )
    fake = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    # TileLang, if this process has it, offers a driver's functions to all that is loaded, and stops where there is none.
    flags = sys.getdlopenflags()
    sys.setdlopenflags(flags | os.RTLD_DEEPBIND)
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    launches = Launches()
    launcher: Any = nvidia.CudaLauncher

    class Launcher(launcher):
        def __init__(self, source: Any, metadata: Any):
            super().__init__(source, metadata)
            self.types = _expanded(source.signature)

        def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            launches.signatures[function] = self.types
            super().__call__(x, y, z, stream, function, *rest)

    class Driver(nvidia.CudaDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = lambda: 0
            self.get_current_stream = self._stream

        def _stream(self, device: int) -> int:
            return STREAM

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 90, 32)

    told = _TOLD(launches.note)
    ctypes.c_void_p.in_dll(fake, "told").value = ctypes.cast(told, ctypes.c_void_p).value
    active: Any = driver
    nvidia.CudaLauncher = Launcher
    active.set_active(Driver())
    try:
        yield launches
    finally:
        ctypes.c_void_p.in_dll(fake, "told").value = None
        active._active = None
        nvidia.CudaLauncher = launcher
        del os.environ["TRITON_LIBCUDA_PATH"]
        sys.setdlopenflags(flags)
