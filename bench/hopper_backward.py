"""Gradients of softmax on Hopper beside their marks: `python -m bench.hopper_backward`.

Forward and backward of public functions: gradients as they come by default, and with `deterministic=True`, beside
cuDNN, compiled FlexAttention and, where `flash_attn.cute` can be imported, FlashAttention-4's kernels for Hopper. bf16,
medians of interleaved rounds on cold L2, TFLOP/s of visible scores: two products forward, five backward. Gradients of
the last head of keys are compared in float64.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch._functorch.config as functorch
from torch import Tensor

import attn_engine
from attn_engine import library
from bench.custom import ahead, back
from bench.custom_rows import Attend, Shape, flex, inputs
from bench.hopper import CUDNN, FA4, OURS, WRONG, Softmax, cudnn, fa4
from bench.timing import interleaved
from bench.warm import side_by_side

STEADY, FLEX = "deterministic", "FlexAttention"
SIDES = (OURS, STEADY, CUDNN, FA4, FLEX)
_CAUSAL, _FULL = ((CUDNN, 1.05), (FA4, 1.0)), ((CUDNN, 1.0), (FA4, 0.97))
ROWS = (
    Softmax(Shape(4, 32, 4096), aims=_CAUSAL),
    Softmax(Shape(1, 32, 16384), aims=_CAUSAL),
    Softmax(Shape(4, 32, 4096, visible=1.0), aims=_FULL),
    Softmax(Shape(1, 32, 16384, visible=1.0), aims=_FULL),
    Softmax(Shape(4, 32, 4096, 64, 64), aims=((CUDNN, 1.0),)),
    Softmax(Shape(1, 32, 8192), 8, aims=((CUDNN, 1.0),)),
)
STEADY_AIM = 0.97
"""Of cuDNN's rate, for gradients that are the same in every run."""


# --- contenders --------------------------------------------------------------------------------


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """FlashAttention-4 reads tensors as B, S, H, D; so do these, and it copies nothing."""
    attend = fa4()
    assert attend is not None
    o = attend(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)


def attends(case: Softmax) -> dict[str, Attend]:
    mask = library.causal if case.causal else None
    found: dict[str, Attend] = {
        OURS: attn_engine.compile(mask_mod=mask, backend="gluon"),
        STEADY: attn_engine.compile(mask_mod=mask, backend="gluon", deterministic=True),
        CUDNN: partial(cudnn, causal=case.causal),
    }
    if fa4() is not None:
        found[FA4] = partial(_flash, causal=case.causal)
    if not case.kv_heads:
        found[FLEX] = flex(None, mask, case.shape.length)
    return found


def leaves_of(case: Softmax, side: str) -> list[Tensor]:
    """Operands in the order in memory that a side reads best."""
    operands = inputs(case.shape, case.kv_heads)
    if side == FA4:
        operands = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands]
    return [x.requires_grad_() for x in operands]


def build(task: tuple[int, str]) -> None:
    """One forward and backward of a side of a row."""
    functorch.donated_buffer = False
    number, side = task
    attend = attends(ROWS[number]).get(side)
    if attend is not None:
        leaves = leaves_of(ROWS[number], side)
        torch.autograd.grad(attend(*leaves), leaves, torch.randn_like(leaves[0]))


# --- errors ------------------------------------------------------------------------------------


def exact(case: Softmax, operands: Sequence[Tensor], d_o: Tensor) -> list[Tensor]:
    """Gradients in float64 of the last head of keys and the queries that share it."""
    group = operands[0].shape[1] // operands[1].shape[1]
    q, k, v = (x[-1, -n:].double().requires_grad_() for x, n in zip(operands, (group, 1, 1), strict=True))
    total = [torch.zeros_like(x) for x in (q, k, v)]
    for head in range(group):
        s = q[head] @ k[0].T * case.shape.d**-0.5
        if case.causal:
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
        found = torch.autograd.grad(s.softmax(-1) @ v[0], (q, k, v), d_o[-1, head - group].double())
        total = [a + b for a, b in zip(total, found, strict=True)]
    return total


def error_of(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest of the relative errors of dq, dk and dv."""
    pairs = zip(got, want, strict=True)
    return max(float((a[-1, -b.shape[0] :].double() - b).norm() / b.norm()) for a, b in pairs)


# --- rows --------------------------------------------------------------------------------------


def measure(case: Softmax) -> str:
    found, forwards = attends(case), dict[str, Callable[[], object]]()
    runs: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    wrong: list[str] = []
    want: list[Tensor] | None = None
    for side, attend in found.items():
        try:
            leaves = leaves_of(case, side)
            o = attend(*leaves)
            torch.manual_seed(1)
            d_o = torch.randn(leaves[0].shape, device="cuda", dtype=torch.bfloat16).as_strided(o.shape, o.stride())
            runs[side], forwards[side] = back(o, tuple(leaves), d_o), ahead(attend, leaves)
            if side in (OURS, STEADY):
                want = exact(case, leaves, d_o) if want is None else want
                wrong += [side] if not error_of(runs[side](), want) < WRONG else []
        except Exception as error:  # A peer that refuses a shape has no figure for it.
            print(f"{side} refuses {case.shape}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            runs.pop(side, None)
            if side == OURS:
                raise
    del want
    times = interleaved(forwards, rounds=3, launches=2), interleaved(runs, rounds=4, launches=2)
    return line_of(case, *times, wrong)


def line_of(case: Softmax, forward: dict[str, float], backward: dict[str, float], wrong: Sequence[str]) -> str:
    flops = case.shape.flops
    cells = [
        f"{forward[side]:.2f}, {flops[0] / forward[side] * 1e-9:.0f} / "
        f"{backward[side]:.2f}, {flops[1] / backward[side] * 1e-9:.0f}"
        if side in backward
        else ""
        for side in SIDES
    ]
    aims = [(OURS, peer, aim) for peer, aim in case.aims] + [(STEADY, CUDNN, STEADY_AIM)]
    texts: list[str] = []
    for ours, peer, aim in aims:
        if peer in backward and ours in backward:
            ratio = backward[peer] / backward[ours]
            text = f"{'deterministic ' if ours == STEADY else ''}{ratio:.2f}x {peer} (>= {aim:g})"
            texts.append(text if ratio >= aim else f"**{text}**")
    name = f"{case}{' (wrong: ' + ', '.join(wrong) + ')' if wrong else ''}"
    return f"| {name} | {case.shape} | {' | '.join(cells)} | {'; '.join(texts)} |"


def header() -> list[str]:
    installed = "flash_attn.cute" if fa4() is not None else "not installed"
    return [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}; bf16, forward"
        f" and backward; `python -m bench.hopper_backward`. FA4 is {installed}.",
        "Milliseconds, TFLOP/s of visible scores, forward / backward. What is bold was aimed at and not reached.",
        "",
        "| mask | shape | ours | deterministic | cuDNN | FA4 | FlexAttention | backward aims |",
        "|---|---|---|---|---|---|---|---|",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="numbers of rows, with commas; all if not given")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    numbers = [int(n) for n in arguments.rows.split(",")] if arguments.rows else list(range(len(ROWS)))
    side_by_side(build, [(n, side) for side in (OURS, STEADY, FA4, FLEX) for n in numbers])
    functorch.donated_buffer = False  # a graph is run backward more than once
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = header()
    print("\n".join(lines), flush=True)
    for number in numbers:
        torch._dynamo.reset()
        try:
            lines.append(measure(ROWS[number]))
        except Exception as error:  # One row must not cost the others their figures.
            traceback.print_exc()
            lines.append(f"| {ROWS[number]} | failed: {type(error).__name__}: {str(error)[:120]} | | | | | | |")
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
        (arguments.out / "hopper_backward.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
