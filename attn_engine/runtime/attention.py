"""`compile` and `attention`: a definition without shapes, called with tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_engine.frontend.build import Traced, build, rebind
from attn_engine.frontend.checks import (
    Sizes,
    check_capture_gradients,
    check_captures,
    check_qkv,
    check_scale,
)
from attn_engine.frontend.definition import Definition
from attn_engine.frontend.identity import definition_key
from attn_engine.frontend.online_func import OnlineFunc
from attn_engine.runtime import driver, op
from attn_engine.runtime.devices import Target, target_of
from attn_engine.runtime.driver import Compiled, Request
from attn_engine.runtime.inspect import Inspection
from attn_engine.runtime.schedules import default_schedule

UserFunction = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced definition and its printed module, which names it for the compiler."""

    traced: Traced
    text: str


@dataclass(eq=False)
class Attention(Inspection):
    """A compiled attention: call it with q, k and v; inspect it with `ir` and `source`.

    Kernels are built when first needed for a dtype, head dims and a set of tensors that need
    gradients, and kept in memory. New lengths, batches and numbers of heads build nothing.
    """

    definition: Definition
    backend: str | None = None
    _traces: dict[object, Trace] = field(default_factory=dict[object, Trace], repr=False)
    _compiled: dict[object, Compiled] = field(default_factory=dict[object, Compiled], repr=False)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        custom: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """o [B, H, Sq, Dv] in the dtype of q; with `return_lse` (o, lse [B, H, Sq] float32).

        q is [B, H, Sq, D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv], H a multiple of Hkv; all float16, bfloat16 or
        float32, any strides. lse is the natural log-sum-exp of the visible scores. Differentiable with
        respect to q, k, v and captured float tensors, o and lse both.

        Raises:
            AttnEngineError: one subclass per mistake, before anything is built (see `attn_engine.errors`).
        """
        sizes = check_qkv(q, k, v)
        factor = check_scale(self.definition.default_scale(sizes.head_dim) if scale is None else scale)
        trace, captures = self._trace(q.dtype, sizes, return_lse, custom or {})
        check_captures(trace.traced.capture_names, captures, q.device)
        if torch.is_grad_enabled():
            check_capture_gradients(trace.traced)
        compiled = self._compile(trace, q, wrt_of(q, k, v, captures), factor > 0)
        results = op.forward(q, k, v, captures, factor, compiled.key)
        return (results[0], results[1]) if return_lse else results[0]

    def _trace(
        self, dtype: torch.dtype, sizes: Sizes, return_lse: bool, custom: Mapping[str, Tensor]
    ) -> tuple[Trace, list[Tensor]]:
        """The trace for these types and the tensors that the definition reads now; traced again only if need be."""
        identity = definition_key(self.definition)
        kinds = tuple((name, tensor.dtype, tensor.ndim) for name, tensor in custom.items())
        key = (identity, dtype, sizes.head_dim, sizes.head_dim_v, return_lse, kinds)
        if identity is not None and key in self._traces:
            trace = self._traces[key]
            captures = rebind(self.definition, trace.traced, custom)
            if captures is not None:
                return trace, captures
        traced = build(
            self.definition,
            dtype=dtype,
            head_dim=sizes.head_dim,
            head_dim_v=sizes.head_dim_v,
            return_lse=return_lse,
            custom=custom,
        )
        trace = Trace(traced, str(traced.module))
        if identity is not None:
            self._traces[key] = trace
        return trace, traced.captures

    def _compile(self, trace: Trace, q: Tensor, wrt: tuple[str, ...], positive: bool) -> Compiled:
        target: Target = target_of(q.device, self.backend)
        tf32 = q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
        key = (trace.text, target, wrt, tf32, positive)
        if key not in self._compiled:
            schedule = default_schedule(target, trace.traced.module, tf32)
            request = Request(wrt, target.backend, schedule, positive)
            self._compiled[key] = driver.compile_traced(trace.traced.module, trace.text, request)
        return self._compiled[key]


def wrt_of(q: Tensor, k: Tensor, v: Tensor, captures: list[Tensor]) -> tuple[str, ...]:
    """What needs a gradient: "q", "k", "v" and capture positions; empty outside of autograd."""
    if not torch.is_grad_enabled():
        return ()
    operands = [name for name, tensor in (("q", q), ("k", k), ("v", v)) if tensor.requires_grad]
    return (*operands, *(str(n) for n, capture in enumerate(captures) if capture.requires_grad))


def compile(
    *,
    score_mod: UserFunction | None = None,
    mask_mod: UserFunction | None = None,
    row: UserFunction | OnlineFunc | None = None,
    query_mod: UserFunction | None = None,
    key_mod: UserFunction | None = None,
    value_mod: UserFunction | None = None,
    backend: str | None = None,
) -> Attention:
    """An attention from its functions, without shapes.

    Args:
        score_mod: (score, b, h, q_idx, kv_idx) -> score; the score is scale * q.k.
        mask_mod: (b, h, q_idx, kv_idx) -> whether the key is visible.
        row: weights from a row of scores, as in `attn_engine.library`; softmax if absent.
        query_mod, key_mod, value_mod: elementwise, (x) or (x, b, h, position, channel).
        backend: by default triton on a GPU and cpu elsewhere.
    """
    return Attention(Definition(score_mod, mask_mod, row, query_mod, key_mod, value_mod), backend=backend)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: UserFunction | None = None,
    mask_mod: UserFunction | None = None,
    row: UserFunction | OnlineFunc | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """o = row(score_mod(scale * q k^T), over the keys that mask_mod shows) v, in one call.

    Shapes, dtypes, results and errors as in `Attention.__call__`; functions as in `compile`. `scale` is
    1 / sqrt(head dim) by default. What was compiled is found again by what the functions are.
    """
    definition = Definition(score_mod, mask_mod, row)
    return _SHARED.with_definition(definition, backend)(q, k, v, scale=scale, return_lse=return_lse)


class _Shared:
    """Compilations shared by all calls of `attention`: one `Attention` per definition that can be told apart."""

    def __init__(self) -> None:
        self.known: dict[object, Attention] = {}

    def with_definition(self, definition: Definition, backend: str | None) -> Attention:
        identity = definition_key(definition)
        if identity is None:
            return Attention(definition, backend)
        found = self.known.setdefault((identity, backend), Attention(definition, backend))
        return Attention(definition, backend, found._traces, found._compiled)  # pyright: ignore[reportPrivateUsage]


_SHARED = _Shared()
