"""Which of several schedules of an attention is taken, and why those before it were not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch._subclasses.fake_tensor import FakeTensor

from attn_engine.backends.backend import get_backend
from attn_engine.errors import AsyncUnsupportedError, UnsupportedOpError, UnsupportedTileShapeError
from attn_engine.ir.schedule import Schedule
from attn_engine.runtime import op
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Compiled

REFUSALS = (AsyncUnsupportedError, UnsupportedOpError, UnsupportedTileShapeError)


@dataclass(frozen=True)
class Way:
    """A target, and a schedule for it."""

    target: Target
    schedule: Schedule

    def __str__(self) -> str:
        m, n, warps, stages = self.schedule.forward
        return f"{self.target.backend}, forward in blocks of {m} queries and {n} keys, {warps} warps, {stages} stages"


@dataclass(frozen=True)
class Chosen:
    """What was built, and which ways before it were refused, each with the reason."""

    compiled: Compiled
    way: Way
    refused: tuple[tuple[Way, str], ...] = ()

    def lines(self) -> list[str]:
        plans = {name: getattr(plan, "reason", None) for name, plan in self.compiled.plans.items()}
        plain = [f"{name}: plain kernels: {reason}" for name, reason in plans.items() if reason is not None]
        return [*(f"not {way}: {reason}" for way, reason in self.refused), f"taken: {self.way}", *plain]


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


def examine_launched(way: Way, built: Compiled, inputs: op.Call) -> str | None:
    """What the backend says of the forward's kernels after a first launch on the tensors of a call."""
    examine, q = get_backend(way.target.backend).examine, inputs[0]
    if examine is None or q.is_meta or isinstance(q, FakeTensor) or not q.is_cuda:
        return None
    op.run_forward(built, inputs)
    own = [examine(text) for backend, text in built.parts if backend == way.target.backend]
    return next((found.reason for found in own if found.reason is not None), None)
