"""Mamba-2 under the names of mamba_ssm: x [B, T, H, P], dt [B, T, H], A [H], B and C [B, T, groups, N], states [B, H, P, N]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_engine.errors import UnsupportedOptionError
from attn_engine.runtime.recurrence import recurrence, recurrence_step


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """S_t = exp(A dt_t) S_{t-1} + dt_t B_t x_t^T, y_t = C_t S_t + D x_t, times silu(z) if given.

    `seq_idx` [B, T]: the state is forgotten where it changes. `chunk_size` changes no result and is not read. Final
    states follow y if asked for.
    """
    step = _step_size(dt, dt_bias, dt_softplus, dt_limit)
    decay = step * A.float()
    if seq_idx is not None:
        first = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
        decay = torch.where(first[..., None], float("-inf"), decay)
    state = None if initial_states is None else initial_states.transpose(2, 3)
    y, final = recurrence(
        C.to(x.dtype),
        B.to(x.dtype),
        x,
        decay=decay,
        weight=step,
        scale=1.0,
        initial_state=state,
        output_final_state=return_final_states,
        cu_seqlens=cu_seqlens,
    )
    y = _skip_and_gate(y, x, D, z)
    return y if final is None else (y, final.transpose(2, 3))


def _step_size(
    dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float] = (0.0, float("inf"))
) -> Tensor:
    step = dt.float()
    if bias is not None:
        step = step + bias.float()
    if softplus:
        step = F.softplus(step)
    return step if limit == (0.0, float("inf")) else step.clamp(*limit)


def _skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    dtype = y.dtype
    if D is not None:
        y = y.float() + x.float() * (D if D.ndim == 2 else D[:, None]).float()
    if z is not None:
        y = y.float() * F.silu(z.float())
    return y.to(dtype)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """One token: y [B, H, P]; `state` [B, H, P, N], float32, is updated in place.

    dt, dt_bias and A are one number per head, expanded over P (and N): x, z [B, H, P], dt [B, H, P], A [H, P, N],
    B and C [B, groups, N], D and dt_bias [H, P].
    """
    expanded = [dt, A, *([dt_bias] if dt_bias is not None else [])]
    if any(t.shape[-1] > 1 and t.stride(-1) for t in expanded) or (A.shape[-2] > 1 and A.stride(-2)):
        raise UnsupportedOptionError(
            "A and dt", "that differ within a head", "expand one number per head, as Mamba-2 does"
        )
    bias = None if dt_bias is None else dt_bias[..., 0]
    step = _step_size(dt[..., 0], bias, dt_softplus)[:, None]
    decay = step * A[..., 0, 0].float()
    q, k, v = (t.to(x.dtype)[:, None] for t in (C, B, x))
    y = recurrence_step(q, k, v, state=state.transpose(2, 3), decay=decay, weight=step, scale=1.0)
    return _skip_and_gate(y[:, 0], x, D, z)
