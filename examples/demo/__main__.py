"""`python -m examples.demo`: ends with exit code 1 if anything that it shows is not so."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from attn_engine import View

from . import blocks, picture, stages
from .model import Attend, Config, MakeAttend, compiled_attention, dense_attention
from .training import Check, Run, compare, train

BLOCK = 32


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    steps: int
    seed: int
    device: str
    out: Path


def parse(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="training steps of each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out"), help="a .png file, or a folder for demo.png")
    found = parser.parse_args(arguments)
    out = found.out if found.out.suffix == ".png" else found.out / "demo.png"
    return Options(found.steps, found.seed, found.device, out)


def train_both(config: Config, options: Options, console: Console) -> tuple[Run, Run]:
    """The same training with the compiled attention and with the dense one."""

    def compiled(slopes: torch.Tensor) -> Attend:
        return compiled_attention(slopes, config.window)

    def dense(slopes: torch.Tensor) -> Attend:
        return dense_attention(slopes, config.window)

    columns = TextColumn("{task.description:>9}"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as bars:

        def run(name: str, make_attend: MakeAttend) -> Run:
            bar = bars.add_task(name, total=options.steps, loss="")
            return train(
                config,
                make_attend,
                options.steps,
                options.device,
                options.seed,
                lambda step, loss: bars.update(bar, completed=step + 1, loss=f"loss {loss:.3f}"),
            )

        return run("compiled", compiled), run("dense", dense)


def check_blocks(config: Config, kinds: NDArray[np.int64], length: int) -> Check:
    """The map of blocks against the mask, evaluated at every pair of positions."""
    position = torch.arange(length)
    distance = position[:, None] - position
    wrong = blocks.wrong_blocks(kinds, (distance >= 0) & (distance < config.window), BLOCK)
    skipped = int((kinds == blocks.EMPTY).sum())
    return Check("the blocks are right", f"{skipped} of {kinds.size} skipped, {wrong} wrong", not wrong and skipped > 0)


def report(checks: list[Check], console: Console) -> int:
    """Prints what holds and what does not; the exit code."""
    for check in checks:
        mark = "[green]ok    [/]" if check.holds else "[bold red]FAILED[/]"
        console.print(f"{mark} {check.claim}: {check.measured}")
    return 0 if all(check.holds for check in checks) else 1


def main(arguments: list[str] | None = None, console: Console | None = None) -> int:
    """The whole demo; the exit code."""
    options, config, console = parse(arguments), Config(), console or Console()
    # Side by side on few cores, small tensors are faster on one thread; float32 products stay float32.
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")

    console.rule("one definition, stage by stage")
    slopes = torch.full((config.heads,), 0.1, requires_grad=True)
    attention = compiled_attention(slopes, config.window)
    view = View(torch.float32, config.head_dim, backward=True)
    stages.show(attention, view, console)

    console.rule(f"training on Python's standard library, on {options.device}")
    compiled, dense = train_both(config, options, console)
    kinds = blocks.block_map(blocks.analysed(attention, view), config.context, BLOCK, [slopes.detach()])
    picture.save(options.out, compiled, dense, kinds, BLOCK)

    console.rule("what must hold")
    code = report([*compare(compiled, dense), check_blocks(config, kinds, config.context)], console)
    console.print(f"{compiled.seconds:.0f} s compiled, {dense.seconds:.0f} s dense; the picture is {options.out}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
