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
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """S_t = exp(A dt_t) S_{t-1} + dt_t B_t x_t^T, y_t = C_t S_t + D x_t, times silu(z) if given.

    `seq_idx` [B, T]: the state is forgotten where it changes. Final states follow y if asked for, and with
    `return_varlen_states` those of the sequences between `cu_seqlens`, of a batch of one; these are read for nothing else.
    `chunk_size` and `state_dtype` (states are float32) change no result that is asked for, and are not read.
    """
    step = _step_size(dt, dt_bias, dt_softplus, dt_limit)
    decay = step * A.float()
    if seq_idx is not None:
        first = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
        decay = torch.where(first[..., None], float("-inf"), decay)
    state = None if initial_states is None else initial_states.transpose(2, 3)
    q, k = C.to(x.dtype), B.to(x.dtype)
    y, final = recurrence(
        q, k, x, decay=decay, weight=step, scale=1.0, initial_state=state, output_final_state=return_final_states,
        output_dtype=x.dtype if D is None and z is None else torch.float32,
    )  # fmt: skip
    y = _skip_and_gate(y, x, D, z)
    states = [] if final is None else [final.transpose(2, 3)]
    if return_varlen_states:
        if cu_seqlens is None or initial_states is not None:
            raise UnsupportedOptionError(
                "return_varlen_states", "without cu_seqlens, or with initial_states", "pass cu_seqlens alone"
            )
        _, each = recurrence(
            q, k, x, decay=decay, weight=step, scale=1.0, output_final_state=True, cu_seqlens=cu_seqlens
        )
        assert each is not None
        states.append(each.transpose(2, 3))
    return y if not states else (y, *states)


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
    dtype = x.dtype
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
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One token: y [B, H, P]; `state` [B, H, P, N] is updated in place, best in float32: others are copied on the way.

    x, dt and z [B, H, P], A [H, P, N], B and C [B, groups, N], D and dt_bias [H, P]; all without H, too. Where A and dt are
    one number per head, expanded, as in Mamba-2, heads are what they are; else every channel is a head of its own
    with a decay per channel of the state, as in Mamba-1. `state_batch_indices` [B] says which states of a larger batch
    are meant.
    """
    if state.ndim == 3:
        return selective_state_update(
            state[:, None], x[:, None], dt[:, None], A[None], B[:, None], C[:, None],
            _expanded(D, 0), _expanded(z, 1), _expanded(dt_bias, 0), dt_softplus, state_batch_indices,
        )[:, 0]  # fmt: skip
    if state_batch_indices is not None or state.dtype != torch.float32:
        chosen = state if state_batch_indices is None else state[state_batch_indices]
        own = chosen.float().contiguous()
        y = selective_state_update(own, x, dt, A, B, C, D, z, dt_bias, dt_softplus)
        if state_batch_indices is None:
            state.copy_(own)
        else:
            state[state_batch_indices] = own.to(state.dtype)
        return y
    expanded = [dt, A, *([dt_bias] if dt_bias is not None else [])]
    alike = all(t.shape[-1] == 1 or not t.stride(-1) for t in expanded) and (A.shape[-2] == 1 or not A.stride(-2))
    if alike:
        dt, dt_bias = dt[..., :1], None if dt_bias is None else dt_bias[..., :1]
    step = _step_size(dt, dt_bias, dt_softplus)
    y = (_per_head if alike else _per_channel)(state, x, step, A, B, C)
    return _skip_and_gate(y, x, D, z)


def _expanded(x: Tensor | None, axis: int) -> Tensor | None:
    return None if x is None else x.unsqueeze(axis)


def _per_head(state: Tensor, x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """y [B, H, P]; `step` is [B, H, 1]."""
    strength = step[..., 0][:, None]
    decay = strength * A[..., 0, 0].float()
    q, k, v = (t.to(x.dtype)[:, None] for t in (C, B, x))
    return recurrence_step(q, k, v, state=state.transpose(2, 3), decay=decay, weight=strength, scale=1.0)[:, 0]


def _per_channel(state: Tensor, x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """y [B, H, P]: each channel of a head as a head with one value channel; `step` is [B, H, P]."""
    batch, heads, channels, size = state.shape
    strength = step.reshape(batch, 1, -1)
    decay = strength[..., None] * A.float().reshape(-1, size)
    q, k = (t.to(x.dtype)[:, None] for t in (C, B))
    v = x.reshape(batch, 1, -1, 1)
    one_by_one = state.reshape(batch, heads * channels, size, 1)
    y = recurrence_step(q, k, v, state=one_by_one, decay=decay, weight=strength, scale=1.0)
    if one_by_one.data_ptr() != state.data_ptr():
        state.copy_(one_by_one.reshape(state.shape))
    return y.reshape(x.shape)
