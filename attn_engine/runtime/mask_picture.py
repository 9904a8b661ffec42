"""Pictures of the blocks of a mask: as text, and as an image."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from attn_engine.errors import ArgumentError

HIDDEN, PARTIAL, FULL = 0, 1, 2
SIGNS = ("  ", "░░", "██")
COLORS = ("white", "#9ecae1", "#08519c")
MOST_CELLS = 32


def coarse(states: Tensor, most: int = MOST_CELLS) -> Tensor:
    """At most `most` cells a side of [query blocks, key blocks]: of several blocks, all hidden, all full, or partial."""
    for axis in (0, 1):
        count = states.shape[axis]
        times = -(-count // most) if count else 1
        parts: Sequence[Tensor] = torch.split(states, times, axis)
        merged = [_merged(part, axis) for part in parts if part.shape[axis]]
        states = torch.stack(merged, axis) if merged else states
    return states


def _merged(part: Tensor, axis: int) -> Tensor:
    low = part.amin(axis)
    return torch.where(low == part.amax(axis), low, PARTIAL)


def text(states: Tensor) -> str:
    """One line a row of blocks [query blocks, key blocks], two characters a block."""
    rows = cast(list[list[int]], coarse(states).tolist())
    return "\n".join("".join(SIGNS[cell] for cell in row).rstrip() for row in rows)


def save(states: Tensor, title: str, path: str | Path) -> None:
    """An image of blocks [query blocks, key blocks] in the format that the name ends in: png, svg, pdf ...

    Raises:
        ArgumentError: without matplotlib.
    """
    try:
        figures: Any = import_module("matplotlib.figure")
        colors: Any = import_module("matplotlib.colors")
        patches: Any = import_module("matplotlib.patches")
    except ImportError as error:
        raise ArgumentError("images of masks need matplotlib: pip install matplotlib") from error
    figure = figures.Figure(figsize=(5, 5.4), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="block of keys", ylabel="block of queries")
    axes.imshow(
        states.cpu().numpy(), cmap=colors.ListedColormap(COLORS), vmin=HIDDEN, vmax=FULL, interpolation="nearest"
    )
    names = zip(COLORS, ("hidden", "partial", "full"), strict=True)
    legend = [patches.Patch(facecolor=color, edgecolor="black", label=name) for color, name in names]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend))
    figure.savefig(path)
