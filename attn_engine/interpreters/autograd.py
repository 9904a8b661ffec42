"""A differentiable function in which a zero gradient stays zero, whatever the local derivative.

First derivatives take a short way; `_Transformed` is for forward mode and for the transforms of `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

TRANSFORMS: Any = cast(Any, torch)._C._functorch
"""What torch tells of tensors inside of its transforms of functions."""


def is_wrapped(x: Tensor) -> bool:
    """Whether a tensor stands for others, as inside of `torch.vmap`, and has no memory of its own."""
    return TRANSFORMS.is_functorch_wrapped_tensor(x)


def common_shape(args: Sequence[Tensor]) -> tuple[int, ...]:
    """The shape that tensors are broadcast to."""
    return tuple(torch.broadcast_shapes(*(a.shape for a in args)))  # pyright: ignore[reportUnknownArgumentType]


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*args)
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, needs = gradients[0], ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # only under create_graph
            return (None, *_differentiable(ctx.function, ctx.saved_tensors, needs, gradient))
        args = [a.detach().requires_grad_(need) for a, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad():
            # Operands are expanded first, so that the rule acts before the sum over a broadcast axis.
            wide = [a if ctx.function in _REDUCTIONS else a.expand(gradient.shape) for a in args]
            result = ctx.function(*wide)
        wanted = [w for w in wide if w.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, gradient))
        grads = [_stop(next(found), gradient).sum_to_size(a.shape) if a.requires_grad else None for a in args]
        return (None, *grads)


class _Transformed(torch.autograd.Function):
    """The same by means that transforms can look into."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        return function(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function, *args = inputs
        ctx.save_for_backward(*args)
        ctx.save_for_forward(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        args: Sequence[Tensor] = ctx.saved_tensors
        wide = [a if ctx.function in _REDUCTIONS else a.expand(gradient.shape) for a in args]
        moving = [torch.where(gradient != 0, a, a.detach()) for a in wide]
        found = torch.func.vjp(ctx.function, *moving)[1](gradient)
        sums = (_without_nan(f, gradient).sum_to_size(a.shape) for f, a in zip(found, args, strict=True))
        return (None, *sums)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """The functions are elementwise, or reduce the last axis: the sum of derivatives times tangents."""
        args: Sequence[Tensor] = ctx.saved_tensors
        shape = common_shape(args)
        reduces = ctx.function in _REDUCTIONS
        result, pull, *_ = torch.func.vjp(ctx.function, *(a.expand(shape) for a in args))
        total = torch.zeros_like(result)
        for derivative, tangent in zip(pull(torch.ones_like(result)), tangents[1:], strict=True):
            if tangent is not None:
                part = _stop(derivative * tangent, tangent)
                total = total + (part.sum(-1, keepdim=True) if reduces else part)
        return total


def _differentiable(
    function: Callable[..., Tensor], args: Sequence[Tensor], needs: Sequence[bool], gradient: Tensor
) -> list[Tensor | None]:
    """The gradients as functions of the gradient that arrives and, where it is not 0, of the arguments.

    A gradient of 0 times a derivative that is infinite is 0; times any other it depends on the gradient as ever.
    """
    own = [a if need else a.detach() for a, need in zip(args, needs, strict=True)]
    wide = [a if function in _REDUCTIONS else a.expand(gradient.shape) for a in own]
    moving = [torch.where(gradient != 0, a, a.detach()) if a.requires_grad else a for a in wide]
    wanted = [a for a in moving if a.requires_grad]
    found = iter(torch.autograd.grad(function(*moving), wanted, gradient, create_graph=True))
    sums: list[Tensor | None] = []
    for a, m in zip(args, moving, strict=True):
        sums.append(_without_nan(next(found), gradient).sum_to_size(a.shape) if m.requires_grad else None)
    return sums


def _without_nan(found: Tensor, gradient: Tensor) -> Tensor:
    return torch.where((gradient == 0) & found.isnan(), 0.0, found)


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


def _is_transformed(value: Tensor) -> bool:
    tangent = forward_ad.unpack_dual(value).tangent
    return tangent is not None or is_wrapped(value)


def local(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """`function(*args)`, elementwise with broadcasting; where the gradient is 0, so are those of `args`."""
    if not torch.is_grad_enabled() or not any(a.requires_grad for a in args):
        return function(*args)
    if any(map(_is_transformed, args)):
        return _Transformed.apply(function, *args)  # type: ignore[no-any-return]
    return _Local.apply(function, *args)  # type: ignore[no-any-return]


def extremum(value: Tensor, largest: bool, split: bool) -> Tensor:
    """The last axis reduced (kept, with size 1) to its extremum; ties share the gradient, or the first takes it."""
    if split:
        return local(_amax if largest else _amin, value)
    return local(_first_max if largest else _first_min, value)
