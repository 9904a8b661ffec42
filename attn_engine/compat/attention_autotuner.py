"""Retention in its parallel form under the name of attention_autotuner: tensors (batch, heads, tokens, channels)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_engine.errors import RankError, StateShapeError
from attn_engine.frontend.checks import check_tensor
from attn_engine.library import causal as after
from attn_engine.library import retention
from attn_engine.runtime.attention import attention


def RetNetAttnFunc(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, device_type: object = None, causal: bool = False
) -> Tensor:
    """o = p v with s = (q k^T) * mask and p = s / max(1, sum_j |s_j|); differentiable in all four tensors.

    `mask` is (1 or batch, 1 or heads, queries, keys): decays, 0 where a query does not see a key. With `causal` keys after a
    query are not read at all, where the mask must be 0 anyway. `device_type` names no kernel here, and is not read:
    tensors say where they are.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("mask", mask)):
        check_tensor(name, x)
    if q.ndim != 4 or k.ndim != 4:
        raise RankError(f"q and k have {q.ndim} and {k.ndim} dimensions, but need 4 (batch, head, position, channel)")
    batch, heads = q.shape[:2]
    lengths = (q.shape[2], k.shape[2])
    if (
        mask.ndim != 4
        or mask.shape[2:] != lengths
        or mask.shape[0] not in (1, batch)
        or mask.shape[1] not in (1, heads)
    ):
        raise StateShapeError(
            f"mask has shape {tuple(mask.shape)}, expected (1 or {batch}, 1 or {heads}, {lengths[0]}, {lengths[1]})"
        )
    several, own = mask.shape[0] > 1, mask.shape[1] > 1

    def decayed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * mask[b if several else 0, h if own else 0, q_idx, kv_idx]

    return attention(q, k, v, score_mod=decayed, mask_mod=after if causal else None, row=retention, scale=1.0)
