"""Gradients of captures that are read at [.., q, kv]: a block of scores is a block of them, and leaves as one.

Where no two scores have the same place, blocks are stored, in the type of the capture; where scores of different batches
have, a part for each batch may be, or blocks are added up in that type, if batches are few; elsewhere blocks are added
up in f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from xdsl.dialects import arith
from xdsl.dialects.builtin import IntegerAttr
from xdsl.ir import Block, BlockArgument, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.passes.lowering.frame import Frame
from attn_engine.passes.lowering.scope import Scope

_B, _H, _Q, _KV = 2, 3, 4, 5
"""Of the arguments of an element region."""
_OF_ALL_BATCHES = ([_H], [_H, None], [None, _H])
"""Leading indices, None for a number, of which each head has its own, and batches have the same."""
_CASTS = (arith.ExtSIOp, arith.TruncIOp)


@dataclass(frozen=True)
class ScoreGradient:
    """One contribution: its capture, where on the axes before the last two it goes, and whether each place has one score.

    `shared` says that each has one of every batch, and that parts of each batch are stored; `rounded` that these are added
    up in the type of the capture instead, in no particular order.
    """

    capture: int
    leading: tuple[SSAValue, ...]
    alone: bool
    shared: bool = False
    rounded: bool = False

    @property
    def bounded(self) -> bool:
        """Whether memory ends where queries and keys do."""
        return self.alone or self.shared or self.rounded

    @property
    def added(self) -> ScoreGradient:
        """Added up where it would be stored in parts."""
        return replace(self, shared=False, rounded=self.shared or self.rounded)

    def leave(self, frame: Frame, scope: Scope, value: SSAValue, q0: SSAValue, n0: SSAValue) -> None:
        """Stores or adds a block of contributions, 0 where they do not count."""
        name = frame.operands.capture_names[self.capture]
        memory = frame.take(f"d_{name}")
        place = [self._index(frame, scope, index) for index in self.leading] + [q0, n0]
        dims = [len(self.leading), len(self.leading) + 1]
        if self.alone:
            limits = {} if frame.operands.whole else {0: frame.sq, 1: frame.skv}
            scope.add(tile.StoreOp(value, memory, place, dims, limits))
            return
        source = frame.operands[name]
        sizes = [frame.kernel.plan.size(source, axis, f"{name}_n{axis}") for axis in dims]
        inside = frame.operands.whole and frame.operands.covered
        limits = {} if inside else {axis: frame.kernel.take(size) for axis, size in enumerate(sizes)}
        scope.add(tile.AtomicAddOp(value, memory, place, dims, limits))

    @staticmethod
    def _index(frame: Frame, scope: Scope, index: SSAValue) -> SSAValue:
        if isinstance(index, BlockArgument):
            return frame.b if index.index == _B else frame.h
        number = number_of(index)
        assert number is not None
        return scope.value(number)


def number_of(index: SSAValue) -> int | None:
    """What an index is in every score, if it is a constant."""
    owner = index.owner
    constant = isinstance(owner, arith.ConstantOp) and isinstance(owner.value, IntegerAttr)
    return owner.value.value.data if constant else None  # type: ignore[union-attr]


def score_gradients(
    op: attn.BackwardOp, exact: bool, single: bool = False, by_batch: bool = False
) -> dict[int, ScoreGradient]:
    """Those contributions of the element region, by number, whose last indices are the query and the key.

    `exact` says that captures are exactly as long as the tensors wherever b, h, q or kv index them directly. With
    `single` only those whose places have one score each: blocks of them are stored, not added. With `by_batch` parts of
    each batch may be.
    """
    block = op.element.block
    adds = [o for o in block.ops if isinstance(o, attn.AccumulateGradOp)]
    found: dict[int, ScoreGradient] = {}
    for n, add in enumerate(adds):
        indices = [_plain(i) for i in add.indices]
        positions = [i.index if isinstance(i, BlockArgument) else None for i in indices]
        if positions[-2:] == [_Q, _KV] and all(_is_leading(i) for i in indices[:-2]):
            capture = _capture(op, block, add)
            once = exact and _times(op, capture) == 1
            alone = once and sorted(positions[:-2], key=str) == [_B, _H]
            shared = once and by_batch and positions[:-2] in _OF_ALL_BATCHES
            if alone or shared or not single:
                found[n] = ScoreGradient(capture, tuple(indices[:-2]), alone, shared)
    return found


def shares_batches(op: attn.BackwardOp) -> bool:
    """Whether scores read a table at [.., query, key] that all batches share: their programs find it in a cache together."""
    block = op.element.block
    loads = [[_plain(i) for i in o.indices] for o in block.ops if isinstance(o, attn.LoadOp)]
    tables = [indices for indices in loads if indices[-2:] == [block.args[_Q], block.args[_KV]]]
    return any(block.args[_B] not in indices for indices in tables)


def stored(found: Sequence[ScoreGradient]) -> set[int]:
    """The captures whose gradients have the captures' own types."""
    return {gradient.capture for gradient in found if gradient.bounded}


def _plain(index: SSAValue) -> SSAValue:
    while isinstance(index.owner, _CASTS):
        index = index.owner.operands[0]
    return index


def _is_leading(index: SSAValue) -> bool:
    if isinstance(index, BlockArgument):
        return index.index in (_B, _H)
    number = number_of(index)
    return number is not None and number >= 0


def _capture(op: attn.BackwardOp, block: Block, add: attn.AccumulateGradOp) -> int:
    assert isinstance(add.capture, BlockArgument)
    return add.capture.index - (len(block.args) - len(op.captures))


def _times(op: attn.BackwardOp, capture: int) -> int:
    """How many contributions, of any region, a capture has."""
    blocks = [block for region in op.regions for block in region.blocks]
    adds = [(block, o) for block in blocks for o in block.ops if isinstance(o, attn.AccumulateGradOp)]
    return sum(_capture(op, block, add) == capture for block, add in adds)
