"""The recurrence behind the functions with fla's names."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_engine.compat.fla_arguments import check_operands, l2norm
from attn_engine.runtime.recurrence import goes_by_token, recurrence

Result = tuple[Tensor, Tensor | None]


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial: Tensor | None,
    final: bool,
    v_first: bool,
    bounds: Tensor | None,
    *,
    reverse: bool = False,
    normed: bool = False,
    wide: bool = False,
    output_dtype: torch.dtype | None = None,
) -> Result:
    """With `wide` halves are computed with in float32, as fla's kernels that go token by token do, and only o is rounded,
    to `output_dtype` or that of v.

    A few tokens without gradients go token by token here too, where float32 is what halves are computed with anyway.
    """
    check_operands(q, k, v)
    dtype = output_dtype or v.dtype
    if wide and (normed or not goes_by_token(v, q, k, decay, beta, initial)):
        q, k, v = q.float(), k.float(), v.float()
    if normed:
        q, k = l2norm(q), l2norm(k)
    turn = _turn(v.shape[1], bounds, v.device) if reverse else None
    if turn is not None:
        q, k, v = (x.index_select(1, turn) for x in (q, k, v))
        decay, beta = (x if x is None or x.ndim == 1 else x.index_select(1, turn) for x in (decay, beta))
    if initial is not None and v_first:
        initial = initial.transpose(2, 3)
    o, state = recurrence(
        q, k, v, decay=decay, beta=beta, scale=scale, initial_state=initial, output_final_state=final,
        cu_seqlens=bounds, output_dtype=torch.float32 if dtype == torch.float32 else None,
    )  # fmt: skip
    o = o if turn is None else o.index_select(1, turn)
    return o.to(dtype), state.transpose(2, 3) if state is not None and v_first else state


def _turn(tokens: int, bounds: Tensor | None, device: torch.device) -> Tensor:
    """For each token the one that stands as far from the other end of its sequence; nothing is copied to the host."""
    token = torch.arange(tokens, device=device)
    if bounds is None:
        return token.flip(0)
    if bounds.numel() < 2:
        return token
    bounds = bounds.to(torch.int64).clamp(0, tokens)
    sequence = torch.searchsorted(bounds, token, right=True) - 1
    inside = (sequence >= 0) & (sequence < bounds.numel() - 1)
    sequence = sequence.clamp(0, bounds.numel() - 2)
    return torch.where(inside, bounds[sequence] + bounds[sequence + 1] - 1 - token, token)
