"""The meaning of `attn.backward`, densely on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from xdsl.ir import BlockArgument, Operation, Region

from attn_engine.dialects import attn
from attn_engine.interpreters.attn_common import Scene, channel_handlers, index_grid, resolve
from attn_engine.interpreters.attn_steps import fold_keys, initial_states, key_blocks
from attn_engine.interpreters.scalar import Handlers, load_index

Gradients = dict[str, Any]


def run_backward(
    module_or_op: Operation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | Tensor,
    o: Tensor,
    d_o: Tensor,
    saved: Sequence[Tensor] = (),
    d_outputs: Sequence[Tensor] = (),
    captures: Sequence[Any] = (),
    block: int | Sequence[int] = 64,
    order: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Gradients:
    """`{"dq", "dk", "dv", "d_captures"}` of an `attn.backward`: the results that the op has, captures as a list.

    `block` and `order` say how the row steps walk over the keys, as in `run_online`.
    """
    args = [q, k, v, scale, o, d_o, *saved, *d_outputs, *captures]
    op, operands = resolve(module_or_op, attn.BackwardOp, args)
    inputs = 6 + len(op.saved) + len(op.d_outputs)
    scene = Scene.of(op, operands, operands[inputs:], dtype)
    o, d_o, *rows = (x.to(dtype) for x in operands[4:inputs])
    backward = _Backward(scene, op, d_o, [_column((d_o * o).sum(-1)), *map(_column, rows)], scene.visible())
    return backward.run(key_blocks(scene.shape[3], block, order))


def _column(row: Tensor) -> Tensor:
    """[B, H, Sq] as a row vector, [B, H, Sq, 1]."""
    return row.unsqueeze(-1)


@dataclass
class CaptureGradients:
    """Sums of `attn.accumulate_grad`, one tensor per entry of `grad_captures`."""

    scene: Scene
    op: attn.BackwardOp
    sums: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def __post_init__(self) -> None:
        for position in self.op.grad_captures:
            capture = self.scene.captures[position.value.data]
            self.sums[position.value.data] = torch.zeros(capture.shape, dtype=self.scene.real)

    def handlers(self, where: Tensor) -> Handlers:
        """Contributions happen where `where` is true, at every point of its shape."""

        def accumulate(op: attn.AccumulateGradOp, args: Sequence[Tensor]) -> None:
            assert isinstance(op.capture, BlockArgument)
            region = op.capture.block
            position = op.capture.index - (len(region.args) - len(self.scene.captures))
            if position in self.sums and self.sums[position].numel():
                self._add(self.sums[position], args[0], args[2:], where)

        return {attn.AccumulateGradOp: accumulate}

    def _add(self, total: Tensor, value: Tensor, indices: Sequence[Tensor], where: Tensor) -> None:
        chosen = [x.expand(where.shape)[where] for x in (value, *load_index(total, indices))]
        if not indices:
            total += chosen[0].sum()
        else:
            total.index_put_(tuple(chosen[1:]), chosen[0], accumulate=True)

    def results(self) -> list[Tensor]:
        return [self.sums[position.value.data] for position in self.op.grad_captures]


@dataclass
class _Backward:
    scene: Scene
    op: attn.BackwardOp
    d_o: Tensor
    rows: list[Tensor]
    visible: Tensor

    def run(self, blocks: Sequence[slice]) -> Gradients:
        scene, op = self.scene, self.op
        query = scene.modified(op.query_mod, scene.q)
        key = scene.per_query_head(scene.modified(op.key_mod, scene.k))
        value = scene.per_query_head(scene.modified(op.value_mod, scene.v))
        x = scene.scale * torch.einsum("bhqd,bhkd->bhqk", query, key)
        dp = torch.einsum("bhqd,bhkd->bhqk", self.d_o, value)
        grads = CaptureGradients(scene, op)
        p, dx = self._elements(x, dp, self._row_vectors(x, dp, blocks, grads), grads)
        dq = scene.scale * torch.einsum("bhqk,bhkd->bhqd", dx, key)
        dk = scene.scale * torch.einsum("bhqk,bhqd->bhkd", dx, query)
        dv = torch.einsum("bhqk,bhqd->bhkd", p, self.d_o)
        found: dict[str, Callable[[], Tensor]] = {
            "dq": lambda: self._vjp(op.query_vjp, dq, scene.q, 1, grads),
            "dk": lambda: self._vjp(op.key_vjp, dk, scene.k, scene.group, grads),
            "dv": lambda: self._vjp(op.value_vjp, dv, scene.v, scene.group, grads),
        }
        # A gradient that nobody asks for may still lead to those of captures.
        all_ = {name: get() for name, get in found.items() if getattr(op, name) is not None or self._leads(name)}
        results: Gradients = {name: value for name, value in all_.items() if getattr(op, name) is not None}
        return results | {"d_captures": grads.results()}

    def _leads(self, name: str) -> bool:
        region: Region | None = getattr(self.op, {"dq": "query_vjp", "dk": "key_vjp", "dv": "value_vjp"}[name])
        return region is not None and any(isinstance(o, attn.AccumulateGradOp) for o in region.block.ops)

    def _row_vectors(self, x: Tensor, dp: Tensor, blocks: Sequence[slice], grads: CaptureGradients) -> list[Tensor]:
        scene, op, finals = self.scene, self.op, list[Tensor]()
        for init, step in zip(op.init, op.row_steps, strict=True):
            states = initial_states(scene, init)
            for *_, results in fold_keys(scene, step, init, [x, dp], self.rows, finals, self.visible, blocks):
                states = results
            finals += states
        every_row = torch.ones((*scene.shape[:3], 1), dtype=torch.bool)
        return scene.run(op.rows, [*scene.indices()[:3], *self.rows, *finals], grads.handlers(every_row))

    def _elements(
        self, x: Tensor, dp: Tensor, vectors: Sequence[Tensor], grads: CaptureGradients
    ) -> tuple[Tensor, Tensor]:
        """(p, dx), 0 where masked."""
        arguments = [x, dp, *self.scene.indices(), *vectors]
        p, dx = self.scene.run(self.op.element, arguments, grads.handlers(self.visible))
        zero = torch.zeros((), dtype=self.scene.real)
        return torch.where(self.visible, p, zero), torch.where(self.visible, dx, zero)

    def _vjp(
        self, region: Region | None, gradient: Tensor, element: Tensor, group: int, grads: CaptureGradients
    ) -> Tensor:
        """The gradient of an operand from that of its modified elements, query head by query head, summed per group."""
        if region is not None:
            batch, head, place, c = index_grid(*gradient.shape)
            wide = element.repeat_interleave(group, dim=1)
            everywhere = torch.ones(gradient.shape, dtype=torch.bool)
            arguments = [gradient, wide, batch, head // group, place, c]
            handlers = {**channel_handlers(gradient.shape), **grads.handlers(everywhere)}
            gradient = self.scene.run(region, arguments, handlers)[0].expand(gradient.shape)
        b, _, position, channel = gradient.shape
        return gradient.reshape(b, element.shape[1], group, position, channel).sum(2)
