"""Which layout each tile of a role has: products say it, everything else follows from the structure.

Layouts flow forward from products; a value without tiles among its operands (a load, say) takes the layout that
its first user wants. Constants and ranges have none: they are printed at each use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from xdsl.dialects import arith, scf
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Attribute, Block, Operation, SSAValue

from attn_engine.backends.triton.gluon_types import (
    Blocked,
    Lanes,
    Layout,
    Mma,
    Own,
    Slice,
    mma_layout,
    operand_layout,
    restricted,
)
from attn_engine.dialects import tile
from attn_engine.dialects.tile_async_fragments import ToFragmentsOp
from attn_engine.dialects.tile_async_product import (
    AsyncDotOp,
    DotOperandOp,
    JoinColumnsOp,
    PinOp,
    ReducePartialOp,
    SplitColumnsOp,
    WaitOp,
)
from attn_engine.dialects.tile_types import BufferType


def is_gathered(value: SSAValue) -> bool:
    """Vectors read from memory: each element by one thread, and then spread to the layouts of their uses.

    A vector along the columns of a product would be read by every thread whole, and live in registers as addresses;
    of one along its rows a thread has two in sixteen, and reads these.
    """
    owner = value.owner
    gathers = isinstance(owner, tile.MapOp) and any(isinstance(o, tile.GatherOp) for o in owner.body.block.ops)
    return gathers and len(tile.shape_of(value)) == 1


def is_of_rows(layout: Layout) -> bool:
    """Of a vector along the rows of a product."""
    return isinstance(layout, Slice) and layout.axis == 1 and isinstance(layout.of, Mma)


def is_free(value: SSAValue) -> bool:
    """Constants and ranges: printed in whatever layout a use wants."""
    return isinstance(value.owner, arith.ConstantOp | tile.RangeOp)


class LayoutTable:
    """The layouts of all tiles of one region."""

    def __init__(self, block: Block, warps: int):
        self.warps = warps
        self.of: dict[SSAValue, Layout] = {}
        self._ops = [op for op in _walk(block) if type(op) in _FORWARD or type(op) in _BACKWARD]
        self._tiles = [v for v in _values(block) if isinstance(v.type, TensorType) and not is_free(v)]
        while self._settle():
            pass

    def known(self, value: SSAValue) -> Layout | None:
        return self.of.get(value)

    def put(self, value: SSAValue, layout: Layout | None) -> bool:
        """Gives a tile its layout, unless it has one; whether that is news."""
        if layout is None or value in self.of or is_free(value) or not isinstance(value.type, TensorType):
            return False
        if is_gathered(value) and not is_of_rows(layout):
            layout = Blocked(tile.shape_of(value), self.warps)
        self.of[value] = layout
        return True

    def _settle(self) -> bool:
        """Forward as far as it goes; then one step backward, or one default; whether anything changed."""
        while any(_FORWARD[type(op)](self, op) for op in self._ops if type(op) in _FORWARD):
            pass
        if any(_BACKWARD[type(op)](self, op) for op in self._ops if type(op) in _BACKWARD):
            return True
        rest = [value for value in self._tiles if value not in self.of]
        # Whole tiles first: vectors are rows and columns of them.
        first = max(rest, key=lambda value: len(tile.shape_of(value)), default=None)
        return first is not None and self.put(first, Blocked(tile.shape_of(first), self.warps))


def _walk(block: Block) -> Iterator[Operation]:
    """The ops of a block and of its loops and branches, but not of maps, which are scalar."""
    for op in block.ops:
        yield op
        if isinstance(op, scf.ForOp | scf.IfOp | scf.WhileOp):
            for region in op.regions:
                for inner in region.blocks:
                    yield from _walk(inner)


def _values(block: Block) -> Iterator[SSAValue]:
    for op in _walk(block):
        if isinstance(op, scf.ForOp | scf.WhileOp):
            for region in op.regions:
                yield from region.block.args
        yield from op.results


# --- forward -----------------------------------------------------------------------------------


def _wait(table: LayoutTable, op: WaitOp) -> bool:
    news = False
    for pending, value in zip(op.pending, op.values, strict=True):
        assert isinstance(pending.owner, AsyncDotOp)
        news |= table.put(value, product_layout(pending.owner))
    return news


def product_layout(op: AsyncDotOp) -> Layout:
    return mma_layout(op.layout, operand_element(op))


def operand_element(op: AsyncDotOp) -> Attribute:
    """The element type of a product's operands."""
    assert isinstance(op.b.type, BufferType)
    return op.b.type.element_type


def _dot_operand(table: LayoutTable, op: DotOperandOp) -> bool:
    return table.put(op.result, operand_layout(op.layout, tile.element_of(op.value)))


def _map(table: LayoutTable, op: tile.MapOp) -> bool:
    layout = next((table.known(o) for o in op.outputs if table.known(o)), None) or _from_inputs(table, op)
    return any(table.put(output, layout) for output in op.outputs)


def _from_inputs(table: LayoutTable, op: tile.MapOp) -> Layout | None:
    """That of the first whole tile, or of the tile whose row or column the first vector is."""
    rank = len(tile.shape_of(op.outputs[0]))
    inputs = [(table.known(i), a) for i, a in zip(op.inputs, tile.axes_of(op.axes), strict=True)]
    for layout, axes in inputs:
        if layout is not None and len(axes) == rank:
            return layout
    if any(_is_pending(table, i) for i, a in zip(op.inputs, tile.axes_of(op.axes), strict=True) if len(a) == rank):
        return None
    for layout, axes in inputs:
        if isinstance(layout, Slice) and rank == 2 and axes == (1 - layout.axis,):
            return layout.of
    return None


def _is_pending(table: LayoutTable, value: SSAValue) -> bool:
    """Whether a tile will get its layout from what makes it: nothing that is loaded does."""
    return (
        table.known(value) is None
        and not is_free(value)
        and not isinstance(value.owner, tile.LoadOp | tile.LoadDiagonalsOp)
    )


def _reduce(table: LayoutTable, op: tile.ReduceOp) -> bool:
    layout = table.known(op.value)
    return layout is not None and table.put(op.result, Slice(op.axis.value.data, layout))


def _same(table: LayoutTable, op: PinOp | tile.ScanOp) -> bool:
    return table.put(op.result, table.known(op.value))


def _split_columns(table: LayoutTable, op: SplitColumnsOp) -> bool:
    layout = table.known(op.value)
    half = _of_columns(layout, tile.shape_of(op.low)[1])
    news = table.put(op.low, half)
    return table.put(op.high, half) | news


def _join_columns(table: LayoutTable, op: JoinColumnsOp) -> bool:
    return table.put(op.result, _of_columns(table.known(op.low), tile.shape_of(op.result)[1]))


def _of_columns(layout: Layout | None, columns: int) -> Layout | None:
    """How threads hold more or fewer columns of what one instruction gives."""
    return replace(layout, n=columns) if isinstance(layout, Mma) else None


def _reduce_partial(table: LayoutTable, op: ReducePartialOp) -> bool:
    rows, groups = tile.shape_of(op.result)
    by_thread = (groups, op.width.value.data) == (4, 2)
    return table.put(op.result, Lanes(rows, table.warps) if by_thread else Own(op.result))


def _fragments(table: LayoutTable, op: ToFragmentsOp) -> bool:
    """As threads hold the product: whatever the compiler calls that."""
    return table.known(op.value) is not None and table.put(op.result, Own(op.result))


def _carried(op: scf.ForOp | scf.WhileOp) -> Iterator[tuple[SSAValue, ...]]:
    """Values that share one variable of the text: initial, inside, yielded, result."""
    if isinstance(op, scf.ForOp):
        end = op.body.block.last_op
        assert end is not None
        yield from zip(op.iter_args, op.body.block.args[1:], end.operands, op.results, strict=True)
        return
    before, after = op.before_region.block, op.after_region.block
    condition, end = before.last_op, after.last_op
    assert condition is not None and end is not None
    yield from zip(op.arguments, before.args, end.operands, strict=True)
    yield from zip(condition.operands[1:], after.args, op.res, strict=True)


def _loop(table: LayoutTable, op: scf.ForOp | scf.WhileOp) -> bool:
    news = False
    for group in _carried(op):
        layout = next((table.known(v) for v in group if table.known(v)), None)
        news |= any(table.put(v, layout) for v in group)
    return news


def _if(table: LayoutTable, op: scf.IfOp) -> bool:
    ends = [region.block.last_op for region in op.regions if region.blocks]
    news = False
    for n, result in enumerate(op.results):
        group = [result, *(end.operands[n] for end in ends if end is not None)]
        layout = next((table.known(v) for v in group if table.known(v)), None)
        news |= any(table.put(v, layout) for v in group)
    return news


# --- backward ----------------------------------------------------------------------------------


def _map_inputs(table: LayoutTable, op: tile.MapOp) -> bool:
    layout = table.known(op.outputs[0])
    if layout is None:
        return False
    rank = len(tile.shape_of(op.outputs[0]))
    pairs = zip(op.inputs, tile.axes_of(op.axes), strict=True)
    return any(table.put(i, restricted(layout, axes, rank)) for i, axes in pairs)


def _product_inputs(table: LayoutTable, op: AsyncDotOp) -> bool:
    news = table.put(op.a, operand_layout(op.layout, operand_element(op)))
    return news | (op.acc is not None and table.put(op.acc, product_layout(op)))


def _operand_input(table: LayoutTable, op: DotOperandOp) -> bool:
    return table.put(op.value, table.known(op.result))


def _same_input(table: LayoutTable, op: PinOp | tile.ScanOp) -> bool:
    return table.put(op.value, table.known(op.result))


_FORWARD: dict[type[Operation], Callable[..., bool]] = {
    WaitOp: _wait,
    DotOperandOp: _dot_operand,
    tile.MapOp: _map,
    tile.ReduceOp: _reduce,
    tile.ScanOp: _same,
    PinOp: _same,
    SplitColumnsOp: _split_columns,
    JoinColumnsOp: _join_columns,
    ReducePartialOp: _reduce_partial,
    ToFragmentsOp: _fragments,
    scf.ForOp: _loop,
    scf.WhileOp: _loop,
    scf.IfOp: _if,
}
_BACKWARD: dict[type[Operation], Callable[..., bool]] = {
    tile.MapOp: _map_inputs,
    AsyncDotOp: _product_inputs,
    DotOperandOp: _operand_input,
    PinOp: _same_input,
    tile.ScanOp: _same_input,
}
