"""Entry points of fla and mamba_ssm beside ours of the same names: `python -m bench.recurrence_parity --out DIR --peers DIR`.

Both get the same tensors and arguments on one GPU. What is right is ours in float32 on the CPU, which tests hold against
fp64. Errors are relative, the largest of all results and of all gradients; a peer that refuses is told. Peers take the
first of the kernels that they would choose from, which saves their tuning.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import logsigmoid

from bench.recurrence import relative

B, T, H, K, V = 2, 200, 4, 64, 64
Tensors = dict[str, Tensor]


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


def called(function: Any, entry: Entry, given: Tensors) -> tuple[list[Tensor], list[Tensor], str]:
    """Results, gradients, and why there are none."""
    x = {n: t.clone() if t.stride()[-1:] != (0,) else t for n, t in given.items()}
    update_ = "state" in x
    leaves = {n: t.requires_grad_() for n, t in x.items() if t.is_floating_point() and not update_}
    found: Any = function(**x, **entry.options)
    results: list[Tensor] = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
    results += [x["state"]] if update_ else []
    if update_:
        return results, [], ""
    torch.manual_seed(1)
    weights = [torch.randn(t.shape).to(t.device) for t in results]
    try:
        loss = torch.stack([(t.float() * w).sum() for t, w in zip(results, weights, strict=True)]).sum()
        gradients: Any = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    except Exception as error:  # a peer may have no backward, or refuse this card
        return results, [], f"{type(error).__name__}: {str(error)[:60]}"
    return results, [torch.zeros(()) if g is None else g for g in gradients], ""


def worst(found: list[Tensor], right: list[Tensor]) -> str:
    """The largest relative error of several tensors."""
    if not found:
        return "-"
    errors = [relative(f.cpu(), r.double()) for f, r in zip(found, right, strict=True) if f.ndim]
    return f"{max(errors):.1e}"


def compared(number: int) -> str:
    """One row of the table."""
    _take_first_configurations()
    entry = ENTRIES[number]
    torch.manual_seed(number)
    made = entry.make()
    with_v_first = entry.options.get("state_v_first")
    if with_v_first:
        made["initial_state"] = made["initial_state"].mT.contiguous()
    on_gpu = {n: t.cuda() if t.stride()[-1:] != (0,) else t.cuda().expand(t.shape) for n, t in made.items()}
    mine: Any = getattr(importlib.import_module(f"attn_engine.compat.{entry.package}"), entry.name)
    precise = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in made.items()}
    right, right_d, _ = called(mine, entry, precise)
    cells: list[str] = []
    why = ""
    for which in ("ours", "theirs"):
        try:
            function = mine if which == "ours" else getattr(importlib.import_module(entry.module), entry.name)
            results, gradients, why = called(function, entry, on_gpu)
            cells += [worst(results, right), worst(gradients, right_d)]
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:60]}"
            cells += ["refused", "-"]
    why = why.replace("\n", " ").replace("|", "/")
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
    with ProcessPoolExecutor(len(ENTRIES), multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(compared, number) for number in range(len(ENTRIES))]):
            lines.append(future.result())
            print(lines[-1], flush=True)
    (arguments.out / "recurrence_parity.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
