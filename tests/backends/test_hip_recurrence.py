"""Recurrences through HIP, emulated: those whose kernels have no sums over the tokens of a chunk, and an answer for others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import attn_engine
from attn_engine.backends.backend import BACKENDS, Availability
from attn_engine.backends.hip.backend import BACKEND as HIP
from attn_engine.backends.hip.build import emulate
from attn_engine.errors import AttnEngineError
from tests.support.hip import emulates

EMULATED = "hip_emulated"


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    BACKENDS[EMULATED] = lambda: replace(HIP, name=EMULATED, build=emulate, check=lambda: Availability(True))
    yield
    del BACKENDS[EMULATED]


def operands() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 70, h, 32, generator=generator) for h in (1, 1, 2))
    return [q, torch.nn.functional.normalize(k, dim=-1), v]


@emulates
def test_linear_attention():
    """Output, state and gradients."""
    results: list[list[torch.Tensor]] = []
    for backend in ("cpu", EMULATED):
        tensors = [t.requires_grad_() for t in operands()]
        o, state = attn_engine.recurrence(*tensors, output_final_state=True, backend=backend)
        results.append([o, state, *torch.autograd.grad((o * o).sum() + state.sum(), tensors)])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


@emulates
def test_delta_rule():
    """The state is a carry that products read: it goes to LDS where they do."""
    beta = torch.rand(1, 70, 2, generator=torch.Generator().manual_seed(4))
    want, got = (attn_engine.recurrence(*operands(), beta=beta, backend=b)[0] for b in ("cpu", EMULATED))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_what_has_no_form_is_named():
    with pytest.raises(AttnEngineError, match=r"no rule for tile\.scan"):
        attn_engine.recurrence(*operands(), decay=-torch.rand(2), backend=EMULATED)
