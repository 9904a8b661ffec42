"""Rules for the async level in Gluon: rings, barriers, asynchronous copies and products, scheduling fences."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from xdsl.dialects import arith
from xdsl.ir import Operation, SSAValue

from attn_engine.backends.triton import gluon_types as types
from attn_engine.backends.triton.gluon_layout import operand_element, product_layout
from attn_engine.backends.triton.gluon_printer import FunctionPrinter, splat
from attn_engine.backends.triton.gluon_types import Blocked, Own, operand_layout
from attn_engine.dialects import tile
from attn_engine.dialects import tile_async_copy as copies
from attn_engine.dialects import tile_async_fragments as fragments
from attn_engine.dialects import tile_async_memory as memory
from attn_engine.dialects import tile_async_product as products
from attn_engine.dialects import tile_async_view as views
from attn_engine.dialects.tile_flag import AwaitTurnOp, PassTurnOp
from attn_engine.dialects.tile_types import BarriersType, BufferType, DescriptorType, PendingType

_REDUCE = {tile.Reduction.SUM: "_add", tile.Reduction.MAX: "_max", tile.Reduction.MIN: "_min"}
_MATRIX_RANK = 2
_WIDE_PIN = 32
"""Values of a thread that one statement takes."""


# --- memory ------------------------------------------------------------------------------------


def _ring(printer: FunctionPrinter, op: views.RingOp) -> None:
    """Cells are not swizzled; everything else is laid out as copies and products want it."""
    type_ = op.result.type
    assert isinstance(type_, BufferType)
    shape = list(type_.get_shape())
    layout = "gl.SwizzledSharedLayout(1, 1, 1, [0])"
    if len(shape) == 1:
        shape = [*shape, 1]
    else:
        layout = types.shared_layout(type_, min(len(shape) - 1, _MATRIX_RANK))
    printer.assign(op, f"gl.allocate_shared_memory({types.dtype(type_.element_type)}, {shape}, {layout})")


def _slot(printer: FunctionPrinter, op: views.SlotOp) -> None:
    printer.assign(op, f"{printer.text(op.ring)}.index({printer.text(op.index)})")


def _transposed_slot(printer: FunctionPrinter, op: views.TransposedSlotOp) -> None:
    printer.assign(op, f"{printer.text(op.source)}.permute((1, 0))")


def _part(printer: FunctionPrinter, op: views.PartOp) -> None:
    """Placed at compile time, so that the index is a number of the text."""
    printer.assign(op, _sliced(printer, op, printer.text(op.source), op.axis.value.data))


def _sliced(printer: FunctionPrinter, op: views.PartOp, source: str, axis: int) -> str:
    """The part of a text that stands for the whole, along an axis of it."""
    assert isinstance(op.result.type, BufferType)
    size = op.result.type.get_shape()[op.axis.value.data]
    index = op.index.owner
    place = splat(index) if isinstance(index, arith.ConstantOp) else printer.instance
    return f"{source}.slice({place} * {size}, {size}, {axis})"


def _alias_slot(printer: FunctionPrinter, op: views.AliasSlotOp) -> None:
    type_ = op.result.type
    assert isinstance(type_, BufferType)
    shape = list(type_.get_shape())
    layout = types.shared_layout(type_, min(len(shape), _MATRIX_RANK))
    printer.assign(op, f"{printer.text(op.source)}._reinterpret({types.dtype(type_.element_type)}, {shape}, {layout})")


def _read(printer: FunctionPrinter, op: memory.ReadOp) -> None:
    printer.assign(op, f"{printer.text(op.source)}.load({printer.layout(printer.layout_of(op.result))})")


def _write(printer: FunctionPrinter, op: memory.WriteOp) -> None:
    printer.writer.line(f"{printer.text(op.target)}.store({printer.tile(op.value)})")


def _cell_read(printer: FunctionPrinter, op: memory.CellReadOp) -> None:
    layout = printer.layout(Blocked((1,), printer.warps))
    printer.assign(op, f"gl.max({printer.text(op.cells)}.index({printer.text(op.index)}).load({layout}), 0)")


def _cell_write(printer: FunctionPrinter, op: memory.CellWriteOp) -> None:
    layout = printer.layout(Blocked((1,), printer.warps))
    value = f"gl.full([1], {printer.text(op.value)}, {types.dtype(op.value.type)}, {layout})"
    printer.writer.line(f"{printer.text(op.cells)}.index({printer.text(op.index)}).store({value})")


def _fetch_add(printer: FunctionPrinter, op: memory.FetchAddOp) -> None:
    base = printer.text(op.target)
    place = f"{base} + {printer.text(op.index)} * {printer.strides[base][0]}"
    printer.assign(op, f"gl.atomic_add({place}, {printer.text(op.value)})")


# --- barriers and copies -----------------------------------------------------------------------


def _make_barriers(printer: FunctionPrinter, op: copies.MakeBarriersOp) -> None:
    assert isinstance(op.result.type, BarriersType)
    size, name = op.result.type.size.data, printer.text(op.result)
    count = op.count.value.data * op.result.type.threads.data
    printer.assign(op, f"gl.allocate_shared_memory(gl.int64, [{size}, 1], mbarrier.MBarrierLayout())")
    for n in range(size):
        printer.writer.line(f"mbarrier.init({name}.index({n}), count={count})")


def _barrier(
    printer: FunctionPrinter,
    op: copies.BarrierExpectOp | copies.BarrierArriveOp | copies.BarrierWaitOp | copies.AsyncLoadOp,
) -> str:
    return f"{printer.text(op.barriers)}.index({printer.text(op.index)})"


def _barrier_expect(printer: FunctionPrinter, op: copies.BarrierExpectOp) -> None:
    printer.writer.line(f"mbarrier.expect({_barrier(printer, op)}, {op.bytes.value.data})")


def _barrier_arrive(printer: FunctionPrinter, op: copies.BarrierArriveOp) -> None:
    assert isinstance(op.barriers.type, BarriersType)
    threads = op.barriers.type.threads.data
    if threads > 1 and op.condition is None:
        printer.writer.line(f"arrive_apart({_barrier(printer, op)})")
        return
    condition = f", pred={printer.text(op.condition)}" if op.condition is not None else ""
    printer.writer.line(f"mbarrier.arrive({_barrier(printer, op)}, count={threads}{condition})")


def _barrier_wait(printer: FunctionPrinter, op: copies.BarrierWaitOp) -> None:
    printer.writer.line(f"mbarrier.wait({_barrier(printer, op)}, {printer.text(op.parity)})")


def _block(printer: FunctionPrinter, descriptor: SSAValue, slot: SSAValue) -> str:
    """A slot seen with the rank of the descriptor's blocks. A part is taken behind that: it cannot be seen otherwise."""
    assert isinstance(descriptor.type, DescriptorType) and isinstance(slot.type, BufferType)
    block, part = descriptor.type.get_shape(), slot.owner
    lead = len(block) - len(slot.type.get_shape())
    if not lead:
        return printer.text(slot)
    if not isinstance(part, views.PartOp):
        return f"{printer.text(slot)}.reshape({list(block)})"
    assert isinstance(part.source.type, BufferType)
    whole = f"{printer.text(part.source)}.reshape({[*[1] * lead, *part.source.type.get_shape()]})"
    return _sliced(printer, part, whole, lead + part.axis.value.data)


def _async_load(printer: FunctionPrinter, op: copies.AsyncLoadOp) -> None:
    place = f"{printer.text(op.descriptor)}, [{', '.join(printer.texts(op.coordinates))}]"
    slot = _block(printer, op.descriptor, op.target)
    printer.writer.line(f"copy_in({place}, {_barrier(printer, op)}, {slot})")


def _from_slot(function: str) -> Callable[..., None]:
    def rule(printer: FunctionPrinter, op: copies.AsyncStoreOp | copies.AsyncReduceAddOp) -> None:
        place = f"{printer.text(op.descriptor)}, [{', '.join(printer.texts(op.coordinates))}]"
        slot = _block(printer, op.descriptor, op.source)
        printer.writer.line(f"{function}({place}, {slot})")

    return rule


def _async_store_wait(printer: FunctionPrinter, op: copies.AsyncStoreWaitOp) -> None:
    printer.writer.line(f"tma.store_wait({op.pending.value.data})")


def _proxy_fence(printer: FunctionPrinter, op: copies.ProxyFenceOp) -> None:
    printer.writer.line("fence_async_shared()")


def _turn(printer: FunctionPrinter, op: AwaitTurnOp | PassTurnOp) -> str:
    base = printer.text(op.flags)
    terms = [
        f"gl.cast({t}, gl.int64) * {s}" for t, s in zip(printer.texts(op.indices), printer.strides[base], strict=True)
    ]
    return " + ".join([base, *terms])


def _await_turn(printer: FunctionPrinter, op: AwaitTurnOp) -> None:
    printer.writer.line(f"await_turn({_turn(printer, op)}, {printer.text(op.number)})")


def _pass_turn(printer: FunctionPrinter, op: PassTurnOp) -> None:
    printer.writer.line(f"pass_turn({_turn(printer, op)})")


# --- products ----------------------------------------------------------------------------------


def _async_dot(printer: FunctionPrinter, op: products.AsyncDotOp) -> None:
    element, layout = operand_element(op), product_layout(op)
    a, b = printer.text(op.a), printer.text(op.b)
    if not isinstance(op.a.type, BufferType):
        a = printer.tile(op.a, operand_layout(op.layout, element))
    acc, use = "", "True"
    if op.acc is None:
        assert isinstance(op.result.type, PendingType)
        shape = list(tile.shape_of(op.result.type.value))
        acc, use = f"gl.zeros({shape}, gl.float32, {printer.layout(layout)})", "False"
    elif isinstance(op.acc.owner, products.AsyncDotOp):
        acc = printer.text(op.acc)
    else:
        acc = printer.tile(op.acc, layout)
    printer.assign(op, f"warpgroup_mma({a}, {b}, {acc}, use_acc={use}, is_async=True)")


def _wait(printer: FunctionPrinter, op: products.WaitOp) -> None:
    names, deps = ", ".join(printer.texts(op.values)), ", ".join(printer.texts(op.pending))
    printer.writer.line(f"{names} = warpgroup_mma_wait({op.count.value.data}, deps=[{deps}])")


def _dot_operand(printer: FunctionPrinter, op: products.DotOperandOp) -> None:
    printer.assign(op, printer.tile(op.value, printer.layout_of(op.result)))


def _reduce_partial(printer: FunctionPrinter, op: products.ReducePartialOp) -> None:
    rows, columns = tile.shape_of(op.value)
    groups, width = op.groups.value.data, op.width.value.data
    rounds, combine = columns // (groups * width), _REDUCE[op.kind.data]
    inner = op.tree.value.data if op.tree is not None else 1
    sizes = [rows, rounds // inner, *([inner] if inner > 1 else []), groups, width]
    text = f"{printer.tile(op.value)}.reshape({sizes})"
    for axis in [len(sizes) - 1, *([2] if inner > 1 else []), 1]:
        text = f"gl.reduce({text}, {axis}, {combine})"
    layout = printer.layout_of(op.result)
    own = isinstance(layout, Own)
    printer.assign(op, text if own else f"gl.convert_layout({text}, {printer.layout(layout)}, assert_trivial=True)")


def _to_fragments(printer: FunctionPrinter, op: fragments.ToFragmentsOp) -> None:
    """Axes: warp, half, row; eight columns, lane, neighbour. A matter of names: no thread gives anything away."""
    rounds = tile.shape_of(op.value)[1] // fragments.COLUMNS
    rows, columns = tile.shape_of(op.result)
    held = f"{printer.tile(op.value)}.reshape([4, 2, 8, {rounds}, 4, 2]).permute((0, 2, 4, 3, 1, 5))"
    printer.assign(op, f"{held}.reshape([{rows}, {columns}])")


def _from_fragments(printer: FunctionPrinter, op: fragments.FromFragmentsOp) -> None:
    rows, columns = tile.shape_of(op.result)
    parts = op.parts.value.data
    rounds = columns // (parts * fragments.COLUMNS)
    held = f"{printer.tile(op.value)}.reshape([{rows // fragments.ROWS}, {parts}, 4, 8, 4, {rounds}, 2, 2])"
    text = f"{held}.permute((0, 2, 6, 3, 1, 5, 4, 7)).reshape([{rows}, {columns}])"
    printer.assign(op, f"gl.convert_layout({text}, {printer.layout(printer.layout_of(op.result))})")


def _pin(printer: FunctionPrinter, op: products.PinOp) -> None:
    """A few values a thread in pairs, a whole tile in one statement."""
    value, wide = printer.tile(op.value), prod(tile.shape_of(op.value)) >= _WIDE_PIN * 32 * printer.warps
    if wide:
        printer.assign(op, f"pin_wide({value})")
        return
    printer.assign(
        op, f'gl.inline_asm_elementwise(PIN, "=f,=f,f,f", [{value}], dtype=gl.float32, is_pure=False, pack=2)'
    )


def _hold_back(printer: FunctionPrinter, op: products.HoldBackOp) -> None:
    value = printer.text(op.value)
    printer.assign(
        op, f'gl.inline_asm_elementwise(HOLD_BACK, "=f,f", [{value}], dtype=gl.float32, is_pure=False, pack=1)'
    )


def _split_columns(printer: FunctionPrinter, op: products.SplitColumnsOp) -> None:
    rows, columns = tile.shape_of(op.low)
    halves = [printer.text(value) for value in (op.low, op.high)]
    text = f"{printer.tile(op.value)}.reshape([{rows}, 2, {columns}]).permute((0, 2, 1)).split()"
    parts = [f"{name}_part" for name in halves]
    printer.writer.line(f"{', '.join(parts)} = {text}")
    layout = printer.layout(printer.layout_of(op.low))
    for name, part in zip(halves, parts, strict=True):
        printer.writer.line(f"{name} = gl.convert_layout({part}, {layout}, assert_trivial=True)")


def _join_columns(printer: FunctionPrinter, op: products.JoinColumnsOp) -> None:
    rows, columns = tile.shape_of(op.result)
    text = f"gl.join({printer.tile(op.low)}, {printer.tile(op.high)}).permute((0, 2, 1)).reshape([{rows}, {columns}])"
    layout = printer.layout(printer.layout_of(op.result))
    printer.assign(op, f"gl.convert_layout({text}, {layout}, assert_trivial=True)")


def _opaque_zero(printer: FunctionPrinter, op: products.OpaqueZeroOp) -> None:
    source = printer.text(op.source)
    printer.assign(
        op, f'gl.inline_asm_elementwise(OPAQUE_ZERO, "=r,r", [{source}], dtype=gl.int32, is_pure=True, pack=1)'
    )


ASYNC_RULES: dict[type[Operation], Callable[..., None]] = {
    views.RingOp: _ring,
    views.SlotOp: _slot,
    views.TransposedSlotOp: _transposed_slot,
    views.PartOp: _part,
    views.AliasSlotOp: _alias_slot,
    memory.ReadOp: _read,
    memory.WriteOp: _write,
    memory.CellReadOp: _cell_read,
    memory.CellWriteOp: _cell_write,
    memory.FetchAddOp: _fetch_add,
    copies.MakeBarriersOp: _make_barriers,
    copies.BarrierExpectOp: _barrier_expect,
    copies.BarrierArriveOp: _barrier_arrive,
    copies.BarrierWaitOp: _barrier_wait,
    copies.AsyncLoadOp: _async_load,
    copies.AsyncStoreOp: _from_slot("copy_out"),
    copies.AsyncReduceAddOp: _from_slot("reduce_add_out"),
    copies.AsyncStoreWaitOp: _async_store_wait,
    copies.ProxyFenceOp: _proxy_fence,
    AwaitTurnOp: _await_turn,
    PassTurnOp: _pass_turn,
    products.AsyncDotOp: _async_dot,
    products.WaitOp: _wait,
    products.DotOperandOp: _dot_operand,
    products.ReducePartialOp: _reduce_partial,
    products.PinOp: _pin,
    products.HoldBackOp: _hold_back,
    products.SplitColumnsOp: _split_columns,
    products.JoinColumnsOp: _join_columns,
    fragments.ToFragmentsOp: _to_fragments,
    fragments.FromFragmentsOp: _from_fragments,
    products.OpaqueZeroOp: _opaque_zero,
}
