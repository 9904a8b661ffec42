"""The packages fla and mamba_ssm as peers: what they call a recurrence.

Both tune themselves on the first call: hundreds of kernels, compiled one by one. Where several processes have compiled
them before (see `bench.compile_only`), tuning finds them in Triton's cache and measures them undisturbed.
"""

from __future__ import annotations

import importlib
from typing import Any

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
