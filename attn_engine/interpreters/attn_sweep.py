"""The meaning of what a recurrence's gradients are made of, token by token on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from xdsl.dialects import func
from xdsl.ir import Operation, SSAValue

from attn_engine.dialects import attn


def run_sweeps(function: func.FuncOp, arguments: Sequence[Any], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The results of a function of sweeps and the ops beside them, without bounds."""
    promoted = [torch.as_tensor(a).to(dtype) for a in arguments]
    values: dict[SSAValue, Tensor] = dict(zip(function.body.block.args, promoted, strict=True))
    for op in function.body.block.ops:
        found = _run(op, values)
        values.update(zip(op.results, found, strict=True))
    end = function.body.block.last_op
    assert end is not None
    return [values[o] for o in end.operands]


def _run(op: Operation, values: dict[SSAValue, Tensor]) -> list[Tensor]:
    match op:
        case attn.SweepOp():
            return _sweep(op, values)
        case attn.TokenGradientsOp():
            return _token_gradients(op, values)
        case attn.ChannelGradientsOp():
            return [_channel_gradients(op, values)]
        case attn.DeltaBackwardOp():
            return _delta_backward(op, values)
        case attn.SumHeadsOp():
            value, shared = values[op.value], values[op.like].shape[1]
            return [value.unflatten(1, (shared, value.shape[1] // max(1, shared))).sum(2)]
        case _:
            return []


def _sweep(op: attn.SweepOp, values: dict[SSAValue, Tensor]) -> list[Tensor]:
    operands = [values[x] for x in (op.q, op.k, op.v)]
    heads = max(x.shape[1] for x in operands)
    q, k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in operands)
    batch, _, tokens, _ = v.shape
    g = values[op.decay] if op.decay is not None else v.new_zeros(batch, heads, tokens)
    w = values[op.weight] if op.weight is not None else v.new_ones(batch, heads, tokens)
    scale, reverse = values[op.scale], op.reverse is not None
    state = values[op.initial] if op.initial is not None else v.new_zeros(batch, heads, q.shape[3], v.shape[3])
    outputs: dict[int, Tensor] = {}
    segment = 0 if op.segment is None else op.segment.value.data
    places: list[Tensor] = []
    for t in reversed(range(tokens)) if reverse else range(tokens):
        kept = torch.exp(g[:, :, t])
        kept = kept[..., None, None] if kept.ndim == 2 else kept.unsqueeze(-1 if op.columns is None else -2)
        added = k[:, :, t, :, None] * v[:, :, t, None, :]
        if segment and not reverse and t % segment == 0:
            places.append(state)
        state = state + scale * added if reverse else kept * state + w[:, :, t, None, None] * added
        read = torch.einsum("bhk,bhkv->bhv", q[:, :, t], state)
        outputs[t] = read if reverse else scale * read
        state = kept * state if reverse else state
        if segment and reverse and t % segment == 0:
            places.append(state)
    plain = torch.stack([outputs[t] for t in range(tokens)], 2) if tokens else v
    results = [plain * w[..., None] if reverse else plain]
    if op.final is not None:
        results.append(state)
    if op.dot is not None:
        e = values[op.dot]
        told = results[0] if op.whole is not None else plain
        results.append((e.repeat_interleave(heads // e.shape[1], 1) * told).sum(-1))
    if op.kept is not None:
        results.append(_slots(places, state))
    if op.ends is not None and op.meets is not None:
        met = values[op.meets] * _slots(places[::-1], state)
        results.append(met.sum(3 if op.columns is not None else (3, 4)))
    return results


def _slots(places: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(places, 2) if places else like.new_zeros(*like.shape[:2], 0, *like.shape[2:])


def _suffix_sums(change: Tensor, ends: Tensor | None, segment: int, last: Tensor) -> Tensor:
    """Sums along the tokens from each on: to the end of its segment, and what `ends` has of the next; or to the last."""
    if ends is None:
        return change.flip(2).cumsum(2).flip(2) + last.unsqueeze(2)
    parts: list[Tensor] = list(torch.split(change, segment, 2))
    after = [*(ends[:, :, s] for s in range(1, len(parts))), last]
    return torch.cat([p.flip(2).cumsum(2).flip(2) + e.unsqueeze(2) for p, e in zip(parts, after, strict=True)], 2)


def _token_gradients(op: attn.TokenGradientsOp, values: dict[SSAValue, Tensor]) -> list[Tensor]:
    results: list[Tensor] = []
    if op.d_decay is not None and op.decay is not None and op.p is not None and op.n is not None:
        change = values[op.p] - values[op.n]
        last = change.new_zeros(change.shape[:2])
        if op.states:
            last = (values[op.states[0]] * values[op.states[1]]).sum((2, 3))
        sums = _suffix_sums(change, *_segments(op, values), last)
        results.append(torch.where(values[op.decay].isneginf(), 0.0, sums))
    if op.d_weight is not None and op.r is not None:
        results.append(values[op.r])
    return results


def _channel_gradients(op: attn.ChannelGradientsOp, values: dict[SSAValue, Tensor]) -> Tensor:
    decay = values[op.decay]
    heads = decay.shape[1]
    q, dq, k, dk = (values[x].repeat_interleave(heads // values[x].shape[1], 1) for x in (op.q, op.dq, op.k, op.dk))
    change = q * dq - k * dk
    last = change.new_zeros(*change.shape[:2], change.shape[3])
    if op.states:
        last = (values[op.states[0]] * values[op.states[1]]).sum(3)
    return torch.where(decay.isneginf(), 0.0, _suffix_sums(change, *_segments(op, values), last))


def _segments(
    op: attn.TokenGradientsOp | attn.ChannelGradientsOp, values: dict[SSAValue, Tensor]
) -> tuple[Tensor | None, int]:
    if op.ends is None or op.segment is None:
        return None, 0
    return values[op.ends], op.segment.value.data


def _delta_backward(op: attn.DeltaBackwardOp, values: dict[SSAValue, Tensor]) -> list[Tensor]:
    v, d_o, beta, scale = (values[x] for x in (op.v, op.d_o, op.beta, op.scale))
    batch, heads, tokens, channels = v.shape
    q, k = (values[x].repeat_interleave(heads // values[x].shape[1], 1) for x in (op.q, op.k))
    g = values[op.decay] if op.decay is not None else v.new_zeros(batch, heads, tokens)
    kept = torch.exp(g if g.ndim == 4 else g[..., None])[..., None]
    zero = v.new_zeros(batch, heads, q.shape[3], channels)
    state = values[op.initial] if op.initial is not None else zero
    decayed, states = list[Tensor](), list[Tensor]()
    for t in range(tokens):
        decayed.append(kept[:, :, t] * state)
        written = beta[:, :, t, None] * (v[:, :, t] - _read(k[:, :, t], decayed[t]))
        state = decayed[t] + k[:, :, t, :, None] * written[:, :, None]
        states.append(state)
    later = values[op.d_final] if op.d_final is not None else zero
    found: list[list[Tensor]] = []
    for t in reversed(range(tokens)):
        d_state = later + scale * q[:, :, t, :, None] * d_o[:, :, t, None]
        u, through = v[:, :, t] - _read(k[:, :, t], decayed[t]), _read(k[:, :, t], d_state)
        dv = beta[:, :, t, None] * through
        dk = beta[:, :, t, None] * _read(u, d_state.mT) - _read(dv, decayed[t].mT)
        before = d_state - k[:, :, t, :, None] * dv[:, :, None]
        d_decay = (decayed[t] * before).sum((2, 3) if g.ndim == 3 else 3)
        found.append([scale * _read(d_o[:, :, t], states[t].mT), dk, dv, (through * u).sum(-1), d_decay])
        later = kept[:, :, t] * before
    stacked = [torch.stack(parts[::-1], 2) for parts in zip(*found, strict=True)]
    return [*stacked[: 4 if op.d_decay is None else 5], *([later] if op.d_initial is not None else [])]


def _read(vector: Tensor, state: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", vector, state)
