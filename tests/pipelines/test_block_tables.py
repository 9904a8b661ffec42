"""Tables of ranges of blocks, as plans compute them: right, precise on documents, and what they skip is never read."""

from unittest import mock

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp, f32

import attn_engine
from attn_engine.backends.backend import get_backend
from attn_engine.dialects import attn
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.interpreters.tile import run_plan
from attn_engine.passes.lowering import block_ranges
from attn_engine.passes.lowering import tables as lowering
from attn_engine.passes.lowering.frame import Operands
from attn_engine.passes.lowering.kernel import Plan, global_of
from attn_engine.passes.lowering.tables import Tables
from attn_engine.runtime import driver
from tests.support.block_tables import check_documents, check_skipped, documents
from tests.support.engines import ALL, SMALL


class Exposed(Tables):
    """Tables as arguments of the plan in place of temporaries."""

    def alloc(self, sizes, element, hint):
        return self.plan.argument(hint, lowering.tile.GlobalType(4, element))


def table(mask_mod, sq, skv, own, other, transposed=False, heads=(2, 2), run=run_plan):
    """Ranges [batch or 1, heads or 1, blocks, 4] of a mask, by the tile interpreter."""
    traced = build(Definition(None, mask_mod, None), dtype=torch.float32, head_dim=8, head_dim_v=8)
    op = next(o for o in driver.to_attn(traced.module, ()).walk() if isinstance(o, attn.OnlineOp))
    plan = Plan("tables")
    operands = Operands(op, plan, False, False, False)
    for name in ("q", "k", "v"):
        plan.argument(name, global_of(op.q.type))
    for name, value in zip(operands.capture_names, op.captures, strict=True):
        plan.argument(name, global_of(value.type))
    plan.argument("scale", f32)
    operands.describe()
    tables = operands.tables = Exposed("f", plan, operands)
    tables.ranges(transposed, own, other)
    assert len(tables.kernels) == 1
    module = ModuleOp([*tables.kernels, plan.finish()])
    module.verify()
    q, k = torch.zeros(heads[0], heads[1], sq, 8), torch.zeros(heads[0], heads[1], skv, 8)
    lead = [n if tables._depends(i) else 1 for i, n in enumerate(heads)]
    count = -(-(skv if transposed else sq) // own)
    result = torch.full((*lead, count, 4 * tables.runs), -7, dtype=torch.int32)
    run(module, "tables", [q, k, k, *traced.captures, 1.0, result])
    return result


def truth(mask_mod, sq, skv, b=0, h=0):
    q, kv = torch.arange(sq)[:, None], torch.arange(skv)[None]
    return mask_mod(torch.tensor(b), torch.tensor(h), q, kv).expand(sq, skv)


def check(mask_mod, sq, skv, own, other, transposed=False, exact=False):
    found = table(mask_mod, sq, skv, own, other, transposed)
    skipped = empty = 0
    for b in range(2):
        for h in range(2):
            grid = truth(mask_mod, sq, skv, b, h)
            grid = grid.T if transposed else grid
            ranges = found[b % found.shape[0], h % found.shape[1]]
            for row, rows in zip(ranges.tolist(), grid.split(own), strict=True):
                visible, every = (torch.zeros(grid.shape[1], dtype=torch.bool) for _ in range(2))
                end = 0
                for lo, full_lo, full_hi, hi in zip(*[iter(row)] * 4, strict=True):
                    assert end <= lo <= full_lo <= full_hi <= hi <= grid.shape[1], "ranges are sorted and nested"
                    visible[lo:hi], every[full_lo:full_hi], end = True, True, hi
                assert not rows[:, ~visible].any(), "a visible position is skipped"
                assert rows[:, every].all(), "a masked position is called full"
                seen = [bool(part.any()) for part in rows.split(other, 1)]
                inside = [bool(part[0]) for part in visible.split(other)]
                if exact:
                    whole = [bool(part.all()) for part in rows.split(other, 1)]
                    assert inside == seen
                    assert whole == [bool(part[0]) for part in every.split(other)]
                skipped += inside.count(False)
                empty += seen.count(False)
    return skipped / max(empty, 1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("sq", "skv", "own", "other"), [(70, 70, 16, 32), (40, 90, 32, 16), (300, 300, 16, 16)])
def test_documents(sq, skv, own, other, transposed):
    ids, keys = documents(sq, 5, 1), documents(skv, 5, 2)
    check(lambda b, h, q, kv: ids[q] == keys[kv], sq, skv, own, other, transposed, exact=True)
    check(lambda b, h, q, kv: (ids[q] == keys[kv]) & (q >= kv), sq, skv, own, other, transposed)


def test_more_blocks_than_a_step_looks_at():
    ids = documents(200, 12, 3)
    with mock.patch.object(block_ranges, "ELEMENTS", 64):
        check(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), 200, 200, 4, 4, exact=True)
        check(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), 200, 200, 4, 4, transposed=True, exact=True)


def _on_cpu(module, name, arguments):
    cpu = get_backend("cpu")
    driver.run_passes(module, cpu.pipeline)
    cpu.build(cpu.emit(module))[name](*arguments)


def test_a_million_positions():
    """Ranges of 977 blocks: what is kept grows with the length, not with its square."""
    size, block, length = 1_000_000, 1024, 5000
    ids = torch.arange(size) // length
    found = table(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), size, size, block, block, run=_on_cpu)
    first = torch.arange(0, size, block)
    last = (first + block - 1).clamp(max=size - 1)
    lo = first // length * length // block * block
    start, stop = found[0, 0, :, 0], found[0, 0, :, 3]
    assert torch.equal(start.long(), lo) and torch.equal(stop.long(), (last // block + 1).mul(block).clamp(max=size))
    whole = -(-(first // length * length) // block) * block
    full = (first // length == last // length) & (whole < first)
    assert torch.equal(found[0, 0, full, 1].long(), whole[full])
    assert torch.equal(found[0, 0, full, 2].long(), first[full])


def test_per_batch_and_head():
    ids = torch.stack([documents(64, 4, 4), documents(64, 9, 5)])
    check(lambda b, h, q, kv: ids[b, q] == ids[b, kv], 64, 64, 16, 8, exact=True)
    check(lambda b, h, q, kv: (ids[h, q] == ids[h, kv]) & (kv <= q), 64, 64, 16, 8, transposed=True, exact=True)
    check(lambda b, h, q, kv: (ids[h, q] == ids[b, kv]) | (kv > q), 64, 64, 16, 8)


def test_precision_on_sorted_documents():
    """At least 95 % of the empty blocks are skipped, whatever the lengths of the documents."""
    for seed in range(4):
        lengths = torch.randint(1, 200, (6,), generator=torch.Generator().manual_seed(seed))
        ids = torch.repeat_interleave(torch.arange(6), lengths)
        size = len(ids)
        assert check(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), size, size, 32, 32) >= 0.95  # noqa: B023


@pytest.mark.parametrize("transposed", [False, True])
def test_first_keys_and_documents(transposed):
    """A union keeps two ranges, exact here, the full blocks in each."""
    ids = torch.arange(320) // 80

    def sinks(b, h, q, kv):
        return (kv < 16) | (ids[q] == ids[kv])

    def both_ends(b, h, q, kv):
        return (kv < 20) | (ids[q] == ids[kv]) & (q >= kv)

    check(sinks, 320, 320, 16, 16, transposed, exact=not transposed)
    assert check(both_ends, 320, 320, 16, 8, transposed) > (0.4 if transposed else 0.95)


def test_unsorted_is_sound():
    for seed in range(6):
        ids = torch.randint(0, 3, (90,), generator=torch.Generator().manual_seed(seed))
        flag = ids > 1
        check(lambda b, h, q, kv: (ids[q] <= ids[kv]) & ~flag[kv] | (q == kv), 90, 90, 8, 16)  # noqa: B023
        check(lambda b, h, q, kv: ids[q // 30] == ids[kv // 20], 90, 90, 8, 16, True)  # noqa: B023


# --- mutants ------------------------------------------------------------------------------------


def _late(kernel, scope, ends):
    lo, last, full, hole = ends
    return RANGES(kernel, scope, [scope.value(scope.plus(lo, 1)), last, full, hole])


def _early_end(kernel, scope, ends):
    lo, last, full, hole = ends
    return RANGES(kernel, scope, [lo, scope.value(scope.minus(last, 1)), full, hole])


def _longer_full(kernel, scope, ends):
    lo, last, full, hole = ends
    return RANGES(kernel, scope, [lo, last, full, scope.value(scope.plus(hole, 1))])


RANGES = block_ranges.RangesKernel._ranges
MUTANTS = {
    "starts a block late": (block_ranges.RangesKernel, "_ranges", _late),
    "ends a block early": (block_ranges.RangesKernel, "_ranges", _early_end),
    "a full run one block longer": (block_ranges.RangesKernel, "_ranges", _longer_full),
    "lengths swapped": (Tables, "length", lambda self, queries: self.operands.skv if queries else self.operands.sq),
    "terms swapped": (Tables, "place", lambda self, scope, frame: [scope.value(0), scope.value(0)]),
    "largest for smallest": (block_ranges, "LARGEST", block_ranges.SMALLEST),
}


def _check_all():
    ids, keys = documents(90, 5, 6), documents(60, 5, 7)
    per_head = torch.stack([documents(90, 4, 8), documents(90, 9, 9)])
    check(lambda b, h, q, kv: ids[q] == keys[kv], 90, 60, 16, 8, exact=True)
    check(lambda b, h, q, kv: per_head[h, q] == per_head[h, kv], 90, 90, 16, 8, exact=True)


def test_no_mutant_lives_without_a_mutation():
    _check_all()


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_die(name):
    with mock.patch.object(*MUTANTS[name]), pytest.raises((AssertionError, attn_engine.AttnEngineError)):
        _check_all()


# --- whole attentions ---------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 8])
@pytest.mark.parametrize("backend", ALL)
def test_skipped_keys_are_never_read(backend, first):
    check_skipped(backend, SMALL, first=first)


@pytest.mark.parametrize(
    ("backend", "size", "first"),
    [*((b, 50, 0) for b in ALL), *((b, 64, 0) for b in ALL[:2]), *((b, 48, 5) for b in ALL)],
)
def test_causal_documents(backend, size, first):
    check_documents(backend, SMALL, size, first)
