"""`recurrence`: linear attention and state space models on tensors as they come out of a projection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from attn_engine.errors import (
    DtypeError,
    NoGradientError,
    RankError,
    ScaleError,
    StateShapeError,
    UnsupportedGradientError,
)
from attn_engine.frontend.checks import check_scale, check_tensor
from attn_engine.frontend.recurrence import Operands, check_recurrence
from attn_engine.runtime import recurrence_op, recurrence_reference
from attn_engine.runtime.eager import is_plain, trains
from attn_engine.runtime.recurrence_compile import FEW_TOKENS
from attn_engine.runtime.reference import is_reference


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    weight: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(o, final state): a state S [K, V] per head that decays, is written to by keys and read by queries.

    ```
    S_t = exp(decay_t) S_{t-1} + weight_t k_t v_t^T                                           without beta
    S_t = (I - beta_t k_t k_t^T) exp(decay_t) S_{t-1} + beta_t k_t v_t^T                      the delta rule
    o_t = scale * q_t S_t
    ```

    Args:
        q, k: [B, T, Hk, K]; float16, bfloat16 or float32 (float64 for the reference), any strides.
        v: [B, T, H, V], H a multiple of Hk: head h reads head h // (H // Hk) of q and k.
        decay: the log decay, at most 0; [H], [B, T, H], or one per key channel [B, T, H, K]. -inf forgets
            everything before its token. None is no decay.
        beta: [B, T, H], for the delta rule.
        weight: [B, T, H], how strongly a token writes; 1 if None.
        scale: 1 / sqrt(K) if None.
        initial_state: [B, H, K, V], or one per sequence; zeros if None.
        output_final_state: whether to return the state after the last token, float32; else None.
        cu_seqlens: [N + 1] integers: N sequences that follow each other in a batch of one.
        output_dtype: torch.float32 leaves o as it was added up, for what changes it further; None is the dtype of q.
        backend: by default ("auto") triton on a GPU and cpu elsewhere. "reference" goes token by token in torch
            operations, in float64, and has derivatives of any order.

    Differentiable in all tensors, through o and the final state. o has the shape of v.

    Raises:
        AttnEngineError: one subclass per mistake, before anything is built (see `attn_engine.errors`). Values, of
            `decay` (DecayError) and `cu_seqlens` (SequenceBoundsError), are looked at on a CPU, and on a GPU at the
            first call that builds kernels: later ones wait for nothing.
    """
    exact = is_reference(backend)
    operands = _operands(q, k, v, decay, beta, weight, initial_state, cu_seqlens, exact)
    check_recurrence(operands, exact)
    factor, wide = _scale(q, scale), _is_wide(q, output_dtype)
    if exact:
        o, final = recurrence_reference.recur(operands, factor, wide)
        return o.transpose(1, 2), final if output_final_state else None
    stepwise = goes_by_token(v, operands.q, operands.k, *operands.optional)
    results = recurrence_op.recur(
        operands.q,
        operands.k,
        operands.v,
        *operands.optional,
        factor,
        output_final_state,
        stepwise,
        backend or "",
        wide,
    )
    return results[0].transpose(1, 2), results[1] if output_final_state else None


def recurrence_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    state: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    weight: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """o of one token per sequence, or of a few; `state` [B, H, K, V], float32, is replaced by the state after them.

    For decoding, under `torch.no_grad()` best. The other arguments, and errors, are those of `recurrence`.

    Raises:
        NoGradientError: for a state that requires a gradient, which would be that of a value that is gone.
        UnsupportedGradientError: of a backward pass through o: a step has no gradients, `recurrence` has.
    """
    check_tensor("state", state)
    exact = is_reference(backend)
    if state.dtype != (torch.float64 if exact and q.dtype == torch.float64 else torch.float32):
        raise DtypeError(f"state is {state.dtype}: it is updated in place, keep it in float32")
    if state.requires_grad and torch.is_grad_enabled():
        raise NoGradientError(
            "state requires a gradient, but is replaced in place: pass state.detach() and keep that, decode under"
            " torch.no_grad(), or call recurrence(..., initial_state=state, output_final_state=True), which has gradients"
        )
    with torch.no_grad():
        operands = _operands(q, k, v, decay, beta, weight, state, cu_seqlens, exact)
        check_recurrence(operands, exact)
        _check_own_memory(state)
        factor, wide = _scale(q, scale), _is_wide(q, output_dtype)
        if exact:
            o, after = recurrence_reference.recur(operands, factor, wide)
            state.copy_(after)
        else:
            o = recurrence_op.step(
                operands.q, operands.k, operands.v, operands.decay, operands.beta, operands.weight, state,
                operands.bounds, factor, backend or "", wide,
            )  # fmt: skip
    return _without_gradients(o.transpose(1, 2), (q, k, v, decay, beta, weight))


class _Stepped(torch.autograd.Function):
    """o as it is; a gradient of it is an error, where without this there would be none, which nobody sees."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, *behind: Tensor | None) -> Tensor:
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise UnsupportedGradientError(
            "recurrence_step, which replaces its state in place",
            "call recurrence(..., initial_state=state, output_final_state=True), or decode under torch.no_grad()",
        )


def _without_gradients(o: Tensor, behind: Sequence[Tensor | None]) -> Tensor:
    """o, which depends on tensors in a way that has no derivative here. In code that torch compiles it is left detached."""
    if torch.compiler.is_compiling() or not is_plain(behind) or not trains(behind):
        return o
    function: Any = _Stepped
    return function.apply(o, *behind)


def _scale(q: Tensor, scale: float | None) -> float:
    if isinstance(scale, Tensor):
        raise ScaleError("scale is a Tensor, not a number: pass a float, and multiply q by a scale that is learned")
    return check_scale(1 / math.sqrt(q.shape[3]) if scale is None else scale)


def _is_wide(q: Tensor, output_dtype: torch.dtype | None) -> bool:
    """Whether o is left in float32 where q is not."""
    if output_dtype not in (None, torch.float32, q.dtype):
        raise DtypeError(f"output_dtype is {output_dtype}: o can be {q.dtype}, as q is, or torch.float32")
    return output_dtype == torch.float32 and q.dtype != torch.float32


def _check_own_memory(state: Tensor) -> None:
    """Sequences and heads that share one state would all write to it."""
    if any(size > 1 and not stride for size, stride in zip(state.shape, state.stride(), strict=True)):
        raise StateShapeError("state is expanded, but is updated in place: pass state.contiguous() and keep that")


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    weight: Tensor | None,
    initial: Tensor | None,
    bounds: Tensor | None,
    exact: bool,
) -> Operands:
    """Heads before tokens; what is one number per token or a state in float32, float64 if it is `exact`."""
    others = (("decay", decay), ("beta", beta), ("weight", weight), ("state", initial), ("cu_seqlens", bounds))
    for name, tensor in (("q", q), ("k", k), ("v", v), *others):
        if tensor is not None or name in "qkv":
            check_tensor(name, tensor)
        if tensor is not None and tensor.is_complex():
            raise DtypeError(
                f"{name} is {tensor.dtype}: a recurrence is real, pass its real and imaginary part as heads"
            )
    if decay is not None and decay.ndim == 1:
        decay = decay.expand(v.shape[0], v.shape[1], -1)
    real = torch.float64 if exact else torch.float32
    rows = [
        None if x is None else _heads_first(n, x, real)
        for n, x in (("decay", decay), ("beta", beta), ("weight", weight))
    ]
    main = [x.transpose(1, 2) if x.ndim == 4 else x for x in (q, k, v)]
    if bounds is not None and bounds.dtype == torch.int64:
        bounds = bounds.int()
    state = None if initial is None else initial.to(real)
    return Operands(main[0], main[1], main[2], rows[0], rows[1], rows[2], state, bounds)


def _heads_first(name: str, x: Tensor, real: torch.dtype) -> Tensor:
    if x.ndim not in (3, 4):
        raise RankError(f"{name} has {x.ndim} dimensions, but needs 3 (batch, token, head)")
    return x.to(real).transpose(1, 2)


def goes_by_token(*tensors: Tensor | None) -> bool:
    """Whether `recurrence` of these tensors [B, T, ...], of which the first tells T, goes token by token, not in chunks."""
    known = [t for t in tensors if t is not None]
    return known[0].shape[1] <= FEW_TOKENS and not (torch.is_grad_enabled() and any(t.requires_grad for t in known))
