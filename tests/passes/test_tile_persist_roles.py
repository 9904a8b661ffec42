"""Programs of roles that go on to further tiles, under random schedules: results are those of programs of one tile."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from xdsl.dialects import scf
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine.backends.gluon.legalize import GRADIENTS, LATE
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.dialects.tile_async_memory import FetchAddOp
from attn_engine.frontend import Definition
from attn_engine.interpreters import tile, tile_async
from attn_engine.interpreters.tile_async_order import AsyncProtocolError
from attn_engine.interpreters.tile_async_state import DeadlockError
from attn_engine.runtime import driver
from tests.passes.test_tile_async_backward import DEFINITIONS, Compiled, Problem, lower, problem

D = 128
MORE = {
    "no visible queries": Definition(mask_mod=lambda b, h, q, kv: (q >= kv) & (kv < 130)),
    "keys behind all queries": Definition(mask_mod=lambda b, h, q, kv: q + 40 < kv),
}
CASES = {**DEFINITIONS, **MORE}


@cache
def compiled(name: str, d: int = D) -> Compiled:
    trained = ("0",) if name.startswith("trained") else ()
    module, captures = lower(CASES[name], torch.float16, ("q", "k", "v", *trained), fused=True, d=d)
    scheduled = module.clone()
    driver.run_passes(scheduled, LATE)
    return Compiled(module, scheduled, captures, d)


def persists(module: ModuleOp) -> bool:
    """Whether all kernels of roles of the backward take tiles off a counter."""
    roles = [op for op in module.walk() if isinstance(op, RolesOp)]
    takes = [
        any(isinstance(op, FetchAddOp) for op in r.walk()) and any(isinstance(o, scf.WhileOp) for o in r.walk())
        for r in roles
    ]
    assert roles and len(set(takes)) == 1
    return takes[0]


def compare(given: Problem, module: ModuleOp, seed: int, processors: int) -> None:
    want = given.gradients(tile.run_plan, given.made.value)
    assert all(torch.isfinite(w).all() for w in want)
    for a, b in zip(given.gradients(tile_async.run_plan, module, seed=seed, processors=processors), want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.parametrize(
    "name", ["full", "causal", "documents", "alibi", "sigmoid", "trained slopes", "trained keys", *MORE]
)
def test_programs_of_several_tiles(name: str, processors: int):
    """One program takes all tiles, or three take what comes; some have no step at all."""
    made = compiled(name)
    assert persists(made.scheduled)
    compare(problem(made, (1, 2, 1), (150, 300)), made.scheduled, 1, processors)


@pytest.mark.parametrize("sizes", [(1, 1), (129, 130), (5, 0), (0, 5)])
def test_lengths(sizes: tuple[int, int]):
    made = compiled("causal")
    compare(problem(made, (2, 2, 1), sizes), made.scheduled, 2, 2)


def test_more_programs_than_tiles():
    made = compiled("causal")
    compare(problem(made, (1, 1, 1), (70, 90)), made.scheduled, 3, 50)


@pytest.mark.parametrize("d", [16, 64])
def test_results_without_a_slot_of_their_size_keep_programs_of_one_tile(d: int):
    assert not persists(compiled("causal", d).scheduled)


def test_steps_that_depend_on_their_number_keep_programs_of_one_tile():
    """A weight put off to the next step releases nothing in the first one."""
    module, _ = lower(DEFINITIONS["full"], torch.float16)
    driver.run_passes(module, GRADIENTS)
    before = str(module)
    driver.run_passes(module, ("tile-persist-roles",))
    assert str(module) == before and not persists(module)


FAULTS = {
    "the next tile's keys over those in use": ("tile.barrier_wait %owned_free", 0),
    "keys never given back": ("tile.barrier_arrive %owned_free", 0),
    "results over what others still read": ("tile.barrier_wait %done", 0),
    "what a step passes on over results of others that still leave": ("tile.barrier_wait %staged_free", 0),
    "no meeting before it": ("tile.barrier_arrive %staged_free", 0),
    "a number read before it is there": ("tile.barrier_wait %tile_full", 0),
    "consumers not told of a tile": ("tile.barrier_arrive %tile_full", 0),
    "a step that there was not is not passed on": ("tile.barrier_arrive %written", -1),
    "its slot is not given back": ("tile.barrier_arrive %free", -1),
    "nothing of it arrives": ("tile.barrier_arrive %d_o_full", -1),
    "ends while results leave": ("tile.async_store_wait", -1),
    "results of the tile before not waited for": ("tile.async_store_wait", 0),
    "results over sums that still leave": ("tile.async_store_wait 1", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_op_is_found(fault: str):
    """By the rules of the protocol, as a deadlock, or by what the next tile reads."""
    made, (start, number) = compiled("full"), FAULTS[fault]
    lines = str(made.scheduled).split("\n")
    found = [n for n, line in enumerate(lines) if line.strip().startswith(start)]
    text = "\n".join(line for n, line in enumerate(lines) if n != found[number])
    module = Parser(driver.context(), text).parse_module()
    given = problem(made, (1, 1, 1), (150, 500))
    with pytest.raises((AsyncProtocolError, DeadlockError)):
        for seed in range(4):
            given.gradients(tile_async.run_plan, module, seed=seed, processors=1)
