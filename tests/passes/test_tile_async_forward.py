"""The forward through every pass to the async level, under random schedules: what it means never changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine import library, pipelines
from attn_engine.backends.gluon.legalize import PREPARE, SCHEDULE, supports
from attn_engine.dialects import tile as dialect
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.frontend import Definition, build
from attn_engine.interpreters import tile_async
from attn_engine.interpreters.tile_async_order import AsyncProtocolError
from attn_engine.interpreters.tile_async_state import DeadlockError
from attn_engine.passes.lowering.kernel import Blocks
from attn_engine.runtime import driver

D, N = 16, 64
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENTS = torch.arange(1000) // 90
TABLE = torch.randn(1, 4, 304, 312, generator=torch.Generator().manual_seed(1)).half()
CHOSEN = torch.tensor([3, 1, -4, 2], dtype=torch.int32)


def far(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Rows that see nothing, and then ever more keys."""
    return q_idx >= kv_idx + 150


def first_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 8


def first_or_near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Two ranges of blocks, of which the first holds whole ones."""
    return (q_idx >= kv_idx) & ((kv_idx < 70) | (q_idx - kv_idx < 60))


@dataclass(frozen=True)
class Case:
    definition: Definition
    row: Callable[[Tensor, Tensor], Tensor] = field(
        default=lambda s, seen: s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    )
    """The weights, densely, from scores and visibility."""


CASES: dict[str, Case] = {
    "full": Case(Definition()),
    "causal": Case(Definition(mask_mod=library.causal)),
    "window": Case(Definition(mask_mod=library.sliding_window(100))),
    "prefix": Case(Definition(mask_mod=library.prefix_lm(70))),
    "sinks": Case(
        Definition(mask_mod=library.or_masks(library.sliding_window(60), library.and_masks(library.causal, first_keys)))
    ),
    "first keys or window": Case(Definition(mask_mod=first_or_near)),
    "dead rows": Case(Definition(mask_mod=far)),
    "documents": Case(Definition(mask_mod=library.document(DOCUMENTS))),
    "alibi": Case(Definition(score_mod=library.alibi(SLOPES), mask_mod=library.causal)),
    "soft cap": Case(Definition(score_mod=library.soft_cap(2.0))),
    "sigmoid": Case(
        Definition(row=library.sigmoid, mask_mod=library.causal), lambda s, seen: torch.where(seen, s.sigmoid(), 0.0)
    ),
    "relu": Case(Definition(row=library.relu), lambda s, seen: torch.where(seen, s.relu(), 0.0)),
    "cosine": Case(
        Definition(row=library.cosine, mask_mod=library.causal),
        lambda s, seen: torch.where(seen, s, 0.0) / torch.where(seen, s, 0.0).norm(dim=-1, keepdim=True),
    ),
    "table": Case(Definition(score_mod=library.bias(TABLE), mask_mod=library.causal)),
    "chosen tables": Case(
        Definition(score_mod=lambda s, b, h, q, kv: (s + TABLE[0, CHOSEN[h], q, kv]) * TABLE[0, 1, q, kv]),
    ),
    "distances": Case(
        Definition(score_mod=lambda s, b, h, q, kv: s + TABLE[0, h, 0, (q - kv) % 300], mask_mod=library.causal)
    ),
    "distances of batches, twice": Case(
        Definition(
            score_mod=lambda s, b, h, q, kv: torch.tanh(s + TABLE[0, b, 0, (kv - q) % 300]) / (2 + torch.abs(q - kv)),
            mask_mod=first_or_near,
        )
    ),
    "query_mod": Case(Definition(query_mod=lambda x: x * 0.5 + 0.25, mask_mod=library.causal)),
}


@dataclass(frozen=True)
class Compiled:
    case: Case
    value: ModuleOp
    captures: list[Tensor]
    rows: int

    def scheduled(self, passes: int = len(SCHEDULE), queries: str | None = None) -> ModuleOp:
        module = self.value.clone()
        pipeline = f'tile-pipeline{{queries="{queries}"}}' if queries else "tile-pipeline"
        for spec in (*PREPARE, *(pipeline if s == "tile-pipeline" else s for s in SCHEDULE[:passes])):
            driver.run_passes(module, (spec,))
        return module


@cache
def compiled(name: str, dtype: torch.dtype = torch.float16, blocks: Blocks | None = None) -> Compiled:
    case, blocks = CASES[name], blocks or Blocks(128, N, 8, 2)
    traced = build(case.definition, dtype=dtype, head_dim=D, head_dim_v=D, return_lse=case.definition.row is None)
    module = driver.to_attn(traced.module, ())
    rows = driver.signature(module).outputs
    schedule = f"{blocks.m},{blocks.n},{blocks.num_warps},{blocks.num_stages}"
    convert = f'convert-attn-to-tile{{forward={schedule} tables=false distances="loaded"}}'
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP))
    return Compiled(case, module, list(traced.captures), rows)


@cache
def scheduled(name: str) -> ModuleOp:
    return compiled(name).scheduled()


def inputs(heads: tuple[int, int, int], sizes: tuple[int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    (batch, q_heads, kv_heads), (sq, skv) = heads, sizes
    generator = torch.Generator().manual_seed(sq + 1000 * skv)
    q = torch.randn(batch, q_heads, sq, D, generator=generator)
    k, v = (torch.randn(batch, kv_heads, skv, D, generator=generator) for _ in range(2))
    return [x.half().to(dtype) for x in (q, k, v)]


def outputs(q: Tensor, rows: int) -> list[Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [torch.full_like(q, torch.nan), *(torch.full(q.shape[:3], torch.nan, dtype=wide) for _ in range(rows))]


def dense(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    definition = case.definition
    q = definition.query_mod(q) if definition.query_mod is not None else q
    s = q @ k.transpose(2, 3) * D**-0.5
    index = [torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate(s.shape)]
    if definition.score_mod is not None:
        s = definition.score_mod(s, *index)
    seen = torch.ones_like(s, dtype=torch.bool)
    if definition.mask_mod is not None:
        seen = seen & definition.mask_mod(*index)
    return case.row(s, seen) @ v if k.shape[2] else torch.zeros_like(q)


def run(module: ModuleOp, made: Compiled, operands: list[Tensor], seed: int, processors: int = 2) -> list[Tensor]:
    results = outputs(operands[0], made.rows)
    exact = operands[0].dtype == torch.float64
    captures = [c.double() if exact and c.is_floating_point() else c for c in made.captures]
    arguments = [*operands, *results, *captures, D**-0.5]
    tile_async.run_plan(module, "forward", arguments, seed=seed, processors=processors, exact=exact)
    return results


def check(name: str, heads: tuple[int, int, int], sizes: tuple[int, int], seeds: range, processors: int = 2) -> None:
    """Against dense attention in float64; what remains are constants that are rounded to f32."""
    made, operands = compiled(name), inputs(heads, sizes)
    want = dense(made.case, *operands)
    for seed in seeds:
        o, *_ = run(scheduled(name), made, operands, seed, processors)
        torch.testing.assert_close(o, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_definitions(name: str):
    check(name, (1, 4, 2), (200, 300), range(3))


@pytest.mark.parametrize("name", ["full", "causal", "dead rows"])
@pytest.mark.parametrize("sizes", [(1, 1), (127, 128), (128, 127), (129, 200), (300, 129), (5, 0)])
def test_lengths(name: str, sizes: tuple[int, int]):
    check(name, (1, 2, 1), sizes, range(3))


SHAPES = {
    "three consumers": (Blocks(192, N, 12, 3), None),
    "three consumers, queries shared": (Blocks(192, N, 12, 2), "shared"),
    "one consumer": (Blocks(64, N, 4, 2), "shared"),
    "queries shared": (Blocks(128, N, 8, 2), "shared"),
    "rings of one slot": (Blocks(128, N, 8, 1), None),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["causal", "sinks", "sigmoid", "dead rows"])
def test_schedules(name: str, shape: str):
    blocks, queries = SHAPES[shape]
    made, operands = compiled(name, blocks=blocks), inputs((1, 2, 1), (300, 129))
    module, want = made.scheduled(queries=queries), dense(made.case, *operands)
    assert ("tile.read" in str(module)) == (queries is None)
    for seed in range(2):
        o, *_ = run(module, made, operands, seed)
        torch.testing.assert_close(o, want, atol=2e-6, rtol=2e-6)


def test_tables_are_copied_in_blocks():
    """No element is gathered; the batch is the inner axis of the tiles, for all of it reads the same table."""
    text = str(scheduled("table"))
    assert "tile.gather" not in text and text.count("tile.async_load %table_copies") == 3
    assert "tile.part" in text and re.search(r"%h\S* = arith.divsi %head\S*, %batch", text)
    check("table", (3, 4, 2), (200, 300), range(2))


BEYOND: dict[str, Callable[..., Any]] = {
    "a number": lambda s, b, h, q, kv: s + TABLE[5, h, q, kv],
    "heads": lambda s, b, h, q, kv: s + TABLE[0, h + 2, q, kv],
    "before the first": lambda s, b, h, q, kv: s + TABLE[0, h - 6, q, kv],
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_table_has_nothing_beyond_its_ends(name: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever the index that is outside: blocks are 0 there, as gathered elements are, and no access leaves the table."""
    monkeypatch.setitem(CASES, f"beyond, {name}", Case(Definition(score_mod=BEYOND[name])))
    made, operands = compiled(f"beyond, {name}"), inputs((1, 4, 4), (200, 300))
    prepared = made.scheduled(0)
    assert "tile.gather" not in str(prepared)
    table = {
        "a number": torch.zeros(4),
        "heads": torch.tensor([1.0, 1, 0, 0]),
        "before the first": torch.tensor([0.0, 0, 1, 1]),
    }
    head = {"heads": [2, 3, 0, 0], "before the first": [0, 0, 0, 1]}.get(name, [0] * 4)
    added = TABLE[0, head, :200, :300].double() * table[name][:, None, None]
    q, k, v = operands
    want = (q @ k.transpose(2, 3) * D**-0.5 + added).softmax(-1) @ v
    for module in (prepared, made.scheduled()):
        o, *_ = run(module, made, operands, seed=0)
        torch.testing.assert_close(o, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("processors", [1, 5])
def test_one_program_and_more_than_tiles(processors: int):
    check("causal", (1, 3, 3), (300, 300), range(2), processors)


def heads_in_flight(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int], length: int) -> int:
    """What a plan passes on where 16384 positions fit."""
    module = compiled("causal").value.clone()
    driver.run_passes(module, (f"tile-schedule-grid{{l2_bytes={16384 * 4 * D}}}",))
    seen: list[int] = []

    def launch(host: tile_async.Host, op: dialect.LaunchOp) -> list[Any]:
        kernel = next(o for o in module.ops if isinstance(o, dialect.KernelOp))
        names = [argument.name_hint for argument in kernel.body.block.args]
        seen.extend(host.ints([op.arguments[names.index("heads_in_flight")]]))
        return []

    monkeypatch.setitem(tile_async._HOST_RULES, dialect.LaunchOp, launch)  # pyright: ignore[reportPrivateUsage]
    batch, q_heads, kv_heads = heads
    q, k = (torch.empty(batch, h, length, D, dtype=torch.float16) for h in (q_heads, kv_heads))
    rows = torch.empty(batch, q_heads, length)
    tile_async.run_plan(module, "forward", [q, k, k, q, rows, 1.0], processors=132)
    return seen[0]


@pytest.mark.parametrize(
    ("heads", "length", "expected"),
    [
        ((1, 32, 8), 8192, 8),  # two heads of keys, four times
        ((1, 20, 10), 2048, 10),  # 8 heads of keys fit, of 10: two times 5, not 8 and 2
        ((1, 24, 3), 6144, 16),  # heads that share keys stay together: 2 and 1
        ((1, 7, 7), 4096, 4),
        ((1, 9, 9), 4096, 3),
        ((3, 4, 2), 30000, 2),
        ((0, 4, 2), 64, 1),
        ((1, 4, 4), 0, 4),
    ],
)
def test_groups_of_heads_are_alike(
    heads: tuple[int, int, int], length: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    assert heads_in_flight(monkeypatch, heads, length) == expected


FAULTS = {
    "slot of K never released": "tile.barrier_arrive %k_empty",
    "copy of V not waited for": "tile.barrier_wait %v_full",
    "tile never announced": "tile.barrier_arrive %tile_full",
    "output stored without a fence": "tile.proxy_fence",
}
TABLE_FAULTS = {
    "slot of a table never released": "tile.barrier_arrive %table_empty",
    "copy of a table not waited for": "tile.barrier_wait %table_full",
    "table read and refilled without a fence": "tile.proxy_fence",
}


PLANTED = [*((fault, "causal") for fault in FAULTS), *((fault, "first keys or window") for fault in list(FAULTS)[:2])]


@pytest.mark.parametrize(("fault", "name"), [*PLANTED, *((fault, "table") for fault in TABLE_FAULTS)])
def test_a_missing_op_is_found(fault: str, name: str):
    """Every handshake that the passes make is needed: without it a schedule deadlocks or races."""
    place = -1 if fault in FAULTS else 1
    start = FAULTS.get(fault) or TABLE_FAULTS[fault]
    lines = str(scheduled(name)).split("\n")
    found = [n for n, line in enumerate(lines) if line.strip().startswith(start)]
    text = "\n".join(line for n, line in enumerate(lines) if n != found[place])
    module = Parser(driver.context(), text).parse_module()
    made = compiled(name)
    operands = inputs((1, 2, 1), (200, 300))
    with pytest.raises((AsyncProtocolError, DeadlockError)):
        for seed in range(8):
            run(module, made, operands, seed)


def test_what_is_not_taken_says_why():
    wide = Definition(key_mod=lambda x: x * 2.0)
    three_passes = Definition(row=lambda s: torch.exp(s - s.sum()) / torch.exp(s - s.sum()).sum())
    for definition, dtype, d, reason in (
        (Definition(), torch.float32, D, "not f16 or bf16"),
        (Definition(), torch.bfloat16, 512, "registers"),
        (wide, torch.float16, D, "modifies keys"),
        (three_passes, torch.float16, D, "more than one pass"),
    ):
        traced = build(definition, dtype=dtype, head_dim=d, head_dim_v=d)
        module = driver.to_attn(traced.module, ())
        driver.run_passes(module, ("convert-attn-to-tile{forward=128,64,8,2}", *pipelines.TILE_CLEANUP))
        found = supports(module)
        assert found is not None and reason in found
        with pytest.raises(AsyncUnsupportedError, match=reason):
            driver.run_passes(module, (SCHEDULE[0],))


def test_shared_memory_is_a_reason():
    made = compiled("full")
    module = made.scheduled(SCHEDULE.index("tile-pipeline"))
    with pytest.raises(AsyncUnsupportedError, match="shared memory"):
        driver.run_passes(module, ("tile-pipeline{stages=64 shared_bytes=100000}",))


def test_the_output_leaves_through_the_queries_where_room_is_short():
    """12 KiB for queries, keys and values in two stages; 16 KiB with a slot of its own for the output."""
    made, operands = compiled("causal"), inputs((1, 2, 1), (300, 129))
    module = made.value.clone()
    pipeline = "tile-pipeline{shared_bytes=13000}"
    driver.run_passes(module, (*PREPARE, *(pipeline if s == "tile-pipeline" else s for s in SCHEDULE)))
    assert "tile.read" not in str(module) and str(module).count("= tile.ring : !tile.buffer<2x64x16x") == 3
    o, *_ = run(module, made, operands, seed=0)
    torch.testing.assert_close(o, dense(made.case, *operands), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("hold", ["true", "false"])
@pytest.mark.parametrize("name", ["causal", "sigmoid"])
def test_when_slots_are_released_changes_nothing(name: str, hold: str):
    """Behind the wait for the product that read them, or under the next ones: then loops carry which is free."""
    made, operands = compiled(name), inputs((1, 2, 1), (300, 129))
    module = made.value.clone()
    order = f"tile-order-async{{hold={hold}}}"
    driver.run_passes(module, (*PREPARE, *(order if s == "tile-order-async" else s for s in SCHEDULE)))
    assert ("%free" in str(module).partition("role count 1")[0]) == (hold == "true")
    for seed in range(2):
        o, *_ = run(module, made, operands, seed)
        torch.testing.assert_close(o, dense(made.case, *operands), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", ["causal", "table"])
def test_threads_may_release_what_products_alone_read(name: str):
    """Each for itself; blocks of a table are read by threads, whose reads only a meeting of the warps orders."""
    made, operands = compiled(name), inputs((1, 4, 2), (300, 312))
    module = made.value.clone()
    apart = "tile-specialize-warps{apart=true}"
    driver.run_passes(module, (*PREPARE, *(apart if s == "tile-specialize-warps" else s for s in SCHEDULE)))
    found = re.findall(r"%(\w+) = tile.make_barriers count 2 : !tile.barriers<2(, 128)?>", str(module))
    apart_of = {name: bool(threads) for name, threads in found}
    assert apart_of["k_empty"] and apart_of["v_empty"] and not apart_of["tile_empty"]
    assert not apart_of.get("table_empty", False)
    o, *_ = run(module, made, operands, seed=0)
    torch.testing.assert_close(o, dense(made.case, *operands), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("d", "dv", "keys", "held"),
    [(64, 64, 128, True), (96, 96, 128, False), (128, 128, 128, False), (128, 128, 64, True), (192, 128, 64, False)],
)
@pytest.mark.parametrize("meets", [False, True])
def test_slots_are_held_where_products_are_short(d: int, dv: int, keys: int, held: bool, meets: bool):
    """And warps meet to release them: those of softmax, whose steps exchange maxima, do not."""
    definition = Definition(row=library.relu) if meets else Definition()
    traced = build(definition, dtype=torch.bfloat16, head_dim=d, head_dim_v=dv)
    module = driver.to_attn(traced.module, ())
    convert = f"convert-attn-to-tile{{forward=128,{keys},8,2 channels=32}}"
    driver.run_passes(module, (convert, *pipelines.TILE_CLEANUP, *PREPARE, *SCHEDULE))
    assert ("%free" in str(module).partition("role count 1")[0]) == (held and meets)
