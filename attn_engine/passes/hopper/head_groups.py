"""The order of programs: groups of heads one after the other, the blocks of a group's heads side by side."""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects import arith
from xdsl.ir import SSAValue

from attn_engine.passes.lowering.scope import Scope


@dataclass
class HeadGroups:
    """What a kernel needs to know to turn the number of a program into a block of rows of a head."""

    row_tiles: SSAValue
    heads: SSAValue
    all_heads: SSAValue
    """Of the whole batch."""
    heads_in_flight: SSAValue
    """Of a group."""
    batch: SSAValue | None = None
    """The size of the batch, if heads of the same number run together across it."""

    def place(self, scope: Scope, number: SSAValue) -> tuple[SSAValue, SSAValue, SSAValue]:
        """Row tile, head and batch of a program: a group's row tiles go across its heads."""

        def divide(a: SSAValue, b: SSAValue, quotient: str, rest: str) -> tuple[SSAValue, SSAValue]:
            return scope.add(arith.DivSIOp(a, b), quotient).result, scope.add(arith.RemSIOp(a, b), rest).result

        per_group = scope.add(arith.MuliOp(self.row_tiles, self.heads_in_flight), "per_group").result
        group, inside = divide(number, per_group, "group", "in_group")
        first = scope.add(arith.MuliOp(group, self.heads_in_flight), "first_head").result
        left = scope.minus(self.all_heads, first, "heads_left")
        width = scope.value(scope.smaller(self.heads_in_flight, left, "width"))
        row, across = divide(inside, width, "i", "across")
        head = scope.value(scope.plus(first, across, "head"))
        if self.batch is not None:
            h, b = divide(head, self.batch, "h", "b")
        else:
            b, h = divide(head, self.heads, "b", "h")
        return row, h, b


def alike(scope: Scope, all_heads: SSAValue, most: SSAValue, group: SSAValue) -> SSAValue:
    """At most so many heads, and no fewer in the last run of them than need be: few long tiles at the end wait for each other.

    Heads that share keys stay together.
    """
    runs = scope.add(arith.CeilDivSIOp(all_heads, most), "runs").result
    each = scope.add(arith.CeilDivSIOp(all_heads, scope.value(scope.larger(runs, 1, "runs"))), "each").result
    groups = scope.add(arith.CeilDivSIOp(each, group), "groups").result
    found = scope.add(arith.MuliOp(groups, group), "alike").result
    return scope.value(scope.larger(scope.smaller(found, most), 1, "heads_in_flight"))
