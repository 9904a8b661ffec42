"""Which of several ways to run an attention is taken, and why others were not: the first that runs, or the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from attn_engine.backends.backend import get_backend
from attn_engine.errors import AsyncUnsupportedError, UnsupportedOpError, UnsupportedTileShapeError
from attn_engine.ir.schedule import Schedule
from attn_engine.runtime import op
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Compiled

_SHOWN = 200
"""Characters of a compiler's message."""
_OF_DEVICE: tuple[type[Exception], ...] = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),
)
"""What says nothing of a backend: another one would want the memory too, and runs on no device that has failed."""
REFUSALS = (AsyncUnsupportedError, UnsupportedOpError, UnsupportedTileShapeError)


@dataclass(frozen=True)
class Way:
    """A target, a schedule for it, and the backend of the gradients, if that is another."""

    target: Target
    schedule: Schedule
    gradients: str = ""

    def __str__(self) -> str:
        m, n, warps, stages = self.schedule.forward
        blocks = f"{self.target.backend}, forward in blocks of {m} queries and {n} keys, {warps} warps, {stages} stages"
        return f"{blocks}, gradients by {self.gradients}" if self.gradients else blocks


@dataclass(frozen=True)
class Chosen:
    """What was built, and which ways before it were refused, each with the reason."""

    compiled: Compiled
    way: Way
    refused: tuple[tuple[Way, str], ...] = ()
    why: str = ""

    def lines(self) -> list[str]:
        plain = [line for name, plan in self.compiled.plans.items() for line in _replaced(name, plan)]
        why = f" ({self.why})" if self.why else ""
        return [*(f"not {way}: {reason}" for way, reason in self.refused), f"taken: {self.way}{why}", *plain]


def _replaced(name: str, plan: Any) -> list[str]:
    """What took the place of a plan whose kernels came out badly; that may be one which looks at its own kernels too."""
    reason = getattr(plan, "reason", None)
    if reason is None:
        return []
    kernels = "a kernel for each gradient" if hasattr(plan.plan, "reason") else "plain kernels"
    return [f"{name}: {kernels}: {reason}", *_replaced(name, plan.plan)]


def first_that_runs(
    ways: Sequence[Way], build: Callable[[Way], Compiled], examine: Callable[[Way, Compiled], str | None]
) -> Chosen:
    """Built for the first way that takes this attention and does what it means; the last one's refusal is the caller's."""
    refused: list[tuple[Way, str]] = []
    for way in ways[:-1]:
        try:
            built = build(way)
        except REFUSALS as error:
            refused.append((way, str(error)))
            continue
        reason = examine(way, built)
        if reason is None:
            return Chosen(built, way, tuple(refused))
        refused.append((way, reason))
    return Chosen(build(ways[-1]), ways[-1], tuple(refused))


def refusal(call: Callable[[], object]) -> str | None:
    """What a first launch raises: compilers that work then refuse in ways of their own, where another backend may not.

    Raises:
        torch.OutOfMemoryError, torch.AcceleratorError: as the launch did.
    """
    try:
        call()
    except _OF_DEVICE:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:_SHOWN]}"
    return None


def examine_launched(way: Way, built: Compiled, inputs: op.Call) -> str | None:
    """What the backend says of the forward's kernels after a first launch on the tensors of a call."""
    examine, q = get_backend(way.target.backend).examine, inputs[0]
    if q.is_meta or isinstance(q, FakeTensor) or not q.is_cuda:
        return None
    if examine is None:
        return refusal(lambda: op.run_forward(built, inputs))
    op.run_forward(built, inputs)
    own = [examine(text) for backend, text in built.parts if backend == way.target.backend]
    return next((found.reason for found in own if found.reason is not None), None)


Seconds = Mapping[str, float]
"""Of each plan of an attention, `forward` and `backward`."""


def fastest(
    ways: Sequence[Way],
    build: Callable[[Way], Compiled],
    examine: Callable[[Way, Compiled], str | None],
    measure: Callable[[Compiled], Seconds],
) -> Chosen:
    """The fastest forward of one backend with the fastest gradients of any; of each backend its first way that runs.

    Raises:
        what building the last way raises, if none runs.
    """
    refused: list[tuple[Way, str]] = []
    measured: dict[Way, tuple[Compiled, Seconds]] = {}
    for backend in dict.fromkeys(way.target.backend for way in ways):
        own = [way for way in ways if way.target.backend == backend]
        try:
            chosen = first_that_runs(own, build, examine)
        except REFUSALS as error:
            refused.append((own[-1], str(error)))
            continue
        refused += chosen.refused
        times: dict[str, float] = {}
        reason = refusal(lambda chosen=chosen, times=times: times.update(measure(chosen.compiled)))
        if reason is None:
            measured[chosen.way] = chosen.compiled, times
        else:
            refused.append((chosen.way, reason))
    if not measured:
        return Chosen(build(ways[-1]), ways[-1], tuple(refused))
    best = {plan: min(measured, key=lambda way: measured[way][1][plan]) for plan in next(iter(measured.values()))[1]}
    told = {way: _told(seconds) for way, (_, seconds) in measured.items()}
    taken = _joined(best["forward"], best.get("backward", best["forward"]))
    built = measured[taken][0] if taken in measured else build(taken)
    others = [(way, f"measured {text}") for way, text in told.items() if way not in best.values()]
    why = "; ".join(f"{way.target.backend} measured {told[way]}" for way in dict.fromkeys(best.values()))
    return Chosen(built, taken, (*refused, *others), why)


def _joined(forward: Way, backward: Way) -> Way:
    """One way with the forward of one and the gradients of another."""
    if forward == backward:
        return forward
    gradients = {kind: getattr(backward.schedule, kind) for kind in ("rows", "dq", "dkdv")}
    return replace(forward, schedule=replace(forward.schedule, **gradients), gradients=backward.target.backend)


def _told(seconds: Seconds) -> str:
    return ", ".join(f"{plan} {time * 1e3:.3f} ms" for plan, time in seconds.items())
