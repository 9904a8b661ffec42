"""Recurrences on one GPU beside the bytes that they must move: `python -m bench.recurrence --out DIR`.

The floor of a forward reads q, k, v and the log decay and writes o, once each; that of a backward reads these and d_o
and writes the gradients. Marks are what the packages fla (simple GLA; retention backward) and mamba_ssm took on a card of
this kind, as they were measured earlier; with `--peers` the packages run in the same rounds, where installed.
Kernels compile in processes of their own first, all at once.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus

from attn_engine import recurrence, recurrence_step
from bench.timing import interleaved

BYTES_PER_MS = 3.02e9
"""What a copy reaches on an H100 with HBM3."""
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One shape: batch, tokens, heads of q and k and of v, key and value channels."""

    name: str
    b: int
    t: int
    shared: int
    h: int
    k: int
    v: int
    kind: str = "token"
    """Log decays per token or per channel, "mamba" (with a weight), "delta" (with a decay) or "head"."""
    marks: tuple[float | None, float | None] = (None, None)
    """Milliseconds of a peer, forward and backward."""
    forward_only: bool = False

    def floor(self, backward: bool) -> float:
        """Milliseconds."""
        keys = 2 * self.b * self.t * self.shared * self.k * 2
        values = self.b * self.t * self.h * self.v * 2
        rows = self.b * self.t * self.h * 4 * (self.k if self.kind == "channel" else 1)
        once = keys + 2 * values + rows
        return (once + (keys + values + rows if backward else 0)) / BYTES_PER_MS

    def inputs(self) -> dict[str, Tensor]:
        """With weak decays in half of the heads, so that old states count."""
        generator = torch.Generator("cuda").manual_seed(0)

        def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        rate = torch.where(torch.arange(self.h, device="cuda") % 2 == 0, 1.0, 0.01)
        made = {
            "q": randn(self.b, self.t, self.shared, self.k),
            "k": randn(self.b, self.t, self.shared, self.k),
            "v": randn(self.b, self.t, self.h, self.v),
            "decay": rate * logsigmoid(randn(self.b, self.t, self.h, dtype=torch.float32)),
        }
        strength = randn(self.b, self.t, self.h, dtype=torch.float32)
        if self.kind == "mamba":
            made["weight"] = softplus(strength - 4)
            made["decay"] = -made["weight"] * (1 + torch.arange(self.h, device="cuda") % 16)
        elif self.kind == "delta":
            made["k"] = normalize(made["k"].float(), dim=-1).to(torch.bfloat16)
            made["beta"] = strength.sigmoid()
        elif self.kind == "channel":
            made["decay"] = made["decay"][..., None] * torch.rand(self.k, generator=generator, device="cuda")
        elif self.kind == "head":
            made["decay"] = torch.log1p(-torch.exp2(-5.0 - torch.arange(self.h, device="cuda")))
        return {name: x.requires_grad_(self.kind != "head" or name != "decay") for name, x in made.items()}


def mamba(b: int, t: int) -> Case:
    return Case(f"Mamba-2 2.7B B{b} S{t}", b, t, 1, 80, 128, 64, "mamba")


CASES = [
    Case("simple GLA B4 S4096 H32 128/128", 4, 4096, 32, 32, 128, 128, marks=(0.522, 1.751)),
    Case("retention B4 S4096 H32 128/128", 4, 4096, 32, 32, 128, 128, "head", (0.572, 1.751)),
    Case("few heads B1 S32768 H8 128/128", 1, 32768, 8, 8, 128, 128),
    Case("Mamba-2 B8 S4096 H80 P64 N128", 8, 4096, 1, 80, 128, 64, "mamba", (1.589, 5.044)),
    Case("GLA B4 S4096 H32 128/128", 4, 4096, 32, 32, 128, 128, "channel"),
    Case("gated delta rule B4 S4096 H32 128/128", 4, 4096, 32, 32, 128, 128, "delta"),
]
OTHER_SHAPES = [
    *(mamba(b, t) for b in (1, 8) for t in (2048, 4096, 8192)),
    *(Case(f"gated retention B64 S{t} H16 64/64", 64, t, 16, 16, 64, 64) for t in (1024, 2048, 4096)),
    *(Case(f"gated retention B8 S{t} H40 256/256", 8, t, 40, 40, 256, 256) for t in (1024, 2048, 4096)),
    *(Case(f"RetNet B{b} S{t} H32 256/512", b, t, 32, 32, 256, 512, "head") for b in (1, 8) for t in (2048, 4096)),
]
"""Those that this project's ancestors report."""


def ours(x: dict[str, Tensor]) -> Tensor:
    return recurrence(**x)[0]


def contenders(case: Case, peers: bool) -> dict[str, Run]:
    """Ours, and if wanted the package that has this recurrence."""
    found: dict[str, Run] = {"attn_engine": ours}
    if not peers:
        return found
    try:
        if case.kind == "mamba":
            scan: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
            rates = -(1.0 + torch.arange(case.h, device="cuda") % 16)
            found["mamba_ssm"] = lambda x: scan(x["v"], x["weight"], rates, x["k"], x["q"], 256)
        elif case.kind == "token":
            simple_gla: Any = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
            found["fla"] = lambda x: simple_gla(x["q"], x["k"], x["v"], g=x["decay"])[0]
    except ImportError:
        pass
    return found


def error(case: Case) -> float:
    """Of o, relative to a token loop in fp64 over the first tokens of one batch."""
    tokens = 512
    x = {name: t[:1, :tokens].detach() if t.ndim > 1 else t.detach() for name, t in case.inputs().items()}
    wide = {name: t.double() for name, t in x.items()}
    q, k = (wide[n].repeat_interleave(case.h // case.shared, 2) for n in ("q", "k"))
    decay = wide["decay"].expand(1, tokens, -1) if wide["decay"].ndim == 1 else wide["decay"]
    state = q.new_zeros(1, case.h, case.k, case.v)
    outputs: list[Tensor] = []
    for t in range(tokens):
        kept = decay[:, t].exp()
        state = state * (kept[..., None] if kept.ndim == 3 else kept[..., None, None])
        written = wide["v"][:, t] * (wide["weight"][:, t, :, None] if case.kind == "mamba" else 1)
        if case.kind == "delta":
            written = wide["beta"][:, t, :, None] * (written - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, ..., None] * written[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * case.k**-0.5)
    right = torch.stack(outputs, 1)
    with torch.no_grad():
        got = ours(x).double()
    return ((got - right).norm() / right.norm()).item()


def forward_of(x: dict[str, Tensor], run: Run) -> Callable[[], object]:
    def ahead() -> Tensor:
        with torch.no_grad():
            return run(x)

    return ahead


def backward_of(x: dict[str, Tensor], run: Run) -> Callable[[], object]:
    o = run(x)
    d_o, leaves = torch.randn_like(o), [t for t in x.values() if t.requires_grad]

    def back() -> object:
        return torch.autograd.grad(o, leaves, d_o, retain_graph=True, allow_unused=True)

    return back


def warm(task: tuple[Case, bool]) -> None:
    """Compiles what a case needs, in this process and for the next one."""
    case, backward = task
    (backward_of if backward else forward_of)(case.inputs(), ours)()
    if not backward:
        error(case)
    torch.cuda.synchronize()


def compile_all(cases: list[Case]) -> None:
    tasks = [(case, backward) for backward in (True, False) for case in cases if not (backward and case.forward_only)]
    workers = max(1, min(len(tasks), (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm, tasks))


def measure(case: Case, peers: bool) -> list[str]:
    x, runs = case.inputs(), contenders(case, peers)
    ahead = interleaved({name: forward_of(x, run) for name, run in runs.items()})
    back = {} if case.forward_only else interleaved({name: backward_of(x, run) for name, run in runs.items()})
    lines: list[str] = []
    for name in runs:
        wrong = f"{error(case):.1e}" if name == "attn_engine" else ""
        cells = [
            figures(times.get(name), case.floor(backward), mark)
            for backward, (times, mark) in enumerate(zip((ahead, back), case.marks, strict=True))
        ]
        lines.append(f"| {case.name} | {name} | {cells[0]} | {cells[1]} | {wrong} |")
        print(lines[-1], flush=True)
    return lines


def figures(time: float | None, floor: float, mark: float | None = None) -> str:
    """Milliseconds, floor, their ratio, and the ratio to a mark, as cells of a table."""
    if time is None:
        return f" | {floor:.3f} | | "
    return f"{time:.3f} | {floor:.3f} | {time / floor:.2f} | {f'{time / mark:.2f} of {mark}' if mark else ''}"


def decode(batch: int) -> str:
    """One token: every byte of the states is read and written once."""
    h, d = 32, 128
    q, k, v = (torch.randn(batch, 1, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g, state = -torch.rand(batch, 1, h, device="cuda"), torch.randn(batch, h, d, d, device="cuda")
    time = interleaved({"step": lambda: recurrence_step(q, k, v, state=state, decay=g)})["step"]
    floor = 2 * state.numel() * 4 / BYTES_PER_MS
    line = f"| one token B{batch} H{h} {d}/{d} | attn_engine | {figures(time, floor)} | | | | | |"
    print(line, flush=True)
    return line


def report(cases: list[Case], peers: bool) -> list[str]:
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, Python"
        f" {platform.python_version()}; bf16, fp32 states; `python -m bench.recurrence`. error: of o, against fp64.",
        "",
        "| shape | | forward ms | floor | times | of mark | backward ms | floor | times | of mark | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for case in cases:
        lines += measure(case, peers)
        torch.cuda.empty_cache()
    return lines + [decode(batch) for batch in (1, 16, 256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument(
        "--peers", action="store_true", help="also fla and mamba_ssm, which tune themselves for a minute"
    )
    parser.add_argument("--shapes", action="store_true", help="the shapes of the ancestors instead")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cases = OTHER_SHAPES if arguments.shapes else CASES
    compile_all(cases)
    name = "recurrence_shapes.md" if arguments.shapes else "recurrence.md"
    (arguments.out / name).write_text("\n".join(report(cases, arguments.peers)) + "\n")


if __name__ == "__main__":
    main()
