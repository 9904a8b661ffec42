"""CUDA source of TileLang through nvcc: what the assembler says of registers and spills."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path


def find_nvcc() -> str | None:
    """Of the machine, or of the nvidia-cuda-nvcc wheel."""
    found = shutil.which("nvcc")
    wheel = find_spec("nvidia")
    for folder in (wheel.submodule_search_locations or ()) if found is None and wheel is not None else ():
        found = next(map(str, Path(folder).glob("*/bin/nvcc")), found)
    return found


def spilled_bytes(source: str, arch: str, folder: Path) -> int:
    """Bytes that the kernels of a source store to and load from local memory because registers run out."""
    home = find_spec("tilelang")
    assert home is not None and home.origin is not None
    headers = Path(home.origin).parent
    (folder / "kernel.cu").write_text(source)
    includes = [f"-I{headers / 'src'}", f"-I{headers / '3rdparty/cutlass/include'}"]
    options = ["-w", "-ftz=true", f"-arch={arch}", "-std=c++17", "-cubin", "-DENABLE_BF16", "-Xptxas", "-v"]
    nvcc = find_nvcc()
    assert nvcc is not None
    done = subprocess.run(
        [nvcc, *options, *includes, "kernel.cu", "-o", "kernel.cubin"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    counts = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    assert counts, done.stderr
    return sum(map(int, counts))
