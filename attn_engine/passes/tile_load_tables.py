"""`tile-load-tables`: tables with an element per score are loaded as tiles, beside keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects import arith
from xdsl.dialects.builtin import ModuleOp, TensorType, bf16, f16, f32, i32
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint, Rewriter

from attn_engine.dialects import tile
from attn_engine.errors import AsyncUnsupportedError
from attn_engine.passes.error_bounds import maps_of
from attn_engine.passes.hopper.edit import Before, Signature
from attn_engine.passes.hopper.form import find_plan, signature_of
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
            value = end.values[owner.outputs.index(value)]  # type: ignore[arg-type]
        elif isinstance(owner, arith.ExtSIOp):
            value = owner.input
        else:
            return value


def _leaves(guard: SSAValue) -> Iterator[SSAValue]:
    found = origin(guard)
    if isinstance(found.owner, arith.AndIOp):
        yield from _leaves(found.owner.lhs)
        yield from _leaves(found.owner.rhs)
    else:
        yield found


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
        scalar = all(o.type == i32 or isinstance(o.owner, arith.ConstantOp) for o in lead)
        if order is None or not steps or not scalar or not self._guard_is_bounds(origins):
            return False
        self._replace(lead, [r.start for r in ranges], sizes, turned=order == [1, 0])
        return True

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

    def _guard_is_bounds(self, origins: list[SSAValue]) -> bool:
        """Whether elements that the guard leaves out are outside of the table, or of the scores that count."""
        guard = self.gather.guard
        return guard is None or all(self._is_bound(leaf.owner, origins) for leaf in _leaves(guard))

    def _is_bound(self, leaf: Operation | Block, origins: list[SSAValue]) -> bool:
        if not isinstance(leaf, arith.CmpiOp) or leaf.predicate.value.data not in (*_BELOW, *_ABOVE):
            return False
        index, limit = (leaf.lhs, leaf.rhs) if leaf.predicate.value.data in _BELOW else (leaf.rhs, leaf.lhs)
        return origin(index) in origins and self._is_size(origin(limit))

    def _is_size(self, value: SSAValue) -> bool:
        """Whether an argument is the length of a tensor."""
        mine = isinstance(value, BlockArgument) and value.block is self.signature.kernel.body.block
        return mine and isinstance(self.signature.passed(value).owner, tile.DimOp)

    def _replace(self, lead: list[SSAValue], starts: list[SSAValue], shape: list[int], turned: bool) -> None:
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
        dims = list(range(rank - _MATRIX_RANK, rank))
        type_ = TensorType(tile.element_of(source), shape)
        load = scope.add(tile.LoadOp(source, [*places, *starts], dims, type_, limits), "table").result
        if turned:
            load = scope.add(tile.TransposeOp(load), "table").result
        block = self.inside.body.block
        argument = block.insert_arg(self.gather.result.type, len(block.args))
        argument.name_hint = self.gather.result.name_hint
        self.gather.result.replace_all_uses_with(argument)
        Rewriter.erase_op(self.gather)
        _erase_unused(block)
        used = [n for n, a in enumerate(block.args[:-1]) if a.uses]
        for unused in [a for a in block.args[:-1] if not a.uses]:
            block.erase_arg(unused)
        inputs = [*(self.inside.inputs[n] for n in used), load]
        axes = [*(tile.axes_of(self.inside.axes)[n] for n in used), (0, 1)]
        types = [o.type for o in self.inside.outputs]
        new = tile.MapOp(inputs, axes, types, self.inside.detach_region(self.inside.body))
        Rewriter.insert_op(new, InsertPoint.before(self.inside))
        for was, now in zip(self.inside.outputs, new.outputs, strict=True):
            now.name_hint = was.name_hint
            was.replace_all_uses_with(now)
        Rewriter.erase_op(self.inside)


def _narrow(value: SSAValue) -> SSAValue:
    """An integer before it was widened."""
    while isinstance(value.owner, arith.ExtSIOp):
        value = value.owner.input
    return value


def _as_i32(scope: Before, value: SSAValue) -> SSAValue:
    owner = value.owner
    return scope.value(owner.value.value.data) if isinstance(owner, arith.ConstantOp) else value  # type: ignore[attr-defined]


def _erase_unused(block: Block) -> None:
    """Scalar code whose results nothing uses, from the end on."""
    for op in reversed(list(block.ops)):
        if op.results and not any(result.uses for result in op.results):
            Rewriter.erase_op(op)


def _tables(signature: Signature, turned: bool) -> Iterator[_Table]:
    for inside in list(maps_of(signature.kernel)):
        for op in list(inside.body.block.ops):
            wide = isinstance(op, tile.GatherOp) and len(op.indices) >= _MATRIX_RANK
            if isinstance(op, tile.GatherOp) and wide and op.result.type in _ELEMENTS:
                current = op.parent_op()
                if isinstance(current, tile.MapOp):
                    yield _Table(signature, current, op, turned)


@dataclass(frozen=True)
class TileLoadTablesPass(ModulePass):
    """Turns gathers of a captured table at [.., query, key] into loads of a block of it, which copies can bring.

    In gradients, where queries may be the columns of the scores, the block is turned. The gather's guard may only say what is in range: what a load leaves out is 0 as well, or belongs to scores that do not
    count. A table that is indexed in any other way keeps its gathers.

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
        plan = find_plan(op, self.plan)
        if plan is None:
            raise AsyncUnsupportedError(f"no plan is named @{self.plan}")
        forward = self.plan == "forward"
        for signature in [signature_of(op, plan)] if forward else signatures(op, self.plan):
            for table in _tables(signature, turned=not forward):
                table.load()
