"""What a kernel's loops cost, read from its machine code: instructions by kind, and llvm-mca's cycles corrected.

Good for comparing kernels and schedules with each other; no time comes out of it.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from attn_engine.arch import Arch
from attn_engine.backends.hip import toolchain
from attn_engine.errors import BackendError

_LABEL = re.compile(r"^(\.L\w+):")
_BRANCH = re.compile(r"^s_c?branch\w*\s+(\.L\w+)")
_ENDS = ("s_endpgm", "s_setpc", "s_trap")
_SINGLE = re.compile(r"^(global|buffer|flat)_load_(ushort|ubyte|sbyte|sshort|short_d16\w*)\b")
"""Loads of single elements of 16 bits: the road for tensors whose channels lie apart, and for ragged ends."""
_KINDS = (
    ("mfma", re.compile(r"^v_s?mfmac?_")),
    ("exp", re.compile(r"^v_exp_")),
    ("valu", re.compile(r"^v_")),
    ("lds", re.compile(r"^ds_")),
    ("memory", re.compile(r"^(global|buffer|flat)_")),
    ("barrier", re.compile(r"^s_barrier")),
    ("scalar", re.compile(r"^s_(?!waitcnt|nop)")),
)
KINDS = tuple(name for name, _ in _KINDS)


def kind_of(instruction: str) -> str | None:
    """`v_mfma_...` -> "mfma"; waits are of no kind."""
    return next((name for name, pattern in _KINDS if pattern.match(instruction)), None)


@dataclass
class _Block:
    label: str | None
    body: list[str]
    targets: tuple[str, ...] = ()
    falls: bool = True


def _blocks(code: str) -> list[_Block]:
    """The basic blocks of one kernel's assembly, in order."""
    blocks = [_Block(None, [])]
    for raw in code.split("\n"):
        line = raw.split(";")[0].strip()
        if label := _LABEL.match(line):
            blocks.append(_Block(label.group(1), []))
        elif line and not line.startswith((".", "//")) and not line.endswith(":"):
            blocks[-1].body.append(line)
            if branch := _BRANCH.match(line):
                blocks[-1].targets = (branch.group(1),)
                blocks[-1].falls = not line.startswith("s_branch")
                blocks.append(_Block(None, []))
            elif line.startswith(_ENDS):
                blocks[-1].falls = False
                blocks.append(_Block(None, []))
    return blocks


class _Flow:
    """The flow of control through blocks, by number."""

    def __init__(self, blocks: list[_Block]):
        place = {block.label: n for n, block in enumerate(blocks) if block.label}
        self.blocks = blocks
        self.after: list[set[int]] = []
        for n, block in enumerate(blocks):
            reached = {place[t] for t in block.targets if t in place}
            self.after.append(reached | {n + 1} if block.falls and n + 1 < len(blocks) else reached)
        self.before: list[set[int]] = [set() for _ in blocks]
        for n, successors in enumerate(self.after):
            for successor in successors:
                self.before[successor].add(n)

    def loops(self) -> dict[int, set[int]]:
        """Natural loops by their headers, those that begin at one block joined."""
        found: dict[int, set[int]] = {}
        for end, header in self._back_edges():
            found.setdefault(header, {header}).update(self._reaching(end, header))
        return found

    def _back_edges(self) -> list[tuple[int, int]]:
        """Edges to a block that is on the way from the start (depth first)."""
        edges: list[tuple[int, int]] = []
        state: dict[int, bool] = {}
        stack = [(0, iter(sorted(self.after[0])))]
        state[0] = True
        while stack:
            block, rest = stack[-1]
            step = next(rest, None)
            if step is None:
                state[block] = False
                stack.pop()
            elif step not in state:
                state[step] = True
                stack.append((step, iter(sorted(self.after[step]))))
            elif state[step]:
                edges.append((block, step))
        return edges

    def _reaching(self, end: int, header: int) -> set[int]:
        body, stack = {end}, [end]
        while stack:
            block = stack.pop()
            if block != header:
                fresh = self.before[block] - body
                body |= fresh
                stack += fresh
        return body

    def hot(self, header: int, loop: set[int]) -> list[int]:
        """The loop's blocks but for the road of single elements, in the order in which they are reached."""
        cold = {n for n in loop if any(_SINGLE.match(line) for line in self.blocks[n].body)}
        forward = self._spread(header, loop - cold, self.after)
        latches = {n for n in forward if header in self.after[n]}
        back = set[int]()
        for latch in latches:
            back.update(self._spread(latch, loop - cold, self.before, stop=header))
        return [n for n in forward if n in back]

    def _spread(self, start: int, within: set[int], edges: list[set[int]], stop: int | None = None) -> list[int]:
        found, order = {start}, [start]
        for block in order:
            if block == stop:
                continue
            for step in sorted(edges[block]):
                if step in within and step not in found:
                    found.add(step)
                    order.append(step)
        return order


@dataclass(frozen=True)
class Loop:
    """An innermost loop around matrix instructions: its instructions, those of the road of single elements left out."""

    body: tuple[str, ...]

    @cached_property
    def counts(self) -> dict[str, int]:
        found = Counter(kind_of(line) for line in self.body)
        return {name: found[name] for name in KINDS}


def hot_loops(code: str) -> list[Loop]:
    """The innermost loops of a kernel's assembly that hold matrix instructions, the one with the least work first."""
    flow = _Flow(_blocks(code))
    loops = {h: loop for h, loop in flow.loops().items() if any(_multiplies(flow.blocks[n]) for n in loop)}
    inner = [(h, loop) for h, loop in loops.items() if not any(other < loop for other in loops.values())]
    bodies = [tuple(line for n in flow.hot(h, loop) for line in flow.blocks[n].body) for h, loop in inner]
    found = [Loop(body) for body in bodies if any(kind_of(line) == "mfma" for line in body)]
    return sorted(found, key=lambda loop: loop.counts["valu"])


def _multiplies(block: _Block) -> bool:
    return any(kind_of(line) == "mfma" for line in block.body)


# --- cycles ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pressure:
    """Cycles that one iteration of one wave takes of each unit of a SIMD: matrix, vector, and LDS of the whole CU."""

    matrix: float
    vector: float
    lds: float

    @property
    def bound(self) -> float:
        """Of the unit that is needed longest, if waves of other programs fill all gaps."""
        return max(self.matrix, self.vector, self.lds)


_PASS = 4
"""Clocks of one of llvm-mca's units: a wave of 64 goes through 16 lanes."""
_SLOW_EXP = 3
"""Further units of an exponential, which it counts as any other vector instruction; the hardware takes a quarter's rate."""
_RESOURCE = re.compile(r"^\[(\d+(?:\.\d+)?)\]\s+-\s+(\w+)", re.MULTILINE)


def pressure(loop: Loop, arch: str) -> Pressure:
    """llvm-mca's resource pressure of one iteration, with what it does not know put right."""
    text = "\n".join(line for line in loop.body if not _BRANCH.match(line))
    # Tables alone: pressure adds up over instructions, and simulating some loops of gfx90a does not end (LLVM 19).
    command = [toolchain.tool("llvm-mca"), "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-instruction-tables"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BackendError(f"llvm-mca failed for {arch}:\n{done.stderr[:2000]}")
    used = _used(done.stdout)
    vector = used.get("HWVALU", 0.0) + _SLOW_EXP * loop.counts["exp"]
    # Four SIMDs share LDS; a read of 16 bytes per lane keeps it busy for 8 clocks, one of 8 bytes or less for 4.
    lds = sum(
        8 if re.match(r"^ds_(read|write)(2\w*_b64|_b128)", line) else 4 for line in loop.body if line.startswith("ds_")
    )
    return Pressure(used.get("HWXDL", 0.0) * _PASS, vector * _PASS, 4.0 * lds)


def _used(report: str) -> dict[str, float]:
    """`Resource pressure per iteration`, by the name of the resource."""
    names = dict(_RESOURCE.findall(report))
    lines = report.split("\n")
    at = next((n for n, line in enumerate(lines) if line.startswith("Resource pressure per iteration")), None)
    if at is None:
        raise BackendError("llvm-mca gave no resource pressure")
    columns = re.findall(r"\[([\d.]+)\]", lines[at + 1])
    values = lines[at + 2].split()
    return {names[c]: 0.0 if v == "-" else float(v) for c, v in zip(columns, values, strict=False) if c in names}


def waves_per_simd(registers: int, shared: int, arch: Arch, threads: int) -> int:
    """How many waves share a SIMD: as many programs as registers and LDS allow, 8 waves at most."""
    waves = -(-threads // (arch.warp_size * SIMDS))
    by_registers = arch.registers_per_thread // (-(-registers // _GRANULE) * _GRANULE)
    by_lds = arch.shared_per_multiprocessor // max(1, shared) * waves
    return min(8, by_registers // waves * waves, by_lds)


SIMDS = 4
_GRANULE = 8


def clocks(pressures: Pressure, waves: int) -> float:
    """Of one iteration of one wave: the unit that is needed longest, or all after each other where no other wave runs."""
    return pressures.bound if waves > 1 else pressures.matrix + pressures.vector + pressures.lds
