"""Custom attention beside compiled FlexAttention, or the compiled dense formula where it has none: `python -m bench.custom`.

Forward and backward of what a user gets without naming a backend, bf16, milliseconds, medians, interleaved with the
peer. Rows stand in `bench/custom_rows.py`. All of them take some minutes; `--rows` runs a few.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch._functorch.config as functorch
from torch import Tensor

from bench.custom_rows import ROWS, Attend, Custom, inputs
from bench.timing import interleaved
from bench.warm import side_by_side

OURS, PEER, BESIDE = "ours", "peer", "beside"
SIDES = (OURS, PEER, BESIDE)
HEADER = (
    "| definition | shape | forward ms | TFLOP/s | peer | ratio | backward ms | TFLOP/s | peer | ratio | missed |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass
class Times:
    """Milliseconds by side."""

    forward: dict[str, float] = field(default_factory=dict[str, float])
    backward: dict[str, float] = field(default_factory=dict[str, float])


def sides(case: Custom) -> dict[str, Attend]:
    found = {OURS: case.ours, PEER: case.peer() if case.peer is not None else None, BESIDE: case.beside}
    return {name: attend for name, attend in found.items() if attend is not None}


def trained_by(case: Custom, side: str) -> tuple[Tensor, ...]:
    return () if side == BESIDE else case.trained


def measure(case: Custom, attends: dict[str, Attend]) -> Times:
    leaves = [x.requires_grad_() for x in inputs(case.shape)]
    times = Times(interleaved({name: ahead(attend, leaves) for name, attend in attends.items()}))
    outputs = {name: attend(*leaves) for name, attend in attends.items()}
    d_o = torch.randn_like(outputs[OURS])
    backward = {name: back(o, (*leaves, *trained_by(case, name)), d_o) for name, o in outputs.items()}
    slow = {name: run for name, run in backward.items() if name == PEER and case.slow_peer}
    times.backward = interleaved({name: run for name, run in backward.items() if name not in slow})
    times.backward |= interleaved(slow, rounds=1, launches=1, warm_ups=1)
    return times


def ahead(attend: Attend, leaves: Sequence[Tensor]) -> Callable[[], object]:
    """The forward as it is in training: without gradients it would be another compilation of each side."""
    return lambda: attend(*leaves)


def back(o: Tensor, leaves: tuple[Tensor, ...], d_o: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True)


def build(task: tuple[str, str]) -> None:
    """One forward and backward of a side of a row."""
    functorch.donated_buffer = False
    name, side = task
    case = ROWS[name]()
    attend = sides(case).get(side)
    if attend is None:
        return
    leaves = [x.requires_grad_() for x in inputs(case.shape)]
    o = attend(*leaves)
    torch.autograd.grad(o, (*leaves, *trained_by(case, side)), torch.randn_like(o))


def missed(case: Custom, times: Times) -> list[str]:
    """What was aimed at and not reached."""
    found: list[str] = []
    for n, (name, ms) in enumerate((("forward", times.forward), ("backward", times.backward))):
        ours = ms[OURS]
        if PEER in ms and ms[PEER] / ours < case.aims[n]:
            found.append(f"{name} >= {case.aims[n]:g}x the peer")
        if case.beside_at_most is not None and math.isfinite(case.beside_at_most[n]) and BESIDE in ms:
            ratio, most = ours / ms[BESIDE], case.beside_at_most[n]
            if round(ratio, 2) > round(most, 2):
                found.append(f"{name} {ratio:.2f}x, not {most:.2f}x, of {_other(case)}")
        if case.rates is not None and rate(case, ms[OURS], n) < case.rates[n]:
            found.append(f"{name} >= {case.rates[n]:.0f} TFLOP/s")
    return found


def _other(case: Custom) -> str:
    return "untrained" if case.trained else "softmax"


def rate(case: Custom, ms: float, number: int) -> float:
    return case.shape.flops[number] / ms * 1e-9


def line(case: Custom, times: Times) -> str:
    name = f"{case.name} (the peer's backward in 2 stages: 3 do not fit)" if case.fewer_stages else case.name
    cells = [name, str(case.shape)]
    for n, ms in enumerate((times.forward, times.backward)):
        ours, peer = ms[OURS], ms.get(PEER)
        beside = f" ({ms[BESIDE]:.3f} {_other(case)})" if BESIDE in ms else ""
        cells += [f"{ours:.3f}{beside}", f"{rate(case, ours, n):.0f}"]
        cells += [f"{peer:.3f}", f"{peer / ours:.2f}"] if peer is not None else ["", ""]
    return "| " + " | ".join([*cells, "; ".join(missed(case, times))]) + " |"


def run(name: str) -> str:
    """A line of the table; what fails says so, and costs the other rows nothing."""
    torch._dynamo.reset()
    case = ROWS[name]()
    attends = sides(case)
    try:
        text = line(case, measure(case, attends))
    except Exception as error:
        text = f"| {case.name} | failed: {type(error).__name__}: {str(error)[:160]} | | | | | | | | | |"
    told = getattr(case.ours, "choices", list[str])()
    for choice in told:
        print(f"    {choice[:200]}", file=sys.stderr, flush=True)
    torch.cuda.empty_cache()
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--rows", default=",".join(ROWS), help=f"with commas, of {', '.join(ROWS)}")
    arguments = parser.parse_args()
    functorch.donated_buffer = False  # a graph is run backward more than once
    names: list[str] = arguments.rows.split(",")
    command = "python -m bench.custom" + (f" --rows {arguments.rows}" if names != list(ROWS) else "")
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bf16; `{command}`.", "", *HEADER]
    print("\n".join(lines), flush=True)
    side_by_side(build, [(name, side) for name in names for side in SIDES])
    for name in names:
        lines.append(run(name))
        print(lines[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"custom_{names[0]}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
