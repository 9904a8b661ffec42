"""How long compilation takes, from Python functions to emitted text: `python -m bench.compile_time --out DIR`.

Processor time of this process; imports are done before, and verification between passes is off.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from attn_engine import library
from attn_engine.backends.backend import get_backend
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Facts, Request
from attn_engine.runtime.schedules import default_schedule

BACKENDS = {"cpu": "cpu", "triton": "sm_90"}
QKV = ("q", "k", "v")


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def definitions() -> dict[str, Definition]:
    slopes, documents = torch.rand(8), torch.zeros(64, dtype=torch.int64)

    def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 20 * torch.tanh(score / 20) + slopes[h] * (kv_idx - q_idx)

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < 256) & (documents[q_idx] == documents[kv_idx])

    return {
        "softmax, causal": Definition(mask_mod=causal),
        "softcap and alibi, window of documents": Definition(score_mod=softcap, mask_mod=window),
        "sigmoid": Definition(row=library.sigmoid),
    }


@dataclass(frozen=True)
class Stages:
    """Seconds from functions to text."""

    trace: float
    attn: float
    tile: float
    emit: float

    @property
    def total(self) -> float:
        return self.trace + self.attn + self.tile + self.emit


def compile_once(definition: Definition, backend: str, wrt: tuple[str, ...]) -> Stages:
    """The stages of the driver, without its cache."""
    marks = [time.process_time()]

    def done(value: Any) -> Any:
        marks.append(time.process_time())
        return value

    module = done(build(definition, dtype=torch.float32, head_dim=64, head_dim_v=64)).module
    lowered = done(driver.to_attn(module, wrt))
    manifest = get_backend(backend)
    request = Request(wrt, backend, default_schedule(Target(backend, BACKENDS[backend]), lowered), Facts(True))
    tiles = done(driver.to_tile(lowered, request, manifest))
    done(manifest.emit(tiles))
    return Stages(*(b - a for a, b in pairwise(marks)))


def median(runs: list[Stages], part: Callable[[Stages], float]) -> str:
    return f"{statistics.median(part(run) for run in runs) * 1e3:.0f}"


def lines(rounds: int) -> Iterator[str]:
    yield "### Compile time\n\nFrom Python functions to the text of kernels, ms of processor time, medians.\n"
    yield "| definition | backend | gradients | trace | attn | tile | emit | all |\n|---|---|---|---|---|---|---|---|"
    for name, definition in definitions().items():
        for backend in BACKENDS:
            for wrt in ((), QKV):
                runs = [compile_once(definition, backend, wrt) for _ in range(rounds + 1)][1:]
                parts = [median(runs, lambda r, p=p: getattr(r, p)) for p in ("trace", "attn", "tile", "emit", "total")]
                yield f"| {name} | {backend} | {', '.join(wrt) or 'none'} | {' | '.join(parts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    text = "\n".join(lines(arguments.rounds))
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "compile_time.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
