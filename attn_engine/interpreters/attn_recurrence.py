"""The meaning of `attn.recurrence`, token by token on torch tensors; differentiable by torch autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from xdsl.ir import Operation, Region

from attn_engine.dialects import attn
from attn_engine.interpreters.attn_common import index_grid, promote, resolve
from attn_engine.interpreters.scalar import oracle_dtypes, run_region


def run_recurrence(
    module_or_op: Operation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    initial: Tensor | None = None,
    captures: Sequence[Any] = (),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """(o, final state if the op has one) of an `attn.recurrence`, or of the one inside a module.

    `decay`, `beta` and `initial` are given where the op, or the function, has them.
    """
    given = [x for x in (decay, beta, initial) if x is not None]
    op, operands = resolve(module_or_op, attn.RecurrenceOp, [q, k, v, scale, *given, *captures])
    values = _named(
        op, [promote(torch.as_tensor(x), o.type, dtype) for x, o in zip(operands, op.operands, strict=True)]
    )
    inputs = [_modified(op, name, values, dtype) for name in ("q", "k", "v", "decay")]
    query, key, value, log_decay = _per_head(inputs, values["v"].shape[1])
    state = values["initial"]
    if state is None:
        state = value.new_zeros((*value.shape[:2], key.shape[3], value.shape[3]))
    outputs: list[Tensor] = []
    for t in range(value.shape[2]):
        strength = None if values["beta"] is None else values["beta"][:, :, t]
        state = _step(state, key[:, :, t], value[:, :, t], log_decay[:, :, t], strength)
        outputs.append(values["scale"] * torch.einsum("bhk,bhkv->bhv", query[:, :, t], state))
    o = torch.stack(outputs, 2) if outputs else value.new_zeros(value.shape)
    return (o, state) if op.final is not None else (o,)


def _named(op: attn.RecurrenceOp, operands: Sequence[Tensor]) -> dict[str, Any]:
    """Operands by name; None for the ones that the op does not have, a list for the captures."""
    rest = iter(operands)
    names = ("q", "k", "v", "scale", "decay", "beta", "initial")
    values: dict[str, Any] = {name: next(rest) if getattr(op, name) is not None else None for name in names}
    return values | {"captures": list(rest)}


def _modified(op: attn.RecurrenceOp, name: str, values: dict[str, Any], real: torch.dtype) -> Tensor:
    """An operand as its mod makes it, [B, H, T, channels]; a decay per token has one channel, none at all is 0."""
    element: Tensor | None = values[name]
    if element is None:
        element = torch.zeros((*values["v"].shape[:3], 1), dtype=real)
    if element.ndim == 3:
        element = element.unsqueeze(-1)
    region: Region | None = getattr(op, f"{name}_mod")
    if region is None:
        return element
    arguments = [element, *index_grid(*element.shape), *values["captures"]]
    return run_region(region.block, arguments, oracle_dtypes(real))[0].expand(element.shape)


def _per_head(inputs: Sequence[Tensor], heads: int) -> list[Tensor]:
    """Queries and keys repeated for the heads that share them."""
    return [x.repeat_interleave(heads // max(1, x.shape[1]), dim=1) for x in inputs]


def _step(state: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor | None) -> Tensor:
    """The state after one token."""
    state = torch.exp(log_decay).unsqueeze(-1) * state
    if strength is None:
        return state + torch.einsum("bhk,bhv->bhkv", key, value)
    written = value - torch.einsum("bhk,bhkv->bhv", key, state)
    return state + torch.einsum("bh,bhk,bhv->bhkv", strength, key, written)
