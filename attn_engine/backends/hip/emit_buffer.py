"""Rules for ops on buffers: each is one call into the header library, or one loop over a lane's elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects.builtin import f32
from xdsl.ir import Operation, SSAValue

from attn_engine.backends.code_writer import find_rule
from attn_engine.backends.hip import types
from attn_engine.backends.hip.emit_scalar import SCALAR_RULES
from attn_engine.backends.hip.lds import NeedsScratch, scratch_sizes
from attn_engine.backends.hip.printer import KernelPrinter
from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_compute as compute
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_buffer_layout import MfmaAttr
from attn_engine.dialects.tile_types import BufferType
from attn_engine.errors import UnsupportedOpError

_REDUCTIONS = {tile.Reduction.SUM: "attn::Sum", tile.Reduction.MAX: "attn::Max", tile.Reduction.MIN: "attn::Min"}


# --- memory ------------------------------------------------------------------------------------


def _alloc(printer: KernelPrinter, op: memory.BufferAllocOp) -> None:
    type_ = memory.buffer_type(op.result)
    name = printer.text(op.result)
    if memory.is_fragment(op.result):
        printer.writer.line(f"{types.fragment(type_, op.layout, printer.threads)} {name};")
    elif op.host is not None:
        printer.writer.line(f"auto &{name} = attn::within<{types.shared(type_, op.layout)}>({printer.text(op.host)});")
    else:
        printer.writer.line(f"ATTN_SHARED {types.shared(type_, op.layout)} {name};")


def _fill(printer: KernelPrinter, op: memory.BufferFillOp) -> None:
    threads = "" if memory.is_fragment(op.target) else f"<{printer.threads}>"
    printer.writer.line(f"attn::fill{threads}({', '.join(printer.texts([op.target, op.value]))});")


def _window(printer: KernelPrinter, op: tile.Access, source: SSAValue) -> str:
    """`k.window<2, 3>(attn::below(skv), attn::all(), b, h, n0, 0)`."""
    dims = tile.ints_of(op.dims)
    limits = dict(zip(tile.ints_of(op.bounded), printer.texts(op.limits), strict=True))
    bounds = [f"attn::below({limits[t]})" if t in limits else "attn::all()" for t in range(len(dims))]
    kind = {1: "line", 2: "window"}.get(len(dims))
    if kind is None:
        raise UnsupportedOpError(f"a copy of rank {len(dims)}", types.BACKEND_NAME)
    arguments = ", ".join([*bounds, *printer.texts(op.indices)])
    return f"{printer.text(source)}.{kind}<{', '.join(map(str, dims))}>({arguments})"


def _copy_in(printer: KernelPrinter, op: memory.CopyInOp) -> None:
    window = _window(printer, op, op.source)
    printer.writer.line(f"attn::copy_in<{printer.threads}>({window}, {printer.text(op.target)});")


def _copy_out(printer: KernelPrinter, op: memory.CopyOutOp) -> None:
    window = _window(printer, op, op.target)
    printer.writer.line(f"attn::copy_out<{printer.threads}>({printer.text(op.value)}, {window});")


def _atomic_add(printer: KernelPrinter, op: memory.BufferAtomicAddOp) -> None:
    printer.writer.line(f"attn::atomic_add({printer.text(op.value)}, {_window(printer, op, op.target)});")


def _copy(printer: KernelPrinter, op: memory.CopyOp) -> None:
    printer.writer.line(f"attn::copy<{printer.threads}>({', '.join(printer.texts([op.source, op.target]))});")


def _barrier(printer: KernelPrinter, op: memory.BarrierOp) -> None:
    printer.writer.line("attn::barrier();")


def _load(printer: KernelPrinter, op: tile.LoadOp) -> None:
    """One element, the same for all threads."""
    printer.assign(op, f"{printer.text(op.source)}.load({', '.join(printer.texts(op.indices))})")


def _store(printer: KernelPrinter, op: tile.StoreOp) -> None:
    values = printer.texts([op.value, *op.indices])
    printer.writer.line(f"{printer.text(op.target)}.store({', '.join(values)});")


def _atomic_add_scalar(printer: KernelPrinter, op: tile.AtomicAddOp) -> None:
    """The same number for all threads, added once."""
    values = printer.texts([op.value, *op.indices])
    printer.writer.line(f"{printer.text(op.target)}.add({', '.join(['attn::thread() == 0', *values])});")


def _gather(printer: KernelPrinter, op: tile.GatherOp) -> None:
    indices = printer.texts(op.indices)
    if op.guard is None:
        printer.assign(op, f"{printer.text(op.source)}.load({', '.join(indices)})")
    else:
        arguments = ", ".join([printer.text(op.guard), *indices])
        printer.assign(op, f"{printer.text(op.source)}.gather({arguments})")


# --- computing ---------------------------------------------------------------------------------


def _layout(value: SSAValue) -> MfmaAttr:
    held = memory.fragment_layout(value)
    if not isinstance(held, MfmaAttr):
        raise UnsupportedOpError(f"a fragment {value.type} held as {held}", types.BACKEND_NAME)
    return held


def _gemm(printer: KernelPrinter, op: compute.GemmOp) -> None:
    if op.clear is not None:
        raise UnsupportedOpError("tile.gemm clear", types.BACKEND_NAME)
    a, b, acc = printer.texts([op.a, op.b, op.acc])
    shape = memory.buffer_type(op.a).get_shape()
    depth = shape[0] if op.transpose_a is not None else shape[1]
    left = f"attn::transposed({a})" if op.transpose_a is not None else a
    right = f"attn::transposed({b})" if op.transpose_b is not None else b
    sizes = ", ".join(map(str, (*_layout(op.acc).instruction, depth)))
    printer.writer.line(f"attn::gemm<{sizes}>({left}, {right}, {acc});")


def scratch_type(op: NeedsScratch) -> str:
    """The C++ type of the LDS that an op needs where waves share its axis."""
    length, waves = scratch_sizes(op)
    return f"attn::Scratch<{types.element(memory.buffer_type(op.source).element_type)}, {length}, {waves}>"


def _reduce(printer: KernelPrinter, op: compute.BufferReduceOp) -> None:
    source, target = printer.texts([op.source, op.target])
    name = f"attn::reduce<{_REDUCTIONS[op.kind.data]}, {op.axis.value.data}>"
    printer.writer.line(f"{name}({source}, {target}, {printer.scratch[op]});")


def _total(printer: KernelPrinter, op: compute.BufferTotalOp) -> None:
    name = f"attn::total<{_REDUCTIONS[op.kind.data]}>"
    printer.assign(op, f"{name}({printer.text(op.source)}, {printer.scratch[op]})")


def _scan(printer: KernelPrinter, op: compute.BufferScanOp) -> None:
    element = memory.buffer_type(op.source).element_type
    if element != f32:
        raise UnsupportedOpError(f"tile.buffer_scan on {element}: only on f32", types.BACKEND_NAME)
    source, target = printer.texts([op.source, op.target])
    reverse = str(op.reverse is not None).lower()
    name = f"attn::scan<{_REDUCTIONS[op.kind.data]}, {op.axis.value.data}, {reverse}>"
    printer.writer.line(f"{name}({source}, {target}, {printer.scratch[op]});")


def _index(printer: KernelPrinter, op: compute.IndexOp) -> None:
    printer.assign(op, f"{printer.place}.index({op.axis.value.data}, {printer.element_index})")


Everywhere = compute.BufferMapOp | compute.BufferScatterAddOp
"""Ops with a region that runs for each of a lane's elements."""


def _map(printer: KernelPrinter, op: compute.BufferMapOp) -> None:
    _each_element(printer, op, printer.text(op.outputs[0]), _write_outputs)


def _scatter_add(printer: KernelPrinter, op: compute.BufferScatterAddOp) -> None:
    """Of the lanes that hold copies, one adds."""
    first = printer.text(op.inputs[0])
    with printer.writer.block(f"if ({first}.owner()) {{", "}"):
        _each_element(printer, op, first, _add_element)


def _each_element(printer: KernelPrinter, op: Everywhere, first: str, finish: Callable[..., None]) -> None:
    """A loop over a lane's elements, which stand where those of `first` do."""
    writer = printer.writer
    index = printer.element_index = printer.names.fresh("e")
    printer.first = first
    if any(isinstance(inner, compute.IndexOp) for inner in op.body.block.ops) or any(map(_is_shared, op.inputs)):
        printer.place = printer.names.fresh("place")
        writer.line(f"const auto {printer.place} = {first}.place();")
    writer.line("ATTN_UNROLL")
    with writer.block(f"for (int {index} = 0; {index} < {first}.count; ++{index}) {{", "}"):
        for argument, value, axes in zip(op.body.block.args, op.inputs, tile.axes_of(op.axes), strict=True):
            _bind_input(printer, op, argument, value, axes)
        for inner in op.body.block.ops:
            if isinstance(inner, tile.MapYieldOp):
                finish(printer, op, inner)
            else:
                find_rule(MAP_RULES, inner, types.BACKEND_NAME)(printer, inner)


def _bind_input(
    printer: KernelPrinter, op: Everywhere, argument: SSAValue, value: SSAValue, axes: Sequence[int]
) -> None:
    """A scalar or global stands for itself; an element is read into a variable."""
    if not isinstance(value.type, BufferType):
        printer.names.bind(argument, printer.text(value))
        return
    place = _shared_place(printer, axes) if _is_shared(value) else _slot(printer, op, axes)
    type_ = types.element(value.type.element_type)
    printer.writer.line(f"const {type_} {printer.text(argument)} = {printer.text(value)}.get({place});")


def _slot(printer: KernelPrinter, op: Everywhere, axes: Sequence[int]) -> str:
    """Which of a lane's elements of an input belongs to the element at hand."""
    index = printer.element_index
    if len(axes) == len(op.shape):
        return index
    return f"{printer.first}.slice<{1 - axes[0]}>({index})"


def _is_shared(value: SSAValue) -> bool:
    return isinstance(value.type, BufferType) and not memory.is_fragment(value)


def _shared_place(printer: KernelPrinter, axes: Sequence[int]) -> str:
    places = [f"{printer.place}.index({axis}, {printer.element_index})" for axis in axes]
    return ", ".join(places if len(places) == 2 else ["0", *places])


def _write_outputs(printer: KernelPrinter, op: compute.BufferMapOp, end: tile.MapYieldOp) -> None:
    for output, value in zip(op.outputs, end.values, strict=True):
        printer.writer.line(f"{printer.text(output)}.set({printer.element_index}, {printer.text(value)});")


def _add_element(printer: KernelPrinter, op: compute.BufferScatterAddOp, end: tile.MapYieldOp) -> None:
    value, *places, guard = printer.texts(end.values)
    printer.writer.line(f"{printer.text(op.target)}.add({', '.join([guard, value, *places])});")


MAP_RULES: dict[type[Operation], Callable[..., None]] = {
    **SCALAR_RULES,
    tile.GatherOp: _gather,
    compute.IndexOp: _index,
}
BUFFER_RULES: dict[type[Operation], Callable[..., None]] = {
    memory.BufferAllocOp: _alloc,
    memory.BufferFillOp: _fill,
    memory.CopyInOp: _copy_in,
    memory.CopyOutOp: _copy_out,
    memory.BufferAtomicAddOp: _atomic_add,
    memory.CopyOp: _copy,
    memory.BarrierOp: _barrier,
    tile.LoadOp: _load,
    tile.StoreOp: _store,
    tile.AtomicAddOp: _atomic_add_scalar,
    tile.GatherOp: _gather,
    compute.GemmOp: _gemm,
    compute.BufferMapOp: _map,
    compute.BufferReduceOp: _reduce,
    compute.BufferScanOp: _scan,
    compute.BufferScatterAddOp: _scatter_add,
    compute.BufferTotalOp: _total,
}
