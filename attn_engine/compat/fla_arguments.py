"""What functions with fla's names make of their arguments before the recurrence itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_engine.errors import UnsupportedOptionError

L2_EPSILON = 1e-6
UNREAD = ("chunk_size",)


def l2norm(x: Tensor, eps: float = L2_EPSILON) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the channels, in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def check_options(options: dict[str, Any]) -> None:
    for name in options:
        if name not in UNREAD:
            raise UnsupportedOptionError(name, "here", f"leave it out; of the rest {', '.join(UNREAD)} is taken")


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b.float()
    return a.float() + b.float()


def gate(g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    if g is None or A_log is None:
        raise UnsupportedOptionError("use_gate_in_kernel", "without g and A_log", "pass both")
    step = g.float() if dt_bias is None else g.float() + dt_bias.float()
    return -A_log.float().exp() * F.softplus(step)


def gate_of_channels(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """A_log [H], dt_bias [H * K]."""
    A_log = None if A_log is None else A_log[:, None]
    dt_bias = None if dt_bias is None else dt_bias.view(g.shape[2:])
    if lower_bound is None:
        return gate(g, A_log, dt_bias)
    step = g.float() if dt_bias is None else g.float() + dt_bias.float()
    return lower_bound * torch.sigmoid(step if A_log is None else A_log.float().exp() * step)


def strength(beta: Tensor | None, v: Tensor, sigmoid: bool, negative: bool) -> Tensor:
    """beta, 1 if absent; of a sigmoid, `negative` takes it to 2, and eigenvalues of I - beta k k^T to -1."""
    if beta is None:
        return ones(v)
    return beta.float().sigmoid() * (2 if negative else 1) if sigmoid else beta


def ones(v: Tensor) -> Tensor:
    return torch.ones(v.shape[:3], device=v.device)


def refuse_gv(gv: Tensor | None) -> None:
    if gv is not None:
        raise UnsupportedOptionError("gv", "here: a decay is one per token or per key channel", "pass gk")
