"""Sequences packed one behind the other: the same functions, for the sequence and the place that a token has in it."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from attn_engine.errors import SequenceBoundsError
from attn_engine.frontend.checks import check_tensor
from attn_engine.frontend.definition import Definition
from attn_engine.frontend.online_func import OnlineFunc
from attn_engine.frontend.trace import choose_arity

Function = Callable[..., Any]
INTEGERS = (torch.int32, torch.int64)
SHOWN = 8
"""So many offsets stand in a message whole."""


@dataclass(frozen=True)
class Tokens:
    """Of each token on one side the number of its sequence, and its place in it; past the end no number is real."""

    sequence: Tensor
    place: Tensor

    @classmethod
    def of(cls, bounds: Tensor, count: int, past: int) -> Tokens:
        """From offsets [N + 1]; tokens behind the last sequence have the number N + `past`. Nothing is copied to the host."""
        token = torch.arange(count, device=bounds.device, dtype=bounds.dtype)
        sequences = bounds.numel() - 1
        found = torch.searchsorted(bounds, token, right=True) - 1
        inside = (found >= 0) & (found < sequences)
        place = torch.where(inside, token - bounds[found.clamp(0, sequences)], 0)
        return cls(torch.where(inside, found, sequences + past).to(torch.int32), place.to(torch.int32))


def check_bounds(name: str, bounds: Tensor, batch: int, device: torch.device) -> None:
    """Offsets of one side; their values stay on the device and are not looked at."""
    check_tensor(name, bounds)
    if bounds.ndim != 1 or not len(bounds) or bounds.dtype not in INTEGERS:
        raise SequenceBoundsError(f"{name} is {bounds.dtype} of shape {tuple(bounds.shape)}")
    if batch != 1:
        raise SequenceBoundsError(f"the batch size is {batch}, not 1")
    if bounds.device != device:
        raise SequenceBoundsError(f"{name} is on {bounds.device}, the operands are on {device}")


def check_offsets(name: str, bounds: Tensor) -> None:
    """Their values, which are copied to the host. Sequences end with the tokens: an offset may be past these."""
    values = cast("list[int]", bounds.tolist())
    if values != sorted(values) or values[0] < 0:
        some = values if len(values) <= SHOWN else f"{len(values)} numbers from {min(values)} to {max(values)}"
        raise SequenceBoundsError(f"{name} is {some}, where a sequence ends before it begins, or begins before 0")


def packed(definition: Definition, queries: Tokens, keys: Tokens) -> Definition:
    """The definition for packed tokens: b is the number of a sequence, positions count from its start."""
    return replace(
        definition,
        score_mod=None if definition.score_mod is None else _score(definition.score_mod, queries, keys),
        mask_mod=_mask(definition.mask_mod, queries, keys),
        row=None if definition.row is None else _row(definition.row, queries, keys),
        query_mod=_element("query_mod", definition.query_mod, queries),
        key_mod=_element("key_mod", definition.key_mod, keys),
        value_mod=_element("value_mod", definition.value_mod, keys),
    )


def _mask(function: Function | None, queries: Tokens, keys: Tokens) -> Function:
    q_sequence, q_place, kv_sequence, kv_place = queries.sequence, queries.place, keys.sequence, keys.place

    def same_sequence(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_sequence[q_idx] == kv_sequence[kv_idx]

    if function is None:
        return same_sequence
    visible = function

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        inside = visible(q_sequence[q_idx], h, q_place[q_idx], kv_place[kv_idx])
        return (q_sequence[q_idx] == kv_sequence[kv_idx]) & inside

    return mask


def _score(function: Function, queries: Tokens, keys: Tokens) -> Function:
    q_sequence, q_place, kv_place = queries.sequence, queries.place, keys.place

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return function(s, q_sequence[q_idx], h, q_place[q_idx], kv_place[kv_idx])

    return score


def _row(function: Function | OnlineFunc, queries: Tokens, keys: Tokens) -> Function | OnlineFunc:
    """A row function that looks at no index stays as it is."""
    if isinstance(function, OnlineFunc):
        return _online(function, queries)
    arity = choose_arity(function, "row", (1, 4, 5), "row(s) or row(s, b, h, q_idx)")
    q_sequence, q_place, kv_place = queries.sequence, queries.place, keys.place

    def row(s: Any, b: Any, h: Any, q_idx: Any) -> Any:
        return function(s, q_sequence[q_idx], h, q_place[q_idx])

    def row_of_keys(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return function(s, q_sequence[q_idx], h, q_place[q_idx], kv_place[kv_idx])

    return {1: function, 4: row, 5: row_of_keys}[arity]


def _online(written: OnlineFunc, queries: Tokens) -> OnlineFunc:
    sequence, place = queries.sequence, queries.place
    step, end = written.online_fwd, written.online_fwd_epilogue

    def online_fwd(scores: Any, online_rowscales: Any, b: Any, h: Any, q_idx: Any) -> Any:
        return step(scores, online_rowscales, sequence[q_idx], h, place[q_idx])

    def online_fwd_epilogue(o: Any, online_rowscales: Any, b: Any, h: Any, q_idx: Any) -> Any:
        return end(o, online_rowscales, sequence[q_idx], h, place[q_idx])

    result = copy(written)
    result.written = written
    result.online_fwd, result.online_fwd_epilogue = online_fwd, online_fwd_epilogue
    return result


def _element(name: str, function: Function | None, tokens: Tokens) -> Function | None:
    if function is None:
        return None
    arity = choose_arity(function, name, (1, 5), f"{name}(x) or {name}(x, b, h, pos, channel)")
    if arity == 1:
        return function
    sequence, place = tokens.sequence, tokens.place

    def element(x: Any, b: Any, h: Any, pos: Any, channel: Any) -> Any:
        return function(x, sequence[pos], h, place[pos], channel)

    return element
