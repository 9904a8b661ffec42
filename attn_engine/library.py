"""Ready definitions, in plain user code: row functions, score functions, mods and masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

Score = Callable[[Any, Any, Any, Any, Any], Any]
Mask = Callable[[Any, Any, Any, Any], Any]
Row = Callable[[Any, Any, Any, Any], Any]
Mod = Callable[[Any, Any, Any, Any, Any], Any]


# Row functions: from the scores of a row to its weights
def softmax(s: Any) -> Any:
    """exp(s - max s) / sum: weights that add up to one."""
    e = torch.exp(s - s.amax())
    return e / e.sum()


def softmax_with_temperature(temperature: float | torch.Tensor, per: str = "head") -> Row:
    """softmax(s / temperature); a trainable tensor of shape [] or, `per` "head" or "query", [H] or [H, Sq]."""
    if per not in ("head", "query"):
        raise ValueError(f'temperature per {per!r}: write "head" or "query"')
    read = _per_row(temperature, per)

    def row(s: Any, b: Any, h: Any, q_idx: Any) -> Any:
        e = torch.exp((s - s.amax()) / read(h, q_idx))
        return e / e.sum()

    return row


def softmax1(s: Any) -> Any:
    """Softmax with one more score of 0 that has no value: a row may attend to nothing."""
    m = torch.maximum(s.amax(), torch.zeros(()))
    e = torch.exp(s - m)
    return e / (torch.exp(-m) + e.sum())


def softmax_with_sink(sink: float | torch.Tensor) -> Row:
    """Softmax with one more score that has no value, trainable where it is a tensor of shape [] or [H]."""
    read = _per_row(sink, "head")

    def row(s: Any, b: Any, h: Any, q_idx: Any) -> Any:
        extra = read(h, q_idx)
        m = torch.maximum(s.amax(), torch.as_tensor(extra))
        e = torch.exp(s - m)
        return e / (torch.exp(extra - m) + e.sum())

    return row


def softmax_centred(s: Any) -> Any:
    """Softmax of the scores less their mean."""
    c = s - s.mean()
    e = torch.exp(c - c.amax())
    return e / e.sum()


def log_cosh_softmax(s: Any) -> Any:
    """exp(s - c) with c = log(sum cosh s): a softmax whose normaliser counts both tails."""
    m = s.abs().amax()
    e = torch.exp(s - m)
    return e / (0.5 * (e.sum() + torch.exp(-s - m).sum()))


def sigmoid(s: Any) -> Any:
    """Each key by itself: 1 / (1 + exp(-s))."""
    return torch.sigmoid(s)


def sigmoid_of_length(length: int | torch.Tensor) -> Row:
    """sigmoid(s - log n): weights of about 1 / n for scores around 0; n is a number, or a tensor of one per batch."""
    bias = math.log(length) if isinstance(length, int) else torch.log(length.float())

    def row(s: Any, b: Any, h: Any, q_idx: Any) -> Any:
        return torch.sigmoid(s - (bias[b] if isinstance(bias, torch.Tensor) and bias.ndim else bias))

    return row


def relu(s: Any) -> Any:
    """Each key by itself: max(s, 0)."""
    return torch.relu(s)


def squared_relu(s: Any) -> Any:
    """Each key by itself: max(s, 0)^2."""
    positive = torch.relu(s)
    return positive * positive


def relu_by_length(s: Any) -> Any:
    """max(s, 0) over the number of visible keys."""
    return torch.relu(s) / torch.ones_like(s).sum()


def identity(s: Any) -> Any:
    """The scores themselves."""
    return s


def retention(s: Any) -> Any:
    """s / max(1, sum |s|)."""
    return s / torch.clamp(torch.abs(s).sum(), min=1.0)


def cosine(s: Any) -> Any:
    """s / sqrt(sum s^2): weights of unit length."""
    return s / torch.sqrt((s * s).sum())


def p_norm(p: float) -> Callable[[Any], Any]:
    """s / (sum |s|^p)^(1/p)."""
    if not p >= 1:
        raise ValueError(f"p is {p}: a norm needs at least 1")

    def row(s: Any) -> Any:
        return s / (s.abs() ** p).sum() ** (1.0 / p)

    return row


def softplus_normalised(s: Any) -> Any:
    """log(1 + exp(s)) / sum."""
    t = torch.nn.functional.softplus(s)
    return t / t.sum()


def _per_row(value: float | torch.Tensor, per: str) -> Callable[[Any, Any], Any]:
    """How a number of the row is read: as it is, by head, or by head and query."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return lambda h, q_idx: value
    if per == "head":
        return lambda h, q_idx: value[h]
    return lambda h, q_idx: value[h, q_idx]


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


# Query, key and value mods
def rotary(frequencies: torch.Tensor) -> Mod:
    """Rotates channels c and c + half by position * frequencies[c]; frequencies of shape [half], for 2 half channels."""
    half = frequencies.shape[0]

    def mod(x: Any, b: Any, h: Any, position: Any, channel: Any) -> Any:
        angle = position * frequencies[channel % half]
        partner = torch.where(channel < half, -x[channel + half], x[channel - half])
        return x * torch.cos(angle) + partner * torch.sin(angle)

    return mod


def rms_norm(weight: torch.Tensor | None = None, eps: float = 1e-6) -> Mod:
    """x / sqrt(mean(x * x) + eps), times a weight per channel."""

    def mod(x: Any, b: Any, h: Any, position: Any, channel: Any) -> Any:
        y = x * torch.rsqrt((x * x).mean() + eps)
        return y if weight is None else y * weight[channel]

    return mod


def in_turn(*mods: Mod) -> Mod:
    """The first mod, then the next on what it gave."""

    def mod(x: Any, b: Any, h: Any, position: Any, channel: Any) -> Any:
        return reduce(lambda y, each: each(y, b, h, position, channel), mods, x)

    return mod


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
    """Visible where all masks say so: everywhere, if there are none."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return reduce(lambda a, c: a & c, [mask(b, h, q_idx, kv_idx) for mask in masks]) if masks else True

    return mask_mod


def or_masks(*masks: Mask) -> Mask:
    """Visible where any mask says so: nowhere, if there are none."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return reduce(lambda a, c: a | c, [mask(b, h, q_idx, kv_idx) for mask in masks]) if masks else False

    return mask_mod
