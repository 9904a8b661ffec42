"""The IR of an attention after each stage, in a few lines each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.console import Console

from attn_engine import Attention, View


@dataclass(frozen=True)
class Stage:
    """A stage, what it is, and which of its lines are worth a look."""

    name: str
    about: str
    interesting: tuple[str, ...]


STAGES = (
    Stage(
        "traced", "the functions as they were written, as scalar code", ("math.tanh", "attn.load", "attn.row_reduce")
    ),
    Stage(
        "attn",
        "the row in one loop over keys, key ranges per block, gradients of everything",
        ("attn.step_yield", "attn.epilogue_yield", "attn.accumulate_grad", r"attn.yield .*i64, i64"),
    ),
    Stage("tile", "kernels over blocks, and plans that launch them", ("tile.kernel", "tile.dot")),
    Stage("triton", "Triton source for an NVIDIA H100, printed without one", (r"^def [a-z]", r"tl.dot\(", "tl.exp2")),
    Stage("cpu", "batched torch code, blockwise", (r"^def [a-z]", "exp2")),
)
MOST = 5


def text_of(stage: Stage, attention: Attention, view: View) -> str:
    if stage.name in ("triton", "cpu"):
        return attention.source(stage.name, view)
    return attention.ir(stage.name, view)


def excerpt(text: str, patterns: tuple[str, ...]) -> list[str]:
    """Up to `MOST` lines that match, the patterns taking turns, in the order of the text."""
    lines = text.splitlines()
    found = [[n for n, line in enumerate(lines) if re.search(pattern, line)] for pattern in patterns]
    turns = [hits[rank] for rank in range(MOST) for hits in found if rank < len(hits)]
    chosen = list(dict.fromkeys(turns))[:MOST]
    return [lines[n].strip() for n in sorted(chosen)]


def show(attention: Attention, view: View, console: Console) -> None:
    """Prints every stage: its size, and the lines that say what happened."""
    for stage in STAGES:
        text = text_of(stage, attention, view)
        console.print(f"[bold cyan]{stage.name}[/] {stage.about} [dim]({len(text.splitlines())} lines)[/]")
        for line in excerpt(text, stage.interesting):
            console.print(f"    {line}", style="dim", markup=False, highlight=False, overflow="ellipsis", no_wrap=True)
