"""What generated Triton host functions call: descriptors of tensors for whole blocks."""

from __future__ import annotations

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_engine.backends.triton.host_strides import described_strides


def describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor for blocks of a tensor."""
    return TensorDescriptor(tensor, list(tensor.shape), described_strides(tensor), block)
