"""What functions with fla's names make of their arguments before the recurrence itself."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_engine.errors import UnsupportedOptionError

L2_EPSILON = 1e-6
UNREAD = ("chunk_size",)
OLD_V_FIRST = "transpose_state_layout"


def l2norm(x: Tensor, eps: float = L2_EPSILON) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the channels, in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def check_options(options: dict[str, Any], v_first: bool | None = None) -> bool:
    """Whether states have values first, which may be said by its old name where a function knows it as `v_first`."""
    known = (*UNREAD, *(() if v_first is None else (OLD_V_FIRST,)))
    for name in options:
        if name not in known:
            raise UnsupportedOptionError(name, "here", f"leave it out; of the rest {', '.join(known)} is taken")
    if v_first and OLD_V_FIRST in options:
        raise UnsupportedOptionError(OLD_V_FIRST, "beside state_v_first", "it is the old name of that, pass one")
    return bool(v_first or options.get(OLD_V_FIRST))


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
    """A_log of H elements, dt_bias of H * K."""
    A_log = None if A_log is None else A_log.reshape(-1, 1)
    dt_bias = None if dt_bias is None else dt_bias.reshape(g.shape[2:])
    if lower_bound is not None and lower_bound >= 0:
        raise UnsupportedOptionError("lower_bound", f"of {lower_bound}", "a log decay is below 0, and so is its bound")
    if lower_bound is None:
        return gate(g, A_log, dt_bias)
    step = g.float() if dt_bias is None else g.float() + dt_bias.float()
    return lower_bound * torch.sigmoid(step if A_log is None else A_log.float().exp() * step)


def strength(beta: Tensor | None, v: Tensor, sigmoid: bool, negative: bool) -> Tensor:
    """beta, 1 if absent; of a sigmoid, `negative` takes it to 2, and eigenvalues of I - beta k k^T to -1."""
    if negative and not sigmoid:
        raise UnsupportedOptionError(
            "allow_neg_eigval", "without use_beta_sigmoid_in_kernel", "pass that too, or 2 * beta for beta"
        )
    if beta is None:
        if sigmoid:
            raise UnsupportedOptionError("use_beta_sigmoid_in_kernel", "without beta", "pass beta before its sigmoid")
        return ones(v)
    return beta.float().sigmoid() * (2 if negative else 1) if sigmoid else beta


def ones(v: Tensor) -> Tensor:
    return torch.ones(v.shape[:3], device=v.device)


def refuse_gv(gv: Tensor | None) -> None:
    if gv is not None:
        raise UnsupportedOptionError("gv", "here: a decay is one per token or per key channel", "pass gk")
