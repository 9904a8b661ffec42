"""The gradient of a logistic function, as the front end spells it: p (1 - p), one exponential and one division a score."""

from __future__ import annotations

import math

import pytest
import torch
from xdsl.dialects import arith
from xdsl.dialects import math as math_ops
from xdsl.ir import Operation

import attn_engine
from attn_engine import library
from attn_engine.dialects import attn
from attn_engine.frontend import Definition, build
from attn_engine.runtime import driver
from attn_engine.runtime.devices import Target
from attn_engine.runtime.driver import Facts, Request
from attn_engine.runtime.schedules import candidate_schedules

torch.set_num_threads(1)
WRT = ("q", "k", "v")


def counts(ops: list[Operation]) -> tuple[int, int, int]:
    kinds = (math_ops.Exp2Op, arith.DivfOp, arith.SelectOp)
    exp2, divide, select = (sum(isinstance(op, kind) for op in ops) for kind in kinds)
    return exp2, divide, select


def test_scores_of_the_gradient_go_through_one_side():
    traced = build(Definition(row=library.sigmoid), dtype=torch.bfloat16, head_dim=64, head_dim_v=64).module
    lowered = driver.to_attn(traced, WRT)
    backward = next(op for op in lowered.walk() if isinstance(op, attn.BackwardOp))
    assert counts(list(backward.element.block.ops)) == (1, 1, 2)
    schedule = candidate_schedules(Target("gluon", "sm_90"), traced)[0]

    def loops(facts: Facts) -> list[str]:
        """In the loop over heads: masked steps, then those without keys that a mask hides; whole lengths have no others."""
        part = driver.to_parts(driver.to_attn(traced.clone(), WRT), Request(WRT, "gluon", schedule, facts))[1]
        kernel = part.source.partition("def backward_dkdv_role_0(")[2].partition("\ndef ")[0]
        return kernel.split("        for ")[1:]

    ragged, whole = loops(Facts(True, True)), loops(Facts(True, True, multiple=128))
    assert [(loop.count("gl.exp2("), loop.count("RECIPROCAL")) for loop in ragged] == [(1, 1), (1, 1)]
    assert [(loop.count("gl.exp2("), loop.count("RECIPROCAL")) for loop in whole] == [(1, 1)]
    assert "gl.where(" not in whole[0]
    # A block with keys beyond the end, which have no weight, takes masked steps alone: others hide nothing.
    assert "gl.where(" in ragged[0] and "gl.where(" not in ragged[1]


@pytest.mark.parametrize("bias", [-80.0, -12.0, 0.0, 12.0, 200.0])
def test_small_weights_have_exact_gradients(bias: float):
    """In f32: relative errors where weights are small, errors of a unit of 1 where they are 1, as of torch's own."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 1, 40, 16, requires_grad=True) for _ in range(3)]
    found = attn_engine.compile(row=lambda s: torch.sigmoid(s + bias), backend="cpu")(*leaves)
    d_o = torch.randn_like(found)
    gradients = torch.autograd.grad(found, leaves, d_o)
    q, k, v = (x.detach().double().requires_grad_() for x in leaves)
    exact = torch.autograd.grad(torch.sigmoid(q @ k.mT / math.sqrt(16) + bias) @ v, (q, k, v), d_o.double())
    for got, want in zip(gradients, exact, strict=True):
        assert (got - want).norm() <= 3e-6 * want.norm() + (1e-5 if bias > 0 else 0.0)
