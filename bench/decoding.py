"""Few queries over many keys on one GPU beside their peers: `python -m bench.decoding --out DIR`.

Decoding reads every key and value once and computes little, so the table gives GB/s of k and v beside milliseconds. Peers are
cuDNN, compiled FlexAttention and, where `flash_attn.cute` can be imported, FlashAttention-4's kernels for Hopper. bf16, medians of
interleaved rounds on cold L2. Outputs are compared in float64 on the last head.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import attn_engine
from bench.hopper import CUDNN, FA4, OURS, cudnn, fa4
from bench.timing import interleaved
from bench.warm import side_by_side

FLEX = "FlexAttention"
NAMES = (OURS, CUDNN, FLEX, FA4)
WRONG = 1e-2


@dataclass(frozen=True)
class Decode:
    """A call: `queries` of each of `heads` heads, over `keys` keys of each of `kv_heads`."""

    batch: int
    keys: int
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    d: int = 128

    @property
    def gigabytes(self) -> float:
        """Of k and v, each read once."""
        return 2 * self.batch * self.kv_heads * self.keys * self.d * 2e-9

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(self.batch, self.heads, self.queries, self.d, device="cuda", dtype=torch.bfloat16)
        k, v = (
            torch.randn(self.batch, self.kv_heads, self.keys, self.d, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        return q, k, v

    def __str__(self) -> str:
        return f"B{self.batch} H{self.heads}/{self.kv_heads} Q{self.queries} KV{self.keys} D{self.d}"


CASES = (
    Decode(1, 8192),
    Decode(8, 8192),
    Decode(1, 131072),
    Decode(64, 4096),
    Decode(1, 8192, kv_heads=32),
    Decode(8, 8192, queries=4),
    Decode(8, 8192, heads=64, kv_heads=4),
    Decode(8, 8192, heads=16, kv_heads=1, d=64),
)


def contender(name: str, case: Decode, operands: Sequence[Tensor]) -> Callable[[], object] | None:
    """None where this machine lacks the peer."""
    if name == OURS:
        return partial(attn_engine.compile(), *operands)
    if name == CUDNN:
        return partial(cudnn, *operands, False)
    if name == FLEX:
        return partial(torch.compile(flex_attention), *operands, enable_gqa=case.heads != case.kv_heads)
    attend = fa4()
    if attend is None:
        return None
    swapped = [x.transpose(1, 2).contiguous() for x in operands]
    return lambda: attend(*swapped, causal=False)


def build(task: tuple[str, int]) -> None:
    """Compiles one contender's kernels."""
    case = CASES[task[1]]
    with torch.no_grad():
        run = contender(task[0], case, case.operands())
        if run is not None:
            run()


def error_of(case: Decode, operands: Sequence[Tensor], o: Tensor) -> float:
    """Relative, of the last head, against float64."""
    q, k, v = (x[-1, -1].double() for x in operands)
    want = (q @ k.T * case.d**-0.5).softmax(-1) @ v
    return float((o[-1, -1].double() - want).norm() / want.norm())


def line_of(case: Decode) -> str:
    operands = case.operands()
    with torch.no_grad():
        runs: dict[str, Callable[[], object]] = {}
        for name in NAMES:
            run = contender(name, case, operands)
            try:
                if run is not None:
                    run()
                    runs[name] = run
            except Exception as error:  # A peer that refuses a shape has no figure for it.
                print(f"{name} refuses {case}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                if name == OURS:
                    raise
        o = runs[OURS]()
        assert isinstance(o, Tensor)
        wrong = error_of(case, operands, o)
        times = interleaved(runs, rounds=5, launches=5)
    cells = [f"{times[name]:.4f}, {case.gigabytes / times[name] * 1e3:.0f}" if name in times else "" for name in NAMES]
    best = min(time for name, time in times.items() if name != OURS)
    said = "" if wrong < WRONG else f" (wrong: {wrong:.0e})"
    return f"| {case}{said} | {' | '.join(cells)} | {best / times[OURS]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    side_by_side(build, [(name, number) for name in NAMES for number in range(len(CASES))])
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, cuDNN"
        f" {torch.backends.cudnn.version()}; bf16; `python -m bench.decoding`. Milliseconds, GB/s of k and v.",
        "",
        f"| shape | {' | '.join(NAMES)} | best peer's time in ours |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for case in CASES:
        lines.append(line_of(case))
        print(lines[-1], flush=True)
    (out / "decoding.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
