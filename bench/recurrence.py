"""Recurrences on one GPU beside the bytes that they must move: `python -m bench.recurrence --out DIR`.

The floor of a forward reads q, k, v and the log decay and writes o, once each; that of a backward reads these and d_o
and writes the gradients. With `--peers` the packages fla and mamba_ssm run in the same rounds, where installed.
"""

from __future__ import annotations

import argparse
import importlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

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
    mamba: bool = False
    forward_only: bool = False
    """Unless all is asked for: the kernels of a backward in pieces take half a minute to compile."""

    def floor(self, backward: bool) -> float:
        """Milliseconds."""
        keys = 2 * self.b * self.t * self.shared * self.k * 2
        values = self.b * self.t * self.h * self.v * 2
        rows = self.b * self.t * self.h * 4
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
        if self.mamba:
            made["weight"] = softplus(randn(self.b, self.t, self.h, dtype=torch.float32) - 4)
            made["decay"] = -made["weight"] * (1 + torch.arange(self.h, device="cuda") % 16)
        return {name: x.requires_grad_() for name, x in made.items()}


CASES = [
    Case("simple GLA B4 S4096 H32 128/128", 4, 4096, 32, 32, 128, 128),
    Case("few heads B1 S32768 H8 128/128", 1, 32768, 8, 8, 128, 128, forward_only=True),
    Case("Mamba-2 B8 S4096 H80 P64 N128", 8, 4096, 1, 80, 128, 64, mamba=True),
]


def ours(x: dict[str, Tensor]) -> Tensor:
    return recurrence(**x)[0]


def contenders(case: Case, peers: bool) -> dict[str, Run]:
    """Ours, and if wanted the package that has this recurrence."""
    found: dict[str, Run] = {"attn_engine": ours}
    if not peers:
        return found
    try:
        if case.mamba:
            scan: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
            rates = -(1.0 + torch.arange(case.h, device="cuda") % 16)
            found["mamba_ssm"] = lambda x: scan(x["v"], x["weight"], rates, x["k"], x["q"], 256)
        else:
            simple_gla: Any = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
            found["fla"] = lambda x: simple_gla(x["q"], x["k"], x["v"], g=x["decay"])[0]
    except ImportError:
        pass
    return found


def error(case: Case, run: Run) -> float:
    """Of o, relative to a token loop in fp64 over the first tokens of one batch."""
    tokens = 512
    x = {name: t[:1, :tokens].detach() for name, t in case.inputs().items()}
    wide = {name: t.double() for name, t in x.items()}
    q, k = (wide[n].repeat_interleave(case.h // case.shared, 2) for n in ("q", "k"))
    state = q.new_zeros(1, case.h, case.k, case.v)
    outputs: list[Tensor] = []
    for t in range(tokens):
        written = wide["v"][:, t] * (wide["weight"][:, t, :, None] if case.mamba else 1)
        state = state * wide["decay"][:, t].exp()[..., None, None] + k[:, t, ..., None] * written[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * case.k**-0.5)
    right = torch.stack(outputs, 1)
    with torch.no_grad():
        got = run(x).double()
    return ((got - right).norm() / right.norm()).item()


def measure(case: Case, peers: bool, backward_too: bool) -> list[str]:
    x = case.inputs()
    forward: dict[str, Callable[[], object]] = {}
    backward: dict[str, Callable[[], object]] = {}
    for name, run in contenders(case, peers).items():

        def ahead(run: Run = run) -> Tensor:
            with torch.no_grad():
                return run(x)

        forward[name] = ahead
        if not backward_too:
            continue
        o = run(x)
        d_o, leaves = torch.randn_like(o), [t for t in x.values() if t.requires_grad]

        def back(o: Tensor = o, d_o: Tensor = d_o, leaves: list[Tensor] = leaves) -> object:
            return torch.autograd.grad(o, leaves, d_o, retain_graph=True, allow_unused=True)

        backward[name] = back
    times = interleaved(forward), interleaved(backward)
    floors = case.floor(False), case.floor(True)
    lines: list[str] = []
    for name in forward:
        wrong = f"{error(case, ours):.1e}" if name == "attn_engine" else ""
        cells = [figures(times[0][name], floors[0]), figures(times[1].get(name), floors[1])]
        lines.append(f"| {case.name} | {name} | {cells[0]} | {cells[1]} | {wrong} |")
        print(lines[-1], flush=True)
    return lines


def figures(time: float | None, floor: float) -> str:
    """Milliseconds, floor and their ratio as cells of a table."""
    return f"{time:.3f} | {floor:.3f} | {time / floor:.2f}" if time is not None else f" | {floor:.3f} | "


def decode(batch: int) -> str:
    """One token: every byte of the states is read and written once."""
    h, d = 32, 128
    q, k, v = (torch.randn(batch, 1, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g, state = -torch.rand(batch, 1, h, device="cuda"), torch.randn(batch, h, d, d, device="cuda")
    time = interleaved({"step": lambda: recurrence_step(q, k, v, state=state, decay=g)})["step"]
    floor = 2 * state.numel() * 4 / BYTES_PER_MS
    line = f"| one token B{batch} H{h} {d}/{d} | attn_engine | {figures(time, floor)} | | | | |"
    print(line, flush=True)
    return line


def report(peers: bool, full: bool) -> list[str]:
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, Python"
        f" {platform.python_version()}; bf16, fp32 states; `python -m bench.recurrence`. error: of o, against fp64.",
        "",
        "| shape | | forward ms | floor | times | backward ms | floor | times | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        lines += measure(case, peers, full or not case.forward_only)
        torch.cuda.empty_cache()
    return lines + [decode(batch) for batch in (1, 16, 256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument(
        "--peers", action="store_true", help="also fla and mamba_ssm, which tune themselves for a minute"
    )
    parser.add_argument("--full", action="store_true", help="every backward, with its minute of compilation")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "recurrence.md").write_text("\n".join(report(arguments.peers, arguments.full)) + "\n")


if __name__ == "__main__":
    main()
