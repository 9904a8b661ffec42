"""What every kernel of an attention has in common: operands, tiles, index vectors, visibility."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xdsl.dialects import arith
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import Attribute, Block, Region, SSAValue

from attn_engine.dialects import attn, tile
from attn_engine.dialects.tile_async_memory import DescribeOp
from attn_engine.dialects.tile_block import LoadBlockOp
from attn_engine.passes.lowering.kernel import Head, Kernel, Plan
from attn_engine.passes.lowering.masked import simplify_masked
from attn_engine.passes.lowering.partition import Partition
from attn_engine.passes.lowering.program import Bound, Program, Table
from attn_engine.passes.lowering.scope import Scope

if TYPE_CHECKING:
    from attn_engine.passes.lowering.distances import DistanceTables
    from attn_engine.passes.lowering.tables import Tables

AnyAttention = attn.OnlineOp | attn.BackwardOp


def present(region: Region | None) -> Block | None:
    return region.block if region is not None and region.blocks else None


def head_of(tensor: SSAValue, pad: bool, unit: int = 0) -> Head:
    """The last dimension of q or v, padded where targets need that: to a power of two, or to a multiple of `unit`."""
    assert isinstance(tensor.type, TensorType)
    size = tensor.type.get_shape()[3]
    if not pad:
        return Head(size, size)
    return Head(size, -(-size // unit) * unit if unit else max(16, 1 << (size - 1).bit_length()))


@dataclass
class KernelCapture:
    """A capture whose kernel arguments come into being when first read."""

    kernel: Kernel
    value: SSAValue

    @property
    def source(self) -> SSAValue:
        return self.kernel.take(self.value)

    @property
    def sizes(self) -> list[SSAValue]:
        assert isinstance(self.value.type, tile.GlobalType)
        name, rank = self.value.name_hint or "capture", self.value.type.rank.data
        return [self.kernel.take(self.kernel.plan.size(self.value, d, f"{name}_n{d}")) for d in range(rank)]


class Operands:
    """The operands of an attention as arguments of a plan, and the sizes that every kernel takes."""

    descriptors: bool = False
    """Whether blocks of the operands are copied through descriptors."""
    one_loop: bool = False
    """Whether blocks that need no mask are walked in the same loop as those that do."""
    masks_once: bool = True
    """Whether gradients of scores that vanish with their weights are left unmasked."""

    def __init__(
        self, op: AnyAttention, plan: Plan, pad: bool, tf32: bool, covered: bool, whole: bool = False, unit: int = 0
    ):
        self.op, self.plan, self.covered, self.whole = op, plan, covered, whole
        self._described: dict[tuple[str, int, int], SSAValue] = {}
        self.element: Attribute = tile.element_of(op.q)
        self.qk, self.vo = head_of(op.q, pad, unit), head_of(op.v, pad, unit)
        rounds = tf32 and self.element == f32
        self.precision = tile.Precision.TF32 if rounds else tile.Precision.IEEE
        self.tables: Tables | None = None
        self.distances: DistanceTables | None = None
        """Of what scores compute by the distance of two positions."""
        self.sources: dict[str, SSAValue] = {}
        """Operands that were modified by kernels of their own, in the place of what the caller gave."""
        self.targets: dict[str, SSAValue] = {}
        """Gradients of such operands, before they are carried through their mods."""
        self.apart: frozenset[Region] = frozenset()
        """The regions that kernels of their own apply."""
        self.capture_names = [c.name_hint or f"capture{n}" for n, c in enumerate(op.captures)]

    def __getitem__(self, name: str) -> SSAValue:
        return self.plan.args[name]

    def describe(self) -> None:
        """Reads the sizes; called once the plan's arguments are complete."""
        plan = self.plan
        self.batch, self.heads = plan.size(self["q"], 0, "batch"), plan.size(self["q"], 1, "heads")
        self.kv_heads = plan.size(self["k"], 1, "kv_heads")
        self.sq, self.skv = plan.size(self["q"], 2, "sq"), plan.size(self["k"], 2, "skv")
        scope = plan.scope
        divisor = scope.value(scope.larger(self.kv_heads, 1, "some"))
        self.group = scope.add(arith.DivSIOp(self.heads, divisor), "group").result

    def source(self, name: str) -> SSAValue:
        """Where an operand is read: what the caller gave, or what a kernel has made of it."""
        return self.sources.get(name, self[name])

    def leads(self, name: str) -> bool:
        """Whether a kernel has to find the gradient of an operand, for the caller or for a mod."""
        return name in self.targets or name in self.plan.args

    def described(self, name: str, rows: int, channels: int) -> SSAValue:
        """A descriptor of an operand for blocks [rows, channels]; made once."""
        key = (name, rows, channels)
        if key not in self._described:
            describe = DescribeOp(self.source(name), [1, 1, rows, channels])
            self._described[key] = self.plan.scope.add(describe, f"{name}_blocks").result
        return self._described[key]

    def blocks(self, size: SSAValue, block: int, hint: str) -> SSAValue:
        """How many blocks cover `size`."""
        scope = self.plan.scope
        return scope.add(arith.CeilDivSIOp(size, scope.value(block)), hint).result


@dataclass
class Frame:
    """One kernel's view: a tile of scores with queries on `q_axis` and keys on the other axis.

    `b`, `h` and `hk` are this program's batch, query head and key/value head.
    """

    operands: Operands
    kernel: Kernel
    q_axis: int
    b: SSAValue
    h: SSAValue
    hk: SSAValue

    @property
    def kv_axis(self) -> int:
        return 1 - self.q_axis

    @property
    def shape(self) -> tuple[int, int]:
        m, n = self.kernel.blocks.m, self.kernel.blocks.n
        return (m, n) if self.q_axis == 0 else (n, m)

    def take(self, name: str) -> SSAValue:
        return self.kernel.take(self.operands[name])

    def target(self, name: str) -> SSAValue:
        """Where a result of the kernel goes."""
        return self.kernel.take(self.operands.targets.get(name) or self.operands[name])

    def leads(self, name: str) -> bool:
        return self.operands.leads(name)

    @property
    def sq(self) -> SSAValue:
        return self.kernel.take(self.operands.sq)

    @property
    def skv(self) -> SSAValue:
        return self.kernel.take(self.operands.skv)

    def program(self, covered: bool = True) -> Program:
        names = self.operands.capture_names
        return Program(
            [KernelCapture(self.kernel, self.operands[n]) for n in names], covered=covered and self.operands.covered
        )

    def tables(self, scope: Scope, block: Block | None, q0: SSAValue, n0: SSAValue) -> Mapping[SSAValue, Table | Bound]:
        """What is read of the values of a region of scores that depend on the distance of two positions, if anything is."""
        distances = self.operands.distances
        if block is None or distances is None:
            return {}
        return distances.read(self, scope, block, q0, n0)

    def heads(self, program: Program) -> list[SSAValue]:
        return [program.index(Bound(self.b), "b"), program.index(Bound(self.h), "h")]

    def place(self, program: Program, q: SSAValue | None, kv: SSAValue | None, masked: bool = True) -> list[SSAValue]:
        """b, h and then those of q and kv that are given, as a region's index arguments.

        Rows of the program's own block may lie beyond the end; of the blocks that it loops over, only masked ones do.
        """
        index = self.heads(program)
        for value, axis, size, hint in ((q, self.q_axis, self.sq, "q"), (kv, self.kv_axis, self.skv, "kv")):
            if value is not None:
                limit = Bound(size) if (masked or axis == 0) and not self.operands.whole else None
                index.append(program.index(Bound(value, (axis,)), hint, limit))
        return index

    def see(self, program: Program, index: list[SSAValue], in_range: Sequence[tuple[SSAValue, SSAValue]]) -> None:
        """Sets the program's visibility: the user's mask, and each (index vector, limit) within its limit."""
        seen: SSAValue | None = None
        mask = present(self.operands.op.mask)
        if mask is not None:
            seen = program.inline(mask, index).operands[0]
        for value, limit in () if self.operands.whole else in_range:
            inside = program.below(value, Bound(limit))
            seen = inside if seen is None else program.add(arith.AndIOp(seen, inside), "visible")
        program.visible = seen

    def run(self, program: Program, scope: Scope, wanted: Sequence[SSAValue]) -> list[Bound]:
        """Lowers a program over the score tile; `attn.row_reduce` in it runs over the keys."""
        program.fold_factors(self.kv_axis)
        # Held by an op, so that what is replaced is replaced among the wanted values too.
        end = attn.YieldOp(*wanted)
        program.block.add_op(end)
        simplify_masked(program)
        wanted = list(end.operands)
        program.block.erase_op(end)
        return Partition(program, scope, self.shape, self.kv_axis).run(wanted)

    def limits(self, limit: SSAValue | None) -> dict[int, SSAValue]:
        """Where the rows of a block end; nowhere if no block goes beyond its tensor."""
        return {} if limit is None or self.operands.whole else {0: limit}

    def rows(
        self, scope: Scope, name: str, h: SSAValue, row0: SSAValue, rows: int, head: Head, limit: SSAValue | None
    ) -> SSAValue:
        """Loads [rows, head] of an operand from row0 on; rows from `limit`, its length, on are 0."""
        if self.operands.descriptors:
            blocks = self.kernel.take(self.operands.described(name, rows, head.tile))
            return scope.add(LoadBlockOp(blocks, [self.b, h, row0, scope.value(0)]), f"{name}_tile").result
        source = self.kernel.take(self.operands.source(name))
        limits = self.limits(limit)
        if head.padded:
            limits[1] = scope.value(head.size)
        type_ = TensorType(tile.element_of(source), [rows, head.tile])
        index = [self.b, h, row0, scope.value(0)]
        return scope.add(tile.LoadOp(source, index, [2, 3], type_, limits), f"{name}_tile").result

    def vector(
        self, scope: Scope, source: SSAValue, row0: SSAValue, rows: int, limit: SSAValue | None, hint: str
    ) -> SSAValue:
        """Loads a saved row vector [B, H, Sq]."""
        type_ = TensorType(f32, [rows])
        return scope.add(tile.LoadOp(source, [self.b, self.h, row0], [2], type_, self.limits(limit)), hint).result

    def product(self, scope: Scope, a: SSAValue, b: SSAValue, hint: str) -> SSAValue:
        """a b^T over the head dim."""
        shape = [tile.shape_of(a)[0], tile.shape_of(b)[0]]
        return self.dot(scope, a, scope.add(tile.TransposeOp(b), "t").result, scope.splat(shape, 0.0, "zero"), hint)

    def dot(self, scope: Scope, a: SSAValue, b: SSAValue, acc: SSAValue, hint: str) -> SSAValue:
        return scope.add(tile.DotOp(a, b, acc, self.operands.precision), hint).result

    def modified(
        self,
        scope: Scope,
        value: SSAValue,
        region: Region | None,
        h: SSAValue,
        row0: SSAValue,
        limit: SSAValue,
        head: Head,
    ) -> SSAValue:
        """A loaded operand with the user's query_mod, key_mod or value_mod applied; padding stays 0."""
        block = present(region)
        if block is None or region in self.operands.apart:
            return value
        rows = tile.shape_of(value)[0]
        # Channels and positions beyond the operand are computed, and thrown away: its tables are guarded.
        program = self.program(covered=False)
        element = cast(program, program.argument(Bound(value, (0, 1)), "x"), f32)
        index = self.channel_index(program, scope, h, row0, rows, head)
        self.inside(program, index, limit, head)
        result = program.where_visible(program.inline(block, [element, *index]).operands[0])
        wanted = cast(program, result, self.operands.element)
        return spread(scope, Partition(program, scope, (rows, head.tile), -1).run([wanted])[0], (rows, head.tile))

    def channel_index(
        self, program: Program, scope: Scope, h: SSAValue, row0: SSAValue, rows: int, head: Head
    ) -> list[SSAValue]:
        """b, h, position and channel of an operand's tile."""
        positions = scope.add(tile.RangeOp(row0, rows), "positions").result
        channels = scope.add(tile.RangeOp(scope.value(0), head.tile), "channels").result
        return [
            program.index(Bound(self.b), "b"),
            program.index(Bound(h), "h"),
            program.index(Bound(positions, (0,)), "position"),
            program.index(Bound(channels, (1,)), "channel"),
        ]

    def inside(self, program: Program, index: list[SSAValue], limit: SSAValue, head: Head) -> None:
        """Sets the program's visibility: rows before the limit, channels that are no padding."""
        inside = None if self.operands.whole else program.below(index[2], Bound(limit))
        if head.padded:
            size = program.add(arith.ConstantOp.from_int_and_width(head.size, 64), "size")
            channel = program.add(arith.CmpiOp(index[3], size, "slt"), "inside")
            inside = channel if inside is None else program.add(arith.AndIOp(inside, channel), "inside")
        program.visible = inside


def cast(program: Program, value: SSAValue, to: Attribute) -> SSAValue:
    """Between f32 and the operands' element type."""
    if value.type == to:
        return value
    op = arith.ExtFOp if to == f32 else arith.TruncFOp
    return program.add(op(value, to), value.name_hint or "x")


def spread(scope: Scope, bound: Bound, shape: Sequence[int], axes: tuple[int, ...] | None = None) -> SSAValue:
    """A value with all of `axes` (default: every axis of the shape), repeated along those that it lacks."""
    axes = axes if axes is not None else tuple(range(len(shape)))
    if bound.axes == axes:
        return bound.value
    body = Block(arg_types=[tile.element_of(bound.value)])
    body.add_op(tile.MapYieldOp(body.args[0]))
    type_ = TensorType(tile.element_of(bound.value), [shape[a] for a in axes])
    op = tile.MapOp([bound.value], [[axes.index(a) for a in bound.axes]], [type_], body)
    return scope.add(op, bound.value.name_hint or "spread").outputs[0]


def combine(
    scope: Scope, kind: type, a: Bound, b: Bound, shape: Sequence[int], hint: str, to: Attribute = f32
) -> SSAValue:
    """One binary op of two values over a tile, in f32, cast to `to` at the end."""
    program = Program()
    left, right = program.argument(a, "a"), program.argument(b, "b")
    result = program.add(kind(left, right), hint)
    return spread(scope, Partition(program, scope, tuple(shape), -1).run([cast(program, result, to)])[0], shape)
