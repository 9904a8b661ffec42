"""Which blocks of the score matrix a kernel visits, as the compiler's own analysis says."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from xdsl.ir import Block
from xdsl.parser import Parser

from attn_engine import Attention, View
from attn_engine.dialects import attn
from attn_engine.interpreters.scalar import run_region
from attn_engine.universe import make_context

EMPTY, PARTIAL, FULL = 0, 1, 2


def analysed(attention: Attention, view: View) -> attn.OnlineOp:
    """The attention after all passes on attn IR, read back from its text."""
    module = Parser(make_context(), attention.ir("attn", view)).parse_module()
    return next(op for op in module.walk() if isinstance(op, attn.OnlineOp))


def key_ranges(blocks: Block, first: int, end: int, length: int, captures: list[torch.Tensor]) -> list[list[int]]:
    """[visible lo, full lo, full hi, visible hi] of each range of keys for the queries from `first` to `end`."""
    numbers = [torch.tensor(n) for n in (first, end, 0, 0, length, length)]
    bounds = [int(x) for x in run_region(blocks, [*numbers, *captures])]
    return [bounds[n : n + 4] for n in range(0, len(bounds), 4)]


def kind_of(low: int, high: int, ranges: list[list[int]]) -> int:
    """Whether the keys from `low` to `high` are all hidden, all visible, or need the mask."""
    if any(full_low <= low and high <= full_high for _, full_low, full_high, _ in ranges):
        return FULL
    return PARTIAL if any(low < end and first < high for first, _, _, end in ranges) else EMPTY


def block_map(op: attn.OnlineOp, length: int, size: int, captures: list[torch.Tensor]) -> NDArray[np.int64]:
    """The kind of every block of `size` queries by `size` keys."""
    assert op.blocks is not None, "a mask that was analysed has block ranges"
    starts = range(0, length, size)
    rows = [(s, key_ranges(op.blocks.block, s, min(s + size, length), length, captures)) for s in starts]
    return np.array([[kind_of(k, min(k + size, length), ranges) for k in starts] for _, ranges in rows])


def wrong_blocks(kinds: NDArray[np.int64], visible: torch.Tensor, size: int) -> int:
    """How many blocks of the map contradict the mask itself, evaluated at every position."""
    wrong = 0
    for i, row in enumerate(kinds):
        for j, kind in enumerate(row):
            block = visible[i * size : (i + 1) * size, j * size : (j + 1) * size]
            wrong += bool(block.any()) if kind == EMPTY else (not block.all() if kind == FULL else 0)
    return wrong
