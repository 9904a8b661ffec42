"""The rows of `bench.custom`: definitions, shapes, peers, and the ratios that are aimed at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attn_engine
from attn_engine import library

H, S, D, WINDOW, BUCKETS, EXACT = 32, 4096, 128, 1024, 32, 16
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Pass = tuple[float, float]
"""Of the forward, and of the backward."""


@dataclass(frozen=True)
class Shape:
    """Of a call; `visible` of the S x S scores of a head count as work."""

    batch: int = 4
    heads: int = H
    length: int = S
    d: int = D
    dv: int = D
    visible: float = 0.5

    @property
    def flops(self) -> Pass:
        """Two products forward, five backward."""
        scores = 2 * self.batch * self.heads * self.length**2 * self.visible
        return scores * (self.d + self.dv), scores * (3 * self.d + 2 * self.dv)

    def __str__(self) -> str:
        heads = f"{self.d}" if self.d == self.dv else f"{self.d}/{self.dv}"
        return f"B{self.batch} H{self.heads} S{self.length} D{heads}"


@dataclass(frozen=True)
class Custom:
    """A definition of ours beside a peer, and beside another of ours."""

    name: str
    ours: Attend
    peer: Callable[[], Attend] | None = None
    shape: Shape = Shape()
    trained: tuple[Tensor, ...] = ()
    beside: Attend | None = None
    """Ours again, with nothing trained, or softmax."""
    aims: Pass = (1.4, 1.4)
    """Of the peer's time in ours, at least."""
    beside_at_most: Pass | None = None
    """Of our time in the other one's."""
    rates: Pass | None = None
    """TFLOP/s of visible scores, at least."""
    slow_peer: bool = False
    """The peer's backward takes a second or so: it is run once."""
    fewer_stages: bool = False
    """The peer's backward does not fit as it is by default."""


def inputs(shape: Shape, kv_heads: int = 0) -> list[Tensor]:
    """q, k and v in bf16; heads of keys are as many as of queries if not told."""
    torch.manual_seed(0)
    sizes = ((shape.heads, shape.d), (kv_heads or shape.heads, shape.d), (kv_heads or shape.heads, shape.dv))
    return [torch.randn(shape.batch, h, shape.length, d, device="cuda", dtype=torch.bfloat16) for h, d in sizes]


# --- peers -------------------------------------------------------------------------------------


FEWER_STAGES = {"bwd_num_stages": 2}
"""Where a backward of FlexAttention in three stages, its own choice, does not fit into shared memory."""


def flex(score_mod: Any, mask_mod: Any, length: int = S, options: Any = None) -> Attend:
    compiled = torch.compile(flex_attention)
    blocks = create_block_mask(mask_mod, None, None, length, length, device="cuda") if mask_mod is not None else None
    return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=blocks, kernel_options=options)


def flex_with_sink(sink: Tensor) -> Attend:
    """A sink takes a share of the weights: the output of softmax, scaled by what is left."""
    blocks = create_block_mask(causal, None, None, S, S, device="cuda")

    @torch.compile
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse = flex_attention(q, k, v, block_mask=blocks, return_lse=True)  # type: ignore[misc]
        return o * torch.sigmoid(lse - sink[None, :, None]).unsqueeze(-1).to(o.dtype)

    return run


def dense(weight: Callable[[Tensor], Tensor], shape: Shape) -> Attend:
    """weight(scale q k^T) v over visible keys, compiled."""
    visible = torch.ones(shape.length, shape.length, dtype=torch.bool, device="cuda").tril()

    @torch.compile
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = weight((q @ k.transpose(-1, -2)) * shape.d**-0.5)
        p = torch.where(visible, p, 0.0) if shape.visible < 1 else p
        return p.to(v.dtype) @ v

    return run


# --- masks and mods ----------------------------------------------------------------------------


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < WINDOW)


def soft_cap(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return 20 * torch.tanh(s / 20)


def alibi(slopes: Tensor) -> Any:
    return lambda s, b, h, q, kv: s + slopes[h] * (kv - q)


def dense_bias(bias: Tensor) -> Any:
    return lambda s, b, h, q, kv: s + bias[0, h, q, kv]


def pair_bias(bias: Tensor) -> Any:
    return lambda s, b, h, q, kv: s + bias[b, h, q, kv]


def relative(table: Tensor) -> Any:
    return lambda s, b, h, q, kv: s + table[h, q - kv + S - 1]


def t5_buckets(table: Tensor) -> Any:
    """Distances up to 15 have a bucket each, those up to 127 share 16 in steps of equal ratio; the last holds the rest."""

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        n = torch.clamp(q - kv, min=0)
        steps = torch.log(torch.clamp(n, min=1) / EXACT) / math.log(D / EXACT) * (BUCKETS - EXACT)
        far = torch.clamp(EXACT + steps.to(torch.int32), max=BUCKETS - 1)
        return s + table[h, torch.where(n < EXACT, n, far)]

    return score


# --- rows --------------------------------------------------------------------------------------


def _parameter(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def _same(name: str, score_mod: Any, mask_mod: Any, shape: Shape, **more: Any) -> Custom:
    """The very same functions on both sides."""
    ours = attn_engine.compile(score_mod=score_mod, mask_mod=mask_mod)
    options = FEWER_STAGES if more.get("fewer_stages") else None
    return Custom(name, ours, partial(flex, score_mod, mask_mod, shape.length, options), shape, **more)


def _trained(name: str, make: Any, parameter: Tensor, mask_mod: Any, shape: Shape, **more: Any) -> Custom:
    """A score_mod whose tensor trains, beside the same with a tensor that does not."""
    fixed = attn_engine.compile(score_mod=make(parameter.detach().clone()), mask_mod=mask_mod)
    return _same(name, make(parameter), mask_mod, shape, trained=(parameter,), beside=fixed, **more)


def _table(name: str, make: Any, batch: int) -> Custom:
    """A number for each score."""
    table = _parameter(batch, H, S, S, dtype=torch.bfloat16)
    return _trained(name, make, table, None, _FULL, aims=(1.4, 3.0))


def _shared(name: str, make: Any, parameter: Tensor, mask_mod: Any, shape: Shape, **more: Any) -> Custom:
    """Numbers that many scores share: their gradients are sums, which the peer adds up one by one."""
    usual = {"aims": (1.4, 20.0), "beside_at_most": (1.0, 1.3), "slow_peer": True}
    return _trained(name, make, parameter, mask_mod, shape, **{**usual, **more})


def _row(name: str, row: Any, peer: Any, shape: Shape, aims: Pass, **more: Any) -> Custom:
    """A row function beside its dense formula, and beside softmax."""
    mask = causal if shape.visible < 1 else None
    beside = attn_engine.compile(mask_mod=mask)
    compiled = partial(dense, peer, shape) if peer is not None else None
    return Custom(name, attn_engine.compile(row=row, mask_mod=mask), compiled, shape, (), beside, aims, **more)


def _slopes() -> Tensor:
    return torch.exp2(-torch.arange(1, H + 1, device="cuda") / 4)


def _documents() -> Custom:
    documents = torch.arange(S, device="cuda") // (S // 8)

    def same_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (documents[q] == documents[kv])

    return _same("8 documents, causal", None, same_document, Shape(visible=1 / 16))


def _sink() -> Custom:
    sink = _parameter(H)
    ours = attn_engine.compile(row=library.softmax_with_sink(sink), mask_mod=causal)
    return Custom("trained sink, causal", ours, partial(flex_with_sink, sink), Shape(), (sink,))


def _wide(name: str, heads: int, d: int, dv: int, rate: float) -> Custom:
    shape = Shape(8, heads, 8192, d, dv)
    return _same(name, None, causal, shape, aims=(1.0, 1.2), rates=(rate, 0.0), fewer_stages=dv > d)


_BAND = Shape(visible=WINDOW / S * (1 - WINDOW / (2 * S)))
_FULL = Shape(visible=1.0)
_ONE = Shape(batch=1)
_VIT = Shape(64, 6, 2048, 64, 64, 1.0)

ROWS: dict[str, Callable[[], Custom]] = {
    "alibi": lambda: _same("ALiBi, window 1024", alibi(_slopes()), window, _BAND),
    "cap": lambda: _same("soft-cap 20, causal", soft_cap, causal, Shape()),
    "documents": _documents,
    "sink": _sink,
    "bias": lambda: _table("dense bias [1,H,S,S], trained", dense_bias, 1),
    "slopes": lambda: _shared(
        "ALiBi, window 1024, slopes trained",
        alibi,
        _slopes().requires_grad_(),
        window,
        _BAND,
        beside_at_most=(1.0, 1.15),
    ),
    "t5": lambda: _shared(
        "T5 buckets, causal, trained", t5_buckets, _parameter(H, BUCKETS), causal, Shape(), fewer_stages=True
    ),
    "relative": lambda: _shared(
        "relative positions, table 2S - 1, trained",
        relative,
        _parameter(H, 2 * S - 1),
        None,
        _FULL,
        fewer_stages=True,
    ),
    "pair": lambda: _table("pair bias [B,H,S,S], trained", pair_bias, 4),
    "sigmoid": lambda: _row("sigmoid, causal", library.sigmoid, torch.sigmoid, _ONE, (5.0, 3.0)),
    "relu": lambda: _row("relu, causal", library.relu, torch.relu, _ONE, (5.0, 3.0)),
    "sigmoid8k": lambda: _row(
        "sigmoid, causal, long",
        library.sigmoid,
        None,
        Shape(8, H, 8192),
        (0.0, 0.0),
        beside_at_most=(1 / 0.9, math.inf),
        rates=(602.0, 1.3 * 353),
    ),
    "relu64": lambda: _row(
        "relu, narrow heads",
        library.relu,
        None,
        _VIT,
        (0.0, 0.0),
        beside_at_most=(1.0, math.inf),
        rates=(542.0, 1.3 * 327),
    ),
    "wide192": lambda: _wide("causal, heads of 192 and 128", 16, 192, 128, 592.0),
    "wide256": lambda: _wide("causal, heads of 128 and 256", 12, 128, 256, 607.0),
}
