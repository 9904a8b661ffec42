"""The picture: both loss curves, and the blocks of the mask."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from numpy.typing import NDArray

from .training import Run

KINDS = {"empty: skipped": "#f2f2f2", "partial: the mask is evaluated": "#e9a23b", "full: the mask is not": "#2d6a8e"}


def save(path: Path, compiled: Run, dense: Run, kinds: NDArray[np.int64], size: int) -> None:
    """Writes the picture as PNG."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    left.plot(dense.losses, color="#e9a23b", linewidth=4, alpha=0.6, label="plain torch, dense")
    left.plot(compiled.losses, color="#2d6a8e", linewidth=1.2, label="compiled")
    left.set(xlabel="step", ylabel="nats per byte", title="The same model, the same seed")
    left.legend()
    right.imshow(kinds, cmap=ListedColormap(list(KINDS.values())), vmin=0, vmax=2)
    right.set(
        xlabel="block of keys", ylabel="block of queries", title=f"Blocks of {size} by {size} as the compiler sees them"
    )
    right.legend(
        handles=[Patch(color=color, label=name) for name, color in KINDS.items()], loc="upper right", fontsize=8
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
