"""What generated Gluon host functions call: descriptors of tensors, and the device's size."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_engine.backends.triton.host_strides import described_strides


def describe(tensor: Tensor, block: list[int], layout: Any) -> TensorDescriptor:
    """A descriptor for copies of blocks of a tensor; blocks of an empty tensor read as zeros."""
    if tensor.numel() == 0:
        tensor = tensor.new_zeros([max(1, n) for n in tensor.shape])
    return TensorDescriptor(tensor, list(tensor.shape), described_strides(tensor), block, layout)


@cache
def layout_of(block: tuple[int, ...], element: Any) -> Any:
    """The swizzled layout that copies and products share; found once, for that takes as long as a descriptor does."""
    layouts: Any = gl.NVMMASharedLayout
    return layouts.get_default_for(list(block), element)


@cache
def processor_count(device: torch.device) -> int:
    """The number of multiprocessors of a device."""
    cuda: Any = torch.cuda
    return cuda.get_device_properties(device).multi_processor_count
