"""HIP kernels without an AMD device: beside Triton's code for the same attention, and schedules by their static cost.

`python -m bench.hip_static --out DIR`, on any machine with clang-19, llvm-19 and triton; nothing is run. With `--rank`
candidates for the blocks of each kernel are compared too, which takes some minutes.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser
from xdsl.rewriter import Rewriter

import attn_engine
from attn_engine import library
from attn_engine.arch import get_arch
from attn_engine.backends.hip import toolchain
from attn_engine.backends.hip.cost import Loop, clocks, hot_loops, pressure, waves_per_simd
from attn_engine.backends.hip.emit import emit
from attn_engine.backends.triton.ahead import compile_ahead
from attn_engine.dialects import tile
from attn_engine.errors import ScheduleError
from attn_engine.ir.schedule import KernelSchedule, Schedule
from attn_engine.runtime import inspect
from attn_engine.runtime.devices import Target
from attn_engine.runtime.inspect import View
from attn_engine.universe import make_context

ARCHES = ("gfx90a", "gfx942")
HEAD_DIMS = (64, 128)
MASKS = {"causal": {"mask_mod": library.causal}, "full": {}}
ROWS = ("mfma", "exp", "valu", "lds", "memory", "barrier")
_SMALL = KernelSchedule(64, 32, 4, 2)
_OTHERS = Schedule(_SMALL, KernelSchedule(64, 64, 4, 1), _SMALL, KernelSchedule(32, 64, 4, 2))
CANDIDATES: dict[str, Sequence[tuple[int, int, int]]] = {
    "forward": (
        (256, 64, 8),
        (256, 32, 8),
        (128, 64, 4),
        (128, 32, 4),
        (128, 64, 8),
        (128, 32, 8),
        (64, 64, 4),
        (64, 32, 4),
    ),
    "dq": (
        (256, 64, 8),
        (256, 32, 8),
        (128, 32, 4),
        (128, 16, 4),
        (128, 32, 8),
        (128, 16, 8),
        (64, 32, 4),
        (64, 16, 4),
    ),
    "dkdv": ((16, 256, 8), (32, 256, 8), (16, 128, 8), (32, 128, 8), (16, 128, 4), (32, 64, 4), (16, 64, 4)),
}
RANKED_DIMS = (64, 128, 256)
_NAMES = {"forward": "forward_kernel_kernel", "dq": "backward_dq_kernel", "dkdv": "backward_dkdv_kernel"}


@dataclass(frozen=True)
class Compiled:
    """A kernel's loops, the one over full blocks first, and what it needs."""

    loops: Sequence[Loop]
    registers: int
    shared: int
    spills: int
    threads: int


def hip(view: View, mask: str, kernel: str = "forward") -> Compiled:
    source = emit(_alone(attn_engine.compile(**MASKS[mask]).ir("tile", view), _NAMES[kernel].removesuffix("_kernel")))
    with tempfile.TemporaryDirectory() as directory:
        text = toolchain.compile_assembly(source, view.arch, Path(directory)).read_text()
    code, name = toolchain.bodies(text), _NAMES[kernel]
    found = toolchain.read_notes(text, code)[name]
    threads = int(re.findall(r"ATTN_KERNEL\((\d+)\)\s*void " + name, source)[0])
    return Compiled(hot_loops(code[name]), found.registers, found.shared, found.spills, threads)


def _alone(text: str, name: str) -> ModuleOp:
    """A module with one kernel of a text."""
    module = Parser(make_context(), text).parse_module()
    for op in list(module.ops):
        if not isinstance(op, tile.KernelOp) or op.sym_name.data != name:
            Rewriter.erase_op(op, safe_erase=False)
    return module


def triton(view: View, mask: str) -> Compiled:
    """In the blocks that the HIP backend would choose."""
    choose = inspect.default_schedule
    same = mock.patch.object(inspect, "default_schedule", lambda t, *rest: choose(Target("hip", t.arch), *rest))
    with same:
        source = attn_engine.compile(**MASKS[mask]).source("triton", view)
    name = re.findall(r"def (forward\w*)\(", source)[0]
    found = compile_ahead(source, name, get_arch(view.arch))
    threads = 64 * int(re.findall(r"num_warps\W+(\d+)", source)[0])
    return Compiled(hot_loops(found.assembly), found.registers, found.shared, found.spills, threads)


def waves(kernel: Compiled, arch: str) -> int:
    return waves_per_simd(kernel.registers, kernel.shared, get_arch(arch), kernel.threads)


# --- beside Triton -----------------------------------------------------------------------------


def beside_triton() -> Iterator[str]:
    yield "| device | D | mask | loop | code | " + " | ".join(ROWS) + " | registers | LDS bytes | waves per SIMD |"
    yield "|---" * (len(ROWS) + 8) + "|"
    for arch in ARCHES:
        for head_dim in HEAD_DIMS:
            for mask in MASKS:
                yield from _pair(arch, head_dim, mask)


def _pair(arch: str, head_dim: int, mask: str) -> Iterator[str]:
    view = View(torch.bfloat16, head_dim, head_dim, False, False, arch, "hip")
    both = {"HIP": hip(view, mask), "Triton": triton(replace(view, backend="triton"), mask)}
    for number, loop in enumerate(("full blocks", "masked blocks")):
        for name, kernel in both.items():
            counts = [kernel.loops[number].counts[row] for row in ROWS]
            cells = [arch, head_dim, mask, loop, name, *counts, kernel.registers, kernel.shared, waves(kernel, arch)]
            yield "| " + " | ".join(map(str, cells)) + " |"


# --- schedules ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranked:
    schedule: tuple[int, int, int]
    cost: float
    """Clocks of a SIMD per score, of the unit that is needed longest (of all of them where one wave is alone)."""
    work: float
    """Clocks of all units together."""
    kernel: Compiled
    waves: int


def rank(kind: str, arch: str, head_dim: int) -> list[Ranked]:
    """Candidates that fit and do not spill, the cheapest first; of those that cost the same, the one with less work."""
    found: list[Ranked] = []
    for candidate in CANDIDATES[kind]:
        schedule = KernelSchedule(*candidate, 2)
        view = View(torch.bfloat16, head_dim, head_dim, kind != "forward", False, arch, "hip")
        with mock.patch.object(inspect, "default_schedule", lambda *_, s=schedule: replace(_OTHERS, **{kind: s})):
            try:
                kernel = hip(view, "causal", kind)
            except ScheduleError:
                continue
        if not kernel.spills:
            found.append(_ranked(candidate, kernel, arch))
    return sorted(found, key=lambda r: (round(r.cost, 2), r.work))


def _ranked(candidate: tuple[int, int, int], kernel: Compiled, arch: str) -> Ranked:
    rows, columns, warps = candidate
    shared_by = waves(kernel, arch)
    scores, used = rows * columns / warps, pressure(kernel.loops[0], arch)
    work = used.matrix + used.vector + used.lds
    return Ranked(candidate, clocks(used, shared_by) / scores, work / scores, kernel, shared_by)


def ranking() -> Iterator[str]:
    yield "| device | kernel | D | block of queries, of keys, waves | clocks per score | of all units | registers | waves per SIMD |"
    yield "|---" * 8 + "|"
    for arch in ARCHES:
        for kind in CANDIDATES:
            for head_dim in RANKED_DIMS:
                for r in rank(kind, arch, head_dim):
                    costs = (f"{r.cost:.2f}", f"{r.work:.2f}")
                    cells = [arch, kind, head_dim, r.schedule, *costs, r.kernel.registers, r.waves]
                    yield "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--rank", action="store_true")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        "### HIP kernels, read from their code",
        "",
        "No AMD device was at hand: nothing here was run. bf16 forward, both in blocks of 256 queries by 64 keys on 8 waves,",
        "instructions of one iteration of one wave (`attn_engine/backends/hip/cost.py`) where channels lie side by side and",
        "blocks are whole; VALU includes moves between vector and accumulator registers.",
        "",
        *beside_triton(),
    ]
    if arguments.rank:
        lines += [
            "",
            "Schedules by static cost: llvm-mca's pressure on matrix, vector and LDS units, corrected.",
            "",
            *ranking(),
        ]
    (out / "hip_static.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
