"""What the interpreters of the attention ops share: indices, modified operands, scores and visibility.

Everything is dense and four-dimensional: [B, H, Sq, Skv] for scores, [B, H, Sq, 1] for rows. Values
that do not depend on an axis have size 1 there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from xdsl.ir import Attribute, BlockArgument, Operation, Region, SSAValue

from attn_engine.dialects import attn
from attn_engine.interpreters.autograd import extremum
from attn_engine.interpreters.scalar import Handlers, element_of, oracle_dtypes, run_region
from attn_engine.ir.dead_rows import tells_dead_rows

AnyAttention = attn.AttentionOp | attn.OnlineOp | attn.BackwardOp


def index_grid(*sizes: int) -> list[Tensor]:
    """One index tensor per axis, each of size 1 on the other axes."""
    rank = len(sizes)
    return [torch.arange(n).reshape([n if a == axis else 1 for a in range(rank)]) for axis, n in enumerate(sizes)]


def promote(value: Tensor, type_: Attribute, real: torch.dtype) -> Tensor:
    """A tensor as the oracle reads it: floats in `real`, integers as they are."""
    return value.to(oracle_dtypes(real)(element_of(type_)))


def resolve(module_or_op: Operation, kind: type[Any], args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The one op of a kind and its operands: `args` are the operands, or the arguments of the op's function."""
    if isinstance(module_or_op, kind):
        return module_or_op, list(args)
    found = [op for op in module_or_op.walk() if isinstance(op, kind)]
    if len(found) != 1:
        raise ValueError(f"expected one {kind.name}, found {len(found)}")
    return found[0], [_argument(operand, args) for operand in found[0].operands]


def _argument(operand: SSAValue, args: Sequence[Any]) -> Any:
    if not isinstance(operand, BlockArgument):
        raise ValueError("operands of the op must be arguments of its function")
    return args[operand.index]


@dataclass(frozen=True)
class Scene:
    """The operands of one attention op, promoted, and what follows from them alone."""

    op: AnyAttention
    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    captures: tuple[Tensor, ...]
    real: torch.dtype

    @classmethod
    def of(cls, op: AnyAttention, operands: Sequence[Any], captures: Sequence[Any], real: torch.dtype) -> Scene:
        """From q, k, v, scale (what follows is not looked at) and the captures."""
        types = [c.type for c in op.captures]
        promoted = tuple(promote(torch.as_tensor(c), t, real) for c, t in zip(captures, types, strict=True))
        # A number has more digits than a tensor that torch would make of it.
        q, k, v, scale = (x.to(real) if isinstance(x, Tensor) else torch.as_tensor(x, dtype=real) for x in operands[:4])
        return cls(op, q, k, v, scale, promoted, real)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, query heads, queries, keys."""
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // max(1, self.k.shape[1])

    def per_query_head(self, value: Tensor) -> Tensor:
        return value.repeat_interleave(self.group, dim=1)

    def indices(self) -> list[Tensor]:
        return index_grid(*self.shape)

    def run(self, region: Region, leading: Sequence[Tensor], handlers: Handlers | None = None) -> list[Tensor]:
        """Evaluates a region of the op; the captures are appended to the arguments."""
        return run_region(region.block, [*leading, *self.captures], oracle_dtypes(self.real), handlers)

    def modified(self, region: Region | None, element: Tensor) -> Tensor:
        """`query_mod`, `key_mod` or `value_mod` applied to every element of an operand."""
        if region is None:
            return element
        found = self.run(region, [element, *index_grid(*element.shape)], channel_handlers(element.shape))
        return found[0].expand(element.shape)

    def products(self, query: Tensor, key: Tensor) -> Tensor:
        """x: scaled products of modified queries and keys, before score_mod."""
        return self.scale * torch.einsum("bhqd,bhkd->bhqk", query, self.per_query_head(key))

    def scores(self) -> Tensor:
        """s: what score_mod makes of x."""
        x = self.products(self.modified(self.op.query_mod, self.q), self.modified(self.op.key_mod, self.k))
        if self.op.score_mod is None:
            return x
        return self.run(self.op.score_mod, [x, *self.indices()])[0].expand(self.shape)

    def visible(self) -> Tensor:
        if self.op.mask is None:
            return torch.ones(self.shape, dtype=torch.bool)
        with torch.no_grad():
            return self.run(self.op.mask, self.indices())[0].expand(self.shape)


def channel_handlers(shape: Sequence[int]) -> dict[type[Operation], Callable[[Any, Sequence[Tensor]], Tensor | None]]:
    """What reads the row of an operand of this shape: reductions over the channels, and other channels."""

    def reduce(op: attn.RowReduceOp, args: Sequence[Tensor]) -> Tensor:
        value, kind = args[0].expand(*shape), op.kind.data
        if kind == attn.ReduceKind.COUNT:
            return torch.full((*shape[:3], 1), float(shape[3]), dtype=value.dtype)
        if kind == attn.ReduceKind.SUM:
            return value.sum(-1, keepdim=True)
        return extremum(value, kind == attn.ReduceKind.MAX, op.ties is None or op.ties.data == attn.TieRule.SPLIT)

    def at(op: attn.ChannelAtOp, args: Sequence[Tensor]) -> Tensor:
        return torch.take_along_dim(args[0].expand(*shape), args[1].expand(*shape), -1)

    return {attn.RowReduceOp: reduce, attn.ChannelAtOp: at}


class RowReducer:
    """`attn.row_reduce` over the visible keys; remembers which rows an extremum found dead."""

    def __init__(self, visible: Tensor, real: torch.dtype):
        self.visible = visible
        self.real = real
        self.dead = ~visible.any(-1, keepdim=True)

    def handlers(self) -> dict[type[Operation], Callable[[Any, Sequence[Tensor]], Tensor | None]]:
        return {attn.RowReduceOp: self.reduce}

    def reduce(self, op: attn.RowReduceOp, args: Sequence[Tensor]) -> Tensor:
        match op.kind.data:
            case attn.ReduceKind.SUM:
                return self._masked(args[0], 0.0).sum(-1, keepdim=True)
            case attn.ReduceKind.COUNT:
                return self.visible.sum(-1, keepdim=True).to(self.real)
            case kind:
                return self._extremum(args[0], kind == attn.ReduceKind.MAX, op)

    def _masked(self, value: Tensor, identity: float) -> Tensor:
        return torch.where(self.visible, value, torch.tensor(identity, dtype=value.dtype))

    def _extremum(self, value: Tensor, largest: bool, op: attn.RowReduceOp) -> Tensor:
        identity = float("-inf") if largest else float("inf")
        masked = self._masked(value, identity)
        # One more element keeps a row of no keys at all from being an error; it comes last and wins nothing.
        sentinel = masked.new_full((*masked.shape[:-1], 1), identity)
        split = op.ties is None or op.ties.data == attn.TieRule.SPLIT
        result = extremum(torch.cat([masked, sentinel], -1), largest, split)
        if tells_dead_rows(op):
            self.dead = self.dead | (result == identity)
        return result
