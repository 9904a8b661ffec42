"""`tile-load-tables`: tables with an element per score are loaded as tiles, beside keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith
from xdsl.dialects.builtin import ModuleOp, TensorType, bf16, f16, f32, i32
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from attn_engine.dialects import tile
from attn_engine.dialects.tile_base import axes_attr
from attn_engine.ir.walks import behind
from attn_engine.passes.error_bounds import maps_of
from attn_engine.passes.hopper.edit import Before, Signature, drop_unread, erase_unused
from attn_engine.passes.hopper.form import signature_of
from attn_engine.passes.hopper.steps import signatures

_ELEMENTS = (bf16, f16, f32)
_MATRIX_RANK = 2
_BELOW, _ABOVE = (2, 6), (4, 8)
"""Predicates of `arith.cmpi`, signed and unsigned."""


def origin(value: SSAValue) -> SSAValue:
    """What a value inside or behind maps is made of, widened integers taken as they were."""
    while True:
        owner = value.owner
        if isinstance(value, BlockArgument):
            parent = value.block.parent_op()
            if not isinstance(parent, tile.MapOp):
                return value
            value = parent.inputs[value.index]
        elif isinstance(owner, tile.MapOp):
            end = owner.body.block.last_op
            assert isinstance(end, tile.MapYieldOp)
            value = end.values[owner.outputs.index(value)]
        elif isinstance(owner, arith.ExtSIOp):
            value = owner.input
        else:
            return value


def _parts(condition: SSAValue) -> tuple[SSAValue, ...]:
    """What a condition is the conjunction of, if it is one."""
    owner = condition.owner
    return (origin(owner.lhs), origin(owner.rhs)) if isinstance(owner, arith.AndIOp) else ()


@dataclass
class _Table:
    """One gather of a kernel, and how its indices run."""

    signature: Signature
    inside: tile.MapOp
    gather: tile.GatherOp
    turned: bool
    """Whether what the kernel does with it can read it turned."""

    def load(self) -> bool:
        """Puts a load of the whole tile in front of the map, in place of the gather; whether that could be done."""
        shape = tile.shape_of(self.inside.outputs[0])
        origins = [origin(index) for index in self.gather.indices]
        *lead, row, column = origins
        ranges = [o.owner for o in (row, column) if isinstance(o.owner, tile.RangeOp)]
        order = self._order()
        sizes = [tile.shape_of(r.result)[0] for r in ranges]
        steps = order is not None and sizes == [shape[axis] for axis in order]
        if order is None or not steps or not all(map(self._is_known, lead)) or not self._guard_is_bounds(origins):
            return False
        inside = self._bounds_of(lead)
        self._replace(lead, [r.start for r in ranges], sizes, inside, turned=order == [1, 0])
        return True

    def _is_known(self, index: SSAValue) -> bool:
        """Whether an index is a constant, or a scalar that is known in front of the step."""
        if isinstance(index.owner, arith.ConstantOp):
            return True
        block = index.owner if isinstance(index.owner, Block) else index.owner.parent
        return index.type == i32 and block not in (self.inside.parent, self.inside.body.block)

    def _order(self) -> list[int] | None:
        """Along which axes of the scores the table's rows and columns run; None if it is not one each."""
        *_, row, column = self.gather.indices
        found = [axis for index in (row, column) for axis in self._axes_of(index)]
        return found if found == [0, 1] or (self.turned and found == [1, 0]) else None

    def _axes_of(self, index: SSAValue) -> tuple[int, ...]:
        """Of the map, on which an index depends directly."""
        narrow = _narrow(index)
        block = self.inside.body.block
        return tile.axes_of(self.inside.axes)[narrow.index] if narrow in block.args else ()  # type: ignore[attr-defined]

    def _conditions(self) -> list[Operation | Block]:
        """What all must hold for an element to be gathered."""
        guard = self.gather.guard
        found = behind([origin(guard)], _parts) if guard is not None else ()
        return [c.owner for c in found if not _parts(c)]

    def _guard_is_bounds(self, origins: list[SSAValue]) -> bool:
        """Whether elements that the guard leaves out are outside of the table, or of the scores that count."""
        return all(self._is_bound(condition, origins) for condition in self._conditions())

    def _bounds_of(self, lead: list[SSAValue]) -> list[arith.CmpiOp]:
        """The conditions on indices which are the same for the whole tile: of those, a load bounds none itself."""
        found = [c for c in self._conditions() if isinstance(c, arith.CmpiOp)]
        return [c for c in found if origin(c.lhs) in lead or origin(c.rhs) in lead]

    def _is_bound(self, leaf: Operation | Block, origins: list[SSAValue]) -> bool:
        if not isinstance(leaf, arith.CmpiOp) or leaf.predicate.value.data not in (*_BELOW, *_ABOVE):
            return False
        index, limit = (leaf.lhs, leaf.rhs) if leaf.predicate.value.data in _BELOW else (leaf.rhs, leaf.lhs)
        return origin(index) in origins and self._is_size(origin(limit))

    def _is_size(self, value: SSAValue) -> bool:
        """Whether an argument is the length of a tensor."""
        mine = isinstance(value, BlockArgument) and value.block is self.signature.kernel.body.block
        return mine and isinstance(self.signature.passed(value).owner, tile.DimOp)

    def _replace(
        self,
        lead: list[SSAValue],
        starts: list[SSAValue],
        shape: list[int],
        inside: list[arith.CmpiOp],
        turned: bool,
    ) -> None:
        scope = Before(self.inside)
        source = origin(self.gather.source)
        rank = len(self.gather.indices)
        block = self.inside.parent
        assert block is not None and block.first_op is not None
        # A copy of what the load brings may start in front of everything else.
        places = [_as_i32(Before(block.first_op), value) for value in lead]
        limits: dict[int, SSAValue] = {
            axis: scope.add(tile.DimOp(source, rank - _MATRIX_RANK + axis)).result for axis in range(_MATRIX_RANK)
        }
        for bound in inside:
            # A table without rows is all zeros, wherever it would begin.
            left, right = (_as_i32(scope, origin(value)) for value in (bound.lhs, bound.rhs))
            holds = scope.add(arith.CmpiOp(left, right, bound.predicate.value.data), "inside").result
            limits[0] = scope.add(arith.SelectOp(holds, limits[0], scope.value(0)), "rows").result
        dims = list(range(rank - _MATRIX_RANK, rank))
        type_ = TensorType(tile.element_of(source), shape)
        load = scope.add(tile.LoadOp(source, [*places, *starts], dims, type_, limits), "table").result
        if turned:
            load = scope.add(tile.TransposeOp(load), "table").result
        self._read(load)

    def _read(self, table: SSAValue) -> None:
        """The map reads an element of the table in place of what it gathered."""
        inside, block = self.inside, self.inside.body.block
        argument = block.insert_arg(self.gather.result.type, len(block.args))
        argument.name_hint = self.gather.result.name_hint
        self.gather.result.replace_all_uses_with(argument)
        Rewriter.erase_op(self.gather)
        inside.properties["axes"] = axes_attr([*tile.axes_of(inside.axes), (0, 1)])
        inside.operands = [*inside.inputs, table]
        erase_unused(block)
        drop_unread(inside)


def _narrow(value: SSAValue) -> SSAValue:
    """An integer before it was widened."""
    while isinstance(value.owner, arith.ExtSIOp):
        value = value.owner.input
    return value


def _as_i32(scope: Before, value: SSAValue) -> SSAValue:
    owner = value.owner
    return scope.value(owner.value.value.data) if isinstance(owner, arith.ConstantOp) else value  # type: ignore[attr-defined]


def _tables(signature: Signature, turned: bool) -> Iterator[_Table]:
    for inside in list(maps_of(signature.kernel)):
        for op in [o for o in inside.body.block.ops if isinstance(o, tile.GatherOp)]:
            if op.parent is not None and len(op.indices) >= _MATRIX_RANK and op.result.type in _ELEMENTS:
                yield _Table(signature, inside, op, turned)


@dataclass(frozen=True)
class TileLoadTablesPass(ModulePass):
    """Turns gathers of a captured table at [.., query, key] into loads of a block of it, which copies can bring.

    In gradients, where queries may be the columns of the scores, the block is turned. The gather's guard may only say what
    is in range: what a load leaves out is 0 as well, or belongs to scores that do not count. Where the guard says so of the
    other indices, the table has no rows if they are outside. A table that is indexed in any other way keeps its gathers.

    ```
    %s = tile.map (%bias, %h, %rows, %cols, %x) axes [[], [], [0], [1], [0, 1]] {
      %g = tile.gather %bias[%h, %row, %col] if %inside
      ...
    ```
    becomes
    ```
    %t = tile.load %bias[%h, %q0, %n0] dims [1, 2] bounded [0, 1] limits(%rows_size, %cols_size)
    %s = tile.map (%t, %x) axes [[0, 1], [0, 1]] { ... }
    ```
    """

    name = "tile-load-tables"

    plan: str = "forward"
    """The plan whose last kernel is changed, or, of gradients, all that multiply blocks in loops."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        forward = self.plan == "forward"
        for signature in [signature_of(op, self.plan)] if forward else signatures(op, self.plan):
            for table in _tables(signature, turned=not forward):
                table.load()
