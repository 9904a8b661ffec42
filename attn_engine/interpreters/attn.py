"""The meaning of `attn.attention` and `attn.online`, densely on torch tensors: the oracle.

`run_attention` is differentiable by torch autograd, captures included: its gradients are the ones
that every other path is measured against. fp64 unless asked otherwise; memory is B x H x Sq x Skv.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from xdsl.ir import Operation

from attn_engine.dialects import attn
from attn_engine.interpreters.attn_common import RowReducer, Scene, resolve
from attn_engine.interpreters.attn_steps import fold_keys, initial_states, key_blocks


def run_attention(
    module_or_op: Operation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | Tensor,
    captures: Sequence[Any] = (),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """(o, outputs..., saved...) of an `attn.attention`, or of the one inside a module."""
    op, operands = resolve(module_or_op, attn.AttentionOp, [q, k, v, scale, *captures])
    scene = Scene.of(op, operands, operands[4:], dtype)
    visible = scene.visible()
    reducer = RowReducer(visible, dtype)
    p, *rows = scene.run(op.row, [scene.scores(), *scene.indices()], reducer.handlers())
    weight = torch.where(visible & ~reducer.dead, p, torch.zeros((), dtype=dtype))
    value = scene.modified(op.value_mod, scene.v)
    o = torch.einsum("bhqk,bhkd->bhqd", weight, scene.per_query_head(value))
    return (o, *(_row_value(row, reducer.dead) for row in rows))


def _row_value(value: Tensor, dead: Tensor) -> Tensor:
    """[B, H, Sq] from a value of the row function, -inf in dead rows."""
    if value.ndim and value.shape[-1] != 1:
        raise ValueError("a row value depends on the key: reduce it over the row")
    return torch.where(dead, torch.tensor(float("-inf"), dtype=value.dtype), value).squeeze(-1)


def run_online(
    module_or_op: Operation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | Tensor,
    captures: Sequence[Any] = (),
    block: int | Sequence[int] = 64,
    order: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:
    """(o, outputs..., saved...) of an `attn.online`, one block of keys after the other.

    `block` is the size of every block but the last, or the sizes of all of them; `order` is the
    order in which the blocks are visited, by their numbers.
    """
    op, operands = resolve(module_or_op, attn.OnlineOp, [q, k, v, scale, *captures])
    scene = Scene.of(op, operands, operands[4:], dtype)
    blocks, visible, scores = key_blocks(scene.shape[3], block, order), scene.visible(), scene.scores()
    value = scene.per_query_head(scene.modified(op.value_mod, scene.v))
    acc = torch.zeros((*scene.shape[:3], value.shape[3]), dtype=dtype)
    finals: list[Tensor] = []
    for init, step in zip(op.init, op.steps, strict=True):
        states = initial_states(scene, init)
        for keys, last, results in fold_keys(scene, step, init, [scores], [], finals, visible, blocks):
            states, rest = results[: len(init)], results[len(init) :]
            acc = _accumulate(acc, last, rest, visible[..., keys], value[:, :, keys])
        finals += states
    return _epilogue(scene, op, acc, finals)


def _accumulate(acc: Tensor, last: attn.StepYieldOp, rest: Sequence[Tensor], visible: Tensor, value: Tensor) -> Tensor:
    """acc * rescale + sum_block w * v; nothing in a step that yields states only."""
    if last.rescale is not None:
        acc = acc * rest[0]
    if last.weight is None:
        return acc
    weight = torch.where(visible, rest[-1], torch.zeros((), dtype=acc.dtype))
    return acc + torch.einsum("bhqk,bhkd->bhqd", weight, value)


def _epilogue(scene: Scene, op: attn.OnlineOp, acc: Tensor, finals: Sequence[Tensor]) -> tuple[Tensor, ...]:
    scale, *rows = scene.run(op.epilogue, [*scene.indices()[:3], *finals])
    shape = (*scene.shape[:3], 1)
    return (acc * scale, *(row.expand(shape).squeeze(-1) for row in rows))
