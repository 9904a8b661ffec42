"""What the assembler made of the kernels of a text: a schedule may be undone without a word, and is then not taken."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

from attn_engine.backends.backend import Examination
from attn_engine.backends.gluon.emit import SEPARATOR
from attn_engine.errors import ToolError

_MOST_MOVES = 24
"""Instructions of a loop that move spilled registers: more cost as much as a smaller block."""
_MOST_MOVES_OF_GRADIENTS = 96
"""Their blocks cannot be smaller; with 87, a soft cap, they were still 1.03 times as fast as plain kernels."""
_MOST_MOVES_OF_SUMS = 64
"""Where they add up blocks in memory, which others need not: with 73, trained slopes, they took 1.5 times as long as with 15."""
_REDUCING = ("UTMAREDG", "UBLKRED")
"""Instructions that add blocks to memory."""


@dataclass(frozen=True)
class Finding:
    """Of one kernel."""

    kernel: str
    products: int
    spilled_bytes: int
    moves: int
    """Of spilled registers, in the loop with products that has most of them."""
    serialised: str
    """The assembler's own words, if it runs products one after the other."""
    adds: bool = False
    """Whether it adds blocks to memory."""

    @property
    def _most_moves(self) -> int:
        if self.kernel.startswith("forward"):
            return _MOST_MOVES
        return _MOST_MOVES_OF_SUMS if self.adds else _MOST_MOVES_OF_GRADIENTS

    @property
    def reason(self) -> str | None:
        """Why the kernel does not run as its schedule means; None if it does."""
        if self.serialised:
            return f"{self.kernel}: the assembler serialises its products: {self.serialised}"
        if self.moves > self._most_moves:
            return f"{self.kernel}: {self.moves} instructions of a loop move spilled registers"
        return None

    def __str__(self) -> str:
        spills = f"{self.spilled_bytes} bytes of spills, {self.moves} moves of them in a loop"
        return f"{self.kernel}: {self.products} products, {spills if self.spilled_bytes else 'no spills'}"


def findings(source: str) -> list[Finding]:
    """One for each kernel of roles of a text; found once per text and version of Triton, and kept beside Triton's own compilations."""
    asynchronous = source.partition(SEPARATOR)[0]
    version: str = import_module("triton").__version__
    key = hashlib.sha256(f"{version}\n{asynchronous}".encode()).hexdigest()
    cache = _cache(key)
    kept: str | None = cache.get_file(_FILE)
    if kept is None:
        found = _look(asynchronous)
        cache.put(json.dumps([asdict(f) for f in found]), _FILE, binary=False)
        return found
    with open(kept) as file:
        return [Finding(**entry) for entry in json.load(file)]


_FILE = "finding.json"


def _cache(key: str) -> Any:
    cache: Any = import_module("triton.runtime.cache")
    return cache.get_cache_manager(key)


def _look(source: str) -> list[Finding]:
    from attn_engine.backends.triton.gluon_ahead import compile_ahead, kernels_of_roles, launched

    found: list[Finding] = []
    kernels = kernels_of_roles(source)
    with ThreadPoolExecutor() as side_by_side:  # tools, of which each has a process
        assemblies = list(side_by_side.map(partial(launched, source), kernels))
    for kernel, built in zip(kernels, assemblies, strict=True):
        assembly = built or compile_ahead(source, kernel)
        moves = [sum("LDL" in text or "STL" in text for text in loop) for loop in assembly.steps()]
        warning = assembly.warnings[0].partition(")")[2].strip() if assembly.warnings else ""
        adds = any(name in assembly.sass for name in _REDUCING)
        found.append(Finding(kernel, assembly.products, assembly.spilled_bytes, max(moves, default=0), warning, adds))
    return found


def examine(source: str) -> Examination:
    """Of the kernels of roles of a text. Tools that fail say nothing of kernels that Triton has built: none is refused."""
    try:
        found = findings(source)
    except (ToolError, OSError) as error:
        return Examination((f"not examined: {error}",))
    return Examination(tuple(map(str, found)), next((f.reason for f in found if f.reason is not None), None))
