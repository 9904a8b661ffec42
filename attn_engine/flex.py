"""A drop-in for `torch.nn.attention.flex_attention`: its signature, its BlockMask objects, on every backend here.

```python
from attn_engine.flex import create_block_mask, flex_attention
```

What differs from torch: scores are float32 (float64 inputs are refused), row functions other than softmax
are `attn_engine.attention`'s, and a captured tensor of any rank gets its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from attn_engine.errors import ArgumentError, BlockMaskError, HeadCountError
from attn_engine.frontend.definition import Definition
from attn_engine.frontend.mask_algebra import of_lengths
from attn_engine.library import and_masks as and_masks
from attn_engine.library import or_masks as or_masks
from attn_engine.runtime.attention import shared_attention
from attn_engine.runtime.block_mask import BlockMask, check_sizes, mask_of
from attn_engine.runtime.eager import not_compiled
from attn_engine.runtime.kernel_options import read_kernel_options

AuxOutput = torch_flex.AuxOutput
AuxRequest = torch_flex.AuxRequest
FlexKernelOptions = torch_flex.FlexKernelOptions
noop_mask = torch_flex.noop_mask

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "flex_attention",
    "noop_mask",
    "or_masks",
]


@not_compiled
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | torch_flex.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: torch_flex.AuxRequest | None = None,
    deterministic: bool = False,
) -> Any:
    """softmax(score_mod(scale * query key^T), over the keys that block_mask shows) value.

    Args:
        query, key, value: [B, Hq, L, E], [B, Hkv, S, E], [B, Hkv, S, Ev]; float16, bfloat16 or float32. Keys and
            values of a batch of 1 (pages, say) are those of every batch if block_mask is made for the batch of query.
        score_mod: (score, b, h, q_idx, kv_idx) -> score.
        block_mask: from `create_block_mask`, ours or torch's, made for these lengths, and for this or any
            batch and number of heads.
        scale: 1 / sqrt(E) if None.
        enable_gqa: whether Hq may be a multiple of Hkv.
        return_lse: (output, lse) in place of the output.
        kernel_options: torch's keys: block sizes, num_warps and num_stages set the schedule, BACKEND may be
            "AUTO" or "TRITON", promises and preferences are accepted and change nothing.
        return_aux: (output, AuxOutput) with the lse and the largest score [B, Hq, L] that it asks for.
        deterministic: the output and all gradients are the same in every run, bit for bit.

    Raises:
        AttnEngineError: one subclass per mistake (see `attn_engine.errors`); TraceErrors show the user's line.
    """
    if not enable_gqa and query.ndim == key.ndim == 4 and query.shape[1] != key.shape[1]:
        raise HeadCountError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: pass enable_gqa=True to share key heads"
        )
    if return_lse and return_aux is not None:
        raise ArgumentError("return_lse and return_aux exclude each other: pass return_aux=AuxRequest(lse=True)")
    key, value = _of_every_batch(query, key, value, block_mask)
    options = read_kernel_options(kernel_options)
    definition = Definition(score_mod=score_mod, mask_mod=_mask(block_mask, query, key))
    attention = shared_attention(definition, options.backend, options, deterministic)
    aux = return_aux or AuxRequest(lse=return_lse)
    results = attention.rows(query, key, value, scale=scale, return_lse=aux.lse, return_max=aux.max_scores)
    if return_lse:
        return results[0], results[1]
    if return_aux is None:
        return results[0]
    return results[0], AuxOutput(results[1] if aux.lse else None, results[-1].detach() if aux.max_scores else None)


def _of_every_batch(query: Tensor, key: Tensor, value: Tensor, block_mask: object) -> tuple[Tensor, Tensor]:
    """Keys and values, shared where torch shares them: what each batch reads of them is for a mask of that batch to say."""
    batch = query.shape[0] if query.ndim == 4 else 1
    if batch == 1 or key.ndim != 4 or value.ndim != 4 or not key.shape[0] == value.shape[0] == 1:
        return key, value
    if not isinstance(block_mask, BlockMask | torch_flex.BlockMask) or block_mask.shape[0] != batch:
        return key, value
    return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)


def _mask(block_mask: object, query: Tensor, key: Tensor) -> Callable[..., Any] | None:
    if block_mask is None:
        return None
    if not isinstance(block_mask, BlockMask | torch_flex.BlockMask):
        raise BlockMaskError(
            f"block_mask is a {type(block_mask).__name__}: pass create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
        )
    if not query.ndim == key.ndim == 4:
        return mask_of(block_mask)
    check_sizes(block_mask, query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return mask_of(block_mask, query.shape[0], query.shape[1])


@not_compiled
def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """A mask for these sizes; B or H of None serves any. Nothing of size Q_LEN x KV_LEN is evaluated.

    How torch would make its table (`_compile` and what follows it) is taken and not read: there is no table.
    """
    q_block, kv_block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    if not callable(mask_mod):
        raise BlockMaskError(f"mask_mod is a {type(mask_mod).__name__}: pass a function (b, h, q_idx, kv_idx) -> bool")
    if min(q_block, kv_block, B or 1, H or 1) < 1 or min(Q_LEN, KV_LEN) < 0:
        raise BlockMaskError(f"sizes {(B, H, Q_LEN, KV_LEN)} in blocks of {(q_block, kv_block)}: they must be positive")
    mask_mod = of_lengths(mask_mod, Q_LEN, KV_LEN)
    return BlockMask(mask_mod, B or 1, H or 1, (Q_LEN, KV_LEN), (q_block, kv_block), device or "cpu")


@not_compiled
def create_mask(
    mod_fn: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
) -> Tensor:
    """[B, H, Q_LEN, KV_LEN], bool: what a mask function shows, or where a score function of 0 is not -inf."""
    return torch_flex.create_mask(of_lengths(mod_fn, Q_LEN, KV_LEN), B, H, Q_LEN, KV_LEN, device or "cpu")
