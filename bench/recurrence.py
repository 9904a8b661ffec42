"""Recurrences on one GPU beside fla and mamba_ssm and the bytes that they must move: `python -m bench.recurrence --decode --out DIR`.

The floor of a forward reads q, k, v and the log decay and writes o, once each; that of a backward reads these and d_o
and writes the gradients. Every package runs in a process of its own, where it is installed (or found under `--peers`), in
turns with ours; errors are relative, of o and of the gradients, against a token loop in fp64 with the same inputs, of
the first 256 tokens of the first batch alone.
Kernels compile in processes of their own first, side by side, and so do those that peers choose from.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import os
import platform
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from attn_engine import recurrence, recurrence_step
from bench.compile_only import compile_part
from bench.recurrence_cases import BYTES_PER_MS, CASES, OTHER_SHAPES, Case, Inputs, Run, reference
from bench.recurrence_peers import entry, package_of, peer
from bench.timing import interleaved

OURS, ENTRY = "attn_engine", "attn_engine, its mamba_ssm entry point"
TURNS = 2
SHARES = 4
"""Tasks that share the kernels of one contender: each makes the whole call."""
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Measured:
    """Milliseconds and relative errors, forward and backward; None with `why` for what a contender refuses."""

    times: tuple[float | None, float | None]
    errors: tuple[float | None, float | None]
    why: str = ""


def ours(case: Case) -> Run:
    def run(x: Inputs) -> Tensor:
        optional = [x.get(name) for name in ("decay", "beta", "weight")]
        return recurrence(
            x["q"], x["k"], x["v"], decay=optional[0], beta=optional[1], weight=optional[2], scale=case.scale
        )[0]

    return run


def run_of(case: Case, name: str) -> Run:
    if name == OURS:
        return ours(case)
    found = entry(case) if name == ENTRY else peer(case)
    assert found is not None
    return found


def forward_of(x: Inputs, run: Run) -> Callable[[], object]:
    def ahead() -> Tensor:
        with torch.no_grad():
            return run(x)

    return ahead


def backward_of(x: Inputs, run: Run) -> Callable[[], object]:
    o = run(x)
    d_o, wrt = torch.randn_like(o), [t for t in x.values() if t.requires_grad]

    def back() -> object:
        return torch.autograd.grad(o, wrt, d_o, retain_graph=True, allow_unused=True)

    return back


def measure(task: tuple[Case, str, bool]) -> Measured:
    """One contender's turn; `task` ends with whether errors are wanted too."""
    case, name, checked = task
    run, x = run_of(case, name), case.inputs()
    times: list[float | None] = [interleaved({name: forward_of(x, run)}, 4)[name], None]
    errors: tuple[float | None, float | None] = (None, None)
    why = ""
    try:
        times[1] = interleaved({name: backward_of(x, run)}, 4)[name]
    except Exception as error:  # a peer may refuse this card or version
        why = f"{type(error).__name__}: {str(error)[:90]}"
    if checked:
        errors = errors_of(case, x, run, backward=not why, tied=case.kind == "mamba" and name != OURS)
    del x
    torch.cuda.empty_cache()
    return Measured((times[0], times[1]), errors, why)


def errors_of(
    case: Case, x: Inputs, run: Run, backward: bool = True, tied: bool = False
) -> tuple[float | None, float | None]:
    """Of o, and the largest of the gradients; `tied`: the log decay is made of the weight, as Mamba-2 has it."""
    given, wide = case.sample(x), case.sample(x, torch.float64)
    if tied:
        wide["decay"] = wide["weight"] * case.rates()
    right, d_o = reference(case, wide), torch.randn_like(given["v"])
    got = run(given)
    ahead = relative(got, right)
    if not backward:
        return ahead, None
    names = [name for name, t in given.items() if t.requires_grad and not (tied and name == "decay")]
    found: Any = torch.autograd.grad(got, [given[n] for n in names], d_o.to(got.dtype), allow_unused=True)
    wanted = torch.autograd.grad(right, [wide[n] for n in names], d_o.to(got.dtype).double())
    return ahead, max(relative(f, w) for f, w in zip(found, wanted, strict=True) if f is not None)


def relative(got: Tensor, right: Tensor) -> float:
    """|got - right| / |right|."""
    squares = [x.square().sum().item() for x in (got.double() - right, right)]
    return math.sqrt(squares[0] / max(squares[1], 1e-30))


def compile_share(task: tuple[Case, str, int]) -> None:
    """Compiles one share of the kernels of a contender, both ways, the large shape's and those of the sample."""
    case, name, share = task
    try:
        run = run_of(case, name)
    except ImportError:  # told where it is timed
        return
    small = case if name == OURS else replace(case, b=min(case.b, 2))

    def both_ways() -> None:
        x = small.inputs()
        for given in (x, case.sample(x)):
            backward_of(given, run)()

    compile_part(both_ways, share, SHARES)
    torch.cuda.empty_cache()


def compile_all(cases: list[Case], peers: list[Case]) -> None:
    """Our kernels, and beside them those that the peers of some cases choose from."""
    cores = max(2, len(os.sched_getaffinity(0)) - 2)
    names = [(case, package_of(case)) for case in peers] + [(case, OURS) for case in distinct(cases)]
    with ProcessPoolExecutor(cores, SPAWN) as pool:
        tasks = [(case, name, share) for case, name in names for share in range(SHARES)]
        for future in [pool.submit(compile_share, task) for task in tasks]:
            future.result()


def distinct(cases: list[Case]) -> list[Case]:
    """One case of those whose kernels are the same."""
    return list({str(case.scheduled()): case for case in reversed(cases)}.values())


class Contenders:
    """A process for each package."""

    def __init__(self, packages: list[str]):
        self.packages = packages
        self.pools = {name: ProcessPoolExecutor(1, SPAWN) for name in [OURS, *packages]}

    def of(self, case: Case) -> list[str]:
        found = [OURS, *([ENTRY] if case.kind == "mamba" and "mamba_ssm" in self.packages else [])]
        return found + [name for name in self.packages if name == package_of(case)]

    def measure(self, case: Case) -> dict[str, Measured]:
        """In turns; the mean of each contender's medians."""
        found: dict[str, list[Measured]] = {name: [] for name in self.of(case)}
        for turn in range(TURNS):
            for name, turns in found.items():
                pool = self.pools[OURS if name == ENTRY else name]
                turns.append(pool.submit(measure, (case, name, turn == 0)).result())
        return {name: together(turns) for name, turns in found.items()}


def together(turns: list[Measured]) -> Measured:
    ahead, back = ([t for m in turns if (t := m.times[side]) is not None] for side in range(2))
    times = (statistics.mean(ahead) if ahead else None, statistics.mean(back) if back else None)
    return Measured(times, turns[0].errors, turns[0].why)


def figures(time: float | None, floor: float, other: float | None) -> str:
    """Milliseconds, the ratio to a floor and to another's milliseconds, as cells of a table."""
    if time is None:
        return "refused | | "
    return f"{time:.3f} | {time / floor:.2f} of {floor:.3f} | {f'{time / other:.2f} of {other:.3f}' if other else ''}"


def lines_of(case: Case, found: dict[str, Measured], before: dict[str, Measured]) -> list[str]:
    """Rows of the table; `before` has the peers of earlier cases."""
    theirs = found.get(package_of(case))
    judge = before.get(case.judge) or theirs
    lines: list[str] = []
    for name, mine in found.items():
        others = [
            None if other is None or mine is theirs else other.times[n] for n, other in enumerate((theirs, judge))
        ]
        cells = [
            figures(mine.times[side], case.floor(bool(side)), others[side] or case.drafts[side]) for side in range(2)
        ]
        wrong = ["" if e is None else f"{e:.1e}" for e in mine.errors]
        lines.append(f"| {case.name} | {name} | {cells[0]} | {cells[1]} | {wrong[0]} | {wrong[1]} |")
        if mine.why:
            lines.append(f"| | {name}, backward | {mine.why} | | | | | | | |")
    return lines


def decode(batch: int) -> str:
    """One token: every byte of the states is read and written once, as a copy of them does."""
    h, d = 32, 128
    q, k, v = (torch.randn(batch, 1, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g, state = -torch.rand(batch, 1, h, device="cuda"), torch.randn(batch, h, d, d, device="cuda")
    other = torch.empty_like(state)
    times = interleaved(
        {"step": lambda: recurrence_step(q, k, v, state=state, decay=g), "copy": lambda: other.copy_(state)}, 4
    )
    floor = 2 * state.numel() * 4 / BYTES_PER_MS
    return f"| one token B{batch} H{h} {d}/{d} | {OURS} | {figures(times['step'], floor, times['copy'])} | | | | | |"


def report(cases: list[Case], packages: list[str], other: str) -> list[str]:
    lines: list[str] = []

    def say(*new: str) -> None:
        lines.extend(new)
        print("\n".join(new), flush=True)

    say(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, Python"
        f" {platform.python_version()}; bf16, fp32 states; `python -m bench.recurrence`.",
        "",
        f"| shape | | forward ms | of floor | of {other} | backward ms | of floor | of {other} | error o | error d |",
        "|---|---|---|---|---|---|---|---|---|---|",
    )
    contenders, before = Contenders(packages), dict[str, Measured]()
    for case in cases:
        found = contenders.measure(case)
        say(*lines_of(case, found, before))
        if package_of(case) in found:
            before[case.name] = found[package_of(case)]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--peers", type=Path, help="a folder with the packages fla and mamba_ssm")
    parser.add_argument("--shapes", action="store_true", help="the shapes of the ancestors instead, without peers")
    parser.add_argument(
        "--cases", nargs="+", default=[""], metavar="NAME", help="only those with one of these in their names"
    )
    parser.add_argument("--decode", action="store_true", help="one token too, beside a copy of its states")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.peers:
        sys.path.append(str(arguments.peers))
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(arguments.peers)])
    known = OTHER_SHAPES if arguments.shapes else CASES
    cases = [case for case in known if any(part in case.name for part in arguments.cases)]
    packages = [] if arguments.shapes else [p for p in ("fla", "mamba_ssm") if importlib.util.find_spec(p)]
    compile_all(cases, [case for case in cases if package_of(case) in packages])
    lines = report(cases, packages, "draft" if arguments.shapes else "peer")
    for batch in (1, 16, 256) if arguments.decode else ():
        lines.append(decode(batch))
        print(lines[-1], flush=True)
    name = "recurrence_shapes.md" if arguments.shapes else "recurrence.md"
    (arguments.out / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
