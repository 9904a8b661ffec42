"""Faults planted in kernels and headers are caught; the right ones pass the same checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.backends.backend import BACKENDS, Availability
from attn_engine.backends.hip import toolchain
from attn_engine.backends.hip.backend import BACKEND as HIP
from attn_engine.backends.hip.build import emulate
from attn_engine.backends.hip.emit import emit
from attn_engine.errors import BackendError
from attn_engine.ir.schedule import KernelSchedule, Schedule
from attn_engine.runtime.inspect import View
from tests.backends.test_hip_forward import TEXT, run
from tests.support.compare import check, qkv
from tests.support.hip import emulates, parse

CHECKED = "hip_checked"
Headers = Callable[[str, str], None]


@pytest.fixture
def checked() -> Iterator[None]:
    build = functools.partial(emulate, checked=True)
    BACKENDS[CHECKED] = lambda: replace(HIP, name=CHECKED, build=build, check=lambda: Availability(True))
    yield
    del BACKENDS[CHECKED]


@pytest.fixture
def headers(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Headers]:
    """Exchanges one piece of text in a copy of the header library."""

    def exchange(right: str, wrong: str) -> None:
        directory, found = tmp_path_factory.mktemp("include"), 0
        for header in toolchain.INCLUDE.glob("*.h"):
            text = header.read_text()
            found += text.count(right)
            (directory / header.name).write_text(text.replace(right, wrong))
        assert found == 1
        monkeypatch.setattr(toolchain, "INCLUDE", directory)
        emulate.cache_clear()

    yield exchange
    emulate.cache_clear()


def forward(text: str = TEXT, checked: bool = False, causal: bool = True) -> float:
    """The error of the hand-written forward."""
    return run(emulate(emit(parse(text)), checked=checked), causal, 70, 70, (1, 1), torch.float16)[0]


def generated() -> float:
    """The error of a forward that the engine makes, with tiles turned in registers and columns grouped."""
    source = attn_engine.compile().source("hip", View(torch.float16, 128, 128, False, False, "gfx942", "hip"))
    assert "attn::Padded<8, 16>" in source
    assert "attn::Staged<attn::half, 128, 64, 0, 512>" in source
    q, k, v = (t.detach() for t in qkv(h=1, sq=70, d=128, dtype=torch.float16))
    o = torch.zeros_like(q)
    emulate(source)["forward"](q, k, v, o, 128**-0.5)
    return (o - torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())).abs().max().item()


@emulates
def test_nothing_undefined(checked: None):
    """Forward and backward, prefetched, with gradients of a capture, under the compiler's checks."""

    def make(w: torch.Tensor):
        return {"score_mod": lambda s, b, h, q, kv: s * w[h, q] - w[h, kv], "mask_mod": library.causal}

    schedule = Schedule(*[KernelSchedule(64, 32, 4, 2)] * 3, KernelSchedule(32, 64, 4, 2))
    tensors = qkv(h=1, sq=70, d=24, dtype=torch.bfloat16)
    check(make, tensors, {"w": torch.ones(1, 70)}, CHECKED, schedule=schedule)


@emulates
def test_an_index_beyond_an_array(headers: Headers):
    """A fragment that is one vector too short."""
    headers("Vec<T, chunk> data[count / chunk];", "Vec<T, chunk> data[count / chunk - 1];")
    with pytest.raises(BackendError, match=r"an index beyond the end of an array \(program 0,0,0 thread \d+\)"):
        forward(checked=True)


@emulates
def test_an_index_beyond_a_tensor():
    """A copy whose limit is forgotten."""
    bounded = "bounded [0] limits(%skv) into %ks"
    assert bounded in TEXT
    with pytest.raises(BackendError, match=r"beyond the end of a tensor|outside of a tensor"):
        forward(TEXT.replace(bounded, "into %ks"), causal=False)


@emulates
def test_a_barrier_that_the_pass_forgets(monkeypatch: pytest.MonkeyPatch):
    """The last barrier of each kernel is left out: waves that overtake each other show it."""
    broken = TEXT[::-1].replace("tile.barrier"[::-1], "", 1)[::-1]
    errors: list[float] = []
    for seed in range(4):
        monkeypatch.setenv("ATTN_EMULATION_SEED", str(seed))
        errors.append(forward(broken))
    assert any(not error < 2e-3 for error in errors)


@emulates
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(run % halves * 2 + run / halves)", "(run / halves * 2 + run % halves)"),
        ("row + e, column, values", "row + (e ^ 1), column, values"),
    ],
    ids=["grouped columns", "turned vectors"],
)
def test_a_wrong_place_shows(right: str, wrong: str, headers: Headers):
    """The places of what a lane multiplies at once, and of tiles that are turned in registers."""
    headers(right, wrong)
    assert not generated() < 0.1


@emulates
def test_right_places():
    assert generated() < 2e-3
