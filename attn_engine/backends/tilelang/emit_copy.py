"""Rules for buffers and copies.

A copy that a pass marked as a block is TileLang's own, which may become one of the device's bulk copies if it is
marked so; any other is a parallel loop with a guard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from xdsl.ir import Operation, SSAValue

from attn_engine.backends.tilelang import types
from attn_engine.backends.tilelang.copies import BLOCK, BULK, Copy
from attn_engine.backends.tilelang.legalize import tensor_of
from attn_engine.backends.tilelang.printer import (
    KernelPrinter,
    buffer_shape,
    element,
    quoted_dtype,
    tuple_text,
)
from attn_engine.dialects import tile
from attn_engine.dialects import tile_buffer_memory as memory
from attn_engine.dialects.tile_types import MemorySpace
from attn_engine.errors import UnsupportedOpError

_ALLOC = {MemorySpace.SHARED: "T.alloc_shared", MemorySpace.REGISTER: "T.alloc_fragment"}


def _alloc(printer: KernelPrinter, op: memory.BufferAllocOp) -> None:
    if op.layout is not None:
        raise UnsupportedOpError(f"tile.buffer_alloc with layout {op.layout}", types.BACKEND_NAME)
    type_ = memory.buffer_type(op.result)
    shape = tuple_text([str(size) for size in type_.get_shape()])
    printer.assign(op, f"{_ALLOC[type_.memory_space]}({shape}, {quoted_dtype(type_)})")


def _fill(printer: KernelPrinter, op: memory.BufferFillOp) -> None:
    printer.writer.line(f"T.fill({', '.join([*printer.texts([op.target, op.value]), *printer.mark(op)])})")


def _copy(printer: KernelPrinter, op: memory.CopyOp) -> None:
    printer.writer.line(f"T.copy({', '.join([*printer.texts([op.source, op.target]), *printer.mark(op)])})")


def _region(printer: KernelPrinter, op: tile.Access, tensor: SSAValue, shape: Sequence[int]) -> str:
    """`q[b, h, q0 : q0 + 64, 0 : 64]`."""
    size_of = dict(zip(tile.ints_of(op.dims), shape, strict=True))
    texts = printer.texts(op.indices)
    parts = [f"{t} : {t} + {size_of[axis]}" if axis in size_of else t for axis, t in enumerate(texts)]
    return element(printer.text(tensor), parts)


def _copy_block(printer: KernelPrinter, op: Copy, source: str, target: str) -> None:
    """TileLang's own copy. Bulk copies want 16 bytes at a time; those of a kernel with a schedule are all so or none."""
    fact = printer.ahead if printer.ids else printer.unit[tensor_of(op)]
    disabled = f"not {fact}" if BULK in op.attributes else "True"
    printer.writer.line(f"T.copy({', '.join([source, target, f'disable_tma={disabled}', *printer.mark(op)])})")


def _element(
    printer: KernelPrinter, op: tile.Access, tensor: SSAValue, shape: Sequence[int]
) -> tuple[str, str, list[str]]:
    """Opens nothing yet: the element of the tensor, its guard, and the loop variables."""
    dims, indices = tile.ints_of(op.dims), printer.texts(op.indices)
    for axis, variable in zip(dims, printer.indices, strict=True):
        indices[axis] = f"{indices[axis]} + {variable}"
    bounded = zip(tile.ints_of(op.bounded), printer.texts(op.limits), strict=True)
    conditions = [f"({indices[dims[t]]} >= 0) & ({indices[dims[t]]} < {limit})" for t, limit in bounded]
    return element(printer.text(tensor), indices), " & ".join(f"({c})" for c in conditions), list(printer.indices)


def _copy_in(printer: KernelPrinter, op: memory.CopyInOp) -> None:
    shape, target = buffer_shape(op.target), printer.text(op.target)
    if BLOCK in op.attributes:
        _copy_block(printer, op, _region(printer, op, op.source, shape), target)
        return
    printer.indices, header = printer.loop_variables(op, shape)
    with printer.writer.block(header):
        read, guard, variables = _element(printer, op, op.source, shape)
        zero = f"T.cast(0, {quoted_dtype(op.source.type)})"
        value = f"T.if_then_else({guard}, {read}, {zero})" if guard else read
        printer.writer.line(f"{element(target, variables)} = {value}")
    printer.indices = []


def _scattered(printer: KernelPrinter, op: memory.CopyOutOp | memory.BufferAtomicAddOp, spelling: str) -> None:
    """One statement per element, where the guard holds."""
    printer.indices, header = printer.loop_variables(op, buffer_shape(op.value))
    with printer.writer.block(header):
        place, guard, variables = _element(printer, op, op.target, buffer_shape(op.value))
        statement = spelling.format(place, element(printer.text(op.value), variables))
        with printer.writer.block(f"if {guard}:") if guard else nullcontext():
            printer.writer.line(statement)
    printer.indices = []


def _copy_out(printer: KernelPrinter, op: memory.CopyOutOp) -> None:
    if BLOCK in op.attributes:
        _copy_block(printer, op, printer.text(op.value), _region(printer, op, op.target, buffer_shape(op.value)))
        return
    _scattered(printer, op, "{0} = {1}")


def _atomic_add(printer: KernelPrinter, op: memory.BufferAtomicAddOp) -> None:
    _scattered(printer, op, "T.atomic_add({0}, {1})")


def _load_number(printer: KernelPrinter, op: tile.LoadOp) -> None:
    printer.assign(op, element(printer.text(op.source), printer.texts(op.indices)))


def _store_number(printer: KernelPrinter, op: tile.StoreOp) -> None:
    with printer.writer.block("if T.get_thread_binding() == 0:"):
        place = element(printer.text(op.target), printer.texts(op.indices))
        printer.writer.line(f"{place} = {printer.text(op.value)}")


def _add_number(printer: KernelPrinter, op: tile.AtomicAddOp) -> None:
    """A number that every thread has is added by the first of them."""
    place = element(printer.text(op.target), printer.texts(op.indices))
    with printer.writer.block("if T.get_thread_binding() == 0:"):
        printer.writer.line(f"T.atomic_add({place}, {printer.text(op.value)})")


COPY_RULES: dict[type[Operation], Callable[..., None]] = {
    memory.BufferAllocOp: _alloc,
    memory.BufferFillOp: _fill,
    memory.CopyOp: _copy,
    memory.CopyInOp: _copy_in,
    memory.CopyOutOp: _copy_out,
    memory.BufferAtomicAddOp: _atomic_add,
    tile.AtomicAddOp: _add_number,
    tile.LoadOp: _load_number,
    tile.StoreOp: _store_number,
}
