"""The rule for `torch.vmap`: one call of the op for each element of the mapped axis.

Folding the axis into the batch would be one call, but would change what user functions see as b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_engine.interpreters.autograd import TRANSFORMS, is_wrapped

Rule = Callable[..., tuple[list[Tensor], list[int]]]


def is_differentiated(x: Tensor) -> bool:
    """Whether a transform of `torch.func`, such as `grad` or `vjp`, differentiates a tensor."""
    while is_wrapped(x):
        if TRANSFORMS.is_gradtrackingtensor(x):
            return True
        x = TRANSFORMS.get_unwrapped(x)
    return False


def needs_gradient(x: Tensor) -> bool:
    """Whether a tensor requires a gradient, or one that it stands for."""
    while not x.requires_grad and is_wrapped(x):
        x = TRANSFORMS.get_unwrapped(x)
    return x.requires_grad


def in_turn(op: Callable[..., list[Tensor]]) -> Rule:
    """The rule of an op of tensors, lists of tensors and numbers that returns a list of tensors."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[list[Tensor], list[int]]:
        rows = [
            op(*(_element(x, axis, n) for x, axis in zip(arguments, in_dims, strict=True)))
            for n in range(max(1, info.batch_size))
        ]
        results = [torch.stack(column)[: info.batch_size] for column in zip(*rows, strict=True)]
        return results, [0] * len(results)

    return rule


def _element(value: Any, axis: Any, n: int) -> Any:
    if axis is None:
        return value
    if not isinstance(value, Tensor):
        return [_element(x, a, n) for x, a in zip(value, axis, strict=True)]
    if not value.shape[axis]:
        # Results of an axis without elements have the shape, and the gradients, of one that is all zeros.
        return value.sum(axis, dtype=value.dtype)
    # A copy starts where memory was handed out: kernels may have been chosen for blocks that lie so.
    return value.select(axis, n).clone(memory_format=torch.contiguous_format)
