"""Recurrences through HIP: emulated, with all gradients, against the CPU backend; and compiled, as predicted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import logsigmoid

import attn_engine
from attn_engine.arch import get_arch
from attn_engine.backends.hip.emit import emit
from attn_engine.backends.hip.predict import predict
from attn_engine.backends.hip.toolchain import inspect
from attn_engine.frontend.recurrence import Kind, build_recurrence
from attn_engine.passes.attn_schedule_recurrence import form_of
from attn_engine.runtime import devices
from attn_engine.runtime.devices import Target
from attn_engine.runtime.recurrence_compile import Compiled, Request, default_schedule, scheduled, to_tile
from tests.support.hip import EMULATED, emulates, emulation, needs_clang
from tests.support.recurrences import HEADS, KEY, KINDS, check, operands


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The schedules of an AMD device."""
    monkeypatch.setattr(devices, "arch_of", lambda device: "gfx942")
    with emulation():
        yield


@emulates
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients(kind: str):
    check(operands(kind), EMULATED)


@emulates
def test_packed_sequences_in_half_precision():
    """One of them empty, and tokens past the last bound; few value channels, whose products waves compute twice."""
    given = operands("per token, weighted", torch.float16)
    del given["initial_state"]
    given["v"] = given["v"][..., :16].contiguous()
    check(given, EMULATED, 1e-2, cu_seqlens=torch.tensor([0, 30, 30, 65]))


@emulates
def test_pieces_side_by_side():
    """Enough tokens for two pieces; a loop carries the decay of all chunks of a piece, which is a number."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 530, h, KEY, generator=generator) for h in (1, 1, HEADS))
    decay = logsigmoid(torch.randn(1, 530, HEADS, generator=generator))
    want, got = (attn_engine.recurrence(q, k, v, decay=decay, backend=b)[0] for b in ("cpu", EMULATED))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def request(kind: Kind, heads: int, tokens: int, backend: str = "hip") -> Request:
    schedule, place = default_schedule(Target(backend, "gfx942"), kind, heads, tokens, tf32=False, stepwise=False)
    return Request(kind, backend, schedule, ("q", "k", "v", "decay"), place=place)


WHOLE = {"initial": True, "final": True}
COMPILED = {
    "pieces": Kind(torch.bfloat16, 64, 64, "token", weight=True, **WHOLE),
    "channels": Kind(torch.bfloat16, 64, 64, "channel", **WHOLE),
    "delta": Kind(torch.float32, 64, 64, "token", beta=True, **WHOLE),
}


@needs_clang
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_as_predicted(name: str):
    """Kernels (mostly of gradients) for few heads and many tokens: nothing in scratch, LDS and matrix instructions as the IR says."""
    found = request(COMPILED[name], 64, 4096)
    module = Compiled(found).adjoint(True) if name != "pieces" else build_recurrence(found.kind)
    module = to_tile(scheduled(module, found), found)
    needs = predict(module, get_arch("gfx942"))
    assert len(needs) >= 4
    for kernel, mine in inspect(emit(module), "gfx942").items():
        assert mine.spills == 0, kernel
        want = needs[kernel.removesuffix("_kernel")]
        assert (mine.shared, mine.mfma) == (want.shared, want.mfma), kernel


@pytest.mark.parametrize(("heads", "pieces"), [(16, 16), (640, 1)])
def test_programs_do_not_wait_for_each_other(heads: int, pieces: int):
    """Pieces side by side have a form at the buffered level. A chain of them, which Triton would get, has none."""
    forms: dict[str, tuple[int, int]] = {}
    for backend in ("hip", "triton"):
        found = request(Kind(torch.bfloat16, 64, 64, "token"), heads, 8192, backend)
        (op,) = (op for op in scheduled(build_recurrence(found.kind), found).walk() if "form" in op.attributes)
        forms[backend] = form_of(op.attributes)["pieces"], form_of(op.attributes)["chained"]
    assert forms["hip"] == (pieces, 0)
    assert forms["triton"] == ((pieces, 0) if pieces > 1 else (4, 1))
