"""Loops over blocks of keys: what a step of `attn.online` and a row step of `attn.backward` mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from xdsl.dialects.builtin import ArrayAttr, FloatAttr
from xdsl.ir import Region

from attn_engine.dialects import attn
from attn_engine.interpreters.attn_common import RowReducer, Scene


def key_blocks(keys: int, block: int | Sequence[int], order: Sequence[int] | None = None) -> list[slice]:
    """Blocks of keys in visiting order; `block` is one size for all, or the sizes of all."""
    sizes = [block] * -(-keys // block) if isinstance(block, int) else list(block)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if sum(sizes) < keys:
        raise ValueError(f"blocks of {sum(sizes)} keys do not cover {keys}")
    order = range(len(sizes)) if order is None else order
    if sorted(order) != list(range(len(sizes))):
        raise ValueError(f"order {list(order)} is not a permutation of {len(sizes)} blocks")
    return [slice(starts[i], min(starts[i] + sizes[i], keys)) for i in order]


def fold_keys(
    scene: Scene,
    step: Region,
    init: ArrayAttr[FloatAttr],
    elements: Sequence[Tensor],
    rows: Sequence[Tensor],
    earlier: Sequence[Tensor],
    visible: Tensor,
    blocks: Sequence[slice],
) -> Iterator[tuple[slice, attn.StepYieldOp, list[Tensor]]]:
    """Runs one step over the blocks: after each, its keys, its terminator and the terminator's operands.

    Arguments of the step are `elements` (cut to the block), indices, `rows`, its own states and `earlier`.
    """
    last = step.block.last_op
    assert isinstance(last, attn.StepYieldOp)
    states = initial_states(scene, init)
    b, h, q, kv = scene.indices()
    for keys in blocks:
        cut = [e[..., keys] for e in elements]
        handlers = RowReducer(visible[..., keys], scene.real).handlers()
        results = scene.run(step, [*cut, b, h, q, kv[..., keys], *rows, *states, *earlier], handlers)
        states = results[: len(states)]
        yield keys, last, results


def initial_states(scene: Scene, init: ArrayAttr[FloatAttr]) -> list[Tensor]:
    shape = (*scene.shape[:3], 1)
    return [torch.full(shape, value.value.data, dtype=scene.real) for value in init]
