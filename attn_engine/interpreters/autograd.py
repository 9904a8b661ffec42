"""A differentiable function in which a zero gradient stays zero, whatever the local derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*args)
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # only under create_graph
            raise RuntimeError("the oracle has first derivatives only: call autograd without create_graph")
        gradient = gradients[0]
        needs = ctx.needs_input_grad[1:]
        args = [a.detach().requires_grad_(need) for a, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad():
            # Operands are expanded first, so that the rule acts before the sum over a broadcast axis.
            wide = [a if ctx.function in _REDUCTIONS else a.expand(gradient.shape) for a in args]
            result = ctx.function(*wide)
        wanted = [w for w in wide if w.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, gradient))
        grads = [_stop(next(found), gradient).sum_to_size(a.shape) if a.requires_grad else None for a in args]
        return (None, *grads)


def _stop(found: Tensor, gradient: Tensor) -> Tensor:
    return torch.where(gradient == 0, torch.zeros_like(found), found)


def _amax(value: Tensor) -> Tensor:
    return value.amax(-1, keepdim=True)


def _amin(value: Tensor) -> Tensor:
    return value.amin(-1, keepdim=True)


def _first_max(value: Tensor) -> Tensor:
    return value.max(-1, keepdim=True).values


def _first_min(value: Tensor) -> Tensor:
    return value.min(-1, keepdim=True).values


# Reductions of the last axis, which stays with size 1: the gradient broadcasts to the operand's shape.
_REDUCTIONS = frozenset({_amax, _amin, _first_max, _first_min})


def local(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """`function(*args)`, elementwise with broadcasting; where the gradient is 0, so are those of `args`."""
    if not torch.is_grad_enabled() or not any(a.requires_grad for a in args):
        return function(*args)
    return _Local.apply(function, *args)  # type: ignore[no-any-return]


def extremum(value: Tensor, largest: bool, split: bool) -> Tensor:
    """The last axis reduced (kept, with size 1) to its extremum; ties share the gradient, or the first takes it."""
    if split:
        return local(_amax if largest else _amin, value)
    return local(_first_max if largest else _first_min, value)
