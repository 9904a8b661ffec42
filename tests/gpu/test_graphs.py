"""Calls in a CUDA graph: captured once, replayed with other numbers in the same tensors, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attn_engine
from attn_engine import library

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
Leaves = list[Tensor]


def numbers(shapes: list[tuple[int, ...]], seed: int) -> Leaves:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(shape, generator=generator, device="cuda") for shape in shapes]


def attend(x: Leaves) -> Tensor:
    q, k, v = (t.bfloat16() for t in x)
    return attn_engine.attention(q, k, v, mask_mod=library.causal)


def retain(x: Leaves) -> Tensor:
    q, k, v = (t.bfloat16() for t in x[:3])
    return attn_engine.recurrence(q, k, v, decay=torch.nn.functional.logsigmoid(x[3]))[0]


def correct(x: Leaves) -> Tensor:
    q, v = (x[n].bfloat16() for n in (0, 2))
    k = torch.nn.functional.normalize(x[1], dim=-1).bfloat16()
    decay, beta = torch.nn.functional.logsigmoid(x[3]), x[4].sigmoid()
    return attn_engine.recurrence(q, k, v, decay=decay, beta=beta)[0]


CALLS: dict[str, tuple[Callable[[Leaves], Tensor], list[tuple[int, ...]]]] = {
    "attention": (attend, [(2, 4, 200, 64)] * 3),
    "decay per token": (retain, [(2, 200, 4, 64)] * 3 + [(2, 200, 4)]),
    "delta rule": (correct, [(2, 200, 4, 64)] * 3 + [(2, 200, 4)] * 2),
}


def both_ways(call: Callable[[Leaves], Tensor], leaves: Leaves) -> Leaves:
    o = call(leaves)
    return [o.detach(), *torch.autograd.grad(o.float().square().sum(), leaves)]


@pytest.mark.parametrize("name", CALLS)
def test_a_replay_computes_with_the_numbers_of_then(name: str):
    call, shapes = CALLS[name]
    leaves = [x.requires_grad_() for x in numbers(shapes, 0)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles; a capture may not
        for _ in range(2):
            both_ways(call, leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both_ways(call, leaves)
    with torch.no_grad():
        for leaf, value in zip(leaves, numbers(shapes, 1), strict=True):
            leaf.copy_(value)
    graph.replay()
    wanted = both_ways(call, [x.requires_grad_() for x in numbers(shapes, 1)])
    for got, right in zip(found, wanted, strict=True):
        assert bool(right.isfinite().all())
        difference = (got.double() - right.double()).norm() / right.double().norm()
        assert difference < 1e-3  # sums of floats in whatever order
