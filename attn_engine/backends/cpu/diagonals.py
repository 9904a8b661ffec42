"""Tiles and the numbers of their diagonals in memory, for batches of programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_engine.backends.cpu.memory import atomic_add, load
from attn_engine.backends.cpu.support import Programs, Scalar, f32


def load_diagonals(
    programs: Programs,
    memory: Tensor,
    shape: Sequence[int],
    indices: Sequence[Scalar],
    starts: Sequence[Scalar],
    turned: bool,
) -> Tensor:
    """A tile with one number in each diagonal; `starts` are the positions of its first row and column."""
    m, n = reversed(shape) if turned else shape
    row, column = reversed(starts) if turned else starts
    *lead, origin = indices
    first = origin + column - row - (m - 1)
    numbers = load(programs, memory, (m + n - 1,), (*lead, first), (memory.ndim - 1,), {})
    found = numbers.unfold(-1, n, 1).flip(-2)
    return found.transpose(-1, -2) if turned else found


def add_diagonals(
    programs: Programs, value: Tensor, shape: Sequence[int], memory: Tensor, indices: Sequence[Scalar], turned: bool
) -> None:
    """Adds each active program's tile. Of rows that are one number longer than there are diagonals, the next ones start
    one diagonal further on."""
    m, n = reversed(shape) if turned else shape
    value = value.transpose(-1, -2) if turned else value
    rows = torch.nn.functional.pad(f32(value).flip(-2), (0, m))
    sums = rows.flatten(-2)[..., :-m].reshape(*rows.shape[:-2], m, m + n - 1).sum(-2)
    *lead, start = indices
    atomic_add(programs, sums, memory, (m + n - 1,), (*lead, start - (m - 1)), (memory.ndim - 1,), {})
