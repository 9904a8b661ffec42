"""Mamba-2 under the names of mamba_ssm: x [B, T, H, P], dt [B, T, H], A [H], B and C [B, T, groups, N], states [B, H, P, N]."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import eq

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_engine.errors import DtypeError, RankError, StateShapeError, UnsupportedOptionError
from attn_engine.frontend.checks import check_tensor
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

    A is at most 0; D is [H] or [H, P], dt_bias [H], z as x. dt, with its bias and after a softplus, is limited to
    `dt_limit`: without a softplus, negative ones are 0 by default.
    `seq_idx` [B, T]: the state is forgotten where it changes. Final states follow y if asked for, and with
    `return_varlen_states` those of the sequences between `cu_seqlens`, of a batch of one; these are read for nothing else.
    `chunk_size` and `state_dtype` (states are float32) change no result that is asked for, and are not read.
    """
    _check_ranks(("x", x, 4), ("B", B, 4), ("C", C, 4), ("initial_states", initial_states, 4))
    heads = x.shape[2:3]
    D_shapes = [heads, x.shape[2:]]
    _check("dt", dt, [x.shape[:3]])
    for name, given, shapes in (
        ("A", A, [heads]),
        ("D", D, D_shapes),
        ("z", z, [x.shape]),
        ("dt_bias", dt_bias, [heads]),
    ):
        _check(name, given, shapes)
    _check("seq_idx", seq_idx, [x.shape[:2]])
    step = _step_size(dt, dt_bias, dt_softplus)
    low, high = dt_limit
    if not dt_softplus or (low, high) != (0.0, math.inf):
        step = step.clamp(low, high)
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


def _check_ranks(*given: tuple[str, Tensor | None, int]) -> None:
    for name, x, rank in given:
        if x is not None:
            check_tensor(name, x)
            if x.ndim != rank:
                raise RankError(f"{name} has {x.ndim} dimensions, but needs {rank}: its shape is {tuple(x.shape)}")


def _check(name: str, given: Tensor | None, shapes: list[torch.Size]) -> None:
    """What broadcasts would be taken for something else."""
    if given is None:
        return
    check_tensor(name, given)
    # Size by size: what traces with symbols for sizes compares no whole shapes.
    if not any(given.ndim == len(shape) and all(map(eq, given.shape, shape)) for shape in shapes):
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise StateShapeError(f"{name} has shape {tuple(given.shape)}, expected {wanted}")


def _step_size(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    step = dt.float()
    if bias is not None:
        step = step + bias.float()
    return F.softplus(step) if softplus else step


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

    x, dt and z [B, H, P], A [H, P, N], at most 0, B and C [B, groups, N], D and dt_bias [H, P]; all without H, too. Where
    A and dt are one number per head, expanded, as in Mamba-2, heads are what they are; else every channel is a head of its own
    with a decay per channel of the state, as in Mamba-1. `state_batch_indices` [B] says which states of a larger batch
    are meant; a negative one is padding: y is 0, and no state changes.
    """
    check_tensor("state", state)
    if state.ndim == 3:
        _check_ranks(("x", x, 2), ("dt", dt, 2), ("A", A, 2), ("B", B, 2), ("C", C, 2))
        return selective_state_update(
            state[:, None], x[:, None], dt[:, None], A[None], B[:, None], C[:, None],
            _expanded(D, 0), _expanded(z, 1), _expanded(dt_bias, 0), dt_softplus, state_batch_indices,
        )[:, 0]  # fmt: skip
    _check_update(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices)

    def update(chosen: Tensor) -> Tensor:
        return _update(chosen, x, dt, A, B, C, D, z, dt_bias, dt_softplus)

    if state_batch_indices is not None:
        return _of_some(state, state_batch_indices, update) if len(x) else torch.empty_like(x)
    if state.dtype == torch.float32:
        return update(state)
    own = state.float()
    y = update(own)
    state.copy_(own)
    return y


def _check_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    indices: Tensor | None,
) -> None:
    if state.ndim != 4:
        raise StateShapeError(
            f"state has {state.ndim} dimensions, expected (batch, heads, channels, states), or no heads"
        )
    _check_ranks(("x", x, 3), ("dt", dt, 3), ("A", A, 3), ("B", B, 3), ("C", C, 3))
    batch = state.shape[:1] if indices is None else x.shape[:1]
    head, size = state.shape[1:3], state.shape[3:]
    for name, given in (("x", x), ("dt", dt), ("z", z)):
        _check(name, given, [batch + head])
    for name, given, shape in (("A", A, head + size), ("D", D, head), ("dt_bias", dt_bias, head)):
        _check(name, given, [shape])
    for name, given in (("B", B), ("C", C)):
        _check(name, given, [batch + B.shape[1:2] + size])
    _check("state_batch_indices", indices, [batch])
    if indices is not None and indices.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"state_batch_indices is {indices.dtype}: pass int32 or int64")


def _of_some(state: Tensor, indices: Tensor, update: Callable[[Tensor], Tensor]) -> Tensor:
    """What `update` gives for some states, which it replaces. Rows that are padding do what the first other one does, and write what it writes:
    where each of them is, the host does not know."""
    real = indices >= 0
    first = real.int().argmax(0, keepdim=True)
    rows = torch.where(real, indices, indices[first].clamp(min=0))
    after = state[rows].float()
    unchanged = after[first]
    y = update(after)
    rest = torch.where(real[first, None, None, None], after[first], unchanged).to(state.dtype)
    state[rows] = torch.where(real[:, None, None, None], after.to(state.dtype), rest)
    return torch.where(real[:, None, None], y, 0)


def _update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
) -> Tensor:
    """y; `state` is float32."""
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
    """y [B, H, P], float32; `step` is [B, H, 1]."""
    strength = step[..., 0][:, None]
    decay = strength * A[..., 0, 0].float()
    q, k, v = (t[:, None] for t in _of_one_dtype(C, B, x))
    return recurrence_step(
        q, k, v, state=state.transpose(2, 3), decay=decay, weight=strength, scale=1.0, output_dtype=torch.float32
    )[:, 0]


def _per_channel(state: Tensor, x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """y [B, H, P], float32: each channel of a head as a head with one value channel; `step` is [B, H, P]."""
    batch, heads, channels, size = state.shape
    strength = step.reshape(batch, 1, -1)
    decay = strength[..., None] * A.float().reshape(-1, size)
    q, k, v = (t[:, None] for t in _of_one_dtype(C, B, x.reshape(batch, -1, 1)))
    own = state if state.is_contiguous() else state.contiguous()
    one_by_one = own.view(batch, heads * channels, size, 1)
    y = recurrence_step(q, k, v, state=one_by_one, decay=decay, weight=strength, scale=1.0, output_dtype=torch.float32)
    if not state.is_contiguous():
        state.copy_(own)
    return y.reshape(x.shape)


def _of_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """One that rounds none of them."""
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]
