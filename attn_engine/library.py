"""Ready definitions, in plain user code: row functions, score functions and masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

Score = Callable[[Any, Any, Any, Any, Any], Any]
Mask = Callable[[Any, Any, Any, Any], Any]


# Row functions: from the scores of a row to its weights
def softmax(s: Any) -> Any:
    """exp(s - max s) / sum: weights that add up to one."""
    e = torch.exp(s - s.amax())
    return e / e.sum()


def softmax1(s: Any) -> Any:
    """Softmax with one more score of 0 that has no value: a row may attend to nothing."""
    m = torch.maximum(s.amax(), torch.zeros(()))
    e = torch.exp(s - m)
    return e / (torch.exp(-m) + e.sum())


def sigmoid(s: Any) -> Any:
    """Each key by itself: 1 / (1 + exp(-s))."""
    return torch.sigmoid(s)


def relu(s: Any) -> Any:
    """Each key by itself: max(s, 0)."""
    return torch.relu(s)


def identity(s: Any) -> Any:
    """The scores themselves."""
    return s


def retention(s: Any) -> Any:
    """s / max(1, sum |s|)."""
    return s / torch.clamp(torch.abs(s).sum(), min=1.0)


def cosine(s: Any) -> Any:
    """s / sqrt(sum s^2): weights of unit length."""
    return s / torch.sqrt((s * s).sum())


# Score functions
def alibi(slopes: torch.Tensor, offset: int = 0) -> Score:
    """A penalty per head that grows with the distance; `offset` is the position of the first query."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (kv_idx - q_idx - offset)

    return score_mod


def soft_cap(cap: float) -> Score:
    """Scores within (-cap, cap): cap * tanh(score / cap)."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * torch.tanh(score / cap)

    return score_mod


def bias(tensor: torch.Tensor) -> Score:
    """Adds a tensor of shape [Sq, Skv], [H, Sq, Skv] or [B, H, Sq, Skv]; a dimension of size 1 is broadcast."""
    if not 2 <= tensor.ndim <= 4:
        raise ValueError(f"bias has shape {tuple(tensor.shape)}: give it 2 to 4 dimensions, the last two [Sq, Skv]")
    broadcast = tuple(size == 1 for size in tensor.shape)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        indices = (b, h, q_idx, kv_idx)[-len(broadcast) :]
        return score + tensor[tuple(0 if once else i for once, i in zip(broadcast, indices, strict=True))]

    return score_mod


# Masks: true where the query sees the key
def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Keys up to the query's own position, counted from the first."""
    return q_idx >= kv_idx


def causal_bottom_right(sq: int, skv: int) -> Mask:
    """Causal for queries that are the last `sq` of `skv` positions."""
    offset = skv - sq

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + offset >= kv_idx

    return mask_mod


def sliding_window(window: int) -> Mask:
    """The query's own position and the `window - 1` before it."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    return mask_mod


def prefix_lm(prefix: int | torch.Tensor) -> Mask:
    """Causal, and everyone sees the first `prefix` keys; a tensor holds one length per batch."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        length = prefix if isinstance(prefix, int) else prefix[b]
        return (kv_idx < length) | (q_idx >= kv_idx)

    return mask_mod


def document(ids: torch.Tensor) -> Mask:
    """Keys of the query's own document; ids are [S] or [B, S]."""
    batched = ids.ndim == 2

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[b, q_idx] == ids[b, kv_idx] if batched else ids[q_idx] == ids[kv_idx]

    return mask_mod


def and_masks(*masks: Mask) -> Mask:
    """Visible where all masks say so."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return reduce(lambda a, c: a & c, [mask(b, h, q_idx, kv_idx) for mask in masks])

    return mask_mod


def or_masks(*masks: Mask) -> Mask:
    """Visible where any mask says so."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return reduce(lambda a, c: a | c, [mask(b, h, q_idx, kv_idx) for mask in masks])

    return mask_mod
