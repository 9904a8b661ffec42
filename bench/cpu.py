"""The CPU backend beside compiled flex_attention and SDPA: `python -m bench.cpu --out DIR`.

Contenders take turns, figures are medians; memory is the most that a call holds at once, as torch's allocator
sees it. A machine that does other work at the time gives figures that say little: look at the spread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import profile

import attn_engine

Call = Callable[[], object]
HEADS, LENGTH, D = 8, 1024, 64
MEMORY_LENGTHS = (1024, 2048, 4096, 8192, 16384)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


@dataclass(frozen=True)
class Timed:
    """Milliseconds of one contender."""

    median: float
    fastest: float
    slowest: float


def interleaved(contenders: dict[str, Call], rounds: int) -> dict[str, Timed]:
    """Every round runs each contender once, so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 2):
        for name, call in contenders.items():
            start = time.perf_counter()
            call()
            if turn >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: Timed(statistics.median(t), min(t), max(t)) for name, t in times.items()}


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def forward_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Causal attention without gradients; all three agree."""
    mask = create_block_mask(causal, 1, 1, q.shape[2], k.shape[2], device="cpu")
    flex = torch.compile(flex_attention)
    ours = attn_engine.compile(mask_mod=causal)
    calls: dict[str, Call] = {
        "attn_engine": lambda: ours(q, k, v),
        "flex_attention, compiled": lambda: flex(q, k, v, block_mask=mask),
        "SDPA": lambda: causal_sdpa(q, k, v),
    }
    with torch.no_grad():
        expected = calls["SDPA"]()
        for name, call in calls.items():
            torch.testing.assert_close(call(), expected, rtol=1e-4, atol=1e-4, msg=f"{name} differs")
    return {name: without_gradient(call) for name, call in calls.items()}


def without_gradient(call: Call) -> Call:
    return torch.no_grad()(call)


def training_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Call]:
    """Forward and backward; flex_attention has no backward on a CPU."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    d_o = torch.randn_like(q)
    ours = attn_engine.compile(mask_mod=causal)
    return {
        "attn_engine": lambda: torch.autograd.grad(ours(*leaves), leaves, d_o),
        "SDPA": lambda: torch.autograd.grad(causal_sdpa(*leaves), leaves, d_o),
    }


def peak_bytes(call: Call) -> int:
    """The most bytes that a call holds at once beyond what was there."""
    call()
    with profile(profile_memory=True) as record:
        call()
    results: Any = record.profiler
    now = peak = 0
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def time_lines(rounds: int) -> Iterator[str]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, LENGTH, D) for _ in range(3))
    for title, calls in (("forward", forward_calls(q, k, v)), ("forward and backward", training_calls(q, k, v))):
        timed = interleaved(calls, rounds)
        yield f"\nCausal, {title}: B 1, H {HEADS}, S {LENGTH}, D {D}, float32, ms.\n"
        yield "| | median | fastest | slowest | beside SDPA |\n|---|---|---|---|---|"
        base = timed["SDPA"].median
        for name, t in timed.items():
            yield f"| {name} | {t.median:.1f} | {t.fastest:.1f} | {t.slowest:.1f} | {t.median / base:.2f} |"


def memory_lines(lengths: tuple[int, ...]) -> Iterator[str]:
    yield "\nMost memory that a causal call holds beyond its inputs: B 1, H 2, D 64, float32, one thread, MiB.\n"
    yield "| S | forward | forward and backward | scores, if they were stored |\n|---|---|---|---|"
    for length in lengths:
        q, k, v = (torch.randn(1, 2, length, 64) for _ in range(3))
        ours = attn_engine.compile(mask_mod=causal)
        forward = peak_bytes(without_gradient(lambda: ours(q, k, v)))  # noqa: B023  called at once
        training = peak_bytes(training_calls(q, k, v)["attn_engine"])
        sizes = (forward, training, 2 * length * length * 4)
        yield f"| {length} | " + " | ".join(f"{size / 2**20:.1f}" for size in sizes) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--longest", type=int, default=MEMORY_LENGTHS[-1])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    lines = [f"### CPU backend\n\ntorch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds."]
    lines += time_lines(arguments.rounds)
    torch.set_num_threads(1)  # the profiler sees allocations of the calling thread only
    lines += memory_lines(tuple(n for n in MEMORY_LENGTHS if n <= arguments.longest))
    text = "\n".join(lines)
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "cpu.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
