"""The meaning of `attn.recurrence`, token by token on torch tensors; differentiable by torch autograd."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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
    weight: Tensor | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(o, final state if the op has one) of an `attn.recurrence`, or of the one inside a module.

    `decay`, `beta`, `weight`, `initial` and `bounds` are given where the op, or the function, has them.
    """
    given = [x for x in (decay, beta, weight, initial, bounds) if x is not None]
    op, operands = resolve(module_or_op, attn.RecurrenceOp, [q, k, v, scale, *given, *captures])
    # A number has more digits than a tensor that torch would make of it.
    tensors = [x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=dtype) for x in operands]
    values = _named(op, [promote(x, o.type, dtype) for x, o in zip(tensors, op.operands, strict=True)])
    inputs = [_modified(op, name, values, dtype) for name in ("q", "k", "v", "decay")]
    heads = _per_head(inputs, values["v"].shape[1])
    state = values["initial"]
    if values["bounds"] is None:
        results = _sequence(heads, values["scale"], [values["beta"], values["weight"]], state)
    else:
        results = _packed(heads, values, state)
    return results if op.final is not None else results[:1]


def _packed(inputs: Sequence[Tensor], values: dict[str, Any], states: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sequences that follow each other in one batch."""
    o, finals = inputs[2].new_zeros(inputs[2].shape), list[Tensor]()
    ends = [min(int(x), o.shape[2]) for x in values["bounds"]]
    for n, (begin, end) in enumerate(pairwise(ends)):
        strengths = [None if x is None else x[:, :, begin:end] for x in (values["beta"], values["weight"])]
        state = None if states is None else states[n : n + 1]
        found, final = _sequence([x[:, :, begin:end] for x in inputs], values["scale"], strengths, state)
        o = torch.cat([o[:, :, :begin], found, o[:, :, end:]], 2)
        finals.append(final)
    shape = (0, o.shape[1], inputs[1].shape[3], o.shape[3])
    return o, torch.cat(finals) if finals else o.new_zeros(shape)


def _sequence(
    inputs: Sequence[Tensor], scale: Tensor, strengths: Sequence[Tensor | None], state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The outputs of sequences that start together, and the states after them."""
    query, key, value, log_decay = inputs
    if state is None:
        state = value.new_zeros((*value.shape[:2], key.shape[3], value.shape[3]))
    beta, weight = strengths
    outputs: list[Tensor] = []
    for t in range(value.shape[2]):
        written = value[:, :, t] if weight is None else weight[:, :, t, None] * value[:, :, t]
        state = _step(state, key[:, :, t], written, log_decay[:, :, t], None if beta is None else beta[:, :, t])
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", query[:, :, t], state))
    return (torch.stack(outputs, 2) if outputs else value.new_zeros(value.shape)), state


def _named(op: attn.RecurrenceOp, operands: Sequence[Tensor]) -> dict[str, Any]:
    """Operands by name; None for the ones that the op does not have, a list for the captures."""
    rest = iter(operands)
    names = ("q", "k", "v", "scale", "decay", "beta", "weight", "initial", "bounds")
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
