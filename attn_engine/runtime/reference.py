"""`backend="reference"`: a definition itself, densely on torch tensors, for what kernels do not have.

Derivatives of any order, in reverse and in forward mode, and tensors of float64. Computed in float64 whatever the
tensors are; memory is B x H x Sq x Skv.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from xdsl.dialects.builtin import ModuleOp

from attn_engine.errors import ForwardModeError, FunctionTransformError
from attn_engine.interpreters.attn import run_attention
from attn_engine.runtime.env import named_backend
from attn_engine.runtime.vectorize import is_differentiated

REFERENCE = "reference"


def is_reference(backend: str | None) -> bool:
    """Whether the user, or the environment, asks for the reference."""
    return named_backend(backend) == REFERENCE


def rows(module: ModuleOp, q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], scale: float) -> list[Tensor]:
    """[o in the dtype of q, lse or largest score in float32, or in float64 if q is] of a traced definition."""
    with torch.device(q.device):
        o, *values = run_attention(module, q, k, v, scale, captures, torch.float64)
    per_row = torch.float64 if q.dtype == torch.float64 else torch.float32
    return [o.to(q.dtype), *(value.to(per_row) for value in values)]


def refuse_transforms(tensors: Iterable[Tensor], *of: str) -> None:
    """Raises for tensors that carry a tangent of forward mode, or that `torch.func` differentiates.

    `of` is what is called, and what to do instead, where it is no attention.
    """
    tensors = list(tensors)
    # Under a transform what has no tangent is wrapped as well, once an operation has made it.
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise ForwardModeError(*of)
    if any(is_differentiated(tensor) for tensor in tensors):
        raise FunctionTransformError(*of)
