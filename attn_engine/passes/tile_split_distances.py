"""`tile-split-distances`: distances of queries and keys as differences of two vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith, builtin
from xdsl.dialects.builtin import TensorType, f32
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_base import axes_attr
from attn_engine.passes.hopper.edit import Before, drop_unread, erase_unused
from attn_engine.passes.hopper.steps import step_maps

Vector = tuple[SSAValue, int]
"""Of f32, and the axis of the scores along which it runs."""


@dataclass(frozen=True)
class _Distance:
    """A position that the step goes through, minus one that the program owns, or the other way round, as a float."""

    op: arith.SIToFPOp
    moving: BlockArgument
    owned: BlockArgument
    sign: int
    """1 if the moving position comes first."""

    @classmethod
    def of(cls, inside: tile.MapOp, op: Operation) -> _Distance | None:
        if not isinstance(op, arith.SIToFPOp) or op.result.type != f32 or not isinstance(op.input.owner, arith.SubiOp):
            return None
        first, second = (_narrow(v) for v in op.input.owner.operands)
        for moving, owned, sign in ((first, second, 1), (second, first, -1)):
            ranges = [_range(inside, v) for v in (moving, owned)]
            if ranges[0] is None or ranges[1] is None or ranges[0].parent is not inside.parent:
                continue
            if ranges[1].parent is not inside.parent and sorted(_axis(inside, v) for v in (moving, owned)) == [0, 1]:
                assert isinstance(moving, BlockArgument) and isinstance(owned, BlockArgument)
                return cls(op, moving, owned, sign)
        return None


def _narrow(value: SSAValue) -> SSAValue:
    return value.owner.input if isinstance(value.owner, arith.ExtSIOp) else value


def _axis(inside: tile.MapOp, value: SSAValue) -> int:
    """Of the scores; -1 for what does not run along one of them alone."""
    axes = tile.axes_of(inside.axes)[value.index] if isinstance(value, BlockArgument) else ()
    return axes[0] if len(axes) == 1 else -1


def _range(inside: tile.MapOp, value: SSAValue) -> tile.RangeOp | None:
    if not isinstance(value, BlockArgument) or value.block is not inside.body.block:
        return None
    owner = inside.inputs[value.index].owner
    return owner if isinstance(owner, tile.RangeOp) else None


def _vectors(inside: tile.MapOp, distance: _Distance) -> tuple[Vector, Vector]:
    """The places of a step's positions in it, and how far the owned ones are from its start."""
    scope = Before(inside)
    moving, owned = (_range(inside, v) for v in (distance.moving, distance.owned))
    assert moving is not None and owned is not None
    size = tile.shape_of(moving.result)[0]
    places = scope.add(tile.RangeOp(scope.value(0), size), "place").result
    near, far = Block(arg_types=[builtin.i32]), Block(arg_types=[builtin.i32, builtin.i32])
    near.add_op(arith.SIToFPOp(near.args[0], f32))
    far.add_op(arith.SubiOp(far.args[0], far.args[1]))
    far.add_op(arith.SIToFPOp(far.ops.first.results[0], f32))  # type: ignore[union-attr]
    for body in (near, far):
        body.add_op(tile.MapYieldOp(body.last_op.results[0]))  # type: ignore[union-attr]
    rows = tile.shape_of(owned.result)[0]
    one = scope.add(tile.MapOp([places], [[0]], [TensorType(f32, [size])], near), "place")
    two = scope.add(tile.MapOp([owned.result, moving.start], [[0], []], [TensorType(f32, [rows])], far), "offset")
    axes = [_axis(inside, v) for v in (distance.moving, distance.owned)]
    return (one.outputs[0], axes[0]), (two.outputs[0], axes[1])


def _read(inside: tile.MapOp, vector: Vector) -> SSAValue:
    """One more argument of a map."""
    value, axis = vector
    argument = inside.body.block.insert_arg(f32, len(inside.body.block.args))
    argument.name_hint = value.name_hint
    inside.operands = [*inside.inputs, value]
    inside.properties["axes"] = axes_attr([*tile.axes_of(inside.axes), [axis]])
    return argument


def _place(inside: tile.MapOp, value: SSAValue, vectors: tuple[Vector, Vector], sign: int) -> None:
    """The difference of two vectors instead of a value of a map."""
    place, offset = (_read(inside, v) for v in vectors)
    new = arith.SubfOp(place, offset) if sign > 0 else arith.SubfOp(offset, place)
    new.result.name_hint = "distance"
    first = inside.body.block.first_op
    assert first is not None
    Rewriter.insert_op(new, InsertPoint.before(first))
    value.replace_all_uses_with(new.result)
    _distribute(inside, new)


def _distribute(inside: tile.MapOp, difference: arith.SubfOp) -> None:
    """x + (a - b) * s -> (x + a * s) - b * s for scalars s: two multiplications of vectors, in place of one of scores."""
    axes = tile.axes_of(inside.axes)
    scalars = {a for a in inside.body.block.args if not axes[a.index] and a.type == f32}
    for product in [use.operation for use in list(difference.result.uses)]:
        if not isinstance(product, arith.MulfOp):
            continue
        factor = product.rhs if product.lhs is difference.result else product.lhs
        adds = [use.operation for use in product.result.uses]
        if factor not in scalars or not all(isinstance(o, arith.AddfOp) for o in adds):
            continue
        for add in adds:
            assert isinstance(add, arith.AddfOp)
            other = add.rhs if add.lhs is product.result else add.lhs
            parts = [arith.MulfOp(v, factor) for v in (difference.lhs, difference.rhs)]
            new = arith.AddfOp(other, parts[0].result)
            last = arith.SubfOp(new.result, parts[1].result)
            last.result.name_hint = add.result.name_hint
            Rewriter.replace_op(add, [*parts, new, last])


def split(inside: tile.MapOp) -> None:
    """Changes one map of a step, and the maps that read a distance from it."""
    for distance in list(_distances(inside)):
        vectors, value = _vectors(inside, distance), distance.op.result
        end = inside.body.block.last_op
        assert isinstance(end, tile.MapYieldOp)
        for output in [o for o, v in zip(inside.outputs, end.values, strict=True) if v is value]:
            for reader in [use for use in list(output.uses) if isinstance(use.operation, tile.MapOp)]:
                other = reader.operation
                assert isinstance(other, tile.MapOp)
                _place(other, other.body.block.args[reader.index], vectors, distance.sign)
                drop_unread(other)
        _place(inside, value, vectors, distance.sign)
        erase_unused(inside.body.block)
        drop_unread(inside)


def _distances(inside: tile.MapOp) -> Iterator[_Distance]:
    for op in inside.body.block.ops:
        found = _Distance.of(inside, op)
        if found is not None:
            yield found


@dataclass(frozen=True)
class TileSplitDistancesPass(ModulePass):
    """Replaces the float of a distance, in the maps of steps, by a difference of two vectors.

    One holds the places of the positions that a step goes through, in it, and is the same in every step; the other one
    says how far the positions that the program owns are from the start of the step. Both are whole numbers, as exact
    as the distance itself. A scalar factor of a distance that is added to something multiplies the vectors: the sum
    rounds by up to 2^-17 of the factor more.

    ```
    tile.map (%q, %kv, %x, %slope) { %d = arith.subi %kv, %q; %f = arith.sitofp %d; %b = arith.mulf %slope, %f; %x + %b }
    ```
    becomes, for blocks of keys from %n0 on
    ```
    %place = float(range 0); %offset = float(%q - %n0)
    tile.map (%place, %offset, %x, %slope) { (%x + %place * %slope) - %offset * %slope }
    ```
    """

    name = "tile-split-distances"

    plan: str = "backward"
    """The plan whose kernels are changed."""

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for inside in list(step_maps(op, self.plan)):
            split(inside)
