"""One random case through every path: eager torch, the attn oracle, tile interpreter, cpu, Triton interpreted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attn_engine
from attn_engine.frontend import Definition, build
from attn_engine.interpreters.attn import run_attention
from tests.fuzz.grammar import CAPTURES, Case
from tests.support.compare import leaf, randn, run
from tests.support.eager import eager_attention
from tests.support.engines import ALL, SMALL, blocks, poisoned_memory

Results = dict[str, Tensor]
SCALE = 0.4
TOLERANCE = 1e-4
NOISE = 1e-7
MOST_SENSITIVE = 1e-5


@dataclass(frozen=True)
class Outcome:
    """`agreed`, `ill-conditioned` (small changes of the inputs change the results: nothing to compare), or a failure."""

    case: Case
    verdict: str
    detail: str = ""


def function_of(case: Case) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(case.source, f"<fuzz {case.seed}>", "exec"), namespace)
    return namespace["make"]


def inputs_of(case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    n = case.sizes
    shapes = [
        (n["b"], n["h"], n["sq"], n["d"]),
        (n["b"], n["hkv"], n["skv"], n["d"]),
        (n["b"], n["hkv"], n["skv"], n["dv"]),
    ]
    tensors = [randn(*shape, seed=case.seed * 31 + i) for i, shape in enumerate(shapes)]
    sizes = {"b": n["b"], "h": n["h"], "q": n["sq"], "k": n["skv"], "r": 8}
    captures = {}
    for i, name in enumerate(case.captures):
        axes, integers = CAPTURES[name]
        shape = [sizes[a] for a in axes]
        values = randn(*shape, seed=case.seed * 31 + 7 + i)
        captures[name] = (values.abs() * (n["skv"] / 2 if axes == "b" else 2)).long() if integers else values
    return tensors, captures


def oracle(case: Case, tensors: Sequence[Tensor], captures: dict[str, Tensor], cotangents: Sequence[Tensor]) -> Results:
    """The attn interpreter on the traced module, in float64."""
    tensors, captures = (
        [leaf(t, torch.float64) for t in tensors],
        {n: leaf(c, torch.float64) for n, c in captures.items()},
    )
    definition = Definition(
        **function_of(case)(**{n: c.float() if c.is_floating_point() else c for n, c in captures.items()})
    )
    traced = build(definition, dtype=torch.float32, head_dim=case.sizes["d"], head_dim_v=case.sizes["dv"])
    # What the functions make of captures outside of traced values is a capture of its own.
    read = [captures.get(n, t.double()) for n, t in zip(traced.capture_names, traced.captures, strict=True)]
    return run(lambda q, k, v: run_attention(traced.module, q, k, v, SCALE, read)[0], tensors, captures, *cotangents)


def eager(case: Case, tensors: Sequence[Tensor], captures: dict[str, Tensor], cotangents: Sequence[Tensor]) -> Results:
    tensors, captures = (
        [leaf(t, torch.float64) for t in tensors],
        {n: leaf(c, torch.float64) for n, c in captures.items()},
    )
    functions = function_of(case)(**captures)
    return run(lambda q, k, v: eager_attention(q, k, v, functions, SCALE)[0], tensors, captures, *cotangents)


def engine(
    backend: str, case: Case, tensors: Sequence[Tensor], captures: dict[str, Tensor], cotangents: Sequence[Tensor]
) -> Results:
    tensors, captures = [leaf(t) for t in tensors], {n: leaf(c) for n, c in captures.items()}
    with poisoned_memory(), blocks(SMALL):
        attend = attn_engine.compile(**function_of(case)(**captures), backend=backend)
        return run(lambda q, k, v: attend(q, k, v, scale=SCALE), tensors, captures, *cotangents)


def difference(got: Results, want: Results) -> tuple[float, str]:
    """The largest error relative to the largest right value of its tensor (or 1), and where it is."""
    worst, where = 0.0, ""
    for name, value in got.items():
        right = want[name].double()
        if value.shape != right.shape:
            return float("inf"), f"shape of {name}"
        if not right.numel():
            continue
        error = (value.double() - right).abs().max().item() / max(1.0, right.abs().max().item())
        if not error <= worst:
            worst, where = error, name
    return worst, where


def perturbed(
    tensors: Sequence[Tensor], captures: dict[str, Tensor], seed: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Every float changed by a part in ten million."""
    moved = [t * (1 + NOISE * randn(*t.shape, seed=seed + i)) for i, t in enumerate(tensors)]
    others = {
        n: c * (1 + NOISE * randn(*c.shape, seed=seed + 9)) if c.is_floating_point() else c for n, c in captures.items()
    }
    return moved, others


def well_conditioned(case: Case, right: Results, cotangents: Sequence[Tensor]) -> bool:
    """Whether results are finite, of moderate size, and move little when the inputs do."""
    if any(not t.isfinite().all() or (t.numel() and t.abs().max() > 1e4) for t in right.values()):
        return False
    tensors, captures = inputs_of(case)
    return all(
        difference(oracle(case, *perturbed(tensors, captures, seed), cotangents), right)[0] < MOST_SENSITIVE
        for seed in (101, 202)
    )


def check_case(case: Case, backends: Sequence[str] = ALL) -> Outcome:
    tensors, captures = inputs_of(case)
    n = case.sizes
    cotangents = randn(n["b"], n["h"], n["sq"], n["dv"], seed=5), torch.zeros(())
    try:
        right = oracle(case, tensors, captures, cotangents)
        if not well_conditioned(case, right, cotangents):
            return Outcome(case, "ill-conditioned")
        paths: dict[str, Callable[[], Results]] = {"eager": lambda: eager(case, tensors, captures, cotangents)}
        for backend in backends:
            paths[backend] = lambda b=backend: engine(b, case, tensors, captures, cotangents)
        for name, path in paths.items():
            error, where = difference(path(), right)
            if not error <= TOLERANCE:
                return Outcome(case, "failed", f"{name}: {where} is off by {error:.3g}")
    except Exception as error:  # any error is a finding: the grammar makes only what is supported
        return Outcome(case, "failed", f"{type(error).__name__}: {error}")
    return Outcome(case, "agreed")
