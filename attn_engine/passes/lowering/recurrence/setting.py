"""What the kernels of a recurrence have in common: sizes, sequences, operands with heads of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xdsl.dialects import arith
from xdsl.dialects.builtin import DYNAMIC_INDEX, TensorType, f32, i32
from xdsl.ir import Attribute, SSAValue

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_memory import DescribeOp
from attn_engine.dialects.tile_block import LoadBlockOp, StoreBlockOp
from attn_engine.errors import StaticSizeError
from attn_engine.ir.schedule import padded as tile_of
from attn_engine.passes.lowering.kernel import Head, Kernel, Plan
from attn_engine.passes.lowering.program import Bound
from attn_engine.passes.lowering.scope import Index, Scope

if TYPE_CHECKING:
    from attn_engine.passes.lowering.recurrence.decay import Rows
    from attn_engine.passes.lowering.recurrence.heads import RowSizes
    from attn_engine.passes.lowering.recurrence.levels import Gates
    from attn_engine.passes.lowering.recurrence.mods import Mod

Limits = Callable[[], dict[int, SSAValue]]
"""By axis of a tile the index that it must stay below; code that finds it is appended when it is asked for."""


@dataclass(frozen=True)
class Form:
    """How sweeps are cut: tokens per chunk, value channels per program, pieces per sequence, warps and stages."""

    chunk: int
    value_block: int
    pieces: int
    num_warps: int
    num_stages: int
    pad: bool
    tf32: bool
    descriptors: bool = False
    turned: bool = False
    chained: bool = False
    split_f32: bool = False
    part: int = 64
    """Channels at a time where each has its decay."""
    careful: bool = False
    """Whether the assembler shall not optimise."""


def channels_of(tensor: SSAValue) -> int:
    """The static number of channels of a tensor of rank 4."""
    assert isinstance(tensor.type, TensorType)
    size = tensor.type.get_shape()[3]
    if size == DYNAMIC_INDEX:
        raise StaticSizeError(tensor.name_hint or "operand", "channels")
    return size


def padded(size: int, pad: bool) -> int:
    return tile_of(size) if pad else size


def rank_of(tensor: SSAValue) -> int:
    """Of a value of the function, or of the plan."""
    if isinstance(tensor.type, tile.GlobalType):
        return tensor.type.rank.data
    assert isinstance(tensor.type, TensorType)
    return tensor.type.get_num_dims()


@dataclass
class Setting:
    """The plan of one function, and where its values are: arguments, temporaries, results."""

    plan: Plan
    form: Form
    values: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])
    rows: dict[tuple[SSAValue | None, SSAValue | None], Rows] = field(
        default_factory=dict[tuple["SSAValue | None", "SSAValue | None"], "Rows"]
    )
    """What sweeps read per token, by log decay and weight."""
    row_sizes: dict[SSAValue, RowSizes] = field(default_factory=dict[SSAValue, "RowSizes"])
    """By results of a sweep that lie in memory divided by the size of their row."""
    splits: dict[SSAValue, int] = field(default_factory=dict[SSAValue, int])
    """By rows of a sweep: how many parts of the channels they are the sums of."""
    crossings: dict[SSAValue, tuple[SSAValue, Attribute]] = field(
        default_factory=dict[SSAValue, tuple[SSAValue, Attribute]]
    )
    """By what a sweep met: what crosses the end of each chunk (see `Anchors`), and the type of its products."""
    descriptors: dict[tuple[SSAValue, int, int], SSAValue] = field(
        default_factory=dict[tuple[SSAValue, int, int], SSAValue]
    )
    mods: dict[SSAValue, Mod] = field(default_factory=dict[SSAValue, "Mod"])
    """By operand of the function what its elements become when they are loaded."""
    gates: dict[SSAValue, Gates] = field(default_factory=dict[SSAValue, "Gates"])
    """Sums of log decays per channel, by log decay."""
    kernels: list[tile.KernelOp] = field(default_factory=list[tile.KernelOp])

    def of(self, value: SSAValue) -> SSAValue:
        return self.values[value]

    def dim(self, value: SSAValue, axis: int, hint: str) -> SSAValue:
        """A size of a value of the function, read in the plan."""
        return self.plan.size(self.of(value), axis, hint)

    def blocks(self, size: Index, block: int, hint: str) -> SSAValue:
        scope = self.plan.scope
        return scope.add(arith.CeilDivSIOp(scope.value(size), scope.value(block)), hint).result

    def described(self, value: SSAValue, rows: int, columns: int) -> SSAValue:
        """A descriptor of a value of the function, or of the plan, for blocks [rows, columns]; made once."""
        key = (self.values.get(value, value), rows, columns)
        if key not in self.descriptors:
            source = key[0]
            assert isinstance(source.type, tile.GlobalType)
            leading = [1] * (source.type.rank.data - 2)
            self.descriptors[key] = self.plan.scope.add(
                DescribeOp(source, [*leading, rows, columns]), f"{source.name_hint}_blocks"
            ).result
        return self.descriptors[key]

    def precision(self, element: Attribute) -> tile.Precision:
        """Of products of tiles with these elements."""
        if element != f32:
            return tile.Precision.IEEE
        if self.form.tf32:
            return tile.Precision.TF32
        return tile.Precision.TF32X3 if self.form.split_f32 else tile.Precision.IEEE

    def whole(self, sizes: Sizes) -> SSAValue:
        """Tokens of a temporary that is read chunk by chunk: whole chunks, where they are known on the host."""
        if sizes.bounds is not None:
            return sizes.tokens
        chunk, scope = self.form.chunk, self.plan.scope
        return scope.value(scope.times(self.blocks(sizes.tokens, chunk, "chunks"), chunk, "whole"))

    def temporary(self, sizes: Sequence[Index], element: Attribute, hint: str) -> SSAValue:
        scope = self.plan.scope
        type_ = tile.GlobalType(len(sizes), element)
        return scope.add(tile.AllocOp([scope.value(s) for s in sizes], type_), hint).result


class Sizes:
    """Sizes of one op, in the plan: batch, heads, tokens, sequences."""

    def __init__(self, setting: Setting, tensors: Sequence[SSAValue], bounds: SSAValue | None):
        """`tensors` are those of which at least one has all heads; the first is [batch, heads, tokens, ...]."""
        scope = setting.plan.scope
        self.setting, self.bounds = setting, bounds
        self.groups: dict[SSAValue, SSAValue] = {}
        self.batch, self.tokens = setting.dim(tensors[0], 0, "batch"), setting.dim(tensors[0], 2, "tokens")
        heads: Index = setting.dim(tensors[0], 1, "heads")
        for other in tensors[1:]:
            heads = scope.larger(heads, setting.dim(other, 1, "heads"), "heads")
        self.heads = scope.value(heads)
        self.sequences = self.batch
        if bounds is not None:
            self.sequences = scope.value(scope.minus(setting.dim(bounds, 0, "bounds"), 1, "sequences"))

    def group(self, tensor: SSAValue) -> SSAValue | None:
        """How many heads share one of a tensor's; None where that is one for sure."""
        scope, own = self.setting.plan.scope, self.setting.dim(tensor, 1, "heads")
        if own is self.heads:
            return None
        if own not in self.groups:
            some = scope.value(scope.larger(own, 1, "some"))
            self.groups[own] = scope.add(arith.DivSIOp(self.heads, some), "group").result
        return self.groups[own]


@dataclass
class View:
    """One program's place: a head of a sequence, and how it reads operands there."""

    sizes: Sizes
    kernel: Kernel
    h: SSAValue
    n: SSAValue
    begin: Index = 0
    end: SSAValue = field(init=False)
    b: SSAValue = field(init=False)
    grouped: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])

    def __post_init__(self) -> None:
        scope, sizes = self.kernel.scope, self.sizes
        tokens = self.kernel.take(sizes.tokens)
        if sizes.bounds is None:
            self.b, self.end = self.n, tokens
            return
        bounds = self.kernel.take(sizes.setting.of(sizes.bounds))
        after = scope.value(scope.plus(self.n, 1, "after"))
        begin, end = (self._bound(scope, bounds, i) for i in (self.n, after))
        self.b = scope.value(0)
        self.begin = scope.smaller(begin, tokens, "begin")
        self.end = scope.value(scope.smaller(scope.larger(end, self.begin, "end"), tokens, "end"))

    def _bound(self, scope: Scope, bounds: SSAValue, index: SSAValue) -> SSAValue:
        return scope.add(tile.LoadOp(bounds, [index], [], i32), "bound").result

    @property
    def whole_blocks(self) -> bool:
        """Whether rows go through descriptors: those know where a tensor ends, not where one of its sequences does."""
        return self.sizes.setting.form.descriptors and self.sizes.bounds is None

    @property
    def length(self) -> Index:
        return self.kernel.scope.minus(self.end, self.begin, "length")

    def take(self, value: SSAValue) -> SSAValue:
        """The kernel's argument for a value of the function."""
        return self.kernel.take(self.sizes.setting.of(value))

    def head(self, tensor: SSAValue) -> SSAValue:
        """This program's head of a tensor that may have fewer; computed once."""
        group = self.sizes.group(tensor)
        if group is None:
            return self.h
        if group not in self.grouped:
            divided = arith.DivSIOp(self.h, self.kernel.take(group))
            self.grouped[group] = self.kernel.scope.add(divided, "hk").result
        return self.grouped[group]

    def rows(self, scope: Scope, tensor: SSAValue, t0: SSAValue, count: int, head: Head, c0: SSAValue) -> SSAValue:
        """[count, channels] of a tensor of rank 4 from a token and a channel on; tokens past the end are 0."""
        raw = self._raw_rows(scope, tensor, t0, count, head, c0)
        mod = self.sizes.setting.mods.get(tensor)
        if mod is None:
            return raw
        token = Bound(scope.add(tile.RangeOp(t0, count), "token").result, (0,))
        channel = Bound(scope.add(tile.RangeOp(c0, head.tile), "channel").result, (1,))
        limits = [(token, Bound(self.end))]
        if head.size % head.tile:
            limits.append((channel, Bound(scope.value(head.size))))
        return mod.apply(self.kernel, scope, raw, [Bound(self.b), Bound(self.head(tensor)), token, channel], limits)

    def _raw_rows(self, scope: Scope, tensor: SSAValue, t0: SSAValue, count: int, head: Head, c0: SSAValue) -> SSAValue:
        index, hint = [self.b, self.head(tensor), t0, c0], f"{tensor.name_hint or 'x'}_tile"
        return self.load_block(
            scope, self.sizes.setting.of(tensor), index, (count, head.tile), self._row_limits(scope, head), hint
        )

    def own_rows(
        self, scope: Scope, source: SSAValue, t0: SSAValue, count: int, channels: int, c0: SSAValue, hint: str
    ) -> SSAValue:
        """[count, channels] of a temporary that has all heads and whole chunks."""
        index = [self.b, self.h, t0, c0]
        return self.load_block(scope, source, index, (count, channels), self._end_with_bounds, hint)

    def placed_rows(
        self, scope: Scope, source: SSAValue, t0: SSAValue, count: int, head: Head, c0: SSAValue
    ) -> SSAValue:
        """[count, channels] of what `store_rows` has written."""
        index = [self.b, self.h, t0, c0]
        return self.load_block(scope, source, index, (count, head.tile), self._row_limits(scope, head), "placed")

    def store_own(self, scope: Scope, value: SSAValue, target: SSAValue, t0: SSAValue, c0: SSAValue) -> None:
        """Writes rows of such a temporary: past the end too, where others will read them."""
        self.store_block(scope, value, target, [self.b, self.h, t0, c0], self._end_with_bounds)

    def _end_with_bounds(self) -> dict[int, SSAValue]:
        return {} if self.sizes.bounds is None else {0: self.end}

    def store_rows(
        self, scope: Scope, value: SSAValue, target: SSAValue, t0: SSAValue, head: Head, c0: SSAValue
    ) -> None:
        """Writes rows of all heads, a value of the plan, from a token and a channel on; none past the end."""
        self.store_block(scope, value, target, [self.b, self.h, t0, c0], self._row_limits(scope, head))

    def load_block(
        self, scope: Scope, source: SSAValue, index: Sequence[SSAValue], shape: Sequence[int], limits: Limits, hint: str
    ) -> SSAValue:
        """A tile along the last two axes of a value of the plan; a descriptor needs no limits."""
        if self.whole_blocks:
            blocks = self.kernel.take(self.sizes.setting.described(source, *shape))
            return scope.add(LoadBlockOp(blocks, index), hint).result
        type_, dims = TensorType(tile.element_of(source), list(shape)), [len(index) - 2, len(index) - 1]
        return scope.add(tile.LoadOp(self.kernel.take(source), index, dims, type_, limits()), hint).result

    def store_block(
        self, scope: Scope, value: SSAValue, target: SSAValue, index: Sequence[SSAValue], limits: Limits
    ) -> None:
        """Writes such a tile."""
        if self.whole_blocks:
            blocks = self.kernel.take(self.sizes.setting.described(target, *tile.shape_of(value)))
            scope.add(StoreBlockOp(value, blocks, index))
            return
        dims = [len(index) - 2, len(index) - 1]
        scope.add(tile.StoreOp(value, self.kernel.take(target), index, dims, limits()))

    def _row_limits(self, scope: Scope, head: Head) -> Limits:
        return lambda: {0: self.end} | channel_limit(scope, head, 1)

    def vector(self, scope: Scope, source: SSAValue, t0: SSAValue, count: int, hint: str) -> SSAValue:
        """One number per token of a kernel argument [B, H, T]; past the end 0."""
        type_ = TensorType(tile.element_of(source), [count])
        return scope.add(tile.LoadOp(source, [self.b, self.h, t0], [2], type_, {0: self.end}), hint).result

    def own_vector(self, scope: Scope, source: SSAValue, t0: SSAValue, count: int, hint: str) -> SSAValue:
        """One number per token of a temporary that has all heads and whole chunks."""
        source, index = self.kernel.take(source), [self.b, self.h, t0]
        type_ = TensorType(tile.element_of(source), [count])
        return scope.add(tile.LoadOp(source, index, [2], type_, self._end_with_bounds()), hint).result

    def last_of(self, scope: Scope, t0: SSAValue, chunk: int) -> SSAValue:
        """The last token of a chunk, in temporaries of whole chunks."""
        end = scope.plus(t0, chunk, "end")
        if self.sizes.bounds is not None:
            end = scope.smaller(end, self.end, "end")
        return scope.value(scope.minus(end, 1, "last"))

    def number(self, scope: Scope, source: SSAValue, t: SSAValue, hint: str) -> SSAValue:
        return scope.add(tile.LoadOp(source, [self.b, self.h, t], [], tile.element_of(source)), hint).result


def channel_limit(scope: Scope, head: Head, axis: int) -> dict[int, SSAValue]:
    """The limit of a tile axis that runs over channels, where the tile may be larger than the channels left."""
    return {axis: scope.value(head.size)} if head.size % head.tile else {}


@dataclass(frozen=True)
class State:
    """Key channels and value channels of a state, and the tile [key.tile, value.tile] that a program holds."""

    key: Head
    value: Head
    turned: bool = False
    """The tile is [value.tile, key.tile]; memory stays as it is."""

    @property
    def shape(self) -> tuple[int, int]:
        key, value = self.key.tile, self.value.tile
        return (value, key) if self.turned else (key, value)

    @property
    def splits(self) -> int:
        """How many programs share the value channels of one state."""
        return -(-self.value.size // self.value.tile)

    def load(
        self,
        scope: Scope,
        source: SSAValue,
        index: Sequence[SSAValue],
        v0: SSAValue,
        hint: str = "state",
        as_held: bool = False,
        k0: SSAValue | None = None,
    ) -> SSAValue:
        """The part of a state from value channel v0, key channel k0 on; `as_held`: memory is turned where the tile is."""
        type_ = TensorType(tile.element_of(source), list(self.shape))
        where, dims = self._place(scope, index, v0, as_held)
        if k0 is not None:
            where[-2] = k0
        return scope.add(tile.LoadOp(source, where, dims, type_, self._limits(scope)), hint).result

    def store(
        self,
        scope: Scope,
        value: SSAValue,
        target: SSAValue,
        index: Sequence[SSAValue],
        v0: SSAValue,
        as_held: bool = False,
    ) -> None:
        where, dims = self._place(scope, index, v0, as_held)
        scope.add(tile.StoreOp(value, target, where, dims, self._limits(scope)))

    def held_sizes(self) -> tuple[int, int]:
        """The last two sizes of memory that is turned where the tile is."""
        return (self.value.size, self.key.size) if self.turned else (self.key.size, self.value.size)

    def _place(
        self, scope: Scope, index: Sequence[SSAValue], v0: SSAValue, as_held: bool
    ) -> tuple[list[SSAValue], list[int]]:
        zero, dims = scope.value(0), [len(index), len(index) + 1]
        if as_held and self.turned:
            return [*index, v0, zero], dims
        return [*index, zero, v0], dims[::-1] if self.turned else dims

    def _limits(self, scope: Scope) -> dict[int, SSAValue]:
        key, value = (1, 0) if self.turned else (0, 1)
        return channel_limit(scope, self.key, key) | channel_limit(scope, self.value, value)
