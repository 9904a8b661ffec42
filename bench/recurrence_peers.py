"""The packages fla and mamba_ssm as peers: what they call a recurrence, and their kernels compiled ahead of their tuning.

Both tune themselves on the first call: hundreds of kernels, compiled one by one. `compile_share` lets several processes
compile all of them without running any; then tuning finds them in Triton's cache and measures them undisturbed.
"""

from __future__ import annotations

import importlib
import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.recurrence_cases import Case, Inputs, Run

FLA: dict[str, tuple[str, str, dict[str, str]]] = {
    "head": ("fla.ops.retention", "chunk_retention", {}),
    "token": ("fla.ops.simple_gla", "chunk_simple_gla", {"g": "decay"}),
    "channel": ("fla.ops.gla", "chunk_gla", {"g": "decay"}),
    "delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", {"g": "decay", "beta": "beta"}),
    "channel delta": ("fla.ops.kda", "chunk_kda", {"g": "decay", "beta": "beta"}),
}
CHUNK = 256
"""Of mamba_ssm, as its models have it."""


def package_of(case: Case) -> str:
    return "mamba_ssm" if case.kind == "mamba" else "fla"


def peer(case: Case) -> Run:
    """The package's function for a case's inputs; ImportError where it is not installed."""
    if case.kind == "mamba":
        scan: Any = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        rates = case.rates().requires_grad_()
        return lambda x: scan(x["v"], x["weight"], rates, x["k"], x["q"], CHUNK)
    module, name, named = FLA[case.kind]
    function: Any = getattr(importlib.import_module(module), name)
    return lambda x: function(x["q"], x["k"], x["v"], **{theirs: x[ours] for theirs, ours in named.items()})[0]


def entry(case: Case) -> Run | None:
    """This project's function of the package's name, where it does more than `recurrence`."""
    if case.kind != "mamba":
        return None
    from attn_engine.compat.mamba_ssm import mamba_chunk_scan_combined

    rates = case.rates().requires_grad_()

    def run(x: Inputs) -> Tensor:
        found = mamba_chunk_scan_combined(x["v"], x["weight"], rates, x["k"], x["q"], CHUNK)
        assert isinstance(found, Tensor)
        return found

    return run


def compile_share(task: tuple[list[Case], int, int]) -> None:
    """Compiles the `number`-th of `count` parts of all kernels that the peers of these cases may choose from."""
    cases, number, count = task
    _compile_only(number, count)
    for case in cases:
        small = replace(case, b=min(case.b, 2))
        try:
            _run_both_ways(small)
        except Exception:  # what a peer refuses is told where it is timed
            continue
        finally:
            torch.cuda.empty_cache()


def _run_both_ways(case: Case) -> None:
    x, run = case.inputs(), peer(case)
    o = run(x)
    torch.autograd.grad(o, [t for t in x.values() if t.requires_grad], torch.empty_like(o), allow_unused=True)


def _compile_only(number: int, count: int) -> None:
    """From here on this process runs no Triton kernel: it compiles its part of them."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    kernel: Any = JITFunction
    launch = kernel.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        plain = sorted((n, str(x)) for n, x in options.items() if not isinstance(x, Tensor))
        if zlib.crc32(repr((self.__name__, plain)).encode()) % count == number:
            launch(self, *args, grid=grid, warmup=True, **options)

    def each(self: Any, *args: Any, **options: Any) -> None:
        self.nargs, self.best_config = dict(zip(self.arg_names, args, strict=False)), self.configs[0]
        for config in self.prune_configs(options):
            try:
                self.fn.run(*args, **options, **config.all_kwargs())
            except Exception:
                continue  # a configuration that does not fit: tuning leaves it out, too

    kernel.run = compiled
    tuners: list[Any] = [Autotuner, *Autotuner.__subclasses__()]
    for tuner in tuners:
        tuner.run = each
