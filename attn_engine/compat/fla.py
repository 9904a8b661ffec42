"""Linear attention under the names of flash-linear-attention: tensors [B, T, H, D], log decays in float32.

Every function returns (o, final state or None), and takes its arguments in the order of its namesake in fla 0.6.0. The
form is chosen by the number of tokens and by whether gradients are needed: `fused_recurrent_*` go in chunks as `chunk_*` do,
but compute with halves in float32 as their namesakes do: more exact, and slower. `state_v_first`, or its old name
`transpose_state_layout`, says that states are [V, K] and not [K, V]; `reverse` goes from the last token of each sequence to
its first. Options that change how fla computes, but no result (`cu_seqlens_cpu`, `chunk_size`, `chunk_indices`), are taken
and not read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_engine.compat.fla_arguments import (
    CHANNEL,
    TOKEN,
    added,
    check_axes,
    check_options,
    decay_of_channels,
    decay_of_retention,
    decay_of_tokens,
    gate,
    gate_of_channels,
    ones,
    refuse_gv,
    strength,
)
from attn_engine.compat.fla_linear import chunk_lightning_attn as chunk_lightning_attn
from attn_engine.compat.fla_linear import chunk_linear_attn as chunk_linear_attn
from attn_engine.compat.fla_linear import fused_chunk_linear_attn as fused_chunk_linear_attn
from attn_engine.compat.fla_linear import fused_chunk_retention as fused_chunk_retention
from attn_engine.compat.fla_linear import fused_chunk_simple_gla as fused_chunk_simple_gla
from attn_engine.compat.fla_linear import fused_recurrent_lightning_attn as fused_recurrent_lightning_attn
from attn_engine.compat.fla_linear import fused_recurrent_linear_attn as fused_recurrent_linear_attn
from attn_engine.compat.fla_linear import parallel_retention as parallel_retention
from attn_engine.compat.fla_linear import parallel_simple_gla as parallel_simple_gla
from attn_engine.compat.fla_run import Result, run
from attn_engine.errors import UnsupportedOptionError


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **options: Any,
) -> Result:
    """A log decay per head and token `g` [B, T, H], per head `g_gamma` [H], or the sum of both."""
    check_options(options)
    decay = decay_of_tokens(g, g_gamma)
    return run(q, k, v, decay, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """`chunk_simple_gla`; with `reverse` from the last token to the first."""
    state_v_first = check_options(options, state_v_first)
    decay = decay_of_tokens(g, g_gamma)
    tail = (scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    return run(q, k, v, decay, None, *tail, reverse=reverse, wide=True)


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """The decay of head h is 1 - 2^(-5 - h)."""
    check_options(options)
    decay = decay_of_retention(q, k, v)
    return run(q, k, v, decay, None, scale, initial_state, output_final_state, False, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """`chunk_retention`; with `reverse` from the last token to the first."""
    decay = decay_of_retention(q, k, v)
    return fused_recurrent_simple_gla(
        q, k, v, None, decay, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens, **options
    )


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> Result:
    """A log decay per head, token and key channel [B, T, H, K]."""
    check_axes("g", g, CHANNEL)
    return run(q, k, v, g, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """`chunk_gla` with gk for g; a log decay per value channel (gv) is refused."""
    state_v_first = check_options(options, state_v_first)
    refuse_gv(gv)
    tail = (scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    return run(q, k, v, decay_of_channels("gk", gk), None, *tail, reverse=reverse, wide=True)


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    **options: Any,
) -> Result:
    """S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T."""
    check_options(options)
    check_axes("beta", beta, TOKEN)
    tail = (scale, initial_state, output_final_state, False, cu_seqlens)
    return run(q, k, v, None, beta, *tail, normed=use_qk_l2norm_in_kernel)


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`chunk_delta_rule`; beta is 1 if absent."""
    beta = ones(v) if beta is None else beta
    tail = (scale, initial_state, output_final_state, False, cu_seqlens)
    return run(q, k, v, None, beta, *tail, normed=use_qk_l2norm_in_kernel, wide=True)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **options: Any,
) -> Result:
    """S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T; beta is 1 if absent.

    `use_gate_in_kernel`: the log decay g [B, T, H] is -exp(A_log) softplus(g + dt_bias). `use_beta_sigmoid_in_kernel`:
    beta is sigmoid(beta), twice that with `allow_neg_eigval`.
    """
    state_v_first = check_options(options, state_v_first)
    if cp_context is not None:
        raise UnsupportedOptionError("cp_context", "here", "hand the state on from device to device yourself")
    g = gate(g, A_log, dt_bias) if use_gate_in_kernel else decay_of_tokens(g, None)
    beta = strength(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    tail = (scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    return run(q, k, v, g, beta, *tail, normed=use_qk_l2norm_in_kernel)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """`chunk_gated_delta_rule`; the log decay is g [B, T, H], gk [B, T, H, K] or their sum."""
    state_v_first = check_options(options, state_v_first)
    refuse_gv(gv)
    g = gate(g, A_log, dt_bias) if use_gate_in_kernel else decay_of_tokens(g, None)
    beta = strength(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if gk is not None and g is not None:
        g = g.float()[..., None]
    tail = (scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    return run(q, k, v, added(g, decay_of_channels("gk", gk)), beta, *tail, normed=use_qk_l2norm_in_kernel, wide=True)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **options: Any,
) -> Result:
    """Kimi Delta Attention: the gated delta rule with a log decay g [B, T, H, K] per key channel.

    `use_gate_in_kernel`: g is -exp(A_log) softplus(g + dt_bias) with A_log [H], dt_bias [H * K]; with a `lower_bound`
    it is lower_bound sigmoid(exp(A_log) (g + dt_bias)), of which A_log may be left out. What `safe_gate`,
    `disable_recompute`, `use_graph` and `max_num_seqs` say changes no result.
    """
    state_v_first = check_options(options, state_v_first)
    if cp_context is not None:
        raise UnsupportedOptionError("cp_context", "here", "hand the state on from device to device yourself")
    if return_intermediate_states:
        raise UnsupportedOptionError("return_intermediate_states", "here", "call it for each part, and keep its state")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise UnsupportedOptionError("safe_gate", "without lower_bound", "say how small a gate's log decay may be")
    check_axes("g", g, CHANNEL)
    check_axes("beta", beta, TOKEN)
    g = gate_of_channels(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
    beta = strength(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    tail = (scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    return run(q, k, v, g, beta, *tail, normed=use_qk_l2norm_in_kernel)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> Result:
    """`chunk_kda`."""
    state_v_first = check_options(options, state_v_first)
    check_axes("g", g, CHANNEL)
    check_axes("beta", beta, TOKEN)
    g = gate_of_channels(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
    beta = strength(beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    tail = (scale, initial_state, output_final_state, state_v_first, cu_seqlens)
    return run(q, k, v, g, beta, *tail, normed=use_qk_l2norm_in_kernel, wide=True)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
