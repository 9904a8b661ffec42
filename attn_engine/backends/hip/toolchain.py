"""Runs clang on emitted text: a code object for a device, a shared library with launchers, or one that emulates.

No ROCm is needed to compile; a library with launchers finds libamdhip64 when it is loaded.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from attn_engine.errors import BackendError, UnsupportedOpError

_HERE = Path(__file__).parent
INCLUDE = _HERE / "include"
EMULATION = _HERE / "emulation"
_COMPILERS = ("clang++-19", "clang++-20", "clang++-21", "clang++")
_COMMON = ("-std=c++17", "-fwrapv", "-Wall", "-Wextra", "-Wno-unused-variable", "-Wno-unused-parameter")
_TARGET = "amdgcn-amd-amdhsa"
_DEVICE = (*_COMMON, "-O3", "-x", "hip", "-nogpuinc", "-nogpulib", "-munsafe-fp-atomics")


@cache
def clang() -> str:
    """The compiler's path; clang 19 is the one that is tested."""
    found = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if found is None:
        raise BackendError("no clang++ here; apt-get install clang-19 llvm-19 lld-19")
    return found


def hipcc() -> str | None:
    """ROCm's own compiler driver, if there is one."""
    return next((path for name in ("hipcc", "/opt/rocm/bin/hipcc") if (path := shutil.which(name))), None)


def has_clang() -> bool:
    try:
        clang()
    except BackendError:
        return False
    return True


def tool(name: str) -> str:
    """An LLVM tool of the compiler's version."""
    version = re.search(r"(-\d+)?$", clang())
    suffix = version.group() if version else ""
    found = shutil.which(name + suffix) or shutil.which(name)
    if found is None:
        raise BackendError(f"no {name}{suffix} here; apt-get install llvm{suffix}")
    return found


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(f"{command[0]} failed:\n{done.stderr[:4000]}")
    return done.stdout


def _write(source: str, directory: Path) -> Path:
    path = directory / "kernels.hip"
    path.write_text(source)
    return path


@cache
def _knows(arch: str) -> bool:
    """Whether the system's clang compiles for an architecture."""
    command = [clang(), f"--target={_TARGET}", "-nogpulib", "--print-supported-cpus"]
    cpus = subprocess.run(command, capture_output=True, text=True, check=False)
    return re.search(rf"^\s*{re.escape(arch)}\b", cpus.stdout + cpus.stderr, re.MULTILINE) is not None


def zig() -> str | None:
    """The newer clang and lld of the wheel `ziglang`, for devices that the system's clang does not know."""
    spec = find_spec("ziglang")
    return str(Path(spec.origin).parent / "zig") if spec is not None and spec.origin is not None else None


def has_compiler(arch: str) -> bool:
    """Whether code objects for an architecture can be made here."""
    return has_clang() and (_knows(arch) or zig() is not None)


def compile_object(source: str, arch: str, directory: Path) -> Path:
    """A code object for one architecture: `gfx90a`, `gfx942`, `gfx950`."""
    target, text = directory / f"kernels.{arch}.hsaco", _write(source, directory)
    device = [*_DEVICE, f"--offload-arch={arch}", "--offload-device-only", f"-I{INCLUDE}", str(text)]
    if _knows(arch):
        _run([clang(), *device, "--no-gpu-bundle-output", "-o", str(target)])
        return target
    newer = zig()
    if newer is None:
        raise BackendError(f"{clang()} does not know {arch}; pip install ziglang, which brings a newer one")
    # One step after the other: its driver does not find its own linker.
    assembly, relocatable = target.with_suffix(".s"), target.with_suffix(".o")
    _run([newer, "clang", *device, "-S", "-o", str(assembly)])
    _run([newer, "clang", f"--target={_TARGET}", f"-mcpu={arch}", "-c", str(assembly), "-o", str(relocatable)])
    _run([newer, "ld.lld", "-shared", str(relocatable), "-o", str(target)])
    return target


def compile_assembly(source: str, arch: str, directory: Path) -> Path:
    """What the compiler makes of a text before it is assembled."""
    target, text = directory / f"kernels.{arch}.s", _write(source, directory)
    compiler = [clang()] if _knows(arch) else [zig() or clang(), "clang"]
    device = [*_DEVICE, f"--offload-arch={arch}", "--offload-device-only", "--no-gpu-bundle-output", f"-I{INCLUDE}"]
    _run([*compiler, *device, "-S", str(text), "-o", str(target)])
    return target


def compile_library(source: str, arch: str, directory: Path) -> Path:
    """A shared library with the code object inside and the plans as C functions; libamdhip64 must be there to load it.

    By hipcc if there is one, and else by clang, step by step.
    """
    target, bundle = directory / "libkernels.so", directory / "kernels.hipfb"
    if (driver := hipcc()) is not None:
        options = ["-O3", "-munsafe-fp-atomics", f"--offload-arch={arch}", f"-I{INCLUDE}", "-shared", "-fPIC"]
        _run([driver, *_COMMON, *options, str(_write(source, directory)), "-o", str(target)])
        return target
    bundle.write_bytes(_bundle(compile_object(source, arch, directory).read_bytes(), arch))
    embed = ["-Xclang", "-fcuda-include-gpubinary", "-Xclang", str(bundle)]
    options = ["--offload-host-only", *embed, f"-I{INCLUDE}", "-shared", "-fPIC", "-no-hip-rt"]
    _run([clang(), *_DEVICE, *options, str(_write(source, directory)), "-o", str(target)])
    return target


def _bundle(code: bytes, arch: str) -> bytes:
    """What the HIP runtime takes: a list of code objects by target, the host's empty, each at the start of a page."""
    entries = [(b"host-x86_64-unknown-linux-gnu-", b""), (f"hipv4-amdgcn-amd-amdhsa--{arch}".encode(), code)]
    head, body, page = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(entries)), b"", 4096
    for name, data in entries:
        head += struct.pack("<QQQ", page + len(body), len(data), len(name)) + name
        body += data
    return head.ljust(page, b"\0") + body


def compile_emulated(source: str, directory: Path, checked: bool = False) -> Path:
    """A shared library with the same C functions, whose kernels run on the CPU (x86-64), far from fast.

    `checked` has the compiler's checks for undefined behaviour in it, such as an index beyond an array: a launch that
    does what is undefined fails.
    """
    target = directory / "libemulated.so"
    options = ["-O1", "-march=native", f"-I{EMULATION}", f"-I{INCLUDE}", "-shared", "-fPIC", "-x", "c++"]
    undefined = ["-fsanitize=undefined", "-fno-sanitize=vptr,function", "-fsanitize-minimal-runtime"]
    # The last array of a struct has an end like any other.
    checks = [*undefined, "-fstrict-flex-arrays=3"] if checked else []
    _run([clang(), *_COMMON, *options, *checks, str(_write(source, directory)), "-o", str(target)])
    return target


# --- what came out -----------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelObject:
    """What a kernel needs on the device, read from its code object; spills in bytes per lane."""

    registers: int
    shared: int
    spills: int
    mfma: int
    barriers: int
    machine: str
    """Disassembly."""


_SYMBOL = re.compile(r"^(?:[0-9a-f]+ <(\w+)>:|(\w+):\s*; @\w+)$", re.MULTILINE)


def inspect(source: str, arch: str) -> dict[str, KernelObject]:
    """Compiles a text for an architecture that need not be here, and reads each kernel's needs."""
    with tempfile.TemporaryDirectory() as directory:
        path = compile_object(source, arch, Path(directory))
        notes = _run([tool("llvm-readelf"), "--notes", str(path)])
        assembly = path.with_suffix(".s")
        machine = bodies(assembly.read_text() if assembly.exists() else _run([tool("llvm-objdump"), "-d", str(path)]))
    return read_notes(notes, machine)


def read_notes(notes: str, machine: Mapping[str, str]) -> dict[str, KernelObject]:
    """The needs of each kernel of a code object, from its notes and its code."""
    found: dict[str, KernelObject] = {}
    for entry in notes.split("- .agpr_count")[1:]:
        name = _field(entry, "name")
        if name not in machine:
            raise UnsupportedOpError(f"kernel {name} without code", "hip")
        found[name] = _kernel(entry, machine[name])
    return found


def _kernel(notes: str, machine: str) -> KernelObject:
    return KernelObject(
        registers=int(_field(notes, "vgpr_count")),
        shared=int(_field(notes, "group_segment_fixed_size")),
        spills=int(_field(notes, "private_segment_fixed_size")),
        mfma=len(re.findall(r"\bv_mfma", machine)),
        barriers=len(re.findall(r"\bs_barrier", machine)),
        machine=machine,
    )


def _field(notes: str, name: str) -> str:
    found = re.search(rf"^\s+\.{name}:\s+(\S+)$", notes, re.MULTILINE)
    if found is None:
        raise BackendError(f"the code object's notes lack {name}")
    return found.group(1)


def bodies(text: str) -> dict[str, str]:
    """By kernel: its part of a disassembly, or of an assembly."""
    marks = list(_SYMBOL.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return {m.group(1) or m.group(2): text[m.end() : end] for m, end in zip(marks, ends, strict=True)}
