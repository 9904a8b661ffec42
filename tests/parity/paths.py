"""The paths from a definition to results: interpreters at each level, and every backend in a form that runs on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor
from xdsl.dialects import func
from xdsl.parser import Parser

import attn_engine
from attn_engine.backends.backend import BACKENDS, Availability, Backend, Level, Plan, get_backend
from attn_engine.backends.gluon.legalize import PREPARE, SCHEDULE
from attn_engine.dialects import attn
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile_async, tile_buffer
from attn_engine.interpreters.attn import run_online
from attn_engine.interpreters.attn_backward import run_backward
from attn_engine.ir.schedule import KernelSchedule, Schedule
from attn_engine.runtime import driver
from attn_engine.universe import make_context
from tests.parity.cases import DTYPES, Case
from tests.support.compare import leaf, randn, run
from tests.support.eager import eager_attention
from tests.support.engines import INTERPRETED, ORACLE, SMALL, blocks, poisoned_memory

Results = dict[str, Tensor]
Interpret = Callable[..., None]


@dataclass(frozen=True)
class Path:
    """One way to results. `expected`: the largest error that it may have, of the largest right value, per type."""

    name: str
    what: str
    run: Callable[[Case], Results]
    expected: Mapping[str, float]
    missing: Callable[[], str | None] = lambda: None
    """What this machine lacks for it."""
    takes: Callable[[Case], bool] = lambda case: True
    """Which cases it is there for."""


EXACT = {"f32": 1e-5, "f16": 1e-3}
"""In f64, from inputs and to results of the case's type."""
COMPILED = {"f32": 3e-5, "f16": 4e-3}


# --- the definition itself ---------------------------------------------------------------------


def cotangents(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Of o and of the lse."""
    return randn(*q.shape[:3], v.shape[3], seed=91).to(q.dtype), randn(*q.shape[:3], seed=92)


def right(case: Case) -> Results:
    """Eager torch, in f64."""
    tensors = case.tensors()
    exact = [leaf(t, torch.float64) for t in tensors]
    captures = {n: leaf(c, torch.float64) for n, c in case.definition.captures.items()}
    functions, scale = case.definition.make(**captures), tensors[0].shape[3] ** -0.5
    d_o, d_lse = cotangents(tensors[0], tensors[2])

    def attend(q: Tensor, k: Tensor, v: Tensor):
        return eager_attention(q, k, v, functions, scale)[: 1 + ("row" not in functions)]

    return run(attend, exact, captures, d_o, d_lse)


# --- the attn level ----------------------------------------------------------------------------


def attn_level(case: Case) -> Results:
    """The derived loops and the derived backward, block by block."""
    q, k, v = case.tensors()
    captures = {n: leaf(c) for n, c in case.definition.captures.items()}
    functions = case.definition.make(**captures)
    has_lse = "row" not in functions
    traced = build(
        Definition(**functions), dtype=q.dtype, head_dim=q.shape[3], head_dim_v=v.shape[3], return_lse=has_lse
    )
    wrt = [str(n) for n, c in enumerate(traced.captures) if c.requires_grad]
    lowered = driver.to_attn(traced.module, ("q", "k", "v", *wrt))
    forward, backward = (_op(f) for f in lowered.ops if isinstance(f, func.FuncOp))
    read = [c.detach().double() if c.is_floating_point() else c for c in traced.captures]
    scale, inputs = q.shape[3] ** -0.5, [t.double() for t in (q, k, v)]
    o, *rest = run_online(forward, *inputs, scale, read, block=16)
    outputs, saved = rest[: len(forward.outputs)], rest[len(forward.outputs) :]
    d_o, d_lse = cotangents(q, v)
    grads = run_backward(
        backward, *inputs, scale, o, d_o.double(), saved, [d_lse.double()][: len(outputs)], read, block=16
    )
    found = {"o": o, **({"lse": outputs[0]} if has_lse else {}), **{f"d{n}": grads[f"d{n}"] for n in "qkv"}}
    return {**found, **_pulled_back([traced.captures[int(n)] for n in wrt], grads["d_captures"], captures)}


def _pulled_back(read: Sequence[Tensor], gradients: Sequence[Tensor], captures: Mapping[str, Tensor]) -> Results:
    """Gradients of captures from those of what the functions made of them before they read it."""
    found: Results = {}
    for name, capture in captures.items():
        if capture.requires_grad:
            made = [g.to(t.dtype) for g, t in zip(gradients, read, strict=True)]
            (found[f"d{name}"],) = torch.autograd.grad(
                [*read, capture.sum() * 0], capture, [*made, torch.ones(())], allow_unused=True, retain_graph=True
            )
    return found


def _op(function: func.FuncOp) -> attn.OnlineOp | attn.BackwardOp:
    return next(o for o in function.walk() if isinstance(o, attn.OnlineOp | attn.BackwardOp))


# --- backends ----------------------------------------------------------------------------------


def _through(backend: str, schedule: Schedule | None, case: Case) -> Results:
    """The public API, with kernels for this backend."""
    tensors = [leaf(t) for t in case.tensors()]
    captures = {n: leaf(c) for n, c in case.definition.captures.items()}
    functions = case.definition.make(**captures)
    scale, has_lse = tensors[0].shape[3] ** -0.5, "row" not in functions
    with poisoned_memory(), blocks(schedule), backends():
        attend = attn_engine.compile(**functions, backend=backend)
        return run(
            lambda q, k, v: attend(q, k, v, scale=scale, return_lse=has_lse),
            tensors,
            captures,
            *cotangents(*tensors[::2]),
        )


def _interpreting(interpret: Interpret) -> Callable[[str], Mapping[str, Plan]]:
    """Plans of printed tile IR."""

    def plans(text: str) -> Mapping[str, Plan]:
        module = Parser(make_context(), text).parse_module()
        return {name: partial(_plan, interpret, module, name) for name in re.findall(r"tile\.plan @(\w+)", text)}

    return plans


def _plan(interpret: Interpret, module: object, name: str, *arguments: object) -> None:
    interpret(module, name, arguments, exact=True)


def _interpreter(level: Level, pipeline: tuple[str, ...], interpret: Interpret) -> Backend:
    return Backend(f"{level}_interpreter", level, pipeline, str, _interpreting(interpret), lambda: Availability(True))


def _tilelang_on_cpu() -> Backend:
    from tests.support.tilelang_shim import run_on_cpu

    return _elsewhere("tilelang", run_on_cpu)


def _hip_emulated() -> Backend:
    from attn_engine.backends.hip.build import emulate

    return _elsewhere("hip", emulate)


def _elsewhere(name: str, run_text: Callable[[str], Mapping[str, Plan]]) -> Backend:
    return replace(get_backend(name), name=f"{name}_here", build=run_text, check=lambda: Availability(True))


MADE: dict[str, Callable[[], Backend]] = {
    "buffered_interpreter": lambda: _interpreter(Level.BUFFERED, ("tile-assign-memory",), tile_buffer.run_plan),
    "async_interpreter": lambda: _interpreter(Level.ASYNC, (*PREPARE, *SCHEDULE), tile_async.run_plan),
    "tilelang_here": _tilelang_on_cpu,
    "hip_here": _hip_emulated,
}


@contextmanager
def backends() -> Iterator[None]:
    """With what stands in for backends in the table of them."""
    BACKENDS.update(MADE)
    try:
        yield
    finally:
        for name in MADE:
            del BACKENDS[name]


# --- all of them -------------------------------------------------------------------------------

TF32 = replace(SMALL, tf32=True)
"""Where products of f32 must be allowed to be rounded; a CPU rounds none."""
WAVES = Schedule(
    KernelSchedule(64, 32, 4, 1),
    KernelSchedule(64, 64, 4, 1),
    KernelSchedule(64, 32, 4, 1),
    KernelSchedule(32, 64, 4, 1),
)
ASYNC = replace(SMALL, forward=KernelSchedule(128, 128, 8, 2))
"""Two warpgroups of 64 queries."""


def _without(package: str) -> Callable[[], str | None]:
    return lambda: None if find_spec(package) else f"{package} is not installed"


@cache
def _without_clang() -> str | None:
    from attn_engine.backends.hip.toolchain import has_clang

    return None if has_clang() else "clang++-19 is not installed"


PATHS = (
    Path("attn", "attn interpreter, loops and backward derived", attn_level, EXACT),
    Path("tile value", "tile interpreter, value level", partial(_through, ORACLE, SMALL), EXACT),
    Path("tile buffered", "tile interpreter, buffered level", partial(_through, "buffered_interpreter", SMALL), EXACT),
    Path(
        "tile async",
        "tile interpreter, async level: 16 bits, heads of 64 or 128",
        partial(_through, "async_interpreter", ASYNC),
        EXACT,
        takes=lambda case: case.is_wide,
    ),
    Path("cpu", "the CPU backend", partial(_through, "cpu", SMALL), COMPILED),
    Path(
        "triton",
        "Triton's text in Triton's interpreter",
        partial(_through, INTERPRETED, SMALL),
        COMPILED,
        _without("triton"),
    ),
    Path(
        "tilelang",
        "TileLang's program on its C target",
        partial(_through, "tilelang_here", TF32),
        COMPILED,
        _without("tilelang"),
    ),
    Path("hip", "HIP's text in its emulation", partial(_through, "hip_here", WAVES), COMPILED, _without_clang),
)
assert set(DTYPES) == set(EXACT) == set(COMPILED)
