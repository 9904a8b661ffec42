"""What generated Gluon host functions call: descriptors of tensors, and the device's size."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn_engine.errors import DescriptorError

_ALIGNMENT = 16


def describe(tensor: Tensor, block: list[int], layout: Any) -> TensorDescriptor:
    """A descriptor for copies of blocks of a tensor; blocks of an empty tensor read as zeros.

    Strides of axes of size 1 do not matter and are replaced where the hardware would refuse them.
    """
    if tensor.numel() == 0:
        tensor = tensor.new_zeros([max(1, n) for n in tensor.shape])
    unit = _ALIGNMENT // tensor.element_size()
    *outer, last = (unit if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    last = 1 if tensor.shape[-1] == 1 else last
    if last != 1 or any(s <= 0 or s % unit for s in outer) or tensor.data_ptr() % _ALIGNMENT:
        raise DescriptorError(tuple(tensor.shape), tuple(tensor.stride()), tensor.data_ptr() % _ALIGNMENT)
    return TensorDescriptor(tensor, list(tensor.shape), [*outer, last], block, layout)


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
