"""The backward through every pass to the async level, under random schedules: what it means never changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine import library, pipelines
from attn_engine.backends.gluon.legalize import GRADIENTS, LATE, ORDERED
from attn_engine.dialects import tile as dialect
from attn_engine.dialects.tile_async import RolesOp
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile, tile_async
from attn_engine.interpreters.tile_async_order import AsyncProtocolError
from attn_engine.interpreters.tile_async_state import DeadlockError
from attn_engine.passes.hopper.role_steps import role_steps
from attn_engine.runtime import driver

D = 16
SCHEDULE = GRADIENTS
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
KEYS = torch.linspace(0.5, 1.5, 400)
DOCUMENTS = torch.arange(1000) // 90
DEFINITIONS = {
    "full": Definition(),
    "causal": Definition(mask_mod=library.causal),
    "window": Definition(mask_mod=library.sliding_window(100)),
    "prefix": Definition(mask_mod=library.prefix_lm(70)),
    "first keys or window": Definition(
        mask_mod=lambda b, h, q, kv: (q >= kv) & ((kv < 140) | (q - kv < 200)),
    ),
    "first keys or document": Definition(
        mask_mod=library.or_masks(library.document(torch.arange(1000) // 260), lambda b, h, q, kv: kv < 70)
    ),
    "dead rows": Definition(mask_mod=lambda b, h, q, kv: q >= kv + 150),
    "documents": Definition(mask_mod=library.document(DOCUMENTS)),
    "alibi": Definition(score_mod=library.alibi(SLOPES), mask_mod=library.causal),
    "soft cap": Definition(score_mod=library.soft_cap(2.0)),
    "sigmoid": Definition(row=library.sigmoid, mask_mod=library.causal),
    "relu": Definition(row=library.relu),
    "trained slopes": Definition(score_mod=library.alibi(SLOPES), mask_mod=library.causal),
    "trained keys": Definition(score_mod=lambda s, b, h, q, kv: s + KEYS[kv]),
    "trained queries": Definition(score_mod=lambda s, b, h, q, kv: s * KEYS[q], mask_mod=library.causal),
}


@dataclass(frozen=True)
class Compiled:
    value: ModuleOp
    scheduled: ModuleOp
    captures: list[Tensor]
    d: int = D

    def arguments(self, plan: str) -> list[str]:
        op = next(o for o in self.value.ops if isinstance(o, dialect.PlanOp) and o.sym_name.data == plan)
        return [a.name_hint or "" for a in op.body.block.args]


def lower(
    definition: Definition,
    dtype: torch.dtype,
    wrt: tuple[str, ...] = ("q", "k", "v"),
    fused: bool = False,
    stages: int = 2,
    alike: bool = False,
    d: int = D,
) -> Any:
    traced = build(definition, dtype=dtype, head_dim=d, head_dim_v=d, return_lse=definition.row is None)
    module = driver.to_attn(traced.module, wrt)
    blocks = f"forward=64,64,4,2 dq=128,64,8,{stages} dkdv=64,128,8,{stages}"
    convert = f"convert-attn-to-tile{{{blocks} tables=true fused={str(fused).lower()} alike={str(alike).lower()}}}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP))
    return module, list(traced.captures)


@cache
def at_value_level(name: str, fused: bool) -> tuple[ModuleOp, list[Tensor]]:
    trained = ("0",) if name.startswith("trained") else ()
    return lower(DEFINITIONS[name], torch.float16, ("q", "k", "v", *trained), fused)


def compiled(name: str, fused: bool = False) -> Compiled:
    return scheduled(name, fused)


@cache
def scheduled(name: str, fused: bool) -> Compiled:
    module, captures = at_value_level(name, fused)
    result = module.clone()
    for spec in LATE if fused else SCHEDULE:
        driver.run_passes(result, (spec,))
    return Compiled(module, result, captures)


@cache
def prefix(name: str, passes: int, fused: bool) -> ModuleOp:
    """After that many passes, the last of them on what those before it gave."""
    if passes == 0:
        return at_value_level(name, fused)[0]
    module = prefix(name, passes - 1, fused).clone()
    driver.run_passes(module, ((LATE if fused else SCHEDULE)[passes - 1],))
    return module


@dataclass
class Problem:
    """Operands, and what a forward at the value level gives."""

    made: Compiled
    operands: dict[str, Tensor]
    rest: list[Tensor]

    def gradients(self, run: Any, module: ModuleOp, **options: Any) -> list[Tensor]:
        names = self.made.arguments("backward")
        wanted = [n for n in ("dq", "dk", "dv") if n in names]
        found = {n: torch.full_like(self.operands[n[1:]], torch.nan) for n in wanted}
        for name in names[names.index(wanted[-1]) + 1 : -1]:
            found[name] = torch.full_like(self.made.captures[0].double(), torch.nan)
        arguments = [*self.operands.values(), *self.rest, *found.values(), self.made.d**-0.5]
        run(module, "backward", arguments, exact=True, **options)
        return list(found.values())


def problem(made: Compiled, heads: tuple[int, int, int], sizes: tuple[int, int]) -> Problem:
    (batch, q_heads, kv_heads), (sq, skv) = heads, sizes
    generator = torch.Generator().manual_seed(sq + 1000 * skv)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).half().double()

    q, d_o = (random(batch, q_heads, sq, made.d) for _ in range(2))
    k, v = (random(batch, kv_heads, skv, made.d) for _ in range(2))
    captures = [c.double() if c.is_floating_point() else c for c in made.captures]
    o, names = torch.zeros_like(q), made.arguments("forward")
    count = sum(n.startswith(("output", "saved")) for n in names)
    rows = [torch.full(q.shape[:3], torch.nan, dtype=torch.float64) for _ in range(count)]
    tile.run_plan(made.value, "forward", [q, k, v, o, *rows, *captures, made.d**-0.5], exact=True)
    saved = sum(n.startswith("saved") for n in names)
    d_rows = [random(batch, q_heads, sq) for n in made.arguments("backward") if n.startswith("d_output")]
    return Problem(made, {"q": q, "k": k, "v": v, "o": o, "d_o": d_o}, [*rows[count - saved :], *d_rows, *captures])


def check(name: str, heads: tuple[int, int, int], sizes: tuple[int, int], seeds: range, fused: bool = False) -> None:
    """Against the value level, which is checked against autograd elsewhere; the order of sums is the same."""
    made = compiled(name, fused=fused)
    given = problem(made, heads, sizes)
    want = given.gradients(tile.run_plan, made.value)
    assert all(torch.isfinite(w).all() for w in want)
    for seed in seeds:
        got = given.gradients(tile_async.run_plan, made.scheduled, seed=seed)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if not name.startswith("first keys")])
def test_definitions(name: str):
    check(name, (1, 2, 1), (150, 200), range(2))


@pytest.mark.parametrize(
    ("name", "fused"),
    [("first keys or window", False), ("first keys or window", True), ("first keys or document", True)],
)
def test_two_ranges_of_blocks_are_one(name: str, fused: bool):
    """With whole blocks in both, seen from the queries and from the keys: two loops of each consumer are left.

    Those of the gradients of keys stand in a loop over heads, in front of which the numbers of documents are loaded.
    """
    check(name, (1, 2, 1), (500, 520), range(1), fused)
    for roles in [op for op in compiled(name, fused=fused).scheduled.walk() if isinstance(op, RolesOp)]:
        assert len(list(role_steps(roles.bodies[0].block))) == 2


@pytest.mark.parametrize("name", ["full", "causal"])
@pytest.mark.parametrize("sizes", [(1, 1), (127, 128), (129, 130), (5, 0)])
def test_lengths(name: str, sizes: tuple[int, int]):
    check(name, (1, 2, 1), sizes, range(2))


FUSED = ("causal", "documents", "sigmoid", "trained slopes", "trained keys")


@pytest.mark.parametrize("name", FUSED)
def test_fused_gradients_mean_what_two_kernels_do(name: str):
    """At the value level and under random schedules; dq is added up in any order."""
    apart, fused = compiled(name), compiled(name, fused=True)
    assert "@backward_dq(" in str(apart.value) and "@backward_dq(" not in str(fused.value)
    given = problem(apart, (1, 2, 1), (150, 200))
    want = given.gradients(tile.run_plan, apart.value)
    runs = [(tile.run_plan, fused.value, {}), *((tile_async.run_plan, fused.scheduled, {"seed": n}) for n in range(2))]
    for run, module, options in runs:
        for a, b in zip(given.gradients(run, module, **options), want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("schedule", [GRADIENTS, LATE, ORDERED], ids=["in their step", "a step late", "in turn"])
@pytest.mark.parametrize("fused", [False, True])
def test_rings_of_one_slot(fused: bool, schedule: tuple[str, ...]):
    """No step waits for the slot of the next one before it has released its own: blocks of four bytes leave room for no other."""
    module, captures = lower(DEFINITIONS["full"], torch.float16, fused=fused, stages=1, alike=schedule is ORDERED)
    scheduled = module.clone()
    driver.run_passes(scheduled, schedule if fused else GRADIENTS)
    given = problem(Compiled(module, scheduled, captures), (1, 2, 1), (150, 300))
    want = given.gradients(tile.run_plan, module)
    for seed in range(2):
        for a, b in zip(given.gradients(tile_async.run_plan, scheduled, seed=seed), want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_keys_beyond_the_end_add_nothing_to_dq():
    """Their scores would grow on: weights that no sum over visible ones bounds."""
    steep = Definition(score_mod=lambda s, b, h, q, kv: s + 40.0 * kv)
    module, captures = lower(steep, torch.float16, fused=True)
    scheduled = module.clone()
    driver.run_passes(scheduled, SCHEDULE)
    given = problem(Compiled(module, scheduled, captures), (1, 2, 1), (150, 200))
    apart, _ = lower(steep, torch.float16)
    want = given.gradients(tile.run_plan, apart)
    assert all(torch.isfinite(w).all() for w in want)
    for run, fused, options in ((tile.run_plan, module, {}), (tile_async.run_plan, scheduled, {"seed": 0})):
        for a, b in zip(given.gradients(run, fused, **options), want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("sizes", [(1, 1), (129, 130), (5, 0), (0, 5), (64, 400)])
def test_fused_lengths(sizes: tuple[int, int]):
    check("causal", (1, 4, 2), sizes, range(2), fused=True)


@pytest.mark.parametrize("wrt", [("q", "k"), ("q", "v")])
def test_fused_gradients_of_some_operands(wrt: tuple[str, ...]):
    """Without dv, the arithmetic of a step is one stage behind both products; without dk, it has one sum less."""
    module, captures = lower(DEFINITIONS["causal"], torch.float16, wrt, fused=True)
    scheduled = module.clone()
    driver.run_passes(scheduled, SCHEDULE)
    given = problem(Compiled(module, scheduled, captures), (1, 4, 2), (150, 200))
    want = given.gradients(tile.run_plan, module)
    assert len(want) == len(wrt) and all(torch.isfinite(w).all() for w in want)
    for seed in range(2):
        got = given.gradients(tile_async.run_plan, scheduled, seed=seed)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_captures_that_queries_own_keep_two_kernels():
    assert "@backward_dq(" in str(compiled("trained queries", fused=True).value)


FUSED_FAULTS = {
    "rows of the other consumers not waited for": ("tile.barrier_wait %written", 1),
    "rows not told to the other consumers": ("tile.barrier_arrive %written", 0),
    "results over an operand that others still read": ("tile.barrier_wait %done", 0),
    "a result written over the one before": ("tile.async_store_wait", 1),
    "added before the fence": ("tile.proxy_fence", 3),
    "written rows not fenced": ("tile.proxy_fence", 2),
    "ends before the last addition": ("tile.async_store_wait", -1),
}


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_a_missing_op_of_fused_gradients_is_found(fault: str):
    made, (start, number) = compiled("full", fused=True), FUSED_FAULTS[fault]
    lines = str(made.scheduled).split("\n")
    found = [n for n, line in enumerate(lines) if line.strip().startswith(start)]
    text = "\n".join(line for n, line in enumerate(lines) if n != found[number])
    module = Parser(driver.context(), text).parse_module()
    given = problem(made, (1, 1, 1), (400, 150))
    with pytest.raises((AsyncProtocolError, DeadlockError)):
        for seed in range(8):
            given.gradients(tile_async.run_plan, module, seed=seed)


FAULTS = {
    "slots never released": "tile.barrier_arrive %free",
    "block not waited for": "tile.barrier_wait %d_o_full",
    "owned block not waited for": "tile.barrier_wait %k_full",
    "vectors read without a fence": "tile.proxy_fence",
    "copied before the slot is free": "tile.barrier_wait %free",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_missing_op_is_found(fault: str):
    """Every handshake that the passes make is needed: without it a schedule deadlocks or races."""
    made = compiled("causal")
    lines = str(made.scheduled).split("\n")
    found = [n for n, line in enumerate(lines) if line.strip().startswith(FAULTS[fault])]
    text = "\n".join(line for n, line in enumerate(lines) if n != found[-1])
    module = Parser(driver.context(), text).parse_module()
    given = problem(made, (1, 1, 1), (400, 150))
    with pytest.raises((AsyncProtocolError, DeadlockError)):
        for seed in range(8):
            given.gradients(tile_async.run_plan, module, seed=seed)


def test_sums_are_added_a_step_late():
    """In a step: scores' gradients under dv, dq of the step before under dk, which ends under the next scores."""
    text = str(compiled("full", fused=True).scheduled)
    waits = [line.split("tile.wait ")[1] for line in text.split("\n") if "tile.wait " in line]
    assert [w[0] for w in waits] == ["0", *["1", "1", "1", "0"] * 2, "0"]
    assert [w.count("->") + w.split("->")[1].count(",") for w in waits[1:5]] == [1, 2, 1, 1]


def test_sums_of_their_own_step_are_added_under_the_next_scores():
    """In a step: scores' gradients under dv, which ends before dq starts behind dk, and both end under the next scores."""
    module, _ = lower(DEFINITIONS["full"], torch.float16, fused=True)
    driver.run_passes(module, GRADIENTS)
    waits = [line.split("tile.wait ")[1] for line in str(module).split("\n") if "tile.wait " in line]
    assert [w[0] for w in waits] == ["0", *["1", "1", "1", "0"] * 2]
    assert [w.count("->") + w.split("->")[1].count(",") for w in waits[1:5]] == [1, 1, 2, 1]


OVERLAPPED = {
    "tile-overlap-products": (["1", "0", "0"] * 2, ["1", "1", "0"] * 2),
    "tile-rotate-steps": (["1", "0", "0"] * 2, ["0", *["1", "1", "0"] * 2]),
    "tile-defer-product": ([*["2", "1", "0"] * 2, "0"], ["0", *["1", "1", "0"] * 2]),
}
"""How many products are in flight where one is waited for, in dq and in dk/dv, behind each of the last passes."""


@pytest.mark.parametrize("last", OVERLAPPED)
def test_products_overlap_with_the_arithmetic_between_them(last: str):
    text = str(prefix("causal", SCHEDULE.index(last) + 1, False))
    dq, dkdv = text[text.index("@backward_dq(") : text.index("@backward_dkdv(")], text[text.index("@backward_dkdv(") :]
    for kernel, waits in zip((dq, dkdv), OVERLAPPED[last], strict=True):
        assert [line.split("tile.wait ")[1][0] for line in kernel.split("\n") if "tile.wait " in line] == waits


def test_what_is_not_taken_says_why():
    for definition, dtype, reason in (
        (Definition(), torch.float32, "not f16 or bf16"),
        (Definition(key_mod=lambda x: x * 2.0), torch.float16, "does not read a block as it was loaded"),
    ):
        module, _ = lower(definition, dtype)
        with pytest.raises(AsyncUnsupportedError, match=reason):
            driver.run_passes(module, SCHEDULE)
