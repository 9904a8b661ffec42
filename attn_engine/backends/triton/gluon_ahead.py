"""Compiles a kernel of an emitted Gluon text without a device, and reads from the machine code how it is scheduled.

An assembler may undo a schedule without a word: serialise products (warnings C7510 to C7519), spill, or hoist a
wait above the work that was to overlap with it. Tests therefore look at what came out.
"""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from attn_engine.backends.triton.build import load
from attn_engine.errors import ToolError

_TARGET = GPUTarget("cuda", 90, 32)
_ALIGNED = 16
_ELEMENTS = {"fp16": gl.float16, "bf16": gl.bfloat16, "fp32": gl.float32}
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_SAID = "bytes spill"
_BRANCH = re.compile(r"\bBRA\S*\s+(?:\S+,\s*)?(?:`\(\S+\)|0x([0-9a-f]+))")


@dataclass(frozen=True)
class Remarks:
    """What the assembler says of a kernel."""

    spilled_bytes: int
    """Stored and loaded."""
    warnings: tuple[str, ...]
    """That products were serialised (C75xx)."""


@dataclass(frozen=True)
class Assembly:
    """What a kernel became."""

    ptx: str
    sass: str
    shared: int
    spilled_bytes: int
    warnings: tuple[str, ...]
    """The assembler's remarks that products were serialised (C75xx)."""

    @property
    def products(self) -> int:
        """Warpgroup matrix instructions."""
        return len(re.findall(r"wgmma\.mma_async", self.ptx))

    def loops(self) -> list[list[str]]:
        """The instructions of each innermost loop that holds products, in order."""
        return [self._code[first:end] for first, end in _innermost(self._loops) if self._multiplies(first, end)]

    def steps(self) -> list[list[str]]:
        """The same for loops that hold others: a wait, or a function that reduces its argument, may be a loop without products."""
        return [self._code[first:end] for first, end in _innermost([b for b in self._loops if self._multiplies(*b)])]

    @cached_property
    def _code(self) -> list[str]:
        return [text for _, text in _INSTRUCTION.findall(self.sass)]

    @cached_property
    def _loops(self) -> list[tuple[int, int]]:
        """The first instruction of each loop, and the one behind it."""
        addresses = [int(address, 16) for address, _ in _INSTRUCTION.findall(self.sass)]
        place = {address: n for n, address in enumerate(addresses)}
        found: list[tuple[int, int]] = []
        for n, (address, text) in enumerate(zip(addresses, self._code, strict=True)):
            branch = _BRANCH.search(text)
            target = int(branch.group(1), 16) if branch is not None and branch.group(1) else address
            if target < address and target in place:
                found.append((place[target], n + 1))
        return found

    def _multiplies(self, first: int, end: int) -> bool:
        return any("HGMMA" in text for text in self._code[first:end])


def _innermost(loops: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [b for b in loops if not any(o != b and b[0] <= o[0] and o[1] <= b[1] for o in loops)]


def compile_ahead(source: str, kernel: str) -> Assembly:
    """Compiles one kernel of a text for sm_90a; strides are taken as multiples of 16."""
    facts = load(source).KERNELS[kernel]
    signature, attributes = _signature(facts["signature"])
    text = GluonASTSource(facts["function"], signature, {}, attributes)
    nvidia, said = _knobs().nvidia, io.StringIO()
    with nvidia.scope(), redirect_stdout(said):
        nvidia.dump_ptxas_log = True
        compiled = _triton().compile(text, target=_TARGET, options=facts["options"])
    return _assembly(compiled, said.getvalue())


def launched(source: str, kernel: str) -> Assembly | None:
    """What a launch of a kernel has compiled in this process, if there was one."""
    function = load(source).KERNELS[kernel]["function"]
    compiled = [found for caches in function.device_caches.values() for found in caches[0].values()]
    return _assembly(compiled[-1]) if compiled else None


def kernels_of_roles(source: str) -> list[str]:
    """The kernels of a text that take descriptors."""
    table = load(source).KERNELS
    return [name for name, facts in table.items() if any("[" in type_ for type_ in facts["signature"].values())]


def _assembly(compiled: Any, said: str = "") -> Assembly:
    """`said`: what the assembler said when Triton ran it, which it does not where its cache has the kernel."""
    ptx = compiled.asm["ptx"]
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(_remarks, said) if _SAID in said else beside.submit(remarks_of, ptx)
        sass = _disassemble(compiled.asm["cubin"])
        remarks = waiting.result()
    return Assembly(
        ptx=ptx,
        sass=sass,
        shared=compiled.metadata.shared,
        spilled_bytes=remarks.spilled_bytes,
        warnings=remarks.warnings,
    )


def remarks_of(ptx: str) -> Remarks:
    """Assembles a text once more, for what the assembler has to say."""
    return _remarks(_assemble(ptx))


def _remarks(text: str) -> Remarks:
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", text)))
    return Remarks(spilled, tuple(line for line in text.splitlines() if "C75" in line))


def _knobs() -> Any:
    return import_module("triton.knobs")


def _triton() -> Any:
    """Triton's functions have no types."""
    return triton


def _signature(types: dict[str, str]) -> tuple[dict[str, str], dict[tuple[int, ...], list[list[object]]]]:
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for position, (name, type_) in enumerate(types.items()):
        signature[name] = _descriptor(type_) if "[" in type_ else "i32" if type_ == "stride" else type_
        if type_.startswith("*"):
            attributes[(position,)] = [["tt.divisibility", _ALIGNED]]
    return signature, attributes


def _descriptor(type_: str) -> str:
    """`fp16[1, 64]` with the layout that a launch would give it."""
    element, sizes = type_.rstrip("]").split("[")
    block = [int(size) for size in sizes.split(",")]
    layouts: Any = gl.NVMMASharedLayout
    layout = layouts.get_default_for(block, _ELEMENTS[element])
    return f"tensordesc<{element}{block},{layout!r}>"


def _assemble(ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        return _run("ptxas", "-v", "-arch=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))).stderr


def _disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _run("cuobjdump", "-sass", file.name).stdout


def _run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the tool that Triton itself uses: another version of it may not know the text."""
    done = subprocess.run(
        [getattr(_knobs().nvidia, tool).path, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ToolError(tool, done.stderr)
    return done
