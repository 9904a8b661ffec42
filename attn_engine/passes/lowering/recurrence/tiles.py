"""Products and elementwise code over tiles, short enough to read as formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects.builtin import f32
from xdsl.ir import Attribute, SSAValue

from attn_engine.dialects import tile
from attn_engine.passes.lowering.recurrence.terms import Terms
from attn_engine.passes.lowering.scope import Scope


class Tiles:
    """Appends ops on tiles to a scope."""

    def __init__(self, scope: Scope, precision: tile.Precision):
        self.scope, self.precision = scope, precision

    def dot(self, a: SSAValue, b: SSAValue, acc: SSAValue | None = None, hint: str = "x") -> SSAValue:
        """acc + a @ b in f32."""
        if acc is None:
            acc = self.scope.splat([tile.shape_of(a)[0], tile.shape_of(b)[1]], 0.0, "zero")
        return self.scope.add(tile.DotOp(a, b, acc, self.precision), hint).result

    def turned(self, x: SSAValue) -> SSAValue:
        return self.scope.add(tile.TransposeOp(x), f"{x.name_hint or 'x'}_t").result

    def map(self, shape: Sequence[int], code: Callable[[Terms], SSAValue], to: Attribute = f32) -> SSAValue:
        """The tile whose elements `code` computes, of type `to`."""
        terms = Terms(self.scope, shape)
        return terms.result(code(terms), to)

    def rounded(self, x: SSAValue, to: Attribute) -> SSAValue:
        return self.map(tile.shape_of(x), lambda t: t.take(x, 0, 1), to)

    def parts(self, x: SSAValue, to: Attribute) -> list[SSAValue]:
        """A tile of f32 as an operand of products: itself where those take f32, else what `to` holds of it and of the rest."""
        if to == tile.element_of(x):
            return [x]
        high, shape = self.rounded(x, to), tile.shape_of(x)
        return [high, self.map(shape, lambda t: t.sub(t.take(x, 0, 1), t.take(high, 0, 1)), to)]

    def dot_parts(
        self, a: Sequence[SSAValue], b: Sequence[SSAValue], acc: SSAValue | None = None, hint: str = "x"
    ) -> SSAValue:
        """acc + a @ b of operands in parts, the small ones first; two rests give each other nothing."""
        for x, y in [(x, y) for x in (1, 0) for y in (1, 0) if x + y < 2 and x < len(a) and y < len(b)]:
            acc = self.dot(a[x], b[y], acc, hint)
        assert acc is not None
        return acc

    def sum(self, x: SSAValue, axis: int, hint: str = "sum") -> SSAValue:
        return self.scope.add(tile.ReduceOp(tile.Reduction.SUM, x, axis), hint).result

    def running(self, x: SSAValue, reverse: bool = False, hint: str = "sums") -> SSAValue:
        """Sums along the rows, from the first on or from the last."""
        return self.scope.add(tile.ScanOp(tile.Reduction.SUM, x, 0, reverse), hint).result

    def range(self, size: int) -> SSAValue:
        return self.scope.add(tile.RangeOp(self.scope.value(0), size), "place").result
