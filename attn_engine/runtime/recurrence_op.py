"""The torch ops of recurrences, forward and backward, with autograd and fake kernels.

Tensors are batch, head, token, channel; any strides. Plans are found by a key; see `recurrence_compile`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from attn_engine.runtime.recurrence_compile import Compiled, lookup


def _output(v: Tensor) -> Tensor:
    """o with heads where v has them."""
    b, h, t, channels = v.shape
    if v.stride(1) < v.stride(2):
        return v.new_empty((b, t, h, channels)).transpose(1, 2)
    return v.new_empty((b, h, t, channels))


def _results(q: Tensor, v: Tensor, bounds: Tensor | None, key: str) -> list[Tensor]:
    """o and the final state."""
    kind = lookup(key).request.kind
    o, b, h = _output(v), v.shape[0], v.shape[1]
    if not kind.final:
        return [o]
    sequences = b if bounds is None else bounds.shape[0] - 1
    return [o, q.new_empty((sequences, h, kind.key, kind.value), dtype=torch.float32)]


@custom_op("attn_engine::recurrence", mutates_args=())
def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    initial: Tensor | None,
    bounds: Tensor | None,
    scale: float,
    key: str,
) -> list[Tensor]:
    """[o, the final state if the compilation has one]."""
    results = _results(q, v, bounds, key)
    given = [x for x in (decay, beta, weight, initial, bounds) if x is not None]
    lookup(key).forward()(q, k, v, scale, *given, *results)
    return results


@recurrence.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    initial: Tensor | None,
    bounds: Tensor | None,
    scale: float,
    key: str,
) -> list[Tensor]:
    return _results(q, v, bounds, key)


@custom_op("attn_engine::recurrence_step", mutates_args=("state",))
def recurrence_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    state: Tensor,
    bounds: Tensor | None,
    scale: float,
    key: str,
) -> Tensor:
    """o; the state is read and replaced."""
    o = _output(v)
    given = [x for x in (decay, beta, weight, state, bounds) if x is not None]
    lookup(key).forward()(q, k, v, scale, *given, o, state)
    return o


@recurrence_step.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    state: Tensor,
    bounds: Tensor | None,
    scale: float,
    key: str,
) -> Tensor:
    return _output(v)


def _gradient_results(inputs: dict[str, Tensor | None], compiled: Compiled) -> list[Tensor]:
    """Like the operands, but gradients of what is not q, k or v are contiguous and float32."""
    found: list[Tensor] = []
    for name in compiled.request.wrt:
        operand = inputs[name]
        assert operand is not None
        if name in ("q", "k", "v"):
            found.append(torch.empty_like(operand))
        else:
            found.append(operand.new_empty(operand.shape, dtype=torch.float32))
    return found


@custom_op("attn_engine::recurrence_backward", mutates_args=())
def recurrence_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    weight: Tensor | None,
    initial: Tensor | None,
    bounds: Tensor | None,
    d_o: Tensor,
    final: Tensor | None,
    d_final: Tensor | None,
    scale: float,
    key: str,
) -> list[Tensor]:
    """The gradients that the compilation is for, in its order."""
    compiled = lookup(key)
    inputs = {"q": q, "k": k, "v": v, "decay": decay, "weight": weight, "initial": initial}
    results = _gradient_results(inputs, compiled)
    turned = None if initial is None else initial.transpose(2, 3)
    given = [x for x in (decay, weight, turned, bounds) if x is not None]
    states = [] if d_final is None else [final, d_final, d_final.transpose(2, 3)]
    compiled.backward(d_final is not None)(q, k, v, scale, *given, d_o, *states, *results)
    return results


@recurrence_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    weight: Tensor | None,
    initial: Tensor | None,
    bounds: Tensor | None,
    d_o: Tensor,
    final: Tensor | None,
    d_final: Tensor | None,
    scale: float,
    key: str,
) -> list[Tensor]:
    inputs = {"q": q, "k": k, "v": v, "decay": decay, "weight": weight, "initial": initial}
    return _gradient_results(inputs, lookup(key))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, decay, _beta, weight, initial, bounds, scale, key = inputs
    ctx.save_for_backward(q, k, v, decay, weight, initial, bounds, *output[1:])
    ctx.scale, ctx.key, ctx.shape, ctx.dtype = scale, key, output[0].shape, output[0].dtype


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    wrt = lookup(ctx.key).request.wrt
    q, k, v, decay, weight, initial, bounds, *rest = ctx.saved_tensors
    d_o = grads[0] if grads[0] is not None else v.new_zeros(ctx.shape)
    d_final = grads[1] if len(grads) > 1 else None
    final = rest[0] if d_final is not None else None
    found = recurrence_backward(
        q, k, v, decay, weight, initial, bounds, d_o.to(v.dtype), final, d_final, ctx.scale, ctx.key
    )
    named = dict(zip(wrt, found, strict=True))
    order = ("q", "k", "v", "decay", "beta", "weight", "initial", "bounds", "scale", "key")
    return tuple(named.get(name) for name in order)


recurrence.register_autograd(_gradients, setup_context=_setup)
