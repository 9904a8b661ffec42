"""Generated forwards on Hopper beside their marks: `python -m bench.hopper [softmax] [custom]`.

Softmax in many shapes beside cuDNN and, where `flash_attn.cute` can be imported, FlashAttention-4's kernels for
Hopper; then the forwards of `bench.custom`'s rows beside their peers. bf16, medians of interleaved rounds on cold
L2, TFLOP/s of visible scores. Outputs of softmax are compared in float64 on the last rows of one head, those of the
rows with their peers', where there is one. FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 lets processes side by side
compile FlashAttention-4's kernels as well.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attn_engine
from attn_engine import library
from bench.custom_rows import ROWS, Attend, Custom, Shape, inputs
from bench.timing import interleaved
from bench.warm import side_by_side

OURS, CUDNN, FA4, PEER, BESIDE = "ours", "cuDNN", "FA4", "peer", "softmax"
GROUPS = ("softmax", "custom")
CHECKED_ROWS = 64
WRONG = 1e-2


@dataclass(frozen=True)
class Softmax:
    """A shape, and the ratios to peers, or the rate in TFLOP/s, that are aimed at."""

    shape: Shape
    kv_heads: int = 0
    """If fewer than query heads."""
    aims: tuple[tuple[str, float], ...] = ()
    rate: float = 0.0

    @property
    def causal(self) -> bool:
        return self.shape.visible < 1

    def __str__(self) -> str:
        group = f", {self.kv_heads} heads of keys" if self.kv_heads else ""
        return f"{'causal' if self.causal else 'full'}{group}"


_CAUSAL, _FULL = ((FA4, 1.0), (CUDNN, 1.1)), ((FA4, 0.97), (CUDNN, 1.0))
SOFTMAX = (
    Softmax(Shape(4, 32, 4096), aims=_CAUSAL),
    Softmax(Shape(1, 32, 16384), aims=_CAUSAL),
    Softmax(Shape(4, 32, 4096, visible=1.0), aims=_FULL),
    Softmax(Shape(1, 32, 16384, visible=1.0), aims=_FULL),
    Softmax(Shape(8, 32, 2048), aims=((FA4, 1.0),)),
    Softmax(Shape(1, 32, 8192), 8, aims=((FA4, 1.0),)),
    Softmax(Shape(4, 32, 4096, 64, 64), aims=((FA4, 1.0),)),
    Softmax(Shape(4, 32, 4096, 64, 64, 1.0), aims=((CUDNN, 1.0),)),
    Softmax(Shape(4, 32, 4096, 96, 96), aims=((CUDNN, 1.0),)),
    Softmax(Shape(4, 32, 4096, 256, 256), aims=((CUDNN, 1.0),)),
    Softmax(Shape(8, 16, 8192, 192, 128), rate=592.0),
    Softmax(Shape(8, 12, 8192, 128, 256), rate=607.0),
)
_WIDE = ("wide192", "wide256")
"""Rows of `bench.custom` that are softmax, and stand above."""
CUSTOM = tuple(name for name in ROWS if name not in _WIDE)


# --- contenders --------------------------------------------------------------------------------


def fa4() -> Callable[..., Any] | None:
    """Reads tensors as B, S, H, D."""
    try:
        return import_module("flash_attn.cute").flash_attn_func
    except ImportError:
        return None


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def _fa4(attend: Callable[..., Any], operands: Sequence[Tensor], causal: bool) -> Callable[[], object]:
    swapped = [x.transpose(1, 2).contiguous() for x in operands]
    return lambda: attend(*swapped, causal=causal)


def softmax(case: Softmax) -> Attend:
    return attn_engine.compile(mask_mod=library.causal if case.causal else None, backend="gluon")


def contenders(case: Softmax, operands: Sequence[Tensor]) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {OURS: partial(softmax(case), *operands)}
    found[CUDNN] = partial(cudnn, *operands, case.causal)
    attend = fa4()
    if attend is not None:
        found[FA4] = _fa4(attend, operands, case.causal)
    kept: dict[str, Callable[[], object]] = {}
    for name, run in found.items():
        try:
            run()
            kept[name] = run
        except Exception as error:  # A peer that refuses a shape has no figure for it.
            print(f"{name} refuses {case.shape}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            if name == OURS:
                raise
    return kept


def build(task: tuple[str, int | str]) -> None:
    """Compiles one of our kernels, or one side of a row of `bench.custom`."""
    with torch.no_grad():
        side, key = task
        if isinstance(key, int):
            case = SOFTMAX[key]
            operands = inputs(case.shape, case.kv_heads)
            attend = fa4() if side == FA4 else None
            run = _fa4(attend, operands, case.causal) if attend is not None else partial(softmax(case), *operands)
            run()
        else:
            custom = ROWS[key]()
            attend = sides(custom)[side]
            attend(*inputs(custom.shape))


def sides(case: Custom) -> dict[str, Attend]:
    found = {OURS: case.ours, PEER: case.peer() if case.peer is not None else None}
    found[BESIDE] = case.beside if not case.trained else None
    return {name: attend for name, attend in found.items() if attend is not None}


# --- rows --------------------------------------------------------------------------------------


def error_of(case: Softmax, operands: Sequence[Tensor], o: Tensor) -> float:
    """Relative, of the last rows of the last head, against float64."""
    q, k, v = (x[-1, -1].double() for x in operands)
    length = q.shape[0]
    s = q[-CHECKED_ROWS:] @ k.T * case.shape.d**-0.5
    if case.causal:
        rows = torch.arange(length - CHECKED_ROWS, length, device=s.device)[:, None]
        s = s.masked_fill(torch.arange(length, device=s.device) > rows, -torch.inf)
    want = s.softmax(-1) @ v
    return float((o[-1, -1, -CHECKED_ROWS:].double() - want).norm() / want.norm())


def line_of(
    name: str, shape: Shape, times: dict[str, float], aims: Sequence[tuple[str, float]], rate: float, error: float
) -> str:
    ours = times[OURS]
    flops = shape.flops[0]
    found = [
        (f"{times[peer] / ours:.2f}x {peer} (>= {aim:g})", times[peer] / ours >= aim)
        for peer, aim in aims
        if peer in times
    ]
    found += [(f"{flops / ours * 1e-9:.0f} (> {rate:.0f})", flops / ours * 1e-9 > rate)] if rate else []
    texts = [text if met else f"**{text}**" for text, met in found]
    cells = [f"{times[p]:.3f}, {flops / times[p] * 1e-9:.0f}" if p in times else "" for p in (CUDNN, FA4, PEER, BESIDE)]
    wrong = "" if error < WRONG else f" (wrong: {error:.0e})"
    return f"| {name}{wrong} | {shape} | {ours:.3f}, {flops / ours * 1e-9:.0f} | {' | '.join(cells)} | {'; '.join(texts)} |"


def softmax_line(case: Softmax) -> str:
    operands = inputs(case.shape, case.kv_heads)
    with torch.no_grad():
        runs = contenders(case, operands)
        o = runs[OURS]()
        assert isinstance(o, Tensor)
        error = error_of(case, operands, o)
        times = interleaved(runs, rounds=5, launches=3)
    return line_of(str(case), case.shape, times, case.aims, case.rate, error)


def custom_line(case: Custom) -> str:
    """An output that is not that of the peer is said so."""
    operands, found = inputs(case.shape), sides(case)
    with torch.no_grad():
        error = 0.0
        if PEER in found:
            ours, theirs = (found[name](*operands)[:, -1].float() for name in (OURS, PEER))
            error = float((ours - theirs).norm() / theirs.norm())
        times = interleaved({name: partial(attend, *operands) for name, attend in found.items()}, rounds=5, launches=3)
    aims: list[tuple[str, float]] = [(PEER, case.aims[0])] if PEER in found else []
    if case.beside_at_most is not None and BESIDE in found:
        aims.append((BESIDE, round(1 / case.beside_at_most[0], 2)))
    return line_of(case.name, case.shape, times, aims, case.rates[0] if case.rates is not None else 0.0, error)


def tasks(groups: Sequence[str]) -> list[tuple[str, int | str]]:
    found: list[tuple[str, int | str]] = []
    if "custom" in groups:
        found += [(side, key) for key in CUSTOM for side in (PEER, OURS)]
    if "softmax" in groups:
        sides_of = (OURS, FA4) if fa4() is not None else (OURS,)
        found += [(side, number) for number in range(len(SOFTMAX)) for side in sides_of]
    return found


def header() -> list[str]:
    return [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}; bf16, forward;"
        f" `python -m bench.hopper`. FA4 is {'flash_attn.cute' if fa4() is not None else 'not installed'}.",
        "Milliseconds, TFLOP/s of visible scores; peer: compiled FlexAttention, or the compiled dense formula for sigmoid"
        " and relu. What is bold was aimed at and not reached.",
        "",
        "| definition | shape | ours | cuDNN | FA4 | peer | our softmax | aims |",
        "|---|---|---|---|---|---|---|---|",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; all if none is named")
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    groups = arguments.groups or GROUPS
    side_by_side(build, tasks(groups))
    lines = header()
    print("\n".join(lines), flush=True)
    work: list[tuple[str, Callable[[], str]]] = []
    if "softmax" in groups:
        work += [(f"{case} {case.shape}", partial(softmax_line, case)) for case in SOFTMAX]
    if "custom" in groups:
        work += [(key, lambda key=key: custom_line(ROWS[key]())) for key in CUSTOM]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, run in work:
        torch._dynamo.reset()
        try:
            lines.append(run())
        except Exception as error:  # One definition must not cost the others their figures.
            traceback.print_exc()
            lines.append(f"| {name} | failed: {type(error).__name__}: {str(error)[:120]} | | | | | | |")
        print(lines[-1], flush=True)
        torch.cuda.empty_cache()
        (arguments.out / f"hopper_forward_{'_'.join(groups)}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
