"""Ready definitions for recurrences: log decays, a normaliser, and the score with which attention is the same thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_engine.errors import UnsupportedOptionError
from attn_engine.frontend.checks import check_tensor
from attn_engine.runtime.recurrence import recurrence

Score = Callable[[Any, Any, Any, Any, Any], Any]


def retention_decay(heads: int, device: torch.device | str | None = None) -> Tensor:
    """Log decays [H] of retention: log(1 - 2^(-5 - h))."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, device=device, dtype=torch.float32)))


def decay_score(log_decay: Tensor) -> Score:
    """The score of retention's parallel form, for one log decay per head [H].

    With it, the mask `library.causal` and the row function `library.identity`, attention equals the recurrence.
    """

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * torch.exp(log_decay[h] * torch.relu(q_idx - kv_idx))

    return score_mod


def gate_decay(gate: Tensor, normalizer: float = 16.0) -> Tensor:
    """The log decay of gated linear attention: logsigmoid(gate) / normalizer, in float32."""
    return F.logsigmoid(gate.float()) / normalizer


def mamba_decay(dt: Tensor, a_log: Tensor, dt_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(log decay, weight) [B, T, H] of Mamba-2: the weight is softplus(dt + dt_bias), the log decay -exp(a_log) times it."""
    weight = F.softplus(dt.float() if dt_bias is None else dt.float() + dt_bias.float())
    return -torch.exp(a_log.float()) * weight, weight


def normalized_linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, **options: Any) -> Tensor:
    """o_t = q_t S_t / (q_t z_t) with z_t the running sum of keys, decayed like S: one more channel of v, which is 1.

    q and k should be positive, for example elu(x) + 1. v has up to 511 channels; options are those of `recurrence`, but
    for `output_final_state`: a state, of which the last value channel is z, only goes in.

    Raises:
        UnsupportedOptionError: for `output_final_state`.
    """
    if options.pop("output_final_state", False):
        instead = "`attn_engine.compat.fla.chunk_linear_attn` returns it, or `recurrence` with a channel of ones in v"
        raise UnsupportedOptionError("output_final_state", "where o alone is returned", instead)
    check_tensor("v", v)
    dtype = options.pop("output_dtype", None) or v.dtype
    ones = v.new_ones((*v.shape[:3], 1))
    o, _ = recurrence(q, k, torch.cat([v, ones], -1), decay=decay, output_dtype=torch.float32, **options)
    return (o[..., :-1] / o[..., -1:]).to(dtype)
