"""Scalar programs over a tile: user regions inlined one after the other, before they become maps.

A program is one straight-line block of scalar ops. Its arguments are bound to kernel values that
have some axes of the tile; everything else follows from them. `attn.load` has become a
guarded `tile.gather`, masks have become selects: only arith, math, `tile.gather` and
`attn.row_reduce` remain, for `partition` to turn into maps and reductions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr, f32, i1, i32, i64
from xdsl.ir import Attribute, Block, BlockArgument, Operation, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.ir.autodiff.graph import IDENTITY
from attn_engine.ir.walks import behind, bottom_up, operands_of
from attn_engine.passes.simplify_constants import constant_of


@dataclass(frozen=True)
class Bound:
    """A kernel value and the axes of the tile that it has: () for a scalar or a global."""

    value: SSAValue
    axes: tuple[int, ...] = ()


class Capture(Protocol):
    """A captured tensor inside a kernel: its global and the sizes of its dimensions (i32)."""

    @property
    def source(self) -> SSAValue: ...

    @property
    def sizes(self) -> Sequence[SSAValue]: ...


class Table(Protocol):
    """A number for each distance inside a kernel: that of kv - q lies at this plus `origin` on the last axis of `source`."""

    @property
    def source(self) -> SSAValue: ...

    @property
    def origin(self) -> SSAValue: ...

    @property
    def axes(self) -> Sequence[str]:
        """Of b and h, those that the axes before it are."""
        ...


@dataclass(frozen=True)
class Contribution:
    """One `attn.accumulate_grad` of a program: a value for one place in a capture's gradient, if `inside`."""

    value: SSAValue
    capture: int
    places: tuple[SSAValue, ...]
    inside: SSAValue | None


@dataclass
class Program:
    """A straight-line scalar block over a tile.

    `visible`, if set, is the program's i1 for 'this key is in the row'; `positive` are factors known to be > 0,
    which a maximum or minimum commutes with (exactly: rounding is monotone).
    """

    captures: Sequence[Capture] = ()
    block: Block = field(default_factory=Block)
    bound: dict[SSAValue, Bound] = field(default_factory=dict[SSAValue, Bound])
    contributions: list[Contribution] = field(default_factory=list[Contribution])
    visible: SSAValue | None = None
    positive: set[SSAValue] = field(default_factory=set[SSAValue])
    limits: set[SSAValue] = field(default_factory=set[SSAValue])
    """Comparisons of an index with a size."""
    reduced: int | None = None
    """The axis that `attn.row_reduce` reduces, once known."""
    rows: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])
    """Of a region's elements: the operand in memory, of which `attn.channel_at` reads other channels."""
    row_index: Sequence[SSAValue] = ()
    """Where in it the row is."""
    covered: bool = False
    """Captures are as long as the tensors wherever b, h, q or kv index them directly."""
    tables: Mapping[SSAValue, Table | Bound] = field(default_factory=dict[SSAValue, "Table | Bound"])
    """Of values of regions that depend on the distance of two positions: they are read, not computed, or have been."""
    _axes: dict[SSAValue, frozenset[int]] = field(default_factory=dict[SSAValue, frozenset[int]])
    _direct: dict[SSAValue, Bound | None] = field(default_factory=dict[SSAValue, Bound | None])
    _globals: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])

    def argument(self, bound: Bound, hint: str, scalar_type: Attribute | None = None) -> SSAValue:
        """Binds a kernel value; inside the program it is one element of it."""
        is_global = isinstance(bound.value.type, tile.GlobalType)
        type_ = scalar_type or (bound.value.type if is_global else tile.element_of(bound.value))
        arg = self.block.insert_arg(type_, len(self.block.args))
        arg.name_hint = hint
        self.bound[arg] = bound
        return arg

    def index(self, bound: Bound, hint: str, limit: Bound | None = None) -> SSAValue:
        """Binds an i32 index that is known to be >= 0, as the i64 that regions take.

        With a limit, elements at or beyond it belong to no query or key.
        """
        return self.widened(self.argument(bound, hint), hint, limit)

    def widened(self, index: SSAValue, hint: str, limit: Bound | None = None) -> SSAValue:
        """`index` of a value of the program."""
        wide = self.add(arith.ExtSIOp(index, i64), hint)
        self._direct[wide] = limit
        return wide

    def below(self, index: SSAValue, limit: Bound) -> SSAValue:
        """Whether a bound index is below an i32 limit, compared in 32 bits."""
        assert isinstance(index.owner, arith.ExtSIOp)
        inside = self.add(arith.CmpiOp(index.owner.input, self.argument(limit, "limit"), "slt"), "inside")
        self.limits.add(inside)
        return inside

    def add(self, op: Operation, hint: str | None = None) -> SSAValue:
        self.block.add_op(op)
        result = op.results[0]
        if hint:
            result.name_hint = hint
        return result

    def real(self, number: float) -> SSAValue:
        return self.add(arith.ConstantOp(FloatAttr(number, f32)), "c")

    def axes(self, value: SSAValue) -> frozenset[int]:
        """The tile axes that a value of the program depends on."""
        return bottom_up(value, operands_of, self._axes_here, self._axes)

    def _axes_here(self, value: SSAValue) -> frozenset[int]:
        if value in self.bound:
            return frozenset(self.bound[value].axes)
        assert isinstance(value.owner, Operation)
        found = frozenset[int]().union(*(self._axes[o] for o in value.owner.operands))
        return found - {self.reduced} if isinstance(value.owner, attn.RowReduceOp) else found

    def fold_factors(self, reduced: int) -> None:
        """(x * r) * c to x * (r * c) where r and c have fewer axes than x: one product per element less.

        `reduced` is the axis of the keys.
        """
        self.reduced, self._axes = reduced, {}
        for op in list(self.block.ops):
            if not isinstance(op, arith.MulfOp):
                continue
            for product, factor in ((op.lhs, op.rhs), (op.rhs, op.lhs)):
                inner = product.owner
                if isinstance(inner, arith.MulfOp) and inner.parent is self.block and self._fold(op, inner, factor):
                    break

    def _fold(self, op: arith.MulfOp, inner: arith.MulfOp, factor: SSAValue) -> bool:
        for x, row in ((inner.lhs, inner.rhs), (inner.rhs, inner.lhs)):
            if self.axes(row) | self.axes(factor) < self.axes(x):
                together = arith.MulfOp(row, factor)
                together.result.name_hint = row.name_hint
                self.block.insert_op_before(together, op)
                op.operands[0], op.operands[1] = x, together.result
                return True
        return False

    def where_visible(self, value: SSAValue, otherwise: float = 0.0) -> SSAValue:
        if self.visible is None:
            return value
        return self.add(arith.SelectOp(self.visible, value, self.real(otherwise)), value.name_hint)

    def inline(self, block: Block, arguments: Sequence[SSAValue]) -> Operation:
        """Appends a region's ops with its leading arguments replaced; the capture arguments follow by position.

        Returns the terminator's clone outside the block: its operands are the region's results here.
        """
        end = block.last_op
        assert end is not None, "a region ends in a terminator"
        ops = [op for op in block.ops if op is not end]
        if self.tables:
            adds = [op for op in ops if isinstance(op, attn.AccumulateGradOp)]
            needed = self._behind([o for op in (end, *adds) for o in op.operands])
            ops = [op for op in ops if op in needed or op in adds]
        mapping = self._append(block, ops, arguments)
        return end.clone(value_mapper=_with_captures(mapping, block.args[len(arguments) :]))

    def values(self, block: Block, arguments: Sequence[SSAValue], wanted: Sequence[SSAValue]) -> list[SSAValue]:
        """The same for some values of a region."""
        needed = self._behind(wanted)
        mapping = self._append(block, [op for op in block.ops if op in needed], arguments)
        return [mapping[value] for value in wanted]

    def _behind(self, values: Sequence[SSAValue]) -> set[Operation | Block]:
        """What computes values, as far as they are not read from tables."""
        return {v.owner for v in behind(values, lambda v: () if v in self.tables else operands_of(v))}

    def _append(
        self, block: Block, ops: Sequence[Operation], arguments: Sequence[SSAValue]
    ) -> dict[SSAValue, SSAValue]:
        mapping: dict[SSAValue, SSAValue] = dict(zip(block.args, arguments, strict=False))
        captures = {arg: n for n, arg in enumerate(block.args[len(arguments) :])}
        for op in ops:
            if op.results and op.results[0] in self.tables:
                index = [mapping[a] for a in block.args if a.type == i64]
                mapping[op.results[0]] = self._look_up(self.tables[op.results[0]], index)
            elif isinstance(op, attn.LoadOp):
                capture = self.captures[captures[_as_argument(op.source)]]
                mapping[op.result] = self._load(op, capture, [mapping[i] for i in op.indices])
            elif isinstance(op, attn.AccumulateGradOp):
                n = captures[_as_argument(op.capture)]
                self._contribute(mapping[op.value], n, [mapping[i] for i in op.indices])
            elif isinstance(op, attn.RowReduceOp):
                mapping[op.result] = self._reduce(op, mapping[op.value])
            elif isinstance(op, attn.ChannelAtOp):
                mapping[op.result] = self._other_channel(op, mapping[op.index])
            elif isinstance(op, arith.TruncIOp) and (source := _widened(mapping[op.input], op.result.type)) is not None:
                mapping[op.result] = source
            else:
                clone = op.clone(value_mapper=mapping)
                self.block.add_op(clone)
                for old, new in zip(op.results, clone.results, strict=True):
                    mapping[old] = new
                    new.name_hint = old.name_hint
        return mapping

    def _look_up(self, table: Table | Bound, index: Sequence[SSAValue]) -> SSAValue:
        """The number of the distance of two positions."""
        if isinstance(table, Bound):
            return self.argument(table, "by_distance")
        b, h, q, kv = index
        lead = [place for axis, place in (("b", b), ("h", h)) if axis in table.axes]
        query, key = _extended(q), _extended(kv)
        assert query is not None and key is not None
        before = self.add(arith.SubiOp(self._global(table.origin), query), "before")
        place = self.add(arith.ExtSIOp(self.add(arith.AddiOp(key, before), "distance"), i64), "distance")
        return self.add(tile.GatherOp(self._global(table.source), [*lead, place], None), "by_distance")

    def _reduce(self, op: attn.RowReduceOp, value: SSAValue) -> SSAValue:
        kind = op.kind.data
        if kind is attn.ReduceKind.COUNT:
            kind, value = attn.ReduceKind.SUM, self.real(1.0)
        factors: list[SSAValue] = []
        if kind in (attn.ReduceKind.MAX, attn.ReduceKind.MIN):
            value, factors = self._without_positive(value)
        value = self.where_visible(value, IDENTITY[kind])
        reduced = self.add(attn.RowReduceOp(kind, value, op.ties.data if op.ties else None), op.result.name_hint)
        for factor in factors:
            reduced = self.add(arith.MulfOp(reduced, factor), op.result.name_hint)
        return reduced

    def _other_channel(self, op: attn.ChannelAtOp, channel: SSAValue) -> SSAValue:
        """An element of the same row of an operand, read from memory."""
        source = self.rows[op.value]
        raw = self.add(tile.GatherOp(self._global(source), [*self.row_index, channel], self.visible), "partner")
        return self._promote(raw, f32, "partner")

    def _without_positive(self, value: SSAValue) -> tuple[SSAValue, list[SSAValue]]:
        """x and [r1, r2 ...] for a value x * r1 * r2 ... with factors known to be positive, in that order.

        None of them where x is a product still: `fold_factors` may join its factors with these wherever else the value
        is used, and the extremum would not be one of the values any more.
        """
        inner, factors = self._positive_factors(value)
        return (value, []) if isinstance(inner.owner, arith.MulfOp) else (inner, factors)

    def _positive_factors(self, value: SSAValue) -> tuple[SSAValue, list[SSAValue]]:
        owner = value.owner
        if isinstance(owner, arith.MulfOp):
            for x, factor in ((owner.lhs, owner.rhs), (owner.rhs, owner.lhs)):
                number = constant_of(factor)
                if factor in self.positive or (number is not None and 0.0 < number < math.inf):
                    inner, factors = self._positive_factors(x)
                    return inner, [*factors, factor]
        return value, []

    def _global(self, source: SSAValue) -> SSAValue:
        if source not in self._globals:
            self._globals[source] = self.argument(Bound(source), source.name_hint or "capture")
        return self._globals[source]

    def _contribute(self, value: SSAValue, capture: int, indices: list[SSAValue]) -> None:
        value = self.where_visible(value)
        places, inside = self._places(self.captures[capture], indices)
        self.contributions.append(Contribution(value, capture, tuple(places), inside))

    def _places(self, capture: Capture, indices: list[SSAValue]) -> tuple[list[SSAValue], SSAValue | None]:
        """Python's negative indices, and a guard on every axis: nothing outside the capture is ever touched."""
        guard: SSAValue | None = None
        places: list[SSAValue] = []
        for index, size in zip(indices, capture.sizes, strict=True):
            limit = self.add(arith.ExtSIOp(self._global(size), i64), "size")
            place, inside = self._place(index, limit)
            places.append(place)
            if inside is not None:
                guard = inside if guard is None else self.add(arith.AndIOp(guard, inside), "inside")
        return places, guard

    def _load(self, op: attn.LoadOp, capture: Capture, indices: list[SSAValue]) -> SSAValue:
        places, guard = self._places(capture, indices)
        hint = op.result.name_hint or "loaded"
        raw = self.add(tile.GatherOp(self._global(capture.source), places, guard), hint)
        return self._promote(raw, op.result.type, hint)

    def _place(self, index: SSAValue, limit: SSAValue) -> tuple[SSAValue, SSAValue | None]:
        if index in self._direct and self.covered:
            end = self._direct[index]
            return index, None if end is None else self.below(index, end)
        if index in self._direct:
            return index, self.add(arith.CmpiOp(index, limit, "slt"), "inside")
        narrow, size = _extended(index), _extended(limit)
        if narrow is None or size is None:
            return self._wrapped(index, limit, 64)
        place, inside = self._wrapped(narrow, size, 32)
        return self.add(arith.ExtSIOp(place, i64), "place"), inside

    def _wrapped(self, index: SSAValue, limit: SSAValue, bits: int) -> tuple[SSAValue, SSAValue]:
        """A negative index counts from the end; inside is what is not negative, and below the limit, as one comparison."""
        zero = self.add(arith.ConstantOp.from_int_and_width(0, bits), "zero")
        negative = self.add(arith.CmpiOp(index, zero, "slt"), "negative")
        wrapped = self.add(arith.AddiOp(index, limit), "wrapped")
        place = self.add(arith.SelectOp(negative, wrapped, index), "place")
        return place, self.add(arith.CmpiOp(place, limit, "ult"), "inside")

    def _promote(self, raw: SSAValue, to: Attribute, hint: str) -> SSAValue:
        """A narrow float as f32, an integer as i64, a byte of a bool tensor as i1."""
        if raw.type == to:
            return raw
        if to == f32:
            op = arith.ExtFOp if raw.type.bitwidth < 32 else arith.TruncFOp  # type: ignore[union-attr]
            return self.add(op(raw, f32), hint)
        if to == i64:
            return self.add(arith.ExtSIOp(raw, i64), hint)
        assert to == i1
        return self.add(arith.TruncIOp(raw, i1), hint)


def _as_argument(value: SSAValue) -> BlockArgument:
    assert isinstance(value, BlockArgument), "captures are block arguments of their region"
    return value


def _with_captures(mapping: dict[SSAValue, SSAValue], captures: Sequence[SSAValue]) -> dict[SSAValue, SSAValue]:
    return {**mapping, **{c: c for c in captures}}


def _extended(value: SSAValue) -> SSAValue | None:
    """The i32 that was sign-extended to `value`."""
    owner = value.owner
    return owner.input if isinstance(owner, arith.ExtSIOp) and owner.input.type == i32 else None


def _widened(value: SSAValue, narrow: Attribute) -> SSAValue | None:
    """The i32 that was sign-extended to `value`, if `narrow` asks for it back."""
    return _extended(value) if narrow == i32 else None
