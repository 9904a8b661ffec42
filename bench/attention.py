"""Softmax attention beside its peers on one GPU: `python -m bench.attention --out DIR`.

Contenders run interleaved in rounds; medians and ratios within this run are what counts. TFLOP/s count visible scores
only (4 B H S S D, half of it if causal); a backward counts 2.5 times the forward.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attn_engine
from attn_engine.library import causal as causal_mask
from bench.timing import interleaved
from bench.warm import side_by_side

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One shape: batch, heads, positions, channels."""

    b: int
    h: int
    s: int
    d: int
    causal: bool

    @property
    def name(self) -> str:
        return f"B{self.b} H{self.h} S{self.s} D{self.d} {'causal' if self.causal else 'full'}"

    @property
    def flops(self) -> float:
        return 4 * self.b * self.h * self.s**2 * self.d * (0.5 if self.causal else 1)


CASES = [Case(4, 32, 4096, 128, True), Case(1, 32, 16384, 128, True), Case(4, 32, 4096, 128, False)]
CASES += [Case(1, 32, 16384, 128, False), Case(4, 32, 4096, 64, True)]


def contenders(case: Case, backends: list[str]) -> dict[str, Attend]:
    """Ours on each backend, compiled FlexAttention, cuDNN."""
    mask = causal_mask if case.causal else None
    found: dict[str, Attend] = {}
    for name in backends:
        chosen = None if name == "auto" else name
        found[f"attn_engine {name}"] = attn_engine.compile(mask_mod=mask, backend=chosen).__call__
    compiled = torch.compile(flex_attention)
    blocks = None
    if case.causal:
        blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, case.s, case.s, device="cuda")
    found["FlexAttention"] = lambda q, k, v: compiled(q, k, v, block_mask=blocks)

    def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)

    found["cuDNN"] = cudnn
    return found


def inputs(case: Case) -> list[Tensor]:
    shape = (case.b, case.h, case.s, case.d)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def measure(case: Case, backends: list[str]) -> dict[str, tuple[float, float]]:
    """Milliseconds forward and backward of each contender."""
    torch.manual_seed(0)
    q, k, v = inputs(case)
    d_o = torch.randn_like(q)
    forward: dict[str, Callable[[], object]] = {}
    backward: dict[str, Callable[[], object]] = {}
    for name, attend in contenders(case, backends).items():
        forward[name] = without_gradient(attend, q, k, v)
        o = attend(q, k, v)
        backward[name] = gradient(o, (q, k, v), d_o)
    ahead, back = interleaved(forward, 4, 3), interleaved(backward, 4, 3)
    return {name: (ahead[name], back[name]) for name in ahead}


def build(task: tuple[Case, list[str], str]) -> None:
    """One forward and backward of one contender."""
    case, backends, name = task
    q, k, v = inputs(case)
    torch.autograd.grad(contenders(case, backends)[name](q, k, v).sum(), (q, k, v))


def without_gradient(attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    def run() -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    return run


def gradient(o: Tensor, inputs: tuple[Tensor, ...], d_o: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True)


def row(case: Case, name: str, times: tuple[float, float], flex: tuple[float, float]) -> str:
    ahead, back = times
    rates = case.flops / ahead * 1e-9, 2.5 * case.flops / back * 1e-9
    ratios = flex[0] / ahead, flex[1] / back
    return (
        f"| {case.name} | {name} | {ahead:.3f} | {rates[0]:.0f} | {ratios[0]:.2f} "
        f"| {back:.3f} | {rates[1]:.0f} | {ratios[1]:.2f} |"
    )


def long_sequence() -> list[str]:
    """The ancestors' example: 128 heads, 32768 positions, fp16, causal, forward and backward; peak memory."""
    shape = (1, 128, 32768, 128)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
    attend = attn_engine.compile(mask_mod=causal_mask)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o = attend(q, k, v)
    o.backward(torch.ones_like(o))
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    tensor = q.numel() * 2 / 2**30
    finite = all(bool(torch.isfinite(t.grad).all()) for t in (q, k, v))
    return [
        "",
        f"B1 H128 S32768 D128 causal fp16, forward and backward: peak {peak:.2f} GiB above the inputs (one tensor of q's"
        f" shape is {tensor:.2f} GiB, a matrix of scores would be {128 * 32768**2 * 2 / 2**30:.0f} GiB); gradients finite: {finite}.",
    ]


def report(backends: list[str], out: Path) -> None:
    """Writes the table row by row: a run that is cut short leaves what it measured."""
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, "
        f"cuDNN {torch.backends.cudnn.version()}, Python {platform.python_version()}; bf16; `python -m bench.attention`.",
        "",
        "| shape | | forward ms | TFLOP/s | vs Flex | backward ms | TFLOP/s | vs Flex |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = [*(f"attn_engine {name}" for name in backends), "FlexAttention"]
    side_by_side(build, [(case, backends, name) for case in CASES for name in names])
    for case in CASES:
        torch._dynamo.reset()
        times = measure(case, backends)
        for name, found in times.items():
            lines.append(row(case, name, found, times["FlexAttention"]))
            print(lines[-1], flush=True)
        out.write_text("\n".join(lines) + "\n")
    torch.cuda.empty_cache()
    lines += long_sequence()
    out.write_text("\n".join(lines) + "\n")
    print(lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--backends", default="auto,triton", help="comma-separated; auto is what a user gets")
    arguments = parser.parse_args()
    import torch._functorch.config

    # The same backward is timed again and again.
    torch._functorch.config.donated_buffer = False
    arguments.out.mkdir(parents=True, exist_ok=True)
    report(arguments.backends.split(","), arguments.out / "attention.md")


if __name__ == "__main__":
    main()
