"""Schedules in order: what does not build, or does not run as it means, makes way for the next, with a reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from attn_engine.errors import AsyncUnsupportedError
from attn_engine.ir.async_schedule import AsyncSchedule
from attn_engine.ir.schedule import Heads, KernelSchedule, Schedule
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Compiled
from attn_engine.runtime.selection import Way, fastest, first_that_runs, refusal


def way(backend: str, keys: int) -> Way:
    kernel = KernelSchedule(128, keys, 8, 2)
    return Way(Target(backend, "sm_90"), Schedule(kernel, kernel, kernel, kernel))


WAYS = [way("gluon", 128), way("gluon", 64), way("triton", 64)]


APART = SimpleNamespace(reason="it spills", plan=print)
PLANS = {"forward": print, "backward": SimpleNamespace(reason="a product waits", plan=APART)}


def build(chosen: Way) -> Compiled:
    if chosen is WAYS[0]:
        raise AsyncUnsupportedError("its blocks need too much")
    return cast(Compiled, SimpleNamespace(way=chosen, plans=PLANS))


def test_the_first_that_runs_is_taken():
    found = first_that_runs(WAYS, build, lambda way, built: None)
    assert found.way is WAYS[1]
    assert [w for w, _ in found.refused] == WAYS[:1]
    assert "its blocks need too much" in found.lines()[0]
    assert found.lines()[1] == "taken: gluon, forward in blocks of 128 queries and 64 keys, 8 warps, 2 stages"
    assert found.lines()[2:] == [
        "backward: a kernel for each gradient: a product waits",
        "backward: plain kernels: it spills",
    ]


def test_what_an_assembler_undoes_is_not_taken():
    found = first_that_runs(WAYS, build, lambda way, built: "serialised" if way.target.backend == "gluon" else None)
    assert found.way is WAYS[2] and [reason for _, reason in found.refused][1] == "serialised"


def test_the_refusal_of_the_last_is_the_callers():
    with pytest.raises(AsyncUnsupportedError):
        first_that_runs(WAYS[:1], build, lambda way, built: None)


def test_the_last_is_taken_as_it_is():
    found: Any = first_that_runs(WAYS[:2], build, lambda way, built: "serialised")
    assert found.way is WAYS[1]


TIMES = {"gluon": {"forward": 1e-3, "backward": 4e-3}, "triton": {"forward": 2e-3, "backward": 3e-3}}


def times(built: Any) -> dict[str, float]:
    return TIMES[built.way.target.backend]


def test_forward_and_gradients_are_each_the_fastest():
    found = fastest(WAYS, build, lambda way, built: None, times)
    assert (found.way.target.backend, found.way.gradients) == ("gluon", "triton")
    assert found.way.schedule.forward == WAYS[1].schedule.forward
    assert found.way.schedule.dq == WAYS[2].schedule.dq
    assert found.lines()[-3].endswith(
        "gradients by triton (gluon measured forward 1.000 ms, backward 4.000 ms;"
        " triton measured forward 2.000 ms, backward 3.000 ms)"
    )


def test_what_is_slower_in_both_is_refused_with_its_times():
    slow = {"gluon": {"forward": 3e-3}, "triton": {"forward": 2e-3}}
    found = fastest(WAYS, build, lambda way, built: None, lambda built: slow[cast(Any, built).way.target.backend])
    assert found.way is WAYS[2] and found.way.gradients == ""
    assert (WAYS[1], "measured forward 3.000 ms") in found.refused


def test_a_backend_that_refuses_is_not_measured():
    found = fastest([WAYS[0], WAYS[2]], build, lambda way, built: None, times)
    assert found.way is WAYS[2] and "need too much" in found.refused[0][1]
    with pytest.raises(AsyncUnsupportedError):
        fastest(WAYS[:1], build, lambda way, built: None, times)


def test_a_compiler_that_fails_at_the_first_launch_is_passed_over():
    def fails(built: Any) -> dict[str, float]:
        if built.way.target.backend == "gluon":
            raise RuntimeError("no layout found")
        return times(built)

    found = fastest(WAYS, build, lambda way, built: None, fails)
    assert found.way is WAYS[2] and (WAYS[1], "RuntimeError: no layout found") in found.refused
    assert refusal(lambda: 1 // 0) == "ZeroDivisionError: integer division or modulo by zero"
    assert refusal(lambda: None) is None


def test_a_device_that_fails_is_no_refusal():
    def full():
        raise torch.OutOfMemoryError("no memory is left")

    with pytest.raises(torch.OutOfMemoryError, match="no memory is left"):
        refusal(full)


@pytest.mark.parametrize("heads", [(64, 64), (96, 96), (128, 128), (192, 128), (128, 256), (256, 256)])
@pytest.mark.parametrize("gathered", [0, 2, 4])
def test_candidates_differ_and_hold_their_registers(heads: tuple[int, int], gathered: int):
    found = AsyncSchedule().candidates(Heads(*heads, "bf16", gathered))
    assert len(set(found)) == len(found) > 1
    for m, n, warps, _ in found:
        consumers = warps // 4
        assert m == 64 * consumers and AsyncSchedule.fits(consumers, n, 0, max(heads))
