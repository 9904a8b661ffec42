"""Linear attention under the names of flash-linear-attention: tensors [B, T, H, D], log decays in float32.

Every function returns (o, final state or None), and takes its arguments in the order of its namesake in fla 0.6.0. The
form is chosen by the number of tokens and by whether gradients are needed: `chunk_*` and `fused_recurrent_*` differ in
their arguments only. `state_v_first` says that states are [V, K] and not [K, V]. Options that change how fla computes, but
no result (`cu_seqlens_cpu`, `chunk_size`, `chunk_indices`), are taken and not read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_engine.errors import UnsupportedOptionError
from attn_engine.library_recurrence import retention_decay
from attn_engine.runtime.recurrence import recurrence

Result = tuple[Tensor, Tensor | None]
L2_EPSILON = 1e-6
UNREAD = ("chunk_size",)


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
    _check_options(options)
    decay = _sum(g, g_gamma)
    return _run(q, k, v, decay, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


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
    _check_options(options)
    decay = _sum(g, g_gamma)
    return _run(q, k, v, decay, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens, reverse)


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
    _check_options(options)
    decay = retention_decay(v.shape[2], device=q.device)
    return _run(q, k, v, decay, None, scale, initial_state, output_final_state, False, cu_seqlens)


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
    decay = retention_decay(v.shape[2], device=q.device)
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
    return _run(q, k, v, g, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


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
    _check_options(options)
    _refuse_gv(gv)
    return _run(q, k, v, gk, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens, reverse)


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
    """`chunk_gated_delta_rule` without decay."""
    _check_options(options)
    return fused_recurrent_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


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
    """S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T; beta is 1 if absent."""
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    beta = _ones(v) if beta is None else beta
    return _run(q, k, v, None, beta, scale, initial_state, output_final_state, False, cu_seqlens)


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
    """`fused_recurrent_gated_delta_rule` without decays per channel."""
    _check_options(options)
    if cp_context is not None:
        raise UnsupportedOptionError("cp_context", "here", "hand the state on from device to device yourself")
    return fused_recurrent_gated_delta_rule(
        q, k, v, g, None, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
    )  # fmt: skip


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
    """S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T; beta is 1 if absent.

    The log decay is g [B, T, H], gk [B, T, H, K] or their sum. `use_gate_in_kernel`: g is -exp(A_log) softplus(g + dt_bias).
    `use_beta_sigmoid_in_kernel`: beta is sigmoid(beta), twice that with `allow_neg_eigval`.
    """
    _check_options(options)
    _refuse_gv(gv)
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    if use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias)
    if beta is None:
        beta = _ones(v)
    elif use_beta_sigmoid_in_kernel:
        beta = beta.float().sigmoid() * (2 if allow_neg_eigval else 1)
    if gk is not None and g is not None:
        g = g.float()[..., None]
    return _run(
        q, k, v, _sum(g, gk), beta, scale, initial_state, output_final_state, state_v_first, cu_seqlens
    )  # fmt: skip


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
    """`fused_recurrent_kda`; what `safe_gate`, `disable_recompute`, `use_graph` and `max_num_seqs` say changes no result."""
    _check_options(options)
    if cp_context is not None:
        raise UnsupportedOptionError("cp_context", "here", "hand the state on from device to device yourself")
    if return_intermediate_states:
        raise UnsupportedOptionError("return_intermediate_states", "here", "call it for each part, and keep its state")
    return fused_recurrent_kda(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
    )  # fmt: skip


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
    """Kimi Delta Attention: the gated delta rule with a log decay g [B, T, H, K] per key channel.

    `use_gate_in_kernel`: g is -exp(A_log) softplus(g + dt_bias) with A_log [H], dt_bias [H * K]; with a `lower_bound`
    it is lower_bound sigmoid(exp(A_log) (g + dt_bias)), of which A_log may be left out.
    """
    if use_gate_in_kernel:
        A_log = None if A_log is None else A_log[:, None]
        dt_bias = None if dt_bias is None else dt_bias.view(g.shape[2:])
        g = _gate(g, A_log, dt_bias) if lower_bound is None else _bounded_gate(g, A_log, dt_bias, lower_bound)
    return fused_recurrent_gated_delta_rule(
        q, k, v, None, g, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, False, None,
        None, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens, **options,
    )  # fmt: skip


def l2norm(x: Tensor, eps: float = L2_EPSILON) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the channels, in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _run(
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
    reverse: bool = False,
) -> Result:
    if reverse:
        if bounds is not None:
            raise UnsupportedOptionError("reverse", "with cu_seqlens", "flip each sequence before the call")
        q, k, v = (x.flip(1) for x in (q, k, v))
        decay, beta = (None if x is None else x.flip(1) if x.ndim > 1 else x for x in (decay, beta))
    if initial is not None and v_first:
        initial = initial.transpose(2, 3)
    o, state = recurrence(
        q, k, v, decay=decay, beta=beta, scale=scale, initial_state=initial, output_final_state=final, cu_seqlens=bounds
    )
    return o.flip(1) if reverse else o, state.transpose(2, 3) if state is not None and v_first else state


def _check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name not in UNREAD:
            raise UnsupportedOptionError(name, "here", f"leave it out; of the rest {', '.join(UNREAD)} is taken")


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b.float()
    return a.float() + b.float()


def _gate(g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    if g is None or A_log is None:
        raise UnsupportedOptionError("use_gate_in_kernel", "without g and A_log", "pass both")
    step = g.float() if dt_bias is None else g.float() + dt_bias.float()
    return -A_log.float().exp() * F.softplus(step)


def _bounded_gate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float) -> Tensor:
    step = g.float() if dt_bias is None else g.float() + dt_bias.float()
    return lower_bound * torch.sigmoid(step if A_log is None else A_log.float().exp() * step)


def _ones(v: Tensor) -> Tensor:
    return torch.ones(v.shape[:3], device=v.device)


def _refuse_gv(gv: Tensor | None) -> None:
    if gv is not None:
        raise UnsupportedOptionError("gv", "here: a decay is one per token or per key channel", "pass gk")
