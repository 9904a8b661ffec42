"""Plain tensor functions that torch lacks, for the table of scalar ops."""

from __future__ import annotations

import torch
from torch import Tensor


def _nonzero(divisor: Tensor) -> Tensor:
    """A quotient by 0 is any number, never a trap: it is computed for elements that are masked later."""
    return torch.where(divisor == 0, 1, divisor)


def truncating_divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, _nonzero(b), rounding_mode="trunc")


def floor_divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, _nonzero(b), rounding_mode="floor")


def ceil_divide(a: Tensor, b: Tensor) -> Tensor:
    return -torch.div(-a, _nonzero(b), rounding_mode="floor")


def remainder(a: Tensor, b: Tensor) -> Tensor:
    """Of the truncating quotient: it has the sign of `a`."""
    return torch.fmod(a, _nonzero(b))


def integer_power(a: Tensor, b: Tensor) -> Tensor:
    """Powers with negative exponents truncate: 0 unless the base is 1 or -1."""
    inverse = torch.where((a == 1) | ((a == -1) & (b % 2 == 0)), 1, torch.where(a == -1, -1, 0))
    return torch.where(b < 0, inverse, torch.pow(a, b.clamp(min=0)))


def cube_root(x: Tensor) -> Tensor:
    return torch.sign(x) * torch.pow(torch.abs(x), 1.0 / 3.0)


def round_away(x: Tensor) -> Tensor:
    """Halves go away from zero."""
    return torch.sign(x) * torch.floor(torch.abs(x) + 0.5)


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b + c
