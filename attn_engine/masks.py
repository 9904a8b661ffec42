"""Ready masks that compose: `causal & window(128, 0) | sinks(4)`; as functions alone they are in `library`.

Attentions, engines and `create_block_mask` take these where they take a mask function. Positions count from 0, queries
i and keys j; with `bottom_right` the last query is level with the last key, whatever the lengths of a call or of a
packed sequence: what only calls a mask, as `library.and_masks` does, needs `of_lengths` of such a one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any

import torch

from attn_engine import library
from attn_engine.errors import MaskRuleError
from attn_engine.frontend.checks import check_tensor
from attn_engine.frontend.mask_algebra import Function, Mask, Offset, as_mask

__all__ = ["Mask", "as_mask", "causal", "document", "from_tensor", "generic", "parse", "prefix", "sinks", "window"]


class _Causal(Mask):
    """Keys up to the query's own position, j <= i; called with `bottom_right=True`, from the end: j <= i + Skv - Sq."""

    def __call__(self, *index: Any, bottom_right: bool | None = None) -> Any:
        if index:
            return super().__call__(*index)
        return _band("causal(bottom_right)", -1, 0, True) if bottom_right else causal


causal = _Causal("causal", lambda offset: library.causal)


def window(left: int, right: int, bottom_right: bool = False) -> Mask:
    """i - left <= j <= i + right, both ends visible; a negative number sets no bound on its side.

    Raises:
        MaskRuleError: for sizes that are no whole numbers, as all of these do.
    """
    _whole("window", left=left, right=right)
    return _band(f"window({left}, {right}{', bottom_right' if bottom_right else ''})", left, right, bottom_right)


def _band(name: str, left: int, right: int, bottom_right: bool) -> Mask:
    def make(offset: Offset) -> Function:
        def band(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            distance = kv_idx - q_idx - offset(b) if bottom_right else kv_idx - q_idx
            sides = [*([distance >= -left] if left >= 0 else []), *([distance <= right] if right >= 0 else [])]
            return sides[0] & sides[-1] if sides else kv_idx >= 0

        return band

    return Mask(name, make, bottom_right)


def prefix(length: int | torch.Tensor) -> Mask:
    """Causal, and everyone sees the first `length` keys; a tensor holds one number per batch."""
    if not isinstance(length, torch.Tensor):
        _whole("prefix", length=length)
    shown = length if isinstance(length, int) else "..."
    return Mask(f"prefix({shown})", _always(library.prefix_lm(length)))


def generic(y: int, x: int) -> Mask:
    """max(0, i - y + 1) <= j < i + x: x columns are live in the first row, and y rows in the first column.

    The rule of CK's generic attention mask (`ck_tile::GenericAttentionMask`).

    Raises:
        MaskRuleError: unless x + y > 1; there would be rows between columns that see nothing.
    """
    _whole("generic", y=y, x=x)
    if x + y <= 1:
        raise MaskRuleError(f"g:{y},{x}", "x + y must be more than 1")

    def rule(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx > q_idx - y) & (kv_idx < q_idx + x)

    return Mask(f"generic({y}, {x})", _always(rule))


def sinks(count: int) -> Mask:
    """The first `count` keys."""
    _whole("sinks", count=count)

    def first(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < count

    return Mask(f"sinks({count})", _always(first))


def document(ids: torch.Tensor) -> Mask:
    """Keys of the query's own document; ids are [S] or [B, S]."""
    check_tensor("ids", ids)
    return Mask("document", _always(library.document(ids)))


def from_tensor(visible: torch.Tensor) -> Mask:
    """A tensor [Sq, Skv], [H, Sq, Skv] or [B, H, Sq, Skv], bool or not 0 where visible; a B or H of 1 serves all.

    Raises:
        MaskRuleError: for other numbers of dimensions.
    """
    check_tensor("visible", visible)
    if not 2 <= visible.ndim <= 4:
        raise MaskRuleError(
            "from_tensor", f"shape {tuple(visible.shape)}: give it 2 to 4 dimensions, the last two [Sq, Skv]"
        )
    once = tuple(size == 1 for size in visible.shape[:-2])

    def read(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        lead = (b, h)[2 - len(once) :]
        place = (*(0 if single else i for single, i in zip(once, lead, strict=True)), q_idx, kv_idx)
        return visible[place] if visible.dtype == torch.bool else visible[place] != 0

    return Mask("from_tensor", _always(read))


def _whole(rule: str, **numbers: object) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise MaskRuleError(rule, f"{name} is {number!r}: give a whole number")


def _always(function: Function) -> Callable[[Offset], Function]:
    return lambda offset: function


_RULE = re.compile(r"(xt|xb|t|b|g)(?::(-?\d+(?:,-?\d+)*))?")


def parse(rule: str) -> Mask:
    """A mask in the words of CK's examples.

    "0" sees all, "1" or "t" is causal and "2" or "b" causal from the end; "t:l,r" and "b:l,r" are windows, "t:l,r,s"
    and "b:l,r,s" with s sinks up to their right bound; "g:y,x" is generic; "xt:w" and "xb:w" are windows of w keys
    as xformers means them, causal for w <= 0.

    Raises:
        MaskRuleError: for anything else.
    """
    rule = {"0": "t:-1,-1", "1": "t", "2": "b"}.get(rule, rule)
    found = _RULE.fullmatch(rule)
    if found is None:
        raise MaskRuleError(
            rule, 'write "0", "1", "2", "t:l,r", "b:l,r", "t:l,r,s", "b:l,r,s", "g:y,x", "xt:w" or "xb:w"'
        )
    kind, numbers = found[1], [int(n) for n in (found[2] or "").split(",") if n]
    maker = _MAKERS.get((kind, len(numbers)))
    if maker is None:
        raise MaskRuleError(rule, f"{len(numbers)} numbers do not fit '{kind}'")
    return maker(*numbers)


def _with_sinks(bottom_right: bool) -> Callable[[int, int, int], Mask]:
    def make(left: int, right: int, count: int) -> Mask:
        return window(left, right, bottom_right) | (sinks(count) & window(-1, right, bottom_right))

    return make


def _of_xformers(bottom_right: bool) -> Callable[[int], Mask]:
    def make(width: int) -> Mask:
        left = width // 2 if width > 0 else -1
        return window(left, width - 1 - left if width > 0 else 0, bottom_right)

    return make


_MAKERS: dict[tuple[str, int], Callable[..., Mask]] = {
    ("t", 0): lambda: causal,
    ("b", 0): partial(causal, bottom_right=True),
    ("t", 2): window,
    ("b", 2): partial(window, bottom_right=True),
    ("t", 3): _with_sinks(False),
    ("b", 3): _with_sinks(True),
    ("g", 2): generic,
    ("xt", 1): _of_xformers(False),
    ("xb", 1): _of_xformers(True),
}
