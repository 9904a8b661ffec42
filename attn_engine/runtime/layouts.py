"""How tensors lie in memory, and what kernels may count on."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from attn_engine.backends.triton.host_strides import ALIGNMENT
from attn_engine.interpreters.autograd import is_wrapped

NARROWEST = 64
"""Columns of an operand's block. Kernels with narrower ones have read illegal memory on an H200, with descriptors and without:
the ptxas 12.8 of Triton 3.6.0 gets some of them wrong (that of CUDA 13.0 does not)."""


def in_blocks(tensors: Iterable[Tensor]) -> bool:
    """Whether descriptors can be made of all of these: rows that are contiguous, and start at multiples of 16 bytes."""
    for x in tensors:
        unit = ALIGNMENT // x.element_size()
        strides = [s for n, s in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
        rows = x.stride(-1) == 1 and x.shape[-1] % unit == 0 and all(s > 0 and s % unit == 0 for s in strides)
        if not x.numel() or not rows or _start(x) % ALIGNMENT:
            return False
    return True


def _start(x: Tensor) -> int:
    """Where a tensor starts; a tensor without memory, as in tracing, as if its storage started at a multiple."""
    if isinstance(x, FakeTensor) or x.is_meta or is_wrapped(x):
        return int(x.storage_offset()) * x.element_size()
    return x.data_ptr()
