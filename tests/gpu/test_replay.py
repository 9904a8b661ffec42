"""Calls of known kinds, which launch what was noted: other numbers, memory, streams, devices and lengths, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attn_engine
from attn_engine import errors, library, recurrence, recurrence_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
KNOWN = 3
"""Calls after which a kind is known."""


def leaves_of(seed: int, length: int = 256, device: str = "cuda", inside: bool = False) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (2, length, 4, 64) if inside else (2, 4, length, 64)
    made = [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(3)]
    return [(x.transpose(1, 2) if inside else x).detach().requires_grad_() for x in made]


def both_ways(call: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    o = call(*leaves)
    return [o.detach(), *torch.autograd.grad(o.float().square().sum(), leaves)]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT * q.shape[3] ** -0.5).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def check(call: Callable[..., Tensor], leaves: list[Tensor]) -> None:
    wanted = both_ways(dense, [x.detach().double().requires_grad_() for x in leaves])
    for got, right in zip(both_ways(call, leaves), wanted, strict=True):
        assert bool(got.isfinite().all())
        assert (got.double() - right).norm() / right.norm() < 1e-2


@pytest.mark.parametrize("backend", [None, "triton"])
def test_other_numbers_memory_and_lengths(backend: str | None):
    attend = attn_engine.compile(mask_mod=library.causal, backend=backend)
    for turn in range(2 * KNOWN):
        for length in (256, 200, 64):
            for inside in (False, True):
                check(attend, leaves_of(turn, length, inside=inside))


def test_another_stream():
    attend = attn_engine.compile(mask_mod=library.causal)
    for turn in range(KNOWN):
        check(attend, leaves_of(turn))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        leaves = leaves_of(9)
        torch.cuda._sleep(20_000_000)
        for leaf in leaves:  # on the side stream alone, after a while
            leaf.detach().mul_(2)
        check(attend, leaves)
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")
def test_another_device():
    attend = attn_engine.compile(mask_mod=library.causal)
    for turn in range(2 * KNOWN):
        for device in ("cuda:0", "cuda:1"):
            check(attend, leaves_of(turn, device=device))


def test_tensors_elsewhere_are_refused_after_good_calls():
    attend = attn_engine.compile(mask_mod=library.causal)
    q, k, v = leaves_of(0)
    tokens = [x.detach().transpose(1, 2) for x in (q, k, v)]
    for _ in range(KNOWN):
        attend(q, k, v)
        recurrence(*tokens)
    for _ in range(2):
        with pytest.raises(errors.DeviceError):
            attend(q, k.cpu(), v)
        with pytest.raises(errors.DeviceError):
            recurrence(tokens[0], tokens[1].cpu(), tokens[2])


def test_a_key_more_in_every_call():
    attend = attn_engine.compile()
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, 8, n, 64, generator=generator, device="cuda", dtype=torch.float16) for n in (1, 2048, 2048)
    )
    for length in (*range(1024, 1040), *range(1024, 1040), *range(1030, 1040)):
        keys, values = k[:, :, :length], v[:, :, :length]
        wanted = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, keys, values)))
        found = attend(q, keys, values).double()
        assert (found - wanted).norm() / wanted.norm() < 2e-3


def test_steps_of_a_recurrence():
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 12, 4, 64, generator=generator, device="cuda") for _ in range(3))
    decay = torch.nn.functional.logsigmoid(torch.randn(2, 12, 4, generator=generator, device="cuda"))
    state = torch.zeros(2, 4, 64, 64, device="cuda")
    right = torch.zeros(2, 4, 64, 64, device="cuda", dtype=torch.float64)
    for t in range(12):
        one = [x[:, t : t + 1] for x in (q, k, v)]
        o = recurrence_step(*one, state=state, decay=decay[:, t : t + 1])
        a, b, c = (x[:, 0].double() for x in one)
        right = decay[:, t].double().exp()[..., None, None] * right + b[..., None] * c[..., None, :]
        wanted = 64**-0.5 * torch.einsum("bhk,bhkv->bhv", a, right)
        assert (o[:, 0].double() - wanted).norm() / wanted.norm() < 1e-3
    assert (state.double() - right).norm() / right.norm() < 1e-3
