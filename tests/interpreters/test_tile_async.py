"""The async interpreter: the hand-written Hopper forward under random schedules, and faults planted in it that must show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser
from xdsl.utils.exceptions import ParseError, VerifyException

from attn_engine.interpreters.tile_async import run_plan
from attn_engine.interpreters.tile_async_order import AsyncProtocolError
from attn_engine.interpreters.tile_async_state import DeadlockError
from attn_engine.universe import make_context

FILES = Path(__file__).parents[1] / "filecheck"
SOURCE = (FILES / "tile" / "hopper_forward.mlir").read_text()
SCALE = 128**-0.5
SEEDS = range(6)


def parse(text: str) -> ModuleOp:
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module


MODULE = parse(SOURCE)


def errors(
    module: ModuleOp,
    *,
    causal: bool,
    seed: int,
    heads: tuple[int, int, int] = (1, 2, 2),
    sizes: tuple[int, int] = (384, 384),
    processors: int = 2,
    exact: bool = False,
) -> tuple[float, float]:
    """Largest errors of the output and of lse (NaN counts as infinite), against dense attention in float64."""
    (batch, q_heads, kv_heads), (sq, skv) = heads, sizes
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, q_heads, sq, 128, generator=generator).half()
    k, v = (torch.randn(batch, kv_heads, skv, 128, generator=generator).half() for _ in range(2))
    o, lse = torch.full_like(q, torch.nan), torch.full((batch, q_heads, sq), torch.nan)
    if exact:
        q, k, v, o, lse = (x.double() for x in (q, k, v, o, lse))
    name = "forward_causal" if causal else "forward_full"
    run_plan(module, name, [q, k, v, o, lse, SCALE], seed=seed, processors=processors, exact=exact)
    wide_k, wide_v = (x.double().repeat_interleave(q_heads // kv_heads, 1) for x in (k, v))
    s = q.double() @ wide_k.transpose(2, 3) * SCALE
    if causal:
        s = s.masked_fill(torch.arange(sq)[:, None] < torch.arange(skv), -torch.inf)
    wrong = [(o.double() - s.softmax(-1) @ wide_v), lse.double() - s.logsumexp(-1)]
    out, statistics = (float(x.abs().nan_to_num(torch.inf).max()) for x in wrong)
    return out, statistics


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("causal", [False, True])
def test_forward_under_random_schedules(causal: bool, seed: int):
    out, lse = errors(MODULE, causal=causal, seed=seed)
    assert out < 2e-3 and lse < 1e-5


@pytest.mark.parametrize("causal", [False, True])
def test_what_remains_without_rounding(causal: bool):
    """Only the constants of the text, log2(e) among them, are rounded to f32."""
    out, lse = errors(MODULE, causal=causal, seed=0, exact=True)
    assert out < 1e-6 and lse < 1e-6


@pytest.mark.parametrize(
    ("heads", "sizes", "processors"),
    [
        ((1, 2, 1), (128, 128), 1),  # one block, two q heads on one kv head
        ((2, 1, 1), (200, 330), 3),  # ragged rows and keys
        ((1, 2, 2), (256, 640), 1),  # one program walks all tiles; rings wrap more than twice
        ((1, 1, 1), (300, 100), 4),  # fewer tiles than processors, fewer keys than rows
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(heads: tuple[int, int, int], sizes: tuple[int, int], processors: int, causal: bool):
    out, lse = errors(MODULE, causal=causal, seed=7, heads=heads, sizes=sizes, processors=processors)
    assert out < 2e-3 and lse < 1e-5


def outcomes(module: ModuleOp, seeds: range = range(8)) -> set[str]:
    """What happens under these schedules: right, wrong, deadlock or protocol error."""
    found: set[str] = set()
    for seed in seeds:
        try:
            out, lse = errors(module, causal=True, seed=seed, processors=1)
            found.add("right" if out < 2e-3 and lse < 1e-5 else "wrong")
        except DeadlockError:
            found.add("deadlock")
        except AsyncProtocolError:
            found.add("protocol")
    return found


def plant(*changes: tuple[str, str]) -> str:
    """The causal kernel with a fault: the first place of each old text changed."""
    causal, full = SOURCE.split("\ntile.plan @forward_causal")
    for old, new in changes:
        assert old in causal
        causal = causal.replace(old, new, 1)
    return causal + "\ntile.plan @forward_causal" + full


RELEASE_K = "          tile.barrier_arrive %k_empty_[%idxj] : !tile.barriers<2>\n"
WAIT_K = "          tile.barrier_wait %k_full_[%idx1], %ph1 : !tile.barriers<2>\n"
FAULTS: dict[str, tuple[list[tuple[str, str]], set[str]]] = {
    "carries swapped": (
        [("scf.yield %it1, %idx1, %ph1, %mn", "scf.yield %it1, %ph1, %idx1, %mn")],
        {"protocol", "deadlock"},
    ),
    "old probabilities carried": ([("%mn, %lpin, %pan, %accn", "%mn, %lpin, %pa, %accn")], {"wrong"}),
    "accumulator not rescaled": ([("%lpin, %pan, %accn", "%lpin, %pan, %o1")], {"wrong"}),
    "slot of K never released": ([(RELEASE_K, "")], {"deadlock"}),
    "tile never announced": (
        [("tile.barrier_arrive %t_full_[%cell]", "tile.barrier_arrive %t_empty_[%cell]")],
        {"deadlock"},
    ),
    "slots of K released before their products": (
        [
            (
                "        %x0 = tile.wait",
                "        tile.barrier_arrive %k_empty_[%idx] : !tile.barriers<2>\n        %x0 = tile.wait",
            ),
            (RELEASE_K, RELEASE_K.replace("idxj", "idx1")),
            ("        tile.barrier_arrive %k_empty_[%idx_l] : !tile.barriers<2>\n", ""),
        ],
        {"protocol"},
    ),
    "K read without a wait": ([(WAIT_K, "")], {"protocol"}),
    "wrong parity": ([(WAIT_K, WAIT_K.replace("ph1", "phj"))], {"protocol", "deadlock"}),
    "Q refilled without a fence": ([("        tile.proxy_fence\n", "")], {"protocol"}),
    "output stored without a fence": (
        [("        tile.proxy_fence\n        tile.async_store ", "        tile.async_store ")],
        {"protocol"},
    ),
    "end without a wait for the stores": (
        [("      tile.async_store_wait 0\n      tile.end", "      tile.end")],
        {"protocol"},
    ),
    "output overwritten while it is stored": ([("        tile.async_store_wait 0\n", "")], {"protocol"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_show(name: str):
    """Every fault shows under every schedule: a race is found even where the result would have been right."""
    changes, expected = FAULTS[name]
    found = outcomes(parse(plant(*changes)))
    assert found <= expected


def test_no_fault_no_alarm():
    assert outcomes(MODULE) == {"right"}


def test_deadlock_names_the_barrier():
    module = parse(plant((RELEASE_K, "")))
    with pytest.raises(DeadlockError, match=r"tile\.barrier_wait %k_empty_\[\d\]"):
        errors(module, causal=True, seed=0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "%sp = tile.async_dot %q, %kt layout <4x1, 128> : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared> ->",
            "%sp = tile.async_dot %q, %kt, %acc layout <4x1, 128>"
            " : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared>, tensor<64x128xf32> ->",
            "consumed by more than one product",
        ),
        ("%s = tile.wait 1, %sp", "%s = tile.wait 2, %sp", "may be unfinished"),
        ("%bm = tile.reduce max %s, 1", "%bm = tile.reduce max %sp, 1", "defined with type !tile.pending"),
        ("tile.barrier_expect %k_full_[%idx1], 32768", "tile.barrier_expect %k_full_[%idx1], 16384", "expects 16384"),
    ],
)
def test_faults_that_the_verifier_finds(old: str, new: str, message: str):
    with pytest.raises((VerifyException, ParseError), match=message):
        parse(plant((old, new)))


EVERY_OP = parse((FILES / "dialects" / "tile_async.mlir").read_text())


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_op(seed: int, exact: bool):
    torch.manual_seed(seed)
    x, y, counter = torch.randn(1, 64, 64).half(), torch.zeros(64, 64), torch.zeros(1, dtype=torch.int32)
    run_plan(EVERY_OP, "run", [x, y, counter], seed=seed, processors=1, exact=exact)
    torch.testing.assert_close(y, 6 * x[0].float() @ x[0].float().T, atol=1e-3, rtol=1e-5)
    assert int(counter) == 1


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_views_of_slots(seed: int, exact: bool):
    torch.manual_seed(seed)
    x, w, bias = torch.randn(64, 128).half(), torch.randn(128, 128).half(), torch.randn(1, 128)
    y, z = torch.zeros(64, 128), torch.zeros(128, 128).half()
    run_plan(EVERY_OP, "run_halves", [x, w, bias, y, z], seed=seed, exact=exact)
    torch.testing.assert_close(y, x.float() @ w.float() + bias, atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(z, torch.cat([x, x]))
