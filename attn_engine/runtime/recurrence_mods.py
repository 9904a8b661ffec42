"""Recurrences whose operands functions make: inside of the kernels forward, by torch once more backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from attn_engine.errors import SecondDerivativeError
from attn_engine.frontend.recurrence import Operands, check_recurrence, check_values
from attn_engine.frontend.recurrence_mods import TracedMods
from attn_engine.runtime import recurrence_op
from attn_engine.runtime.recurrence_tune import active_tuner

NAMES: tuple[str, ...] = ("q", "k", "v", "decay", "initial")
Make = Callable[[Sequence[Tensor | None], Sequence[Tensor]], list[Tensor | None]]
"""From (q, k, v, decay or None), heads before tokens, and inputs: the operands as the functions make them."""


@dataclass(frozen=True, eq=False)
class Modified:
    """What a call needs beside tensors: the regions, the inputs that they read, and the functions themselves."""

    traced: TracedMods
    read: tuple[int, ...]
    """Places of the inputs that regions read, in their order."""
    make: Make
    final: bool
    backend: str


def run(modified: Modified, operands: Operands, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """o [B, H, T, V] and the final state; differentiable in operands and inputs."""
    check_recurrence(operands)
    x = operands
    if "decay" in modified.traced.regions and x.decay is not None and x.q.device.type == "cpu":
        with torch.no_grad():
            check_values(replace(x, decay=modified.make([None, None, None, x.decay], inputs)[3]))
    function: Any = _Recurrence
    found: tuple[Tensor, Tensor] = function.apply(modified, x.q, x.k, x.v, x.decay, x.initial, *inputs)
    return found[0], found[1] if modified.final else None


class _Recurrence(torch.autograd.Function):
    """Keeps operands as they were given; what the functions make of them is made again where it is needed."""

    @staticmethod
    def forward(
        ctx: Any,
        modified: Modified,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        initial: Tensor | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        operands = Operands(q, k, v, decay, None, None, initial)
        read = [inputs[i] for i in modified.read]
        results = recurrence_op.recurrence_of_mods(
            operands, modified.traced, read, 1.0, modified.final, modified.backend
        )
        ctx.modified, ctx.tuner = modified, active_tuner()
        ctx.save_for_backward(q, k, v, decay, initial, *inputs, *results[1:])
        return results[0], results[1] if modified.final else q.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        modified: Modified = ctx.modified
        saved: list[Tensor | None] = list(ctx.saved_tensors)
        final = saved.pop() if modified.final else None
        needed = ctx.needs_input_grad[1:]
        leaves = [
            None if x is None else x.detach().requires_grad_(wanted) for x, wanted in zip(saved, needed, strict=True)
        ]
        with torch.enable_grad():
            made = modified.make(leaves[:4], [x for x in leaves[5:] if x is not None])
        operands: dict[str, Tensor | None] = dict(zip(NAMES, (*made, leaves[4]), strict=True))
        wrt = [name for name, x in operands.items() if x is not None and x.requires_grad]
        d_made = _gradients(operands, wrt, grads, final, modified.backend, ctx.tuner)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        outputs = [x for name in wrt if (x := operands[name]) is not None]
        found = torch.autograd.grad(outputs, wanted, d_made, allow_unused=True)
        if torch.is_grad_enabled():
            found = _once(found, [*saved, *grads])
        rest = iter(found)
        return None, *(next(rest) if x is not None and x.requires_grad else None for x in leaves)


class _Once(torch.autograd.Function):
    """The first tensors as they are; they depend on the others in a way that has no derivative here."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise SecondDerivativeError(recurrence_op.INSTEAD, recurrence_op.WHAT)


def _once(found: Sequence[Tensor | None], behind: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    function: Any = _Once
    return function.apply(len(found), *(None if x is None else x.detach() for x in found), *behind)


def _gradients(
    operands: dict[str, Tensor | None],
    wrt: Sequence[str],
    grads: Sequence[Tensor],
    final: Tensor | None,
    backend: str,
    tuner: str,
) -> list[Tensor]:
    plain = {name: None if x is None else x.detach() for name, x in operands.items()}
    q, k, v = (plain[name] for name in "qkv")
    assert q is not None and k is not None and v is not None
    return recurrence_op.gradients(
        q, k, v, plain["decay"], None, None, plain["initial"], None, grads[0].to(v.dtype),
        final, None if final is None else grads[1], 1.0, backend, " ".join(wrt), tuner,
    )  # fmt: skip
