"""`attn-pack-heads`: query heads that share keys and values become rows of one head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from attn_engine.dialects import attn
from attn_engine.errors import PassError
from attn_engine.passes.attn_simplify import simplify

_OF_QUERIES = (("query_mod", 2), ("score_mod", 2), ("mask", 1), ("row", 2))
"""Regions that know the head and the position of a query, and where the head is among their arguments; the position follows."""


def _number(value: int) -> arith.ConstantOp:
    return arith.ConstantOp.from_int_and_width(value, 64)


def _unpacked(head: SSAValue, row: SSAValue, group: int, single: bool) -> tuple[list[Operation], SSAValue, SSAValue]:
    """What computes the query head and the position of a row of a key head, and these."""
    size = _number(group)
    first = arith.MuliOp(head, size)
    if single:
        own, position = arith.AddiOp(first, row), _number(0)
        return [size, first, own, position], own.result, position.result
    position = arith.FloorDivSIOp(row, size)
    before = arith.MuliOp(position, size)
    within = arith.SubiOp(row, before)
    own = arith.AddiOp(first, within)
    return [size, first, position, before, within, own], own.result, position.result


def _read_unpacked(block: Block, at: int, group: int, single: bool) -> None:
    head, row = block.args[at : at + 2]
    readers = [(use.operation, use.index) for argument in (head, row) for use in argument.uses]
    if not readers or block.first_op is None:
        return
    ops, own, position = _unpacked(head, row, group, single)
    own.name_hint, position.name_hint = "head", "position"
    meant: dict[SSAValue, SSAValue] = {head: own, row: position}
    for operation, index in readers:
        operation.operands[index] = meant[operation.operands[index]]
    block.insert_ops_before(ops, block.first_op)


def pack_heads(op: attn.AttentionOp, group: int, single: bool = False) -> None:
    """See `AttnPackHeadsPass`.

    Raises:
        PassError: the mask was analysed before, for rows that are positions.
    """
    if op.blocks is not None:
        raise PassError(
            "attn-pack-heads", "the ranges of the mask are of positions: pack heads before attn-analyze-mask"
        )
    for name, at in _OF_QUERIES:
        region = getattr(op, name)
        blocks: Sequence[Block] = region.blocks if region is not None else ()
        for block in blocks:
            _read_unpacked(block, at, group, single)
    simplify(op)


@dataclass(frozen=True)
class AttnPackHeadsPass(ModulePass):
    """Makes of every attention one whose q is [B, Hkv, Sq * group, D]: row r of head h is query r // group of head h * group + r % group.

    Keys and values are then read once for all heads of a group. Functions still see heads and positions as their author
    meant them. With `single` there is one query for each head, at position 0.

    ```
    score_mod {                                        score_mod {
    ^bb0(%s, %b, %h, %q, %kv, %slopes):                ^bb0(%s, %b, %h, %q, %kv, %slopes):
      %x = attn.load %slopes[%h]                  ->     %first = arith.muli %h, %group
                                                         %position = arith.floordivsi %q, %group
                                                         %within = %q - %position * %group
                                                         %head = arith.addi %first, %within
                                                         %x = attn.load %slopes[%head]
    ```
    """

    name = "attn-pack-heads"

    group: int
    """Query heads for each head of keys."""
    single: bool = False
    """There is one query."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for inner in list(op.walk()):
            if isinstance(inner, attn.AttentionOp):
                pack_heads(inner, self.group, self.single)
