"""The meaning of `attn.attention` and `attn.online`, densely on torch tensors: the oracle.

`run_attention` is differentiable by torch autograd, captures included: its gradients are the ones
that every other path is measured against. fp64 unless asked otherwise; memory is B x H x Sq x Skv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
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
    num_splits: int | Sequence[int] = 1,
) -> tuple[Tensor, ...]:
    """(o, outputs..., saved...) of an `attn.online`, one block of keys after the other.

    `block` is the size of every block but the last, or the sizes of all of them; `order` is the
    order in which the blocks are visited, by their numbers. `num_splits` parts of the blocks, or parts of so
    many blocks each, are folded apart and then combined; parts may be empty.
    """
    op, operands = resolve(module_or_op, attn.OnlineOp, [q, k, v, scale, *captures])
    scene = Scene.of(op, operands, operands[4:], dtype)
    parts = split_blocks(key_blocks(scene.shape[3], block, order), num_splits)
    if len(parts) > 1 and not op.combine:
        raise ValueError("an attn.online without combine regions cannot be split")
    value = scene.per_query_head(scene.modified(op.value_mod, scene.v))
    run = _Online(scene, op, scene.scores(), scene.visible(), value)
    finals: list[Tensor] = []
    acc = run.nothing()
    for level in range(len(op.steps)):
        partial = [run.fold(level, finals, blocks) for blocks in parts]
        states, acc = reduce(partial_combine(run, level, finals), partial)
        finals += states
    return _epilogue(scene, op, acc, finals)


Partial = tuple[list[Tensor], Tensor]
"""States and accumulator of a part of the keys."""


def partial_combine(run: _Online, level: int, finals: Sequence[Tensor]) -> Callable[[Partial, Partial], Partial]:
    return lambda a, b: run.combine(level, finals, a, b)


@dataclass(frozen=True)
class _Online:
    """One run of an `attn.online`."""

    scene: Scene
    op: attn.OnlineOp
    scores: Tensor
    visible: Tensor
    value: Tensor

    def nothing(self) -> Tensor:
        return torch.zeros((*self.scene.shape[:3], self.value.shape[3]), dtype=self.scene.real)

    def fold(self, level: int, finals: Sequence[Tensor], blocks: Sequence[slice]) -> Partial:
        """One step over some blocks."""
        init, step = self.op.init.data[level], self.op.steps[level]
        states, acc = initial_states(self.scene, init), self.nothing()
        for keys, last, results in fold_keys(self.scene, step, init, [self.scores], [], finals, self.visible, blocks):
            states, rest = results[: len(init)], results[len(init) :]
            acc = _accumulate(acc, last, rest, self.visible[..., keys], self.value[:, :, keys])
        return states, acc

    def combine(self, level: int, finals: Sequence[Tensor], a: Partial, b: Partial) -> Partial:
        region = self.op.combine[level]
        last = region.block.last_op
        assert isinstance(last, attn.CombineYieldOp)
        results = self.scene.run(region, [*self.scene.indices()[:3], *a[0], *b[0], *finals])
        states, factors = results[: len(last.states)], results[len(last.states) :]
        return states, a[1] * factors[0] + b[1] * factors[1] if factors else a[1]


def split_blocks(blocks: Sequence[slice], num_splits: int | Sequence[int]) -> list[Sequence[slice]]:
    """The blocks in parts: so many of about equal length, or of so many blocks each."""
    if isinstance(num_splits, int):
        bounds = [n * len(blocks) // num_splits for n in range(num_splits + 1)]
    else:
        bounds = [sum(num_splits[:n]) for n in range(len(num_splits) + 1)]
    if bounds[-1] != len(blocks) or sorted(bounds) != bounds:
        raise ValueError(f"parts of {num_splits} blocks do not cover {len(blocks)} blocks")
    return [blocks[low:high] for low, high in pairwise(bounds)]


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
