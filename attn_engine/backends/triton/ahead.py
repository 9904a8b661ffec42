"""Compiles a kernel of an emitted text for a device that is not here, and counts what came out.

The wheel of Triton carries ptxas, cuobjdump and an AMD code generator: registers, spills and matrix
instructions are known without a GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attn_engine.arch import Arch, Vendor
from attn_engine.backends.triton.build import load

_TRITON: Any = triton
_ALIGNED = 16
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class AheadOfTime:
    """What a kernel needs on a device; spills and counts are of the machine code (in bytes, in instructions)."""

    registers: int
    spills: int
    shared: int
    wgmma: int
    mma: int
    mfma: int
    assembly: str
    """PTX, or AMD's assembly."""
    machine: str
    """SASS, or AMD's assembly."""
    binary: bytes


def compile_ahead(
    source: str,
    kernel: str,
    arch: Arch,
    options: Mapping[str, int] | None = None,
    contiguous: bool = True,
    ones: Collection[str] = (),
) -> AheadOfTime:
    """Compiles one kernel of a text for `arch`.

    Pointers and strides are taken as multiples of 16, and with `contiguous` the last stride of each
    tensor and the scalars `ones` as 1, which is what a launch specialises on; `options` override those of
    the kernel.
    """
    module = load(source)
    facts = module.KERNELS[kernel]
    target = GPUTarget("cuda" if arch.vendor is Vendor.NVIDIA else "hip", _target_name(arch), arch.warp_size)
    compiled: Any = _TRITON.compile(
        _ast_source(getattr(module, kernel), facts["signature"], contiguous, ones),
        target=target,
        options={**facts["options"], **(options or {})},
    )
    return _read_cuda(compiled) if arch.vendor is Vendor.NVIDIA else _read_hip(compiled)


def _target_name(arch: Arch) -> int | str:
    return int(arch.name.removeprefix("sm_")) if arch.vendor is Vendor.NVIDIA else arch.name


def _ast_source(function: Any, types: Mapping[str, str], contiguous: bool, ones: Collection[str]) -> ASTSource:
    names = list(types)
    unit = {n for n, after in zip(names, [*names[1:], ""], strict=True) if _is_last_stride(types, n, after)}
    constants = dict.fromkeys([n for n in names if n in ones or (contiguous and n in unit)], 1)
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for position, (name, type_) in enumerate(types.items()):
        signature[name] = "constexpr" if name in constants else "i32" if type_ == "stride" else type_
        if name not in constants and (type_ == "stride" or type_.startswith("*")):
            attributes[(position,)] = [["tt.divisibility", _ALIGNED]]
    return ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)


def _is_last_stride(types: Mapping[str, str], name: str, after: str) -> bool:
    return types[name] == "stride" and types.get(after) != "stride"


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def _dump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_CUOBJDUMP, option, file.name], capture_output=True, text=True, check=True).stdout


def _read_cuda(compiled: Any) -> AheadOfTime:
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    usage, sass = _dump(cubin, "-res-usage"), _dump(cubin, "-sass")
    return AheadOfTime(
        registers=_number(r"REG:(\d+)", usage),
        spills=_number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage),
        shared=compiled.metadata.shared,
        wgmma=_count(r"\bHGMMA\b", sass),
        mma=_count(r"\bHMMA\b", sass),
        mfma=0,
        assembly=ptx,
        machine=sass,
        binary=cubin,
    )


def _read_hip(compiled: Any) -> AheadOfTime:
    text = compiled.asm["amdgcn"]
    return AheadOfTime(
        registers=_number(r"\.vgpr_count:\s*(\d+)", text),
        spills=_number(r"\.private_segment_fixed_size:\s*(\d+)", text),
        shared=compiled.metadata.shared,
        wgmma=0,
        mma=0,
        mfma=_count(r"\bv_mfma", text),
        assembly=text,
        machine=text,
        binary=compiled.asm["hsaco"],
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0
