"""One random case through every path: eager torch, the attn oracle, tile interpreter, cpu, Triton interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import attn_engine
from attn_engine.frontend import Definition, build
from attn_engine.frontend.build import Traced
from attn_engine.interpreters.attn import run_attention
from attn_engine.runtime import driver, op
from tests.fuzz.expressions import CAPTURES
from tests.fuzz.grammar import Case
from tests.support.compare import leaf, randn, run
from tests.support.eager import eager_attention
from tests.support.engines import ALL, ORACLE, SMALL, blocks, poisoned_memory

Results = dict[str, Tensor]
SCALE = 0.4
TOLERANCE = 1e-4
NOISE = 1e-7
MOST_SENSITIVE = 1e-5
ON_A_GPU = ("triton", "gluon")


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
    return tensors, {name: _capture(case, name, case.seed * 31 + 7 + i) for i, name in enumerate(case.captures)}


def _capture(case: Case, name: str, seed: int) -> Tensor:
    axes, kind = CAPTURES[name]
    n = case.sizes
    sizes = {"b": n["b"], "h": n["h"], "q": n["sq"], "k": n["skv"], "r": 8}
    values = randn(*[sizes[a] for a in axes], seed=seed)
    if kind == "bool":
        return values > -0.5
    spread = n["skv"] / 2 if name in ("lengths", "offset") else 2
    return (values.abs() * spread).long() if kind == "int" else values


def cotangents_of(case: Case) -> tuple[Tensor, Tensor]:
    """Of o and of the lse."""
    n = case.sizes
    rows = n["b"], n["h"], n["sq"]
    return randn(*rows, n["dv"], seed=5), randn(*rows, seed=6)


def _leaves(
    tensors: Sequence[Tensor], captures: dict[str, Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Tensor]]:
    return [leaf(t, dtype) for t in tensors], {n: leaf(c, dtype) for n, c in captures.items()}


def traced_of(case: Case, captures: dict[str, Tensor]) -> Traced:
    definition = Definition(**function_of(case)(**captures))
    sizes = case.sizes
    return build(definition, dtype=torch.float32, head_dim=sizes["d"], head_dim_v=sizes["dv"], return_lse=case.has_lse)


def oracle(
    case: Case, tensors: Sequence[Tensor], captures: dict[str, Tensor], dtype: torch.dtype = torch.float64
) -> Results:
    """The attn interpreter on the traced module, in float64 or another type."""
    tensors, captures = _leaves(tensors, captures, dtype)
    traced = traced_of(case, {n: c.float() if c.is_floating_point() else c for n, c in captures.items()})
    # What the functions make of captures outside of traced values is a capture of its own.
    read = [captures.get(n, t.to(dtype)) for n, t in zip(traced.capture_names, traced.captures, strict=True)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return run_attention(traced.module, q, k, v, SCALE, read, dtype)[: 1 + case.has_lse]

    return run(attend, tensors, captures, *cotangents_of(case))


def eager(case: Case, tensors: Sequence[Tensor], captures: dict[str, Tensor]) -> Results:
    tensors, captures = _leaves(tensors, captures, torch.float64)
    functions = function_of(case)(**captures)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return eager_attention(q, k, v, functions, SCALE)[: 1 + case.has_lse]

    cotangents = cotangents_of(case)
    with exact_by_default():
        return run(attend, tensors, captures, *cotangents)


@contextmanager
def exact_by_default() -> Iterator[None]:
    """What torch makes of integers and Python numbers is float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def engine(backend: str, case: Case, tensors: Sequence[Tensor], captures: dict[str, Tensor]) -> Results:
    device = "cuda" if backend in ON_A_GPU else "cpu"
    tensors = [leaf(t.to(device)) for t in tensors]
    captures = {n: leaf(c.to(device)) for n, c in captures.items()}
    cotangents = [t.to(device) for t in cotangents_of(case)]
    with poisoned_memory(), blocks(replace(SMALL, parts=case.parts)), exact_rows(backend):
        attend = attn_engine.compile(**function_of(case)(**captures), backend=backend)
        found = run(
            lambda q, k, v: attend(q, k, v, scale=SCALE, return_lse=case.has_lse), tensors, captures, *cotangents
        )
    return {name: value.cpu() for name, value in found.items()}


@contextmanager
def exact_rows(backend: str) -> Iterator[None]:
    """Where kernels compute in float64, what the forward pass keeps of a row is float64 too: a minimum stays a score."""
    if backend != ORACLE:
        yield
        return
    with mock.patch.object(op, "_row", lambda q: q.new_empty(q.shape[:3], dtype=torch.float64)):
        yield


def difference(got: Results, want: Results) -> tuple[float, str]:
    """The largest error relative to the largest right value of its tensor (or 1), and where it is."""
    worst, where = 0.0, ""
    for name, value in got.items():
        right, value = want[name].double(), value.double()
        if value.shape != right.shape:
            return float("inf"), f"shape of {name}"
        if not right.numel():
            continue
        finite = torch.where(right.isfinite(), right, 0.0)
        distance = torch.where(value == right, 0.0, (value - right).abs())
        if distance.isnan().any():
            return float("inf"), name
        error = distance.max().item() / max(1.0, finite.abs().max().item())
        if error > worst:
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


def well_conditioned(case: Case, right: Results) -> bool:
    """Whether results are finite, of moderate size, and move little when the inputs or the rounding do."""
    for name, value in right.items():
        # Rows without a visible key have the lse -inf.
        value = value[value != -torch.inf] if name == "lse" else value
        if not value.isfinite().all() or (value.numel() and value.abs().max() > 1e4):
            return False
    tensors, captures = inputs_of(case)
    if not difference(oracle(case, tensors, captures, torch.float32), right)[0] < TOLERANCE / 2:
        return False
    return all(
        difference(oracle(case, *perturbed(tensors, captures, seed)), right)[0] < MOST_SENSITIVE for seed in (101, 202)
    )


def check_case(case: Case, backends: Sequence[str] = ALL) -> Outcome:
    tensors, captures = inputs_of(case)
    try:
        right = oracle(case, tensors, captures)
        if not well_conditioned(case, right):
            return Outcome(case, "ill-conditioned")
        paths: dict[str, Callable[[], Results]] = {"eager": lambda: eager(case, tensors, captures)}
        for backend in backends:
            paths[backend] = lambda b=backend: engine(b, case, tensors, captures)
        with lowered_once():
            for name, path in paths.items():
                error, where = difference(path(), right)
                if not error <= TOLERANCE:
                    return Outcome(case, "failed", f"{name}: {where} is off by {error:.3g}")
    except Exception as error:  # any error is a finding: the grammar makes only what is supported
        return Outcome(case, "failed", f"{type(error).__name__}: {error}")
    return Outcome(case, "agreed")


@contextmanager
def lowered_once() -> Iterator[None]:
    """The backends of one case share the passes before the conversion to kernels."""
    to_attn, known = driver.to_attn, dict[Any, Any]()

    def remembered(module: Any, wrt: tuple[str, ...]) -> Any:
        key = (str(module), wrt)
        if key not in known:
            known[key] = to_attn(module, wrt)
        return known[key].clone()

    with mock.patch.object(driver, "to_attn", remembered):
        yield
