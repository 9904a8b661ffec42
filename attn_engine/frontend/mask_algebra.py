"""`Mask`: a mask function that is composed with `&`, `|` and `~`, and may ask how the lengths differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attn_engine.errors import ArgumentError, MaskLengthsError

Function = Callable[[Any, Any, Any, Any], Any]
"""(b, h, q_idx, kv_idx) -> whether the query sees the key."""
Offset = Callable[[Any], Any]
"""From b to the number of keys less the number of queries."""


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """A mask function with a name. `a & b`, `a | b` and `~a` are masks; either side may be any mask function.

    `make` gives the function, from what tells by how many the keys are more than the queries: a call finds that out,
    for each of its packed sequences too. Where `uses_lengths` is false it is not asked, and the mask itself is a function.
    """

    name: str
    make: Callable[[Offset], Function]
    uses_lengths: bool = False

    def __repr__(self) -> str:
        return self.name

    @cached_property
    def function(self) -> Function:
        """The mask function of a mask that is the same for all lengths.

        Raises:
            MaskLengthsError: for one that is not.
        """
        if self.uses_lengths:
            raise MaskLengthsError(self.name)
        return self.make(_nothing)

    def of_lengths(self, q_len: int, kv_len: int) -> Function:
        """The mask function for so many queries and keys."""
        difference = kv_len - q_len
        return self.make(lambda b: difference)

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.function(b, h, q_idx, kv_idx)

    def __and__(self, other: Function) -> Mask:
        return _composed("&", self, as_mask(other), lambda a, b: a & b)

    def __or__(self, other: Function) -> Mask:
        return _composed("|", self, as_mask(other), lambda a, b: a | b)

    def __rand__(self, other: Function) -> Mask:
        return as_mask(other) & self

    def __ror__(self, other: Function) -> Mask:
        return as_mask(other) | self

    def __invert__(self) -> Mask:
        def make(offset: Offset) -> Function:
            inner = self.make(offset)

            def inverted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return ~inner(b, h, q_idx, kv_idx)

            return inverted

        return Mask(f"~{self.name}", make, self.uses_lengths)


def _nothing(b: Any) -> Any:
    raise AssertionError("a mask that uses lengths says so")


def as_mask(function: Function) -> Mask:
    """Any mask function as a `Mask`.

    Raises:
        ArgumentError: for what is no function, a tensor say.
    """
    if isinstance(function, Mask):
        return function
    if not callable(function):
        raise ArgumentError(
            f"a mask is composed with a {type(function).__name__}: give a function (b, h, q_idx, kv_idx) -> bool, or"
            " masks.from_tensor of a tensor"
        )
    return Mask(getattr(function, "__name__", "mask"), lambda offset: function)


def _composed(sign: str, left: Mask, right: Mask, combine: Callable[[Any, Any], Any]) -> Mask:
    def make(offset: Offset) -> Function:
        first, second = left.make(offset), right.make(offset)

        def composed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return combine(first(b, h, q_idx, kv_idx), second(b, h, q_idx, kv_idx))

        return composed

    return Mask(f"({left.name} {sign} {right.name})", make, left.uses_lengths or right.uses_lengths)


def of_lengths(function: Function, q_len: int, kv_len: int) -> Function:
    """A mask function that knows its lengths, from any mask."""
    return function.of_lengths(q_len, kv_len) if isinstance(function, Mask) else function


def of_call(mask: Mask, q_len: int, kv_len: int, device: torch.device) -> Function:
    """For one call: the difference is a tensor, so that other lengths trace and compile nothing."""
    difference = torch.full((), kv_len - q_len, dtype=torch.int64, device=device)
    return mask.make(lambda b: difference)


def of_packed(mask: Mask, queries: torch.Tensor, keys: torch.Tensor) -> Function:
    """For packed sequences with these offsets [N + 1]: every one has its own difference."""
    differences = (keys.diff() - queries.diff()).to(torch.int64)
    return mask.make(lambda b: differences[b])
