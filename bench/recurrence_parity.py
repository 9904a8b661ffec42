"""Entry points of fla and mamba_ssm beside ours of the same names: `python -m bench.recurrence_parity --out DIR --peers DIR`.

Both get the same tensors and arguments on one GPU. What is right is ours in float32 on the CPU, which tests hold against
fp64. Errors are relative, the largest of all results and of all gradients; a peer that refuses is told. Peers take the
first of the kernels that they would choose from, which saves their tuning.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor
from torch.nn.functional import logsigmoid

from bench.compile_only import compile_part
from bench.recurrence import relative

B, T, H, K, V = 2, 200, 4, 64, 64
Tensors = dict[str, Tensor]
Array = npt.NDArray[np.float64]
SHARES, RUNNERS = 3, 4
"""Processes that share the kernels of one side of a row, and processes that run them."""


def randn(*shape: int) -> Tensor:
    """In float32 on the CPU, the same for the same order of calls."""
    return torch.randn(shape)


def main_operands(batch: int = B, heads: int = H) -> Tensors:
    return {name: randn(batch, T, heads, K).bfloat16() for name in ("q", "k", "v")}


def per_token(batch: int = B) -> Tensor:
    """Log decays, weak in half of the heads."""
    return logsigmoid(randn(batch, T, H)) * torch.tensor([0.3, 0.01]).repeat(H // 2)


def gla() -> Tensors:
    return main_operands() | {"g": per_token()}


def states(sequences: int = B) -> Tensors:
    return {"initial_state": randn(sequences, H, K, V)}


def packed() -> Tensors:
    return main_operands(1) | {"g": per_token(1), "cu_seqlens": torch.tensor([0, 70, 134, T])} | states(3)


def channels(name: str) -> Tensors:
    return main_operands() | {name: per_token()[..., None] * torch.rand(K)} | states()


def delta(gated: bool) -> Tensors:
    made = main_operands() | {"beta": torch.rand(B, T, H)} | states()
    return made | ({"g": per_token()} if gated else {})


def kimi() -> Tensors:
    return delta(False) | {"g": per_token()[..., None] * torch.rand(K)}


def mamba(initial: bool) -> Tensors:
    made = {"x": randn(B, T, H, V).bfloat16(), "dt": randn(B, T, H), "A": -torch.rand(H) - 0.1}
    made |= {name: randn(B, T, 1, K).bfloat16() for name in ("B", "C")}
    made |= {"D": randn(H), "z": randn(B, T, H, V).bfloat16(), "dt_bias": randn(H)}
    if initial:
        return made | {"initial_states": randn(B, H, V, K)}
    return made | {
        "seq_idx": torch.tensor([0] * 77 + [1] * 50 + [2] * 73, dtype=torch.int32).expand(B, -1).contiguous()
    }


def update(per_head: bool) -> Tensors:
    made = {"state": randn(B, H, V, K), "x": randn(B, H, V), "z": randn(B, H, V), "D": randn(H, V)}
    made |= {"B": randn(B, 1, K), "C": randn(B, 1, K), "dt": randn(B, H, V), "dt_bias": randn(H, V)}
    made["A"] = -torch.rand(H, V, K) - 0.1
    if per_head:
        made["dt"], made["dt_bias"] = (made[n][..., :1].expand(made[n].shape) for n in ("dt", "dt_bias"))
        made["A"] = made["A"][:, :1, :1].expand(H, V, K)
    return made


@dataclass(frozen=True)
class Entry:
    """A function under its name in both packages, what it is called with, and what to say of that."""

    package: str
    module: str
    name: str
    make: Callable[[], Tensors]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    said: str = ""


def fla(module: str, name: str, make: Callable[[], Tensors], said: str = "", **options: Any) -> Entry:
    return Entry("fla", f"fla.ops.{module}", name, make, {"output_final_state": True} | options, said)


def ssm(module: str, name: str, make: Callable[[], Tensors], said: str = "", **options: Any) -> Entry:
    return Entry("mamba_ssm", f"mamba_ssm.ops.triton.{module}", name, make, options, said)


NORMED: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
ENTRIES = [
    fla("simple_gla", "chunk_simple_gla", lambda: gla() | states(), "g, initial state"),
    fla("simple_gla", "chunk_simple_gla", lambda: main_operands() | {"g_gamma": -torch.rand(H) * 0.1}, "g_gamma"),
    fla("simple_gla", "chunk_simple_gla", lambda: gla() | states(), "state_v_first", state_v_first=True),
    fla("simple_gla", "chunk_simple_gla", packed, "cu_seqlens"),
    fla("simple_gla", "fused_recurrent_simple_gla", lambda: gla() | states(), "g, initial state"),
    fla("simple_gla", "fused_recurrent_simple_gla", gla, "reverse", reverse=True),
    fla("retention", "chunk_retention", lambda: main_operands() | states(), "initial state"),
    fla("retention", "fused_recurrent_retention", lambda: main_operands() | states(), "initial state"),
    fla("gla", "chunk_gla", lambda: channels("g"), "g, initial state"),
    fla("gla", "fused_recurrent_gla", lambda: channels("gk"), "gk, initial state"),
    fla("delta_rule", "chunk_delta_rule", lambda: delta(False), "l2norm, initial state", **NORMED),
    fla("delta_rule", "fused_recurrent_delta_rule", lambda: delta(False), "l2norm, initial state", **NORMED),
    fla("gated_delta_rule", "chunk_gated_delta_rule", lambda: delta(True), "l2norm, initial state", **NORMED),
    fla("gated_delta_rule", "fused_recurrent_gated_delta_rule", lambda: delta(True), "l2norm, forward", **NORMED),
    fla("kda", "chunk_kda", kimi, "g, l2norm, initial state", **NORMED),
    fla("kda", "fused_recurrent_kda", kimi, "g, l2norm, forward", **NORMED),
    ssm(
        "ssd_combined", "mamba_chunk_scan_combined", lambda: mamba(True), "D, z, dt_bias, initial states",
        chunk_size=64, dt_softplus=True, return_final_states=True,
    ),
    ssm(
        "ssd_combined", "mamba_chunk_scan_combined", lambda: mamba(False), "D, z, dt_bias, seq_idx",
        chunk_size=64, dt_softplus=True,
    ),
    ssm("selective_state_update", "selective_state_update", lambda: update(True), "one A per head", dt_softplus=True),
    ssm("selective_state_update", "selective_state_update", lambda: update(False), "A per channel", dt_softplus=True),
]  # fmt: skip


OURS, THEIRS, RIGHT = "ours", "theirs", "right"
SIDES = (OURS, THEIRS)


@dataclass
class Found:
    """What a call gave, on the host, and why it gave no gradients, or nothing."""

    results: list[Array] = field(default_factory=list[Array])
    gradients: list[Array] = field(default_factory=list[Array])
    why: str = ""


def host(x: Tensor) -> Array:
    return x.detach().double().cpu().numpy()


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:60]}".replace("\n", " ").replace("|", "/")


def called(function: Any, entry: Entry, given: Tensors) -> Found:
    x = {n: t.clone() if t.stride()[-1:] != (0,) else t for n, t in given.items()}
    update_ = "state" in x
    leaves = {n: t.requires_grad_() for n, t in x.items() if t.is_floating_point() and not update_}
    found: Any = function(**x, **entry.options)
    several: list[Any] = [*found] if isinstance(found, tuple) else [found]
    results: list[Tensor] = [t for t in several if t is not None]
    results += [x["state"]] if update_ else []
    ahead = [host(t) for t in results]
    if update_:
        return Found(ahead)
    torch.manual_seed(1)
    weights = [torch.randn(t.shape).to(t.device) for t in results]
    try:
        loss = torch.stack([(t.float() * w).sum() for t, w in zip(results, weights, strict=True)]).sum()
        gradients: Any = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    except Exception as error:  # a peer may have no backward, or refuse this card
        return Found(ahead, why=told(error))
    return Found(ahead, [host(torch.zeros(()) if g is None else g) for g in gradients])


def worst(found: list[Array], right: list[Array]) -> str:
    """The largest relative error of several tensors."""
    if not found:
        return "-"
    pairs = [(torch.from_numpy(f), torch.from_numpy(r)) for f, r in zip(found, right, strict=True) if f.ndim]
    return f"{max(relative(f, r) for f, r in pairs):.1e}"


def operands(number: int) -> Tensors:
    entry = ENTRIES[number]
    torch.manual_seed(number)
    made = entry.make()
    if entry.options.get("state_v_first"):
        made["initial_state"] = made["initial_state"].mT.contiguous()
    return made


def function_of(entry: Entry, side: str) -> Any:
    module = entry.module if side == THEIRS else f"attn_engine.compat.{entry.package}"
    return getattr(importlib.import_module(module), entry.name)


def run(task: tuple[int, str]) -> Found:
    """One side of one row."""
    number, side = task
    entry, made = ENTRIES[number], operands(number)
    try:
        if side == RIGHT:
            precise = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in made.items()}
            return called(function_of(entry, side), entry, precise)
        _take_first_configurations()
        on_gpu = {n: t.cuda() if t.stride()[-1:] != (0,) else t.cuda().expand(t.shape) for n, t in made.items()}
        return called(function_of(entry, side), entry, on_gpu)
    except Exception as error:
        return Found(why=told(error))


def compiled(task: tuple[int, str, int]) -> tuple[int, str]:
    """Compiles one share of the kernels of one side of one row."""
    number, side, share = task
    with contextlib.suppress(Exception):  # what cannot be imported is told where it runs
        function_of(ENTRIES[number], side)
        _take_first_configurations()
        compile_part(lambda: run((number, side)), share, SHARES)
    return number, side


def row(number: int, found: dict[str, Found]) -> str:
    entry, right = ENTRIES[number], found[RIGHT]
    cells: list[str] = []
    for side in SIDES:
        x = found[side]
        cells += (
            [worst(x.results, right.results), worst(x.gradients, right.gradients)] if x.results else ["refused", "-"]
        )
    why = "; ".join(f"{side}: {found[side].why}" for side in (*SIDES, RIGHT) if found[side].why)
    return f"| {entry.name} | {entry.said} | {' | '.join(cells)} | {why} |"


def _take_first_configurations() -> None:
    from triton.runtime.autotuner import Autotuner

    tuner: Any = Autotuner
    if not hasattr(tuner, "all_configurations"):
        tuner.all_configurations = tuner.prune_configs
        tuner.prune_configs = _first


def _first(tuner: Any, options: Any) -> Any:
    return tuner.all_configurations(options)[:1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--part", type=int, default=0, help="which rows: every PARTS-th from this one on")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--peers", type=Path, help="a folder with the packages fla and mamba_ssm")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.peers:
        sys.path.append(str(arguments.peers))
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(arguments.peers)])
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, Python"
        f" {platform.python_version()}; bf16; `python -m bench.recurrence_parity`. Largest relative errors.",
        "",
        "| function | with | ours | ours, gradients | package | package, gradients | |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    numbers = [n for n in range(len(ENTRIES)) if n % arguments.parts == arguments.part]
    rows: dict[int, str] = {}
    for number, found in rows_of(numbers):
        rows[number] = row(number, found)
        print(rows[number], flush=True)
        text = [*lines, *(rows[n] for n in sorted(rows))]
        (arguments.out / "recurrence_parity.md").write_text("\n".join(text) + "\n")


def rows_of(numbers: list[int]) -> Iterator[tuple[int, dict[str, Found]]]:
    """Rows as they come: kernels compile side by side, and a side runs as soon as all of its own are compiled."""
    spawn = multiprocessing.get_context("spawn")
    cores = max(2, len(os.sched_getaffinity(0)) - 1)
    with ProcessPoolExecutor(cores, spawn) as compilers, ProcessPoolExecutor(RUNNERS, spawn) as runners:
        left = {(n, side): SHARES for n in numbers for side in SIDES}
        shares: set[Future[Any]] = {
            compilers.submit(compiled, (*key, share)) for key in left for share in range(SHARES)
        }
        runs: dict[Future[Any], tuple[int, str]] = {runners.submit(run, (n, RIGHT)): (n, RIGHT) for n in numbers}
        found: dict[int, dict[str, Found]] = {n: {} for n in numbers}
        while shares or runs:
            done, _ = wait([*shares, *runs], return_when=FIRST_COMPLETED)
            for future in done & shares:
                key: tuple[int, str] = future.result()
                left[key] -= 1
                if not left[key]:
                    runs[runners.submit(run, key)] = key
            for future in done - shares:
                number, side = runs.pop(future)
                found[number][side] = future.result()
                if len(found[number]) == len(SIDES) + 1:
                    yield number, found[number]
            shares -= done


if __name__ == "__main__":
    main()
