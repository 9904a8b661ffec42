"""`AttentionEngine`: the ancestors' entry point, bound to shapes and to a memory layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from torch import Tensor

from attn_engine.errors import LayoutError, MaskSizeError, MetaMismatchError
from attn_engine.frontend.custom_io import CustomIO, MetaTensor
from attn_engine.frontend.definition import Definition
from attn_engine.frontend.mask_algebra import as_mask
from attn_engine.frontend.masks import made_for
from attn_engine.frontend.online_func import OnlineFunc
from attn_engine.runtime.attention import Attention
from attn_engine.runtime.tune import Tuner

UserFunction = Callable[..., Any]


class AttentionEngine:
    """An attention for tensors of given shapes.

    The score that `score_mod` sees is the bare product of query and key: multiply by a scale there.

    Args:
        qkv_meta: `meta_tensor`s of q, k and v, each (batch, heads, positions, channels); a dimension given
            as a name may vary from call to call.
        custom_fwd_inputs: names and shapes of further tensors, passed to the call after v in this order.
        score_mod: (score, b, h, q_idx, kv_idx) or (score, custom_fwd_inputs, b, h, q_idx, kv_idx) -> score.
        mask_mod: (b, h, q_idx, kv_idx) -> whether the key is visible.
        block_mask: another name for `mask_mod`; or a tensor from `create_block_mask`, which hides whole blocks.
        online_func: an `OnlineFunc`, or a row function; softmax if absent.
        query_mod, key_mod, value_mod: elementwise, (x) or (x, b, h, position, channel).
        tune: measure a handful of schedules, and on Hopper all backends, at the first call of a kind; take the fastest.
        tune_file: JSON in which measured schedules are found and kept; without `tune` it is only read.
        layout: of the tensors of a call, "bshd" (batch, positions, heads, channels) or "bhsd".
        backend: the backend to use; by default cpu on a CPU and triton on a GPU; on Hopper the one whose forward should be fastest.
        deterministic: results and gradients, those of captured tensors too, are the same in every run, bit for bit.

    Raises:
        LayoutError, MetaMismatchError, MaskSizeError: for arguments that do not fit; tracing errors at the first call.
    """

    def __init__(
        self,
        qkv_meta: Sequence[MetaTensor],
        custom_fwd_inputs: CustomIO | None = None,
        score_mod: UserFunction | None = None,
        block_mask: UserFunction | Tensor | None = None,
        mask_mod: UserFunction | None = None,
        online_func: OnlineFunc | UserFunction | None = None,
        query_mod: UserFunction | None = None,
        key_mod: UserFunction | None = None,
        value_mod: UserFunction | None = None,
        tune: bool = False,
        tune_file: str = "",
        layout: str = "bshd",
        backend: str | None = None,
        deterministic: bool = False,
    ):
        if layout not in ("bshd", "bhsd"):
            raise LayoutError(layout)
        if len(qkv_meta) != 3:
            raise MetaMismatchError("qkv_meta", f"{len(qkv_meta)} entries", "three: q, k and v")
        self.meta = tuple(qkv_meta)
        self.layout = layout
        self.custom_io = custom_fwd_inputs or CustomIO()
        definition = Definition(
            score_mod=score_mod,
            mask_mod=self._mask(block_mask, mask_mod),
            row=online_func,
            query_mod=query_mod,
            key_mod=key_mod,
            value_mod=value_mod,
            custom_io=self.custom_io,
            bare_score=True,
        )
        tuner = Tuner(tune_file, measure=tune) if tune or tune_file else None
        self.attention = Attention(definition, backend=backend, tuner=tuner, deterministic=deterministic)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor) -> Tensor:
        """o in the layout of q; q, k and v must have the shapes and dtypes of `qkv_meta`."""
        operands = [t.transpose(1, 2) if self.layout == "bshd" else t for t in (q, k, v)]
        for name, meta, tensor in zip("qkv", self.meta, operands, strict=True):
            check_meta(name, meta, tensor)
        if len(custom) != len(self.custom_io):
            raise MetaMismatchError(
                "custom inputs", f"{len(custom)} tensors", f"{len(self.custom_io)}: {', '.join(self.custom_io)}"
            )
        named = dict(zip(self.custom_io, custom, strict=True))
        o = self.attention(*operands, custom=named)
        return o.transpose(1, 2) if self.layout == "bshd" else o

    def _mask(self, block_mask: UserFunction | Tensor | None, mask_mod: UserFunction | None) -> UserFunction | None:
        masks = [m for m in (mask_mod,) if m is not None]
        if isinstance(block_mask, Tensor):
            masks.append(self._hidden_blocks(block_mask))
        elif block_mask is not None:
            masks.append(block_mask)
        return reduce(lambda a, b: as_mask(a) & b, masks) if masks else None

    def _hidden_blocks(self, blocks: Tensor) -> UserFunction:
        """A block mask [B or 1, H or 1, q blocks, kv blocks] as a mask function."""
        sizes = [m.shape for m in self.meta]
        (batch, heads, sq, _), (_, _, skv, _) = sizes[0], sizes[1]
        if blocks.ndim != 4 or not isinstance(sq, int) or not isinstance(skv, int):
            raise MaskSizeError(
                tuple(blocks.shape), "a block mask has four dimensions, and needs fixed lengths in qkv_meta"
            )
        for name, have, want in (("batch", blocks.shape[0], batch), ("heads", blocks.shape[1], heads)):
            if have not in (1, want):
                raise MaskSizeError(tuple(blocks.shape), f"its {name} must be 1 or {want}")
        q_block, kv_block = block_sizes(blocks, sq, skv)
        b_step, h_step = int(blocks.shape[0] > 1), int(blocks.shape[1] > 1)

        def hidden_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return blocks[b * b_step, h * h_step, q_idx // q_block, kv_idx // kv_block] != 0

        return hidden_blocks


def block_sizes(blocks: Tensor, sq: int, skv: int) -> tuple[int, int]:
    """Positions per block of a block mask: as it was made, or for a plain tensor what fits the lengths."""
    known = made_for(blocks)
    if known is not None and known.lengths != (sq, skv):
        made = "{} queries and {} keys".format(*known.lengths)
        raise MaskSizeError(tuple(blocks.shape), f"it was made for {made}, the tensors have {sq} and {skv}")
    q_block, kv_block = known.blocks if known else (block_size(sq, blocks.shape[2]), block_size(skv, blocks.shape[3]))
    if not q_block or not kv_block:
        raise MaskSizeError(tuple(blocks.shape), f"no block size gives so many blocks for {sq} queries and {skv} keys")
    return q_block, kv_block


def block_size(length: int, blocks: int) -> int:
    """The power of two that cuts `length` into `blocks` blocks; the smallest from 16 up that does, 0 if none."""
    return next((size for size in (16, 32, 64, 128, 256, 512, 1024) if -(-length // size) == blocks), 0)


def check_meta(name: str, meta: MetaTensor, tensor: Tensor) -> None:
    """The tensor, in order batch, heads, positions, channels, is what the meta tensor promised."""
    fits = len(meta.shape) == tensor.ndim and all(
        isinstance(want, str) or want == have for want, have in zip(meta.shape, tensor.shape, strict=True)
    )
    if not fits:
        raise MetaMismatchError(name, f"{tuple(tensor.shape)}", f"{meta.shape}")
    if tensor.dtype != meta.dtype:
        raise MetaMismatchError(name, str(tensor.dtype), str(meta.dtype))
