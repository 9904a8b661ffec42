"""The same model trained twice on the same bytes, and what must hold of the two runs."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .model import ByteModel, Config, MakeAttend

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Run:
    """A finished training."""

    losses: list[float]
    slopes_before: Tensor
    slopes: Tensor
    seconds: float


@dataclass(frozen=True)
class Check:
    """One thing that must hold, and the number that says whether it does."""

    claim: str
    measured: str
    holds: bool


def library_text(limit: int = 1 << 20) -> Tensor:
    """The first bytes of the source text of Python's standard library, as int64."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:limit]
    if len(text) < 1 << 16:
        raise SystemExit("this Python has no source text of its standard library to train on")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(text: Tensor, config: Config, steps: int, seed: int) -> Iterator[Tensor]:
    """[batch, context + 1] windows at random places, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(text) - config.context - 1, (config.batch,), generator=generator)
        yield torch.stack([text[s : s + config.context + 1] for s in starts.tolist()])


def train(config: Config, make_attend: MakeAttend, steps: int, device: str, seed: int, progress: Progress) -> Run:
    """Trains a new model; everything but the attention follows from the seed."""
    torch.manual_seed(seed)
    model = ByteModel(config, make_attend).to(device)
    before = model.slopes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses: list[float] = []
    start = time.perf_counter()
    for step, batch in enumerate(batches(library_text(), config, steps, seed)):
        tokens = batch.to(device)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        progress(step, losses[-1])
    return Run(losses, before, model.slopes(), time.perf_counter() - start)


def compare(compiled: Run, dense: Run) -> list[Check]:
    """Both runs are one run: equal curves that fall, equal slopes that moved."""
    a, b = torch.tensor(compiled.losses), torch.tensor(dense.losses)
    apart = (a - b).abs().max().item()
    tail = max(1, len(a) // 10)
    first, last = a[0].item(), a[-tail:].mean().item()
    moved = (compiled.slopes - compiled.slopes_before).abs().max().item()
    slopes_apart = (compiled.slopes - dense.slopes).abs().max().item()
    return [
        Check("the two loss curves agree", f"at most {apart:.1e} nats apart", apart < 1e-3),
        Check("the loss falls", f"from {first:.2f} to {last:.2f} nats per byte", last < 0.9 * first),
        Check("the compiled slopes trained", f"moved by up to {moved:.3f}", moved > 1e-3),
        Check(
            "the slopes trained to the same values",
            f"at most {slopes_apart:.1e} apart",
            slopes_apart < 0.05 * moved,
        ),
    ]
