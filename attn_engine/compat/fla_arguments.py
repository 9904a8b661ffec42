"""What functions with fla's names make of their arguments before the recurrence itself."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_engine.errors import RankError, StateShapeError, UnsupportedOptionError
from attn_engine.frontend.checks import check_tensor
from attn_engine.library_recurrence import retention_decay

L2_EPSILON = 1e-6
UNREAD = ("chunk_size",)
OLD_V_FIRST = "transpose_state_layout"


TOKEN, CHANNEL = "batch, token, head", "batch, token, head, key channel"


def check_axes(name: str, x: object, axes: str) -> None:
    """That x is a tensor with these axes: one of other axes may be something else to a recurrence."""
    check_tensor(name, x)
    assert isinstance(x, Tensor)
    if x.ndim != axes.count(",") + 1:
        raise StateShapeError(f"{name} has shape {tuple(x.shape)}, expected ({axes})")


def check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.ndim != 4:
            raise RankError(f"{name} has {x.ndim} dimensions, but needs 4 (batch, token, head, channel)")


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


def decay_of_tokens(g: Tensor | None, g_gamma: Tensor | None) -> Tensor | None:
    """g [B, T, H], g_gamma [H], or the sum of both."""
    for name, x, axes in (("g", g, TOKEN), ("g_gamma", g_gamma, "head")):
        if x is not None:
            check_axes(name, x, axes)
    return added(g, g_gamma)


def decay_of_channels(name: str, g: Tensor | None) -> Tensor | None:
    """g [B, T, H, K]."""
    if g is not None:
        check_axes(name, g, CHANNEL)
    return g


def decay_of_retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    check_operands(q, k, v)
    return retention_decay(v.shape[2], device=q.device)


def added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b.float()
    return a.float() + b.float()


def _elements(name: str, x: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """x, which may have any shape of as many elements, as there."""
    if x is None:
        return None
    check_tensor(name, x)
    if x.numel() != math.prod(shape):
        raise StateShapeError(f"{name} has shape {tuple(x.shape)}, expected {math.prod(shape)} elements")
    return x.reshape(shape).float()


def gate(g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias) with g [B, T, H], A_log and dt_bias of H elements."""
    if g is None or A_log is None:
        raise UnsupportedOptionError("use_gate_in_kernel", "without g and A_log", "pass both")
    check_axes("g", g, TOKEN)
    return _gate(g, _elements("A_log", A_log, g.shape[2:]), _elements("dt_bias", dt_bias, g.shape[2:]))


def _gate(g: Tensor, a_log: Tensor | None, bias: Tensor | None) -> Tensor:
    if a_log is None:
        raise UnsupportedOptionError("use_gate_in_kernel", "without A_log", "pass it, or a lower_bound")
    return -a_log.exp() * F.softplus(g.float() if bias is None else g.float() + bias)


def gate_of_channels(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The same with g [B, T, H, K], A_log of H elements and dt_bias of H K; with a lower bound the sigmoid below it."""
    check_axes("g", g, CHANNEL)
    a_log = _elements("A_log", A_log, (g.shape[2], 1))
    bias = _elements("dt_bias", dt_bias, g.shape[2:])
    if lower_bound is None:
        return _gate(g, a_log, bias)
    if lower_bound >= 0:
        raise UnsupportedOptionError("lower_bound", f"of {lower_bound}", "a log decay is below 0, and so is its bound")
    step = g.float() if bias is None else g.float() + bias
    return lower_bound * torch.sigmoid(step if a_log is None else a_log.exp() * step)


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
    check_tensor("beta", beta)
    return beta.float().sigmoid() * (2 if negative else 1) if sigmoid else beta


def ones(v: Tensor) -> Tensor:
    check_tensor("v", v)
    return torch.ones(v.shape[:3], device=v.device)


def refuse_gv(gv: Tensor | None) -> None:
    if gv is not None:
        raise UnsupportedOptionError("gv", "here: a decay is one per token or per key channel", "pass gk")
