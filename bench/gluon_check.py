"""Runs the hand-written Hopper forward on this GPU: errors against float64, and TFLOP/s beside torch.

python bench/gluon_check.py            # correctness, then speed
python bench/gluon_check.py --no-speed
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from xdsl.parser import Parser

from attn_engine.backends.triton.emit_gluon import emit
from attn_engine.backends.triton.gluon_build import build, check
from attn_engine.universe import make_context

SOURCE = Path(__file__).parents[1] / "tests" / "filecheck" / "tile" / "hopper_forward.mlir"
D = 128
SHAPES = ((8, 32, 2048), (4, 32, 4096), (2, 16, 8192), (1, 16, 16384))
ODD_SHAPES = (((2, 4, 4), (1024, 1024)), ((1, 8, 2), (2048, 2048)), ((2, 3, 1), (1000, 777)), ((1, 2, 2), (128, 128)))


def plans() -> dict[str, Callable[..., None]]:
    module = Parser(make_context(), SOURCE.read_text()).parse_module()
    module.verify()
    found = build(emit(module))
    return {"full": found["forward_full"], "causal": found["forward_causal"]}


def inputs(heads: tuple[int, int, int], sizes: tuple[int, int], spread: float = 1.0) -> list[torch.Tensor]:
    (batch, q_heads, kv_heads), (sq, skv) = heads, sizes
    q = torch.randn(batch, q_heads, sq, D, device="cuda") * spread
    k, v = (torch.randn(batch, kv_heads, skv, D, device="cuda") for _ in range(2))
    return [x.half() for x in (q, k, v)]


def outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device="cuda")


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    s = q.double() @ k.transpose(2, 3) * D**-0.5
    if causal:
        rows, columns = (torch.arange(n, device="cuda") for n in s.shape[2:])
        s = s.masked_fill(rows[:, None] < columns, -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def check_errors(run: dict[str, Callable[..., None]]) -> bool:
    good = True
    for heads, sizes in ODD_SHAPES:
        for name, plan in run.items():
            q, k, v = inputs(heads, sizes, spread=3.0)
            o, lse = outputs(q)
            plan(q, k, v, o, lse, D**-0.5)
            want_o, want_lse = reference(q, k, v, name == "causal")
            error = float((o - want_o).norm() / want_o.norm())
            lse_error = float((lse - want_lse).abs().max())
            fine = error < 1e-3 and lse_error < 1e-4
            good &= fine
            print(
                f"{'ok' if fine else 'WRONG':6}{name:7}{heads} {sizes}: relative {error:.2e}, lse {lse_error:.1e}",
                flush=True,
            )
    return good


def seconds(functions: dict[str, Callable[[], None]], rounds: int = 5, launches: int = 5) -> dict[str, float]:
    """Medians of interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(2_000_000)  # the host gets ahead of the device
            start.record()
            for _ in range(launches):
                function()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / launches * 1e-3)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def torch_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        scaled_dot_product_attention(q, k, v, is_causal=causal)


def measure(run: dict[str, Callable[..., None]]) -> None:
    for batch, heads, size in SHAPES:
        q, k, v = inputs((batch, heads, heads), (size, size))
        o, lse = outputs(q)
        for name, plan in run.items():
            causal = name == "causal"
            flops = 4 * batch * heads * size * size * D / (2 if causal else 1)
            ours = partial(plan, q, k, v, o, lse, D**-0.5)
            found = seconds({"ours": ours, "cudnn": partial(torch_forward, q, k, v, causal)})
            text = ", ".join(f"{who} {flops / time * 1e-12:.0f}" for who, time in found.items())
            print(f"{name:7}B{batch} H{heads} S{size}: {text} TFLOP/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-speed", action="store_true")
    arguments = parser.parse_args()
    available = check()
    if not available.ok:
        print(available.reason)
        return 2
    torch.manual_seed(0)
    run = plans()
    good = check_errors(run)
    if good and not arguments.no_speed:
        measure(run)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
