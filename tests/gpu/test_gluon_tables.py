"""Gradients of tables of scores on a Hopper GPU, as long as the call is: stored, by batch and added up, or added in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attn_engine
from attn_engine import library
from attn_engine.backends.gluon.build import check

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not check().ok, reason=check().reason)]
HEADS, D, LIMIT = 2, 128, 1e-2
TABLES: dict[str, tuple[int, int]] = {"own": (2, 2), "of all batches": (2, 1), "of many batches": (9, 1)}
"""Batches of the call, and of the table."""


def score_of(table: torch.Tensor) -> Any:
    if table.shape[0] == 1:
        return lambda s, b, h, q, kv: s + table[0, h, q, kv]
    return lambda s, b, h, q, kv: s + table[b, h, q, kv]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("mask", [None, library.causal], ids=["full", "causal"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(name: str, mask: Any, deterministic: bool):
    torch.manual_seed(0)
    batch, own = TABLES[name]
    for sq, skv in ((256, 384), (200, 264)):
        table = torch.randn(own, HEADS, sq, skv, device="cuda", dtype=torch.bfloat16).requires_grad_()
        sizes = (sq, skv, skv)
        q, k, v = (torch.randn(batch, HEADS, n, D, device="cuda").bfloat16().requires_grad_() for n in sizes)
        attend = attn_engine.compile(score_mod=score_of(table), mask_mod=mask, deterministic=deterministic)
        o = attend(q, k, v)
        d_o = torch.randn_like(o)
        found = torch.autograd.grad(o, (q, k, v, table), d_o, retain_graph=True)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v, table)]
        s = exact[0] @ exact[1].mT * D**-0.5 + exact[3]
        if mask is not None:
            s = s.masked_fill(~torch.ones(sq, skv, dtype=torch.bool, device="cuda").tril(), -torch.inf)
        wanted = torch.autograd.grad(s.softmax(-1) @ exact[2], exact, d_o.double())
        for got, want in zip(found, wanted, strict=True):
            assert (got.double() - want).norm() < LIMIT * want.norm(), (sq, skv)
        if deterministic:
            assert all(map(torch.equal, found, torch.autograd.grad(o, (q, k, v, table), d_o)))
