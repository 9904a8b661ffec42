"""Forward on TileLang beside TileLang's own example: `python -m bench.tilelang --example FILE --out DIR`.

FILE is examples/flash_attention/example_mha_fwd_bhsd.py of TileLang's repository, which its package does not hold; it runs
in its own configuration (blocks of 128 by 128, 256 threads, 2 stages). Contenders run interleaved; each is held against
float64 first. TFLOP/s count visible scores only.
"""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

import attn_engine
from attn_engine.library import causal
from bench.attention import Attend, Case
from bench.timing import interleaved
from bench.warm import side_by_side

CASES = (Case(4, 32, 4096, 128, True), Case(4, 32, 4096, 128, False))
CASES += (Case(1, 32, 16384, 128, True), Case(1, 32, 16384, 128, False))
BACKENDS = ("tilelang", "triton")
EXAMPLE = "TileLang's example"
LARGEST_ERROR = 2e-3
CHECKED = 4096
"""Positions up to which results are held against float64."""


def load(file: str) -> ModuleType:
    spec = spec_from_file_location("tilelang_example", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contender(name: str, case: Case, example: str) -> Attend:
    if name != EXAMPLE:
        return attn_engine.compile(mask_mod=causal if case.causal else None, backend=name).__call__
    return load(example).flashattn(case.b, case.h, case.s, case.s, case.d, case.causal, 128, 128, 2, 256)


def inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (case.b, case.h, case.s, case.d)
    return [torch.randn(shape, generator=generator, device="cuda").half() for _ in range(3)]


def error(got: Tensor, tensors: list[Tensor], case: Case) -> float:
    """The largest of the first head, against float64."""
    q, k, v = (t[:1, :1].double() for t in tensors)
    scores = q @ k.mT * case.d**-0.5
    if case.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return (got[:1, :1].double() - scores.softmax(-1) @ v).abs().max().item()


def build(task: tuple[str, Case, str]) -> None:
    """Compiles in a process of its own; what is built is kept on disk."""
    contender(*task)(*inputs(task[1]))
    torch.cuda.synchronize()


def row(case: Case, example: str) -> str:
    tensors = inputs(case)
    found = {name: contender(name, case, example) for name in (*BACKENDS, EXAMPLE)}
    if case.s <= CHECKED:
        for name, attend in found.items():
            assert error(attend(*tensors), tensors, case) < LARGEST_ERROR, name
    times = interleaved({name: lambda attend=attend: attend(*tensors) for name, attend in found.items()})
    cells = [f"{ms:.3f} ms, {case.flops / ms / 1e9:.0f}" for ms in times.values()]
    return f"| {case.name} | {' | '.join(cells)} | {times[EXAMPLE] / times['tilelang']:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tilelang")
    parser.add_argument("--example", required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    side_by_side(build, [(name, case, options.example) for case in CASES for name in (*BACKENDS, EXAMPLE)])
    names = " | ".join((*(f"attn_engine {name}" for name in BACKENDS), EXAMPLE))
    head = [
        "# Forward on TileLang beside TileLang's own example",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, tilelang {version('tilelang')}, triton"
        f" {version('triton')}, Python {platform.python_version()}, float16. Time and TFLOP/s of visible scores; the ratio is"
        " the example's time over ours. `python -m bench.tilelang --example example_mha_fwd_bhsd.py`",
        "",
        f"| shape | {names} | ratio |",
        "|---" * (len(BACKENDS) + 3) + "|",
    ]
    for line in head:
        print(line, flush=True)
    rows: list[str] = []
    for case in CASES:
        rows.append(row(case, options.example))
        print(rows[-1], flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "tilelang_forward.md").write_text("\n".join([*head, *rows]) + "\n")


if __name__ == "__main__":
    main()
