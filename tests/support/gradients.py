"""Derived gradients against torch autograd of the oracle, in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp

from attn_engine.dialects import attn
from attn_engine.interpreters.attn import run_attention
from attn_engine.interpreters.attn_backward import run_backward
from attn_engine.passes.attn_derive_backward import AttnDeriveBackwardPass
from attn_engine.universe import make_context

SCALE = 0.7


def derive(module: ModuleOp, wrt: Sequence[str | int]) -> tuple[attn.AttentionOp, attn.BackwardOp]:
    """The two ops after the pass; the module verifies, and prints what parses again."""
    AttnDeriveBackwardPass(tuple(wrt)).apply(make_context(), module)
    module.verify()
    forward, backward = [f for f in module.ops if isinstance(f, func.FuncOp)]
    ops = [
        next(op for op in f.body.block.ops if isinstance(op, kind))
        for f, kind in ((forward, attn.AttentionOp), (backward, attn.BackwardOp))
    ]
    return ops[0], ops[1]  # type: ignore[return-value]


def leaf(tensor: Any) -> Any:
    if isinstance(tensor, Tensor) and tensor.is_floating_point():
        return tensor.detach().clone().requires_grad_(True)
    return tensor


def check_gradients(
    module: ModuleOp,
    inputs: Sequence[Tensor],
    captures: Sequence[Any] = (),
    wrt: Sequence[str | int] = ("q", "k", "v"),
    tolerance: float = 1e-9,
    block: int = 4,
) -> tuple[attn.AttentionOp, attn.BackwardOp]:
    """Asserts that all gradients agree, d_outputs included; gives the ops for further checks."""
    forward, backward = derive(module, wrt)
    q, k, v = map(leaf, inputs)
    leaves = [leaf(c) for c in captures]
    with torch.no_grad():
        every = run_attention(forward, q, k, v, SCALE, leaves)
    count = len(forward.outputs)
    o, *outputs = run_attention(forward, q, k, v, SCALE, leaves)[: 1 + count]
    generator = torch.Generator().manual_seed(7)
    d_o = torch.randn(o.shape, generator=generator, dtype=o.dtype)
    d_outputs = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outputs]
    named = {"q": q, "k": k, "v": v} | dict(enumerate(leaves))
    targets = [named[name] for name in wrt]
    # A dead row gives a constant -inf whatever the caller's gradient is.
    loss = (o * d_o).sum() + sum(
        (torch.where(x.isfinite(), x, torch.zeros_like(x)) * d).sum() for x, d in zip(outputs, d_outputs, strict=True)
    )
    expected = torch.autograd.grad(loss, targets, allow_unused=True)
    for x, d in zip(outputs, d_outputs, strict=True):
        d[~x.isfinite()] = float("nan")
    found = run_backward(
        backward,
        q.detach(),
        k.detach(),
        v.detach(),
        SCALE,
        every[0],
        d_o,
        every[1 + count :],
        d_outputs,
        [c.detach() if isinstance(c, Tensor) else c for c in leaves],
        block=block,
    )
    positions = [p.value.data for p in backward.grad_captures]
    by_name = {n: found[f"d{n}"] for n in "qkv" if f"d{n}" in found} | dict(
        zip(positions, found["d_captures"], strict=True)
    )
    assert set(by_name) == set(wrt)
    for name, target, wanted in zip(wrt, targets, expected, strict=True):
        wanted = torch.zeros_like(target) if wanted is None else wanted
        error = (by_name[name] - wanted).abs().max().item() if wanted.numel() else 0.0
        size = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
        assert error <= tolerance * size, f"d{name}: off by {error:.3g} of {size:.3g}"
    return forward, backward
