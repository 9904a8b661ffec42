"""Masks with their sizes: `BlockMask` of ours, and what torch's own BlockMask objects mean.

A torch BlockMask is a table of blocks (hidden, partial, full) and a function that decides in partial blocks
only. Where the table is what the function gives, the function alone is the mask, and is analysed; otherwise
the mask reads the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from xdsl.ir import Region

from attn_engine.dialects.attn import AttentionOp
from attn_engine.errors import BlockMaskError
from attn_engine.frontend.build import build
from attn_engine.frontend.definition import Definition
from attn_engine.interpreters.attn_common import index_grid
from attn_engine.interpreters.scalar import oracle_dtypes, run_region
from attn_engine.runtime import mask_picture
from attn_engine.runtime.mask_picture import FULL, HIDDEN, PARTIAL

Mask = Callable[[Any, Any, Any, Any], Any]

MOST_CHECKED = 2**28
"""Elements up to which a table is compared with its function; beyond, the table is read."""


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask function and the sizes that it was made for; B or H of 1 serves any batch or head.

    Nothing is evaluated until someone asks: kernels find the blocks that they skip by analysis.
    """

    mask_mod: Mask
    B: int
    H: int
    seq_lengths: tuple[int, int]
    BLOCK_SIZE: tuple[int, int] = (128, 128)
    device: torch.device | str = "cpu"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, queries, keys)."""
        return (self.B, self.H, *self.seq_lengths)

    def numel(self) -> int:
        """B x H x queries x keys."""
        return self.shape[0] * self.shape[1] * self.shape[2] * self.shape[3]

    def to(self, device: torch.device | str) -> BlockMask:
        """The same for another device; tensors that the function captures stay where they are."""
        return replace(self, device=device)

    def __getitem__(self, index: object) -> NoReturn:
        raise BlockMaskError(
            "a block mask of attn_engine has no table to take a part of: make one for these queries, which evaluates nothing,"
            " create_block_mask(lambda b, h, q, kv: mask_mod(b, h, q + first, kv), B, H, Q_LEN, KV_LEN)"
        )

    def states(self) -> Tensor:
        """[B, H, query blocks, key blocks], int8: 0 hidden, 1 partial, 2 full."""
        return self._survey[0]

    def to_dense(self) -> Tensor:
        """The same in which 1 is any block with a visible element."""
        return self.states().clamp(max=1)

    def sparsity(self) -> float:
        """The percentage of blocks that are hidden; 0 if there are none."""
        hidden = self.states() == HIDDEN
        return 100.0 * int(hidden.sum()) / max(1, hidden.numel())

    def density(self) -> float:
        """The percentage of elements that are visible."""
        return 100.0 * self._survey[1] / max(1, self.numel())

    def picture(self, batch: int = 0, head: int = 0) -> str:
        """The blocks as text, hidden ones blank, partial ones light and full ones dark; of many blocks, several a sign."""
        return mask_picture.text(self.states()[batch, head])

    def save(self, path: str | Path, batch: int = 0, head: int = 0) -> None:
        """The blocks as an image, in the format that the name ends in; needs matplotlib."""
        mask_picture.save(self.states()[batch, head], self._title(), path)

    def _title(self) -> str:
        queries, keys = self.seq_lengths
        return (
            f"{queries} queries, {keys} keys: {self.density():.2f} % visible, {self.sparsity():.2f} % of blocks hidden"
        )

    def __str__(self) -> str:
        shares = f"sparsity={self.sparsity():.2f}%, density={self.density():.2f}%"
        return f"BlockMask(shape={self.shape}, {shares})\n{self.picture()}"

    @cached_property
    def _survey(self) -> tuple[Tensor, int]:
        return survey(self.mask_mod, self.shape, self.BLOCK_SIZE, self.device)


def _region(mask_mod: Mask) -> tuple[Region, list[Tensor]]:
    """The mask as it is traced, and the tensors that it captures."""
    traced = build(Definition(mask_mod=mask_mod), dtype=torch.float32, head_dim=16, head_dim_v=16)
    region = next(op for op in traced.module.walk() if isinstance(op, AttentionOp)).mask
    assert region is not None
    return region, list(traced.captures)


AnyBlockMask = BlockMask | torch_flex.BlockMask


def block_states(
    mask_mod: Mask, shape: tuple[int, int, int, int], block: tuple[int, int], device: torch.device | str = "cpu"
) -> Tensor:
    """What a mask makes of every block, [B, H, query blocks, key blocks] int8; one row of blocks at a time."""
    return survey(mask_mod, shape, block, device)[0]


def survey(
    mask_mod: Mask, shape: tuple[int, int, int, int], block: tuple[int, int], device: torch.device | str = "cpu"
) -> tuple[Tensor, int]:
    """`block_states`, and how many elements are visible."""
    rows: list[Tensor] = []
    count = 0
    for visible in _visible_rows(mask_mod, shape, block[0], device):
        rows.append(_row_states(visible, block[1]))
        count += int(visible.sum())
    if not rows:
        return torch.zeros((*shape[:2], 0, -(-shape[3] // block[1])), dtype=torch.int8, device=device), 0
    return torch.stack(rows, dim=2), count


def _row_states(visible: Tensor, block: int) -> Tensor:
    """[B, H, key blocks] of the elements [B, H, queries, keys] of one row of blocks."""
    count = -(-visible.shape[3] // block)
    padding = (0, count * block - visible.shape[3])
    shape = (*visible.shape[:2], count, block)
    some = torch.nn.functional.pad(visible.any(2), padding, value=False).view(shape).any(-1)
    every = torch.nn.functional.pad(visible.all(2), padding, value=True).view(shape).all(-1)
    return some.to(torch.int8) + (some & every).to(torch.int8)


def _visible_rows(
    mask_mod: Mask, shape: tuple[int, int, int, int], block: int, device: torch.device | str
) -> Iterator[Tensor]:
    """The mask as kernels evaluate it, [B, H, queries of a block, keys]."""
    region, read = _region(mask_mod)
    captures = [c.to(device) for c in read]
    batch, head, queries, key = (i.to(device) for i in index_grid(*shape))
    for start in range(0, shape[2], block):
        query = queries[:, :, start : start + block]
        with torch.device(device):
            (visible,) = run_region(region.block, [batch, head, query, key, *captures], oracle_dtypes())
        yield visible.to(device).expand(*shape[:2], query.shape[2], shape[3])


def listed_states(mask: torch_flex.BlockMask) -> Tensor:
    """The table of a torch BlockMask as `block_states` gives it."""
    count = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    states = PARTIAL * _listed(mask.kv_num_blocks, mask.kv_indices, count)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, count)
        states = torch.where(full > 0, FULL, states).to(torch.int8)
    return states


def _listed(numbers: Tensor, indices: Tensor, count: int) -> Tensor:
    """1 where a block stands among the first `numbers` of `indices`."""
    valid = torch.arange(indices.shape[-1], device=indices.device) < numbers.unsqueeze(-1)
    table = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.int8, device=indices.device)
    return table.scatter_(-1, torch.where(valid, indices, count).long(), 1)[..., :count]


def by_table(mask_mod: Mask | None, states: Tensor, block: tuple[int, int]) -> Mask:
    """Full blocks of the table, and in partial ones what the function shows."""
    (q_block, kv_block), (b_step, h_step) = block, (int(states.shape[0] > 1), int(states.shape[1] > 1))

    def table_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        state = states[b * b_step, h * h_step, q_idx // q_block, kv_idx // kv_block]
        if mask_mod is None:
            return state != 0
        return (state == 2) | ((state == 1) & mask_mod(b, h, q_idx, kv_idx))

    return table_mask


Parts = tuple[tuple[object, int], ...]
Sizes = tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class _Meaning:
    """The mask function that means the same as an object that holds these parts, in calls of these sizes."""

    parts: Parts
    sizes: Sizes
    """Batch and heads; None for any."""
    mask: Mask | None

    def holds(self, parts: Parts, sizes: tuple[int, int]) -> bool:
        same = all(a is b and m == n for (a, m), (b, n) in zip(self.parts, parts, strict=True))
        return same and all(mine in (None, n) for mine, n in zip(self.sizes, sizes, strict=True))


_MEANINGS: WeakKeyDictionary[torch_flex.BlockMask, _Meaning] = WeakKeyDictionary()


def mask_of(mask: AnyBlockMask, batch: int = 1, heads: int = 1) -> Mask | None:
    """The mask function that means the same in a call of these sizes, None where everything is visible; found once for what
    an object holds now."""
    if isinstance(mask, BlockMask):
        return mask.mask_mod
    parts, found = _parts(mask), _MEANINGS.get(mask)
    if found is None or not found.holds(parts, (batch, heads)):
        found = _MEANINGS[mask] = _Meaning(parts, *_meaning(mask, (batch, heads)))
    return found.mask


def _parts(mask: torch_flex.BlockMask) -> Parts:
    """Its function and the tensors of its table, each with the number of writes into it as far as torch counts them."""
    table = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    return (mask.mask_mod, 0), *((t, 0 if t is None or t.is_inference() else t._version) for t in table)


def _meaning(mask: torch_flex.BlockMask, sizes: tuple[int, int]) -> tuple[Sizes, Mask | None]:
    """Of a table for any batch or head, whose function tells them apart, for these: the table is what all of them read."""
    states = listed_states(mask)
    everything = mask.mask_mod is torch_flex.noop_mask
    if everything:
        return (None, None), None if bool((states > 0).all()) else by_table(None, states, mask.BLOCK_SIZE)
    told = tuple(
        n if own == 1 and reads else None
        for n, own, reads in zip(sizes, states.shape, _reads(mask.mask_mod), strict=False)
    )
    shape = (told[0] or states.shape[0], told[1] or states.shape[1], *mask.seq_lengths)
    elements = shape[0] * shape[1] * shape[2] * shape[3]
    if elements <= MOST_CHECKED:
        actual = block_states(mask.mask_mod, shape, mask.BLOCK_SIZE, states.device)
        if bool((((states > 0) | (actual == HIDDEN)) & ((states < FULL) | (actual == FULL))).all()):
            return (told[0], told[1]), mask.mask_mod
    return (told[0], told[1]), by_table(mask.mask_mod, states, mask.BLOCK_SIZE)


def _reads(mask_mod: Mask) -> tuple[bool, bool]:
    """Whether a mask depends on the batch, and on the head."""
    batch, head, *_ = _region(mask_mod)[0].block.args
    return bool(batch.uses), bool(head.uses)


def check_sizes(mask: AnyBlockMask, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    """A mask is for these lengths, and for these or any batch and heads."""
    if (lengths := tuple(mask.seq_lengths)) != (q_len, kv_len):
        raise BlockMaskError(
            f"block_mask was made for {lengths[0]} queries and {lengths[1]} keys, but q and k have {q_len} and {kv_len}:"
            f" make it with create_block_mask(mask_mod, B, H, {q_len}, {kv_len})"
        )
    for name, have, want in (("B", mask.shape[0], batch), ("H", mask.shape[1], heads)):
        if have not in (1, want):
            raise BlockMaskError(
                f"block_mask has {name} = {have}, but q has {want}: make it with {name}={want}, or {name}=None for a"
                " mask that does not depend on it"
            )
