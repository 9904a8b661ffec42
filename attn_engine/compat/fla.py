"""Linear attention under the names of flash-linear-attention: tensors [B, T, H, D], log decays in float32.

Every function returns (o, final state or None). `chunk_*` and `fused_recurrent_*` of one name are one function here:
the form is chosen by the number of tokens and by whether gradients are needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_engine.errors import UnsupportedOptionError
from attn_engine.library_recurrence import retention_decay
from attn_engine.runtime.recurrence import recurrence

Result = tuple[Tensor, Tensor | None]
L2_EPSILON = 1e-6


def chunk_simple_gla(
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
    """A log decay per head and token `g` [B, T, H], per head `g_gamma` [H], or the sum of both."""
    decay = g
    if g_gamma is not None:
        decay = g_gamma.float() if g is None else g.float() + g_gamma.float()
    return recurrence(
        q,
        k,
        v,
        decay=decay,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


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
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`chunk_simple_gla`; with `reverse` from the last token to the first."""
    if not reverse:
        return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens)
    q, k, v = (_flipped(x, cu_seqlens) for x in (q, k, v))
    g = None if g is None else _flipped(g, cu_seqlens)
    o, final = chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state)
    return o.flip(1), final


def _flipped(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is not None:
        raise UnsupportedOptionError("reverse", "with cu_seqlens", "flip each sequence before the call")
    return x.flip(1)


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """The decay of head h is 1 - 2^(-5 - h)."""
    decay = retention_decay(v.shape[2], device=q.device)
    return chunk_simple_gla(q, k, v, None, decay, scale, initial_state, output_final_state, cu_seqlens)


def fused_recurrent_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reverse: bool = False,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`chunk_retention`; with `reverse` from the last token to the first."""
    decay = retention_decay(v.shape[2], device=q.device)
    return fused_recurrent_simple_gla(
        q, k, v, None, decay, scale, initial_state, output_final_state, reverse, cu_seqlens
    )


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Result:
    """A log decay per head, token and key channel [B, T, H, K]."""
    return recurrence(
        q,
        k,
        v,
        decay=g,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


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
    cu_seqlens: Tensor | None = None,
) -> Result:
    """`chunk_gla` with gk for g; a log decay per value channel (gv) is refused."""
    if gv is not None:
        raise UnsupportedOptionError("gv", "here: a decay is one per token or per key channel", "pass gk")
    if reverse:
        q, k, v = (_flipped(x, cu_seqlens) for x in (q, k, v))
        gk = None if gk is None else _flipped(gk, cu_seqlens)
    o, final = recurrence(
        q,
        k,
        v,
        decay=gk,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
    return (o.flip(1) if reverse else o), final


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
    cu_seqlens: Tensor | None = None,
) -> Result:
    """S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T; beta is 1 if absent."""
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if beta is None:
        beta = torch.ones(v.shape[:3], device=v.device)
    return recurrence(
        q,
        k,
        v,
        decay=g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


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
) -> Result:
    """`chunk_gated_delta_rule` without decay."""
    return chunk_gated_delta_rule(
        q, k, v, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


fused_recurrent_gated_delta_rule = chunk_gated_delta_rule
fused_recurrent_delta_rule = chunk_delta_rule


def l2norm(x: Tensor, eps: float = L2_EPSILON) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the channels, in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)
