"""Definitions drawn at random, beside compiled FlexAttention: `python -m bench.drawn`.

The first so many draws of the fuzz grammar (`tests/fuzz`) that FlexAttention can express: softmax of a score_mod under a
mask_mod. B2 H16 S2048 D128 bf16, captures do not train. Milliseconds, medians, interleaved; the same passes made all of
them. What FlexAttention cannot compile is left out of the medians. Each definition has a process of its own; they compile
side by side, and measure one after the other.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attn_engine
from attn_engine.runtime.attention import Attention
from bench.custom import ahead, back
from bench.custom_rows import Attend
from bench.timing import interleaved
from bench.warm import as_done
from tests.fuzz.check import function_of, inputs_of
from tests.fuzz.grammar import Case, generate

SIZES = {"b": 2, "h": 16, "hkv": 16, "sq": 2048, "skv": 2048, "d": 128, "dv": 128}
OURS, PEER = "ours", "flex"
LIMIT = 3e-2
"""Of the relative difference of two outputs in bf16."""


@dataclass(frozen=True)
class Drawn:
    """A case, the functions that it makes, and its tensors."""

    case: Case
    functions: dict[str, Any]
    operands: list[Tensor]

    @classmethod
    def of(cls, case: Case) -> Drawn:
        tensors, captures = inputs_of(case)
        moved = {name: tensor.cuda() for name, tensor in captures.items()}
        return cls(case, function_of(case)(**moved), [t.cuda().bfloat16() for t in tensors])

    def attend(self, side: str) -> Attend:
        score, mask = self.functions.get("score_mod"), self.functions.get("mask_mod")
        if side == OURS:
            return attn_engine.compile(score_mod=score, mask_mod=mask)
        blocks = None
        if mask is not None:
            n = self.case.sizes
            blocks = create_block_mask(mask, n["b"], n["h"], n["sq"], n["skv"], device="cuda")
        return partial(torch.compile(flex_attention), score_mod=score, block_mask=blocks)


def draws() -> Iterator[Case]:
    """Those that FlexAttention can express, at the size of the bench."""
    for seed in itertools.count():
        case = generate(seed)
        if case.row == "softmax" and not any(f"def {name}_mod(" in case.source for name in ("query", "key", "value")):
            yield replace(case, sizes=SIZES)


def seeds(count: int, first: int) -> list[int]:
    return [case.seed for case in itertools.islice(draws(), first, first + count)]


def drawn(seed: int) -> Drawn:
    return Drawn.of(replace(generate(seed), sizes=SIZES))


@dataclass(frozen=True)
class Measured:
    """Milliseconds of either side, forward and backward."""

    forward: dict[str, float]
    backward: dict[str, float]
    difference: float
    replaced: list[str]
    """What took the place of kernels that came out badly, and why."""

    def ratios(self) -> tuple[float, float]:
        return self.forward[PEER] / self.forward[OURS], self.backward[PEER] / self.backward[OURS]


class SideError(Exception):
    """What one side raised."""


def _try(side: str, call: Callable[[], object]) -> None:
    """A first call to its end, so that what a device finds is told of the side that did it."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        raise SideError(f"{side}: {type(error).__name__}: {str(error)[:80]!r}") from error


def measure(found: Drawn) -> Measured:
    leaves = tuple(x.requires_grad_() for x in found.operands)
    attends = {side: found.attend(side) for side in (OURS, PEER)}
    for side, attend in attends.items():
        _try(side, partial(attend, *leaves))
    forward = interleaved({side: ahead(attend, leaves) for side, attend in attends.items()})
    outputs = {side: attend(*leaves) for side, attend in attends.items()}
    d_o = torch.randn_like(outputs[OURS])
    backward = interleaved({side: back(o, leaves, d_o) for side, o in outputs.items()})
    a, b = (outputs[side].detach().double() for side in (OURS, PEER))
    ours = attends[OURS]
    told = ours.choices() if isinstance(ours, Attention) else []
    replaced = [line for line in told if not line.startswith(("taken", "not "))]
    return Measured(forward, backward, float((a - b).norm() / b.norm()), replaced)


def row(seed: int) -> tuple[str, tuple[float, float] | None]:
    """A line of the table, and the ratios in it. What is measured waits for what others measure meanwhile."""
    functorch.donated_buffer = False  # a graph is run backward more than once
    torch._dynamo.reset()
    found = drawn(seed)
    told = " ".join(line.strip().removeprefix("return ") for line in found.case.source.splitlines() if "return" in line)
    told = told.rpartition(" {")[0].replace("|", "\\|")[:120]
    try:
        measured = measure(found)
    except Exception as error:
        said = " ".join(str(error).split())[:120]
        return f"| {seed} | `{told}` | failed: {type(error).__name__}: {said} | | | | | |", None
    (fo, fp), (bo, bp) = ((ms[OURS], ms[PEER]) for ms in (measured.forward, measured.backward))
    notes = [] if measured.difference < LIMIT else [f"differs: {measured.difference:.0e}"]
    wrong = f" ({'; '.join([*notes, *measured.replaced])})" if notes or measured.replaced else ""
    cells = f"{fo:.3f} | {fp:.3f} | {fp / fo:.2f} | {bo:.3f} | {bp:.3f} | {bp / bo:.2f}"
    return f"| {seed} | `{told}`{wrong} | {cells} |", measured.ratios()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    chosen = seeds(arguments.count, arguments.first)
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; B2 H16 S2048 D128 bf16; `python -m bench.drawn`.",
        "",
        "| seed | definition | forward ms | FlexAttention | ratio | backward ms | FlexAttention | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    ratios: list[tuple[float, float]] = []
    for text, found in as_done(row, chosen):
        lines.append(text)
        ratios += [found] if found is not None else []
        print(lines[-1], flush=True)
    if ratios:
        forward, backward = (statistics.median(r[n] for r in ratios) for n in range(2))
        lines.append(f"| | median of {len(ratios)} | | | {forward:.2f} | | | {backward:.2f} |")
        print(lines[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "drawn.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
