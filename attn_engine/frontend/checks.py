"""Checks of what attention is called with: one error class per mistake, both values and the fix in the message.

Tensors are given in the logical order batch, head, position, channel, whatever their memory layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from attn_engine.errors import (
    BatchError,
    BlockMaskError,
    DeviceError,
    DtypeError,
    HeadCountError,
    HeadDimError,
    HeadDimLimitError,
    KeyLengthError,
    NamedTensorError,
    NoGradientError,
    NotATensorError,
    RankError,
    ScaleError,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    head_dim_v: int


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exact: bool = False) -> Sizes:
    """The sizes of a call, or the first thing wrong with its query, key and value. `exact` takes float64 too."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.ndim != 4:
            raise RankError(
                f"{name} has {tensor.ndim} dimensions, shape {tuple(tensor.shape)}, but needs 4 (batch, head, position,"
                f" channel): add the missing ones, for example {name}.unsqueeze(0)"
            )
    _check_same_kind(q, {"k": k, "v": v}, exact)
    _check_shapes(q, k, v)
    return Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])


def check_tensor(name: str, tensor: object) -> None:
    """Any argument that has to be a plain tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise NotATensorError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor: pass torch.as_tensor({name})")
    dimensions: tuple[str | None, ...] = getattr(tensor, "names", ())
    if any(dimension is not None for dimension in dimensions):
        raise NamedTensorError(f"{name} has named dimensions {dimensions}: pass {name}.rename(None)")
    if tensor.is_nested:
        raise NotATensorError(f"{name} is a nested tensor: pass its rows one behind the other, and their offsets")
    if tensor.is_sparse or tensor.is_quantized or tensor.layout != torch.strided:
        raise NotATensorError(f"{name} has layout {tensor.layout}, not torch.strided: pass {name}.to_dense()")


def _check_same_kind(q: torch.Tensor, others: Mapping[str, torch.Tensor], exact: bool = False) -> None:
    if q.dtype not in DTYPES and not (exact and q.dtype == torch.float64):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise DtypeError(
            f"q is {q.dtype}, but kernels compute in {names}: pass q.to(torch.bfloat16), and k and v alike"
            + (', or compute in float64 with backend="reference"' if q.dtype == torch.float64 else "")
        )
    for name, tensor in others.items():
        if tensor.dtype != q.dtype:
            raise DtypeError(f"{name} is {tensor.dtype} but q is {q.dtype}: pass {name}.to({q.dtype})")
        if tensor.device != q.device:
            raise DeviceError(f"{name} is on {tensor.device} but q is on {q.device}: pass {name}.to('{q.device}')")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[0] != q.shape[0]:
            raise BatchError(
                f"{name} has batch size {tensor.shape[0]} but q has {q.shape[0]}:"
                f" pass {name}.expand({q.shape[0]}, -1, -1, -1) to share one"
            )
    if v.shape[1] != k.shape[1]:
        raise HeadCountError(f"v has {v.shape[1]} heads but k has {k.shape[1]}: give both the same number of heads")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise HeadCountError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}: the first must be a multiple of the second;"
            " check that the order is batch, head, position, channel"
        )
    if v.shape[2] != k.shape[2]:
        raise KeyLengthError(f"v holds {v.shape[2]} positions but k holds {k.shape[2]}: each key needs one value")
    if k.shape[3] != q.shape[3] or not q.shape[3] or not v.shape[3]:
        raise HeadDimError(
            f"head dims are {q.shape[3]} of q, {k.shape[3]} of k, {v.shape[3]} of v:"
            " q and k must agree, and none may be 0"
        )
    for name, tensor in (("q", q), ("v", v)):
        if tensor.shape[3] > MAX_HEAD_DIM:
            raise HeadDimLimitError(
                f"head dim of {name} is {tensor.shape[3]}, but at most {MAX_HEAD_DIM} fit: split it over more heads"
            )


def check_scale(scale: object) -> float:
    """The scale as a float; zero and negative ones are allowed, NaN and infinity are not."""
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise ScaleError(
            f"scale is a {type(scale).__name__}, not a number: pass a float; to learn a scale, multiply by a"
            " captured tensor in score_mod"
        )
    if not math.isfinite(scale):
        raise ScaleError(f"scale is {scale}, not finite: pass a finite number, or None for 1 / sqrt(head dim)")
    return float(scale)


def check_captures(names: Sequence[str], tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Captured tensors and custom inputs are plain tensors beside the query."""
    for name, tensor in zip(names, tensors, strict=True):
        check_tensor(name, tensor)
        if tensor.device != device:
            raise DeviceError(
                f"captured tensor '{name}' is on {tensor.device} but q is on {device}: move it before it is captured,"
                f" {name} = {name}.to('{device}')"
            )


def check_no_gradient(name: str, tensor: torch.Tensor, reason: str) -> None:
    """A tensor must not require a gradient; `reason` says why there is none."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise NoGradientError(f"{name} requires a gradient, but {reason}: pass {name}.detach(), or use torch.no_grad()")


def check_block_mask(mask: torch.Tensor, sizes: Sizes, q_block: int = 128, kv_block: int = 128) -> None:
    """A block mask has one entry per block of queries and keys; batch and head may be 1."""
    check_tensor("block_mask", mask)
    expected = (sizes.batch, sizes.heads, -(-sizes.q_len // q_block), -(-sizes.kv_len // kv_block))
    actual = tuple(mask.shape)
    fits = len(actual) == 4 and all(a in (e, 1) for a, e in zip(actual[:2], expected[:2], strict=True))
    if not fits or actual[2:] != expected[2:]:
        raise BlockMaskError(
            f"block_mask has shape {actual}, expected {expected} for blocks of {q_block} x {kv_block}:"
            " build it with create_block_mask for these lengths"
        )
    if mask.dtype not in (torch.bool, torch.int8, torch.uint8, torch.int32):
        raise BlockMaskError(f"block_mask is {mask.dtype}, expected int8 or bool: pass block_mask != 0")
