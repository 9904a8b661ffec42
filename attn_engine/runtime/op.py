"""The torch ops: one for the forward, one for the backward, with autograd and fake kernels.

Both find their compiled plans by a key (see `driver`), so that graphs hold plain tensors, a float and a
string. Tensors are batch, head, position, channel; any strides. Calls that nothing but autograd looks at are made
without the ops (see `eager`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.library import custom_op

from attn_engine.errors import SecondDerivativeError
from attn_engine.runtime.driver import Compiled, lookup
from attn_engine.runtime.eager import is_plain, launch, trains
from attn_engine.runtime.layouts import in_blocks
from attn_engine.runtime.vectorize import in_turn


def _like_queries(q: Tensor, channels: int) -> Tensor:
    """An uninitialised result of q's shape but for the channels, with heads innermost where q has them so."""
    b, h, s, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((b, s, h, channels)).transpose(1, 2)
    return q.new_empty((b, h, s, channels))


def _row(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _forward_results(q: Tensor, v: Tensor, compiled: Compiled) -> list[Tensor]:
    shape = compiled.signature
    return [_like_queries(q, v.shape[3]), *(_row(q) for _ in range(shape.outputs + shape.saved))]


def _attend(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], scale: float, key: str) -> list[Tensor]:
    compiled = lookup(key)
    results = _forward_results(q, v, compiled)
    launch(compiled.plans["forward"], q.device, (q, k, v, *results, *captures, scale))
    return results


forward_op = custom_op("attn_engine::forward", _attend, mutates_args=())


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], scale: float, key: str) -> list[Tensor]:
    return _forward_results(q, v, lookup(key))


def _backward_results(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], compiled: Compiled) -> list[Tensor]:
    shape = compiled.signature
    operands = {"q": q, "k": k, "v": v}
    results = [torch.empty_like(operands[n]) for n in shape.gradients]
    types = {n: captures[n].dtype if n in shape.stored else torch.float32 for n in shape.grad_captures}
    return results + [torch.empty(captures[n].shape, dtype=dtype, device=q.device) for n, dtype in types.items()]


def _differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    saved: list[Tensor],
    d_outputs: list[Tensor],
    captures: list[Tensor],
    scale: float,
    key: str,
) -> list[Tensor]:
    compiled = lookup(key)
    results = _backward_results(q, k, v, captures, compiled)
    arguments = (q, k, v, o, d_o, *saved, *d_outputs, *captures, *results, scale)
    launch(compiled.plans["backward"], q.device, arguments)
    return results


backward_op = custom_op("attn_engine::backward", _differentiate, mutates_args=())


@backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    saved: list[Tensor],
    d_outputs: list[Tensor],
    captures: list[Tensor],
    scale: float,
    key: str,
) -> list[Tensor]:
    return _backward_results(q, k, v, captures, lookup(key))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, captures, scale, key = inputs
    ctx.save_for_backward(q, k, v, *captures, *output)
    ctx.captures, ctx.scale, ctx.key = len(captures), scale, key


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    compiled = lookup(ctx.key)
    shape = compiled.signature
    q, k, v, *rest = ctx.saved_tensors
    captures, (o, *rows) = rest[: ctx.captures], rest[ctx.captures :]
    d_o = grads[0] if grads[0] is not None else torch.zeros_like(o)
    d_outputs = [
        torch.zeros_like(r) if g is None else g for g, r in zip(grads[1 : 1 + shape.outputs], rows, strict=False)
    ]
    saved = rows[shape.outputs :]
    d_o = d_o.to(o.dtype)
    if compiled.descriptors and not in_blocks([d_o]):
        d_o = d_o.contiguous()
    found = backward(q, k, v, o, d_o, saved, d_outputs, captures, ctx.scale, ctx.key)
    operands = dict(zip(shape.gradients, found, strict=False))
    d_captures: list[Tensor | None] = [None] * len(captures)
    for n, value in zip(shape.grad_captures, found[len(operands) :], strict=True):
        d_captures[n] = value.to(captures[n].dtype)
    return operands.get("q"), operands.get("k"), operands.get("v"), d_captures, None, None


forward_op.register_autograd(_gradients, setup_context=_setup)


def _no_second_gradients(ctx: Any, *grads: Any) -> None:
    raise SecondDerivativeError.of_kernels()


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """What would be saved is for second derivatives."""


backward_op.register_autograd(_no_second_gradients, setup_context=_keep_nothing)
forward_op.register_vmap(in_turn(forward_op))
backward_op.register_vmap(in_turn(backward_op))


class _Attended(torch.autograd.Function):
    """The forward op for autograd alone."""

    @staticmethod
    def forward(ctx: Any, scale: float, key: str, q: Tensor, k: Tensor, v: Tensor, *captures: Tensor) -> Any:
        results = _attend(q, k, v, list(captures), scale, key)
        _setup(ctx, (q, k, v, captures, scale, key), results)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_q, d_k, d_v, d_captures, *_ = _gradients(ctx, list(grads))
        return None, None, d_q, d_k, d_v, *d_captures


def forward_plainly(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], scale: float, key: str) -> list[Tensor]:
    """`forward` of plain tensors."""
    if not trains((q, k, v, *captures)):
        return _attend(q, k, v, captures, scale, key)
    function: Any = _Attended
    return list(function.apply(scale, key, q, k, v, *captures))


def forward(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor], scale: float, key: str) -> list[Tensor]:
    """[o, row outputs..., saved row vectors...]; rows are [B, H, Sq], float32."""
    run = forward_plainly if is_plain((q, k, v, *captures)) else forward_op
    return run(q, k, v, captures, scale, key)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    saved: list[Tensor],
    d_outputs: list[Tensor],
    captures: list[Tensor],
    scale: float,
    key: str,
) -> list[Tensor]:
    """[dq, dk, dv (those wanted)..., gradients of captures (float32, or the type of the capture)...]."""
    tensors = (q, k, v, o, d_o, *saved, *d_outputs, *captures)
    run = _differentiate if is_plain(tensors) and not trains(tensors) else backward_op
    return run(q, k, v, o, d_o, saved, d_outputs, captures, scale, key)


Call: TypeAlias = tuple[Tensor, Tensor, Tensor, list[Tensor], float]
"""q, k, v, captures and scale of a call."""


def run_forward(compiled: Compiled, inputs: Call) -> list[Tensor]:
    """One forward, outside of autograd."""
    with torch.no_grad():
        return forward(*inputs, compiled.key)


def run_once(compiled: Compiled, inputs: Call) -> None:
    """One forward, and one backward where there is one, of tensors (q, k, v, captures, scale), for their time."""
    for call in calls(compiled, inputs).values():
        call()


def calls(compiled: Compiled, inputs: Call) -> dict[str, Callable[[], object]]:
    """One call of each plan, outside of autograd; the backward's takes what a forward gives."""
    found: dict[str, Callable[[], object]] = {"forward": lambda: run_forward(compiled, inputs)}
    if "backward" in compiled.plans:
        q, k, v, captures, scale = inputs
        o, *rows = run_forward(compiled, inputs)
        count, d_o = compiled.signature.outputs, torch.ones_like(o)

        def gradients() -> None:
            with torch.no_grad():
                backward(q, k, v, o, d_o, rows[count:], rows[:count], captures, scale, compiled.key)

        found["backward"] = gradients
    return found
