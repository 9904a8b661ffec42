"""What generated Triton host functions call: descriptors of tensors for whole blocks."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_engine.errors import DescriptorError

ALIGNMENT = 16


def describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor for blocks of a tensor.

    Strides of axes of size 1 do not matter and are replaced where the hardware would refuse them.
    """
    unit = ALIGNMENT // tensor.element_size()
    *outer, last = (unit if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    last = 1 if tensor.shape[-1] == 1 else last
    if last != 1 or any(s <= 0 or s % unit for s in outer) or tensor.data_ptr() % ALIGNMENT:
        raise DescriptorError(tuple(tensor.shape), tuple(tensor.stride()), tensor.data_ptr() % ALIGNMENT)
    return TensorDescriptor(tensor, list(tensor.shape), [*outer, last], block)
