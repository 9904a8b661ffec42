"""What scores compute by the distance of two positions on a Hopper GPU, and its gradients: against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_engine
from attn_engine import library
from attn_engine.backends.gluon.build import check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not check().ok, reason=check().reason)]
D, LIMIT = 128, 1e-2
Functions = dict[str, Any]


def t5(table: Tensor) -> Functions:
    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        n = torch.clamp(q - kv, min=0)
        steps = torch.log(torch.clamp(n, min=1) / 16) / math.log(8) * 16
        far = torch.clamp(16 + steps.to(torch.int32), max=31)
        return s + table[h, torch.where(n < 16, n, far)]

    return {"score_mod": score, "mask_mod": library.causal}


def relative(table: Tensor) -> Functions:
    """Positions are fewer than the last axis; negative indices count from its end."""
    return {"score_mod": lambda s, b, h, q, kv: s + table[h, q - kv]}


def factor(table: Tensor) -> Functions:
    """Of a batch, and a mask by the same distance: blocks of queries see keys of one range."""

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv - q < 90) & (q - kv < 300)

    return {"score_mod": lambda s, b, h, q, kv: s * torch.tanh(table[b, kv - q]), "mask_mod": mask}


def two(table: Tensor) -> Functions:
    """Two parts that no table trains, inside and outside of a function of the score."""

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return 5 * torch.tanh(s / 5 + table[h, (q - kv) % 50]) - torch.log1p(torch.abs(q - kv).float())

    return {"score_mod": score}


CASES = {"t5": (t5, 4, 32), "relative": (relative, 4, 1300), "factor": (factor, 2, 1300), "two": (two, 4, 50)}
SIZES = ((512, 512), (500, 777), (640, 411))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, trained: bool, kv_heads: int):
    make, *shape = CASES[name]
    torch.manual_seed(0)
    table = torch.randn(shape, device="cuda").requires_grad_(trained)
    attend = attn_engine.compile(**make(table))
    for sq, skv in SIZES:
        sizes = ((4, sq), (kv_heads, skv), (kv_heads, skv))
        leaves = [torch.randn(2, h, n, D, device="cuda").bfloat16().requires_grad_() for h, n in sizes]
        leaves += [table] if trained else []
        o = attend(*leaves[:3])
        d_o = torch.randn_like(o)
        found = [o, *torch.autograd.grad(o, leaves, d_o)]
        exact = [x.detach().double().requires_grad_() for x in (*leaves[:3], table)]
        right = eager(make(exact[3]), exact[:3])
        wanted = [right, *torch.autograd.grad(right, exact[: len(leaves)], d_o.double())]
        for got, want in zip(found, wanted, strict=True):
            assert (got.double() - want).norm() < LIMIT * want.norm(), (sq, skv)


def eager(functions: Functions, operands: list[Tensor]) -> Tensor:
    q, k, v = operands
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * D**-0.5
    index = [
        torch.arange(n, device="cuda").view([-1 if a == axis else 1 for a in range(4)])
        for axis, n in enumerate(s.shape)
    ]
    s = functions["score_mod"](s, *index)
    if "mask_mod" in functions:
        s = s.masked_fill(~functions["mask_mod"](*index).expand_as(s), -torch.inf)
    return s.softmax(-1).nan_to_num(0.0) @ v
