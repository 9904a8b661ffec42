"""Copies for the next iteration of a loop, issued as soon as their place in shared memory is free.

Triton's pipeliner puts the copies for the next iteration behind everything that an iteration computes. With one
iteration of distance they are waited for right away, and all of their latency is seen. Loops that say so (`MARK`) get
another order here, once Triton has scheduled their operations and before it makes code of the schedule: copies that
only products read, which have two places in turn, come before the second product, for the wait for the first one says
that those of the iteration before are done; any other copy comes after the last operation that reads its place. With three stages these others go
out two iterations ahead: what comes from afar is there in time, and two places of small tiles cost little.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "tt.disallow_acc_multi_buffer"
"""What marks a loop: the attribute that `tl.range(..., disallow_acc_multi_buffer=True)` gives it, which has no other use
on Hopper."""
KNOWN = ("3.6.",)
"""Versions of Triton whose hook, passes and text are these. With others copies stay where its pipeliner puts them."""
HOPPER = 9
PIPELINE = "add_pipeline"
SCHEDULED = re.compile(r"loop\.cluster = \d+ : i32, loop\.stage = (\d+) : i32")
DEEPEST = re.compile(r"tt\.scheduled_max_stage = (\d+) ")
PRODUCT, COPY, LOAD = "ttng.warp_group_dot ", "tt.descriptor_load ", "tt.load "
PLACE, VIEW = "ttg.local_alloc ", "ttg.memdesc_"
_LOCK = threading.Lock()


def order_copies() -> None:
    """From now on Triton reorders the marked loops of kernels that it compiles for Hopper."""
    import triton
    from triton import knobs

    version: str = triton.__version__
    runtime: Any = knobs.runtime
    if version.startswith(KNOWN) and not isinstance(runtime.add_stages_inspection_hook, _Hook):
        runtime.add_stages_inspection_hook = _Hook(runtime.add_stages_inspection_hook)


@dataclass(frozen=True)
class _Hook:
    """Triton calls it with the stages of each compilation; `before` is who was called before."""

    before: Callable[..., None] | None

    def __call__(
        self, backend: Any, stages: dict[str, Callable[..., Any]], options: Any, language: Any, capability: int | None
    ) -> None:
        if self.before is not None:
            self.before(backend, stages, options, language, capability)
        if capability is not None and capability // 10 == HOPPER:
            optimise = stages["ttgir"]

            def optimised(module: Any, metadata: dict[str, Any]) -> Any:
                return _optimised(optimise, module, metadata)

            stages["ttgir"] = optimised


def _optimised(optimise: Callable[..., Any], module: Any, metadata: dict[str, Any]) -> Any:
    """What `optimise` makes of a module, with `ordered` between its scheduling and its expansion of loops."""
    if MARK not in str(module):
        return optimise(module, metadata)
    with _LOCK, _recording() as recorder:
        made = optimise(module, metadata)
    if recorder.module is None:
        return made
    metadata["tensordesc_meta"] = recorder.module.get_tensordesc_metadata()
    return recorder.module


# --- passes in two halves ----------------------------------------------------------------------------


@dataclass
class _Recorder:
    """Stands for a pass manager: keeps what is added, and runs it in two halves."""

    ir: Any
    thread: int
    context: Any = None
    passes: list[tuple[str, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list[Any])
    module: Any = None
    """The module of the second half, where that is another one."""

    def enable_debug(self) -> bool:
        return False

    def run(self, module: Any, name: str) -> None:
        names = [added for added, _, _ in self.passes]
        cut = names.index(PIPELINE) if PIPELINE in names else len(names)
        self._half(module, name, slice(0, cut))
        before = str(module)
        after = ordered(before)
        if after != before:
            module = self.module = self._parsed(after)
        self._half(module, name, slice(cut, None))

    def _half(self, module: Any, name: str, which: slice) -> None:
        manager = self.ir.pass_manager(self.context)
        for _, add, arguments in self.passes[which]:
            add(manager, *arguments)
        manager.run(module, name)

    def _parsed(self, text: str) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "scheduled.ttgir"
            path.write_text(text)
            found = self.ir.parse_mlir_module(str(path), self.context)
        found.context = self.context
        return found


class _Passes:
    """Stands for a module of passes, or of such modules; what is not added to a recorder is added as ever."""

    def __init__(self, real: Any):
        self.real = real

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if not name.startswith("add_"):
            return _Passes(found) if hasattr(found, "__name__") and not callable(found) else found

        def add(manager: Any, *arguments: Any) -> None:
            if isinstance(manager, _Recorder):
                manager.passes.append((name, found, arguments))
            else:
                found(manager, *arguments)

        return add


class _Ir:
    """Stands for Triton's `ir`, whose pass manager is the recorder in the recorder's thread."""

    def __init__(self, recorder: _Recorder):
        self.recorder = recorder

    def pass_manager(self, context: Any) -> Any:
        if threading.get_ident() != self.recorder.thread:
            return self.recorder.ir.pass_manager(context)
        self.recorder.context = context
        return self.recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorder.ir, name)


@contextmanager
def _recording() -> Generator[_Recorder]:
    """While it lasts, Triton's compiler for NVIDIA adds the passes of this thread to what this yields."""
    from triton.backends.nvidia import compiler

    module: Any = compiler
    real = {name: getattr(module, name) for name in ("ir", "passes", "nvidia")}
    recorder = _Recorder(real["ir"], threading.get_ident())
    module.ir, module.passes, module.nvidia = _Ir(recorder), _Passes(real["passes"]), _Passes(real["nvidia"])
    try:
        yield recorder
    finally:
        for name, value in real.items():
            setattr(module, name, value)


# --- the order of one text ---------------------------------------------------------------------------


def ordered(text: str) -> str:
    """The module with the copies of its marked loops in other clusters; clusters are what Triton orders a loop by."""
    lines = text.split("\n")
    for start, line in enumerate(lines):
        if "scf.for " in line:
            end = _end(lines, start)
            deep = DEEPEST.search(lines[end])
            if MARK in lines[end] and deep is not None and int(deep[1]) in (1, 2):
                _Loop(lines, start + 1, end, int(deep[1])).order()
    return "\n".join(lines)


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _end(lines: list[str], start: int) -> int:
    """The line that closes a loop."""
    close = " " * _depth(lines[start]) + "}"
    return next(n for n in range(start + 1, len(lines)) if lines[n].startswith(close))


class _Loop:
    """The lines of a loop's body. Operations of stage 0 are as many iterations as `last` ahead of those of that stage.

    Every product is a cluster of its own, and so is what stands between two of them.
    """

    def __init__(self, lines: list[str], start: int, end: int, last: int):
        self.lines, self.range, self.last = lines, range(start, end), last
        depth = _depth(lines[start])
        found = {n: SCHEDULED.search(lines[n]) for n in self.range if _depth(lines[n]) == depth}
        self.stages = {n: int(scheduled[1]) for n, scheduled in found.items() if scheduled is not None}
        self.products = [n for n in self.stages if PRODUCT in lines[n]]

    def order(self) -> None:
        loads = [
            n for n, stage in self.stages.items() if not stage and (COPY in self.lines[n] or LOAD in self.lines[n])
        ]
        known = set(self.stages.values()) <= {0, self.last}
        if len(self.products) < 2 or not loads or not known or not self._waited_for(self.products[0]):
            return
        placed = {n: self._cluster_of_load(n) for n in loads}
        first = min(placed.values())
        for n, stage in self.stages.items():
            cluster = self._cluster(n) if stage else placed.get(n, first)
            at = self.last - 1 if n in placed and self._for_products(n) else stage
            said = f"loop.cluster = {cluster} : i32, loop.stage = {at} : i32"
            self.lines[n] = SCHEDULED.sub(said, self.lines[n])

    def _for_products(self, load: int) -> bool:
        """Whether products alone read it: it has a place more than it is iterations ahead."""
        return COPY in self.lines[load] and all(PLACE in self.lines[n] for n in self._users(load))

    def _cluster(self, n: int) -> int:
        """Even; loads get the odd ones behind them."""
        return 4 * sum(product < n for product in self.products) + 2 * (n in self.products)

    def _cluster_of_load(self, load: int) -> int:
        if self._for_products(load):
            return self._cluster(self.products[1]) - 1
        return self._read_last(load) + 1

    def _read_last(self, n: int) -> int:
        """The cluster after which a value, and with it its place, has been read."""
        last = 0
        for user in self._users(n):
            if PRODUCT in self.lines[user] and not self._waited_for(user):
                return 4 * len(self.products)
            last = max(last, self._cluster(user))
            if PLACE in self.lines[user] or VIEW in self.lines[user]:
                last = max(last, self._read_last(user))
        return last

    def _waited_for(self, product: int) -> bool:
        """Whether a product is waited for where it stands: something but the next iteration reads it."""
        return any("scf.yield" not in self.lines[n] for n in self._users(product))

    def _users(self, n: int) -> list[int]:
        result = self.lines[n].partition(" = ")[0].strip().partition(":")[0]
        pattern = re.compile(rf"{re.escape(result)}(?!\w)")
        return [user for user in self.range if user > n and pattern.search(self.lines[user])]
