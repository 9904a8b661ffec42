"""How a tensor must lie for descriptors of it."""

from __future__ import annotations

from torch import Tensor

from attn_engine.errors import DescriptorError

ALIGNMENT = 16
"""Bytes; what the engine that copies blocks wants of starts and strides."""


def described_strides(tensor: Tensor) -> list[int]:
    """The strides that a descriptor of a tensor says; those of axes of size 1 do not matter, and are ones that it may.

    Raises:
        DescriptorError: the last axis is not contiguous, or the start or another stride is no multiple of 16 bytes.
    """
    unit = ALIGNMENT // tensor.element_size()
    *outer, last = (unit if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    last = 1 if tensor.shape[-1] == 1 else last
    if last != 1 or any(s <= 0 or s % unit for s in outer) or tensor.data_ptr() % ALIGNMENT:
        raise DescriptorError(tuple(tensor.shape), tuple(tensor.stride()), tensor.data_ptr() % ALIGNMENT)
    return [*outer, last]
