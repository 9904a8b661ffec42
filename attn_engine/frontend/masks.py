"""`create_block_mask`: which blocks of keys a mask shows to which blocks of queries, as a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attn_engine.errors import ReturnValueError
from attn_engine.frontend.mask_algebra import of_lengths
from attn_engine.frontend.source import refuse

Mask = Callable[[Any, Any, Any, Any], Any]
_MADE_FOR = "_attn_engine_made_for"


@dataclass(frozen=True)
class MadeFor:
    """Queries and keys that a block mask was made for, and how many of each make a block."""

    lengths: tuple[int, int]
    blocks: tuple[int, int]


def create_block_mask(
    mask_mod: Mask,
    B: int | None,
    H: int | None,
    Q: int,
    KV: int,
    device: torch.device | str = "cpu",
    Qblk: int = 128,
    KVblk: int = 128,
) -> torch.Tensor:
    """An int8 tensor [B, H, ceil(Q / Qblk), ceil(KV / KVblk)]: 1 where a block holds any visible element.

    The mask is evaluated one block of queries at a time, at positions below Q and KV only. B or H of
    None is 1, for masks that do not depend on it. The tensor remembers its lengths and block sizes
    (`made_for`); a copy of it, on another device say, does not.
    """
    mask_mod = of_lengths(mask_mod, Q, KV)
    b = torch.arange(B or 1, device=device).view(-1, 1, 1, 1)
    h = torch.arange(H or 1, device=device).view(-1, 1, 1)
    kv = torch.arange(KV, device=device)
    shape = (B or 1, H or 1, -(-Q // Qblk), -(-KV // KVblk))
    out = torch.zeros(shape, dtype=torch.int8, device=device)
    for i, q in enumerate(_split(torch.arange(Q, device=device), Qblk)):
        visible = _evaluate(mask_mod, b, h, q.view(-1, 1), kv)
        keys = visible.expand(shape[0], shape[1], len(q), KV).any(dim=2)
        padded = torch.nn.functional.pad(keys, (0, shape[3] * KVblk - KV))
        out[:, :, i] = padded.unflatten(-1, (shape[3], KVblk)).any(dim=-1)
    setattr(out, _MADE_FOR, MadeFor((Q, KV), (Qblk, KVblk)))
    return out


def made_for(blocks: torch.Tensor) -> MadeFor | None:
    """Lengths and block sizes of a tensor that `create_block_mask` returned; None for any other."""
    return getattr(blocks, _MADE_FOR, None)


def _evaluate(mask_mod: Mask, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    result = mask_mod(b, h, q, kv)
    visible = torch.as_tensor(result, device=kv.device) if isinstance(result, bool) else result
    if not isinstance(visible, torch.Tensor) or visible.dtype != torch.bool:
        kind = visible.dtype if isinstance(visible, torch.Tensor) else type(visible).__name__
        refuse(ReturnValueError, f"mask_mod returns {kind}", "return a comparison such as q_idx >= kv_idx", mask_mod)
    return visible


def _split(positions: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [positions[i : i + size] for i in range(0, len(positions), size)]
