"""`backend="reference"` of a recurrence: token by token in torch operations, for what kernels do not have.

Derivatives of any order, in reverse and in forward mode, and tensors of float64. Computed in float64 whatever the
tensors are; autograd keeps the state of every token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_engine.frontend.recurrence import Operands, build_recurrence, check_values
from attn_engine.interpreters.attn_recurrence import run_recurrence
from attn_engine.runtime.eager import is_plain


def recur(x: Operands, scale: float, wide: bool) -> tuple[Tensor, Tensor]:
    """(o in the dtype of q, or with `wide` in float32, the final state in float32, or in float64 if q is)."""
    if is_plain([x.q, x.k, x.v, *x.optional]):
        check_values(x)
    kind = replace(x.kind(final=True), dtype=torch.float32, wide=False)
    with torch.device(x.q.device):
        o, final = run_recurrence(
            build_recurrence(kind), x.q, x.k, x.v, scale, x.decay, x.beta, x.initial, weight=x.weight, bounds=x.bounds
        )
    state = torch.float64 if x.q.dtype == torch.float64 else torch.float32
    return o.to(torch.float32 if wide else x.q.dtype), final.to(state)
