"""Linear attention, lightning attention, and fla's other names of retention and simple GLA; see `compat.fla`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_engine.compat.fla_arguments import check_operands, check_options, decay_of_retention, decay_of_tokens
from attn_engine.compat.fla_run import Result, run
from attn_engine.errors import ArgumentError, StateShapeError, UnsupportedOptionError

EPSILON = 1e-10
"""What fla adds to the sum that linear attention is divided by."""
States = Tensor | tuple[Tensor | None, Tensor | None] | None
Normalized = tuple[Tensor, Tensor | tuple[Tensor, Tensor] | None]


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: States = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> Normalized:
    """Linear attention without a decay; with `normalize` o is divided by scale * q_t z_t + 1e-10, z_t the sum of keys.

    v has up to 511 channels then, and states are (S [N, H, K, V], z [N, 1, H, K]), of which either may be None at first;
    S alone will do, too.
    """
    return _linear(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)


fused_chunk_linear_attn = chunk_linear_attn


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: States = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Normalized:
    """`chunk_linear_attn`, which normalizes only if it is asked to here; with `reverse` from the last token to the first."""
    tail = (scale, initial_state, output_final_state, normalize, cu_seqlens)
    return _linear(q, k, v, *tail, reverse=reverse, wide=True)


def _linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    initial: States,
    final: bool,
    normalize: bool,
    bounds: Tensor | None,
    reverse: bool = False,
    wide: bool = False,
) -> Normalized:
    """The sum of keys is one more channel of the state, which a value of 1 writes."""
    if isinstance(initial, tuple) and len(initial) != 2:
        raise StateShapeError(f"initial_state is a tuple of {len(initial)}: pass (S, z)")
    if not normalize:
        if isinstance(initial, tuple):
            raise StateShapeError("initial_state is a tuple: without normalize there is no sum of keys, pass S alone")
        return run(q, k, v, None, None, scale, initial, final, False, bounds, reverse=reverse, wide=wide)
    check_operands(q, k, v)
    state, z = initial if isinstance(initial, tuple) else (initial, None)
    start = _joined(state, z, q, v)
    values = torch.cat([v, v.new_ones((*v.shape[:3], 1))], -1)
    o, state = run(
        q,
        k,
        values,
        None,
        None,
        scale,
        start,
        final,
        False,
        bounds,
        reverse=reverse,
        wide=wide,
        output_dtype=torch.float32,
    )
    o = (o[..., :-1] / (o[..., -1:] + EPSILON)).to(v.dtype)
    return o, None if state is None else (state[..., :-1], state[..., -1][:, None])


def _joined(state: Tensor | None, z: Tensor | None, q: Tensor, v: Tensor) -> Tensor | None:
    """[N, H, K, V + 1], float32."""
    if state is None and z is None:
        return None
    heads, key, value = v.shape[2], q.shape[3], v.shape[3]
    if z is not None and z.shape[1:] != (1, heads, key):
        raise StateShapeError(f"z of initial_state has shape {tuple(z.shape)}, expected (sequence, 1, {heads}, {key})")
    if z is None:
        assert state is not None
        z = state.new_zeros((state.shape[0], 1, heads, key))
    sums = z[:, 0, :, :, None].float()
    state = sums.new_zeros((*sums.shape[:3], value)) if state is None else state.float()
    if state.shape != (*sums.shape[:3], value):
        expected = (*sums.shape[:3], value)
        raise StateShapeError(f"S of initial_state has shape {tuple(state.shape)}, expected {expected}")
    return torch.cat([state, sums], -1)


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """The log decay of head h is -(8 / H) (1 - layer_idx / num_layers) h."""
    check_options(options)
    check_operands(q, k, v)
    decay = _lightning_decay(q, layer_idx, num_layers)
    return run(q, k, v, decay, None, scale, initial_state, output_final_state, False, cu_seqlens)


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`chunk_lightning_attn`; with `reverse` from the last token to the first."""
    check_operands(q, k, v)
    decay = _lightning_decay(q, layer_idx, num_layers)
    tail = (scale, initial_state, output_final_state, False, cu_seqlens)
    return run(q, k, v, decay, None, *tail, reverse=reverse, wide=True)


def _lightning_decay(q: Tensor, layer: int, layers: int) -> Tensor:
    if layers < 1:
        raise ArgumentError(f"num_layers is {layers}: layer_idx counts from 0 to num_layers")
    heads = q.shape[2]
    return -(8 / heads * (1 - layer / layers)) * torch.arange(heads, dtype=torch.float32, device=q.device)


def fused_chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`chunk_simple_gla`."""
    return run(q, k, v, decay_of_tokens(g, g_gamma), None, scale, initial_state, output_final_state, False, cu_seqlens)


def fused_chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`chunk_retention`."""
    decay = decay_of_retention(q, k, v)
    return run(q, k, v, decay, None, scale, initial_state, output_final_state, False, cu_seqlens)


def parallel_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, None]:
    """(o, None) of `chunk_simple_gla`: nothing of size T x T is made, so there are no weights to return."""
    if output_attentions:
        raise UnsupportedOptionError("output_attentions", "here", "weights are scale q_i k_j exp(g_{j+1} + .. + g_i)")
    return run(q, k, v, decay_of_tokens(g, None), None, scale, None, False, False, cu_seqlens)[0], None


def parallel_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """(o, None) of `chunk_retention`."""
    decay = decay_of_retention(q, k, v).expand(*v.shape[:3])
    return parallel_simple_gla(q, k, v, decay, scale, output_attentions, cu_seqlens)
