"""Gradients on this Hopper GPU: errors against float64, then TFLOP/s beside plain Triton, cuDNN and FlexAttention.

python -m bench.gluon_backward                        # correctness, then speed; some minutes with cold caches
python -m bench.gluon_backward --no-speed
python -m bench.gluon_backward --no-check --only causal,full
python -m bench.gluon_backward --processes 14         # compiles first, in so many processes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attn_engine
from attn_engine import library
from attn_engine.backends.backend import get_backend
from bench.gluon_generated import Case, cudnn, inputs, reference, relative
from bench.timing import interleaved

LIMIT = 1e-2
CASE_DIM = 128
SHAPES = (((2, 4, 2), (1000, 777)), ((1, 3, 1), (512, 512)), ((1, 2, 2), (129, 300)))
SPEED = (
    *(("causal", 4, 32, 4096, 128), ("full", 4, 32, 4096, 128), ("causal", 1, 16, 16384, 128)),
    *(("causal", 4, 32, 4096, 64), ("alibi", 4, 32, 4096, 128), ("trained alibi", 4, 32, 4096, 128)),
    *(("soft cap", 4, 16, 4096, 128), ("sigmoid", 4, 16, 4096, 128)),
)
"""Definition, batch, heads, positions, head dim."""


def slopes(heads: int) -> Tensor:
    return 2.0 ** (-torch.arange(1, heads + 1, device="cuda") * 8.0 / heads)


def cases(heads: int, d: int = CASE_DIM) -> dict[str, Case]:
    causal = library.causal
    found = {
        "full": Case("full"),
        "causal": Case("causal", mask_mod=causal),
        "window": Case("window", mask_mod=library.sliding_window(200)),
        "prefix": Case("prefix", mask_mod=library.prefix_lm(150)),
        "alibi": Case("alibi", score_mod=library.alibi(slopes(heads)), mask_mod=causal),
        "trained alibi": Case(
            "trained alibi", score_mod=library.alibi(slopes(heads).requires_grad_()), mask_mod=causal
        ),
        "soft cap": Case("soft cap", score_mod=library.soft_cap(20.0), mask_mod=causal),
        "sigmoid": Case("sigmoid", row=library.sigmoid, mask_mod=causal),
    }
    return {name: Case(case.name, case.score_mod, case.mask_mod, case.row, d) for name, case in found.items()}


def compiled(case: Case, backend: str, deterministic: bool = False) -> Any:
    functions = {"score_mod": case.score_mod, "mask_mod": case.mask_mod, "row": case.row}
    return attn_engine.compile(**functions, backend=backend, deterministic=deterministic)


def check(case: Case, deterministic: bool) -> bool:
    """Relative errors of the gradients, the same bits twice where they are asked for, and which kernels they came from."""
    ours = compiled(case, "gluon", deterministic)
    worst, same = 0.0, True
    for heads, sizes in SHAPES:
        if case.score_mod is not None and "alibi" in case.name and heads[1] != SHAPES[0][0][1]:
            continue  # a slope for each head
        operands = inputs(case, heads, sizes)
        leaves = [x.clone().requires_grad_() for x in operands]
        exact = [x.double().requires_grad_() for x in operands]
        o, want = ours(*leaves), reference(case, *exact)
        weight = torch.randn_like(o)
        grads = torch.autograd.grad(o, leaves, weight, retain_graph=True)
        again = torch.autograd.grad(o, leaves, weight)
        wanted = torch.autograd.grad(want, exact, weight.double())
        worst = max(worst, *(relative(a, b) for a, b in zip(grads, wanted, strict=True)))
        same &= not deterministic or all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    fine = worst < LIMIT and same
    told = [line for line in ours.choices() if line.startswith("backward")]
    print(
        f"{'ok' if fine else 'WRONG':6}{case.name:14}{case.d:4} {'one order ' if deterministic else ''}error {worst:.1e}"
        f" {'' if same else 'DIFFERS'} {told}",
        flush=True,
    )
    return fine


def flex(case: Case, operands: list[Tensor]) -> Callable[[], object]:
    """The same gradients by compiled FlexAttention."""
    block_mask = None
    if case.mask_mod is not None:
        sizes = operands[0].shape[2], operands[1].shape[2]
        block_mask = create_block_mask(case.mask_mod, None, None, *sizes, device="cuda")
    run: Any = torch.compile(flex_attention)
    return backward_of(lambda *x: run(*x, score_mod=case.score_mod, block_mask=block_mask), operands)


def backward_of(forward: Callable[..., Tensor], operands: list[Tensor]) -> Callable[[], object]:
    leaves = [x.detach().clone().requires_grad_() for x in operands]
    o = forward(*leaves)
    weight = torch.randn_like(o)
    return partial(torch.autograd.grad, o, leaves, weight, retain_graph=True)


def contenders(name: str, shape: tuple[int, int, int, int]) -> dict[str, Callable[[], object]]:
    batch, heads, size, d = shape
    case = cases(heads, d)[name]
    operands = inputs(case, (batch, heads, heads), (size, size))
    found = {who: backward_of(compiled(case, who), operands) for who in ("gluon", "triton")}
    found["one order"] = backward_of(compiled(case, "gluon", True), operands)
    if name in ("causal", "full"):
        found["cudnn"] = backward_of(lambda *x: cudnn(*x, name == "causal"), operands)
    if case.row is None and name != "trained alibi":
        found["flex"] = flex(case, operands)
    return found


def measure(names: list[str]) -> None:
    """TFLOP/s of visible scores, five products for each, medians of interleaved rounds."""
    for name, *shape in [entry for entry in SPEED if entry[0] in names]:
        batch, heads, size, d = shape
        flops = 10 * batch * heads * size * size * d / (1 if name == "full" else 2)
        found = interleaved(contenders(name, (batch, heads, size, d)), rounds=4, launches=2)
        text = ", ".join(f"{who} {ms:.3f} ms {flops / ms * 1e-9:.0f}" for who, ms in found.items())
        print(f"{name:14}B{batch} H{heads} S{size} D{d} bf16: {text} TFLOP/s", flush=True)


def warm(job: tuple[str, str, int, tuple[int, int]]) -> str:
    """Compiles what one check or measurement needs; strides that 16 divides are one case, others another."""
    who, name, d, sizes = job
    functorch.donated_buffer = False  # a graph is run backward more than once
    case, start = cases(4, d)[name], time.perf_counter()
    operands = inputs(case, (4, 4, 4), sizes)
    if who == "flex":
        flex(case, operands)()
        return f"{who} {name} {d} {sizes[0]}: {time.perf_counter() - start:.0f} s"
    backward_of(compiled(case, who.split()[0], "order" in who), operands)()
    return f"{who} {name} {d} {sizes[0]}: {time.perf_counter() - start:.0f} s"


def warm_all(processes: int, names: list[str], speed: bool) -> None:
    backends = ("gluon", "gluon in order", "triton", "flex") if speed else ("gluon", "gluon in order")
    without = ("trained alibi", "sigmoid", "window", "prefix")
    wanted = [(who, name, 128) for who in backends for name in names if who != "flex" or name not in without]
    wanted += [(who, "causal", 64) for who in backends if "causal" in names]
    lengths = ((4096, 4096),) if speed else ((4096, 4096), (1000, 777))
    jobs = [(*job, sizes) for sizes in lengths for job in wanted]
    with get_context("spawn").Pool(processes) as pool:
        print("; ".join(pool.map(warm, jobs, chunksize=1)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--only", help="names of definitions, with commas")
    parser.add_argument("--processes", type=int, default=0)
    arguments = parser.parse_args()
    available = get_backend("gluon").check()
    if not available.ok:
        print(available.reason)
        return 2
    names = arguments.only.split(",") if arguments.only else list(cases(4))
    if arguments.processes:
        warm_all(arguments.processes, names, not arguments.no_speed)
    torch.manual_seed(0)
    functorch.donated_buffer = False  # a graph is run backward more than once
    found = [cases(4, d)[name] for d in (128, 64) for name in names if d == CASE_DIM or name == "causal"]
    results = [check(case, order) for case in found for order in (False, True)] if not arguments.no_check else []
    if not arguments.no_speed:
        measure(names)
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
