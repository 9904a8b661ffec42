"""Rules for global memory: pointer arithmetic in 64 bits, one mask per bounded axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects.builtin import i1
from xdsl.ir import Operation, SSAValue

from attn_engine.backends.triton.emit_map import joined
from attn_engine.backends.triton.printer import KernelPrinter, along, shape_text, spread, wide
from attn_engine.dialects import tile
from attn_engine.dialects.tile_block import LoadBlockOp, SetAsideOp, StoreBlockOp, TakeBackOp
from attn_engine.dialects.tile_flag import AwaitOp, SignalOp
from attn_engine.dialects.tile_types import DescriptorType

ASIDE = 1024
"""Numbers that the threads of four warps write at a time, 8 of 16 bits each."""


def _place(
    printer: KernelPrinter, op: tile.LoadOp | tile.WriteAccess, memory: SSAValue, shape: Sequence[int]
) -> tuple[str, str]:
    """Prints the pointers and the mask of an access; returns the expressions that name them.

    The tile's own offsets are kept apart from its origin: in a loop they are invariant.
    """
    stem = printer.reserve(op)
    base, dims = printer.text(memory), tile.ints_of(op.dims)
    strides = printer.strides[base]
    terms = [f"{wide(printer.text(i))} * {s}" for i, s in zip(op.indices, strides, strict=True)]
    origin = printer.names.fresh(f"{stem}_origin")
    printer.writer.line(f"{origin} = {' + '.join([base, *terms])}")
    steps = [wide(f"tl.arange(0, {size})") + f" * {strides[d]}" for size, d in zip(shape, dims, strict=True)]
    steps = [along(f"({step})", axis, len(shape)) for axis, step in enumerate(steps)]
    return " + ".join([origin, *steps]), _mask(printer, op, stem, shape)


def _mask(printer: KernelPrinter, op: tile.LoadOp | tile.WriteAccess, stem: str, shape: Sequence[int]) -> str:
    """The name of the mask, or nothing where the access is not bounded."""
    conditions: list[str] = []
    dims = tile.ints_of(op.dims)
    for axis, limit in zip(tile.ints_of(op.bounded), op.limits, strict=True):
        index = printer.names.fresh(f"{stem}_index")
        printer.writer.line(f"{index} = {printer.text(op.indices[dims[axis]])} + tl.arange(0, {shape[axis]})")
        inside = f"(({index} >= 0) & ({index} < {printer.text(limit)}))"
        conditions.append(along(inside, axis, len(shape)))
    if not conditions:
        return ""
    mask = printer.names.fresh(f"{stem}_mask")
    printer.writer.line(f"{mask} = {' & '.join(conditions)}")
    return mask


def _zero(value: SSAValue) -> str:
    return "False" if tile.element_of(value) == i1 else "0"


def print_load(printer: KernelPrinter, op: tile.LoadOp) -> None:
    place, mask = _place(printer, op, op.source, tile.shape_of(op.result))
    masked = f", mask={mask}, other={_zero(op.result)}" if mask else ""
    printer.assign(op, f"tl.load({place}{masked})")


def print_store(printer: KernelPrinter, op: tile.StoreOp) -> None:
    place, mask = _place(printer, op, op.target, tile.shape_of(op.value))
    printer.writer.line(f"tl.store({place}, {printer.text(op.value)}{f', mask={mask}' if mask else ''})")


def print_atomic_add(printer: KernelPrinter, op: tile.AtomicAddOp) -> None:
    place, mask = _place(printer, op, op.target, tile.shape_of(op.value))
    masked = f", mask={mask}" if mask else ""
    printer.writer.line(f'tl.atomic_add({place}, {printer.text(op.value)}{masked}, sem="relaxed")')


def print_atomic_max(printer: KernelPrinter, op: tile.AtomicMaxOp) -> None:
    place, _ = _place(printer, op, op.target, ())
    printer.writer.line(f'tl.atomic_max({place}, {printer.text(op.value)}, sem="relaxed")')


def print_gather(printer: KernelPrinter, op: tile.GatherOp) -> None:
    """One load per index tuple; where only the guard varies along an axis, the pointers are broadcast."""
    base = printer.text(op.source)
    strides = printer.strides[base]
    terms = [f"{wide(printer.text(i))} * {s}" for i, s in zip(op.indices, strides, strict=True)]
    place = " + ".join([base, *terms])
    if op.guard is None:
        printer.assign(op, f"tl.load({place})")
        return
    axes = joined(printer, [*op.indices, op.guard])
    if axes != joined(printer, list(op.indices)):
        shape = [size if axis in axes else 1 for axis, size in enumerate(printer.map_shape)]
        place = f"tl.broadcast_to({place}, {shape_text(shape)})"
    printer.assign(op, f"tl.load({place}, mask={printer.text(op.guard)}, other={_zero(op.result)})")


def print_scatter_add(printer: KernelPrinter, op: tile.ScatterAddOp) -> None:
    shape, axes = tile.shape_of(op.value), tile.axes_of(op.axes)
    base = printer.text(op.target)
    operands = [*op.indices, *([op.guard] if op.guard is not None else [])]
    texts = [spread(printer.text(v), a, len(shape)) for v, a in zip(operands, axes, strict=True)]
    pairs = zip(texts, printer.strides[base], strict=False)
    place = " + ".join([base, *(f"{wide(index)} * {stride}" for index, stride in pairs)])
    mask = ""
    if shape:
        place = f"tl.broadcast_to({place}, {shape_text(shape)})"
    if op.guard is not None:
        guard = f"tl.broadcast_to({texts[-1]}, {shape_text(shape)})" if shape else texts[-1]
        mask = f", mask={guard}"
    printer.writer.line(f'tl.atomic_add({place}, {printer.text(op.value)}{mask}, sem="relaxed")')


def print_load_block(printer: KernelPrinter, op: LoadBlockOp) -> None:
    """Triton reads the block without its leading ones: the reshape costs nothing."""
    coordinates = ", ".join(printer.texts(op.coordinates))
    shape = shape_text(tile.shape_of(op.result))
    printer.assign(op, f"tl.reshape({printer.text(op.source)}.load([{coordinates}]), {shape})")


def print_store_block(printer: KernelPrinter, op: StoreBlockOp) -> None:
    assert isinstance(op.target.type, DescriptorType)
    coordinates, shape = ", ".join(printer.texts(op.coordinates)), shape_text(op.target.type.get_shape())
    value = f"tl.reshape({printer.text(op.value)}, {shape})"
    printer.writer.line(f"{printer.text(op.target)}.store([{coordinates}], {value})")


def _aside(printer: KernelPrinter, memory: SSAValue, indices: Sequence[SSAValue], count: int) -> str:
    """Pointers to the numbers of a tile that is set aside, as rows that four warps write 16 bytes a thread."""
    base = printer.text(memory)
    strides = printer.strides[base]
    terms = [f"{wide(printer.text(i))} * {s}" for i, s in zip(indices, strides, strict=True)]
    row = min(count, ASIDE)
    offsets = f"tl.arange(0, {count // row})[:, None] * {row} + tl.arange(0, {row})[None, :]"
    return f"{' + '.join([base, *terms])} + ({offsets})"


def _fragments(shape: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """How the threads of four warps hold the result of a product: sizes of its parts, and their order thread by thread.

    Rows are tile, warp, half, thread; columns pair of tiles, tile, thread, number. A thread's numbers come last.
    """
    rows, columns = shape
    if rows % 64 or columns % 16:
        return None
    return [rows // 64, 4, 2, 8, columns // 16, 2, 4, 2], [0, 4, 1, 3, 6, 5, 2, 7]


def print_set_aside(printer: KernelPrinter, op: SetAsideOp) -> None:
    rows, columns = shape = tile.shape_of(op.value)
    value, found = printer.text(op.value), _fragments(shape)
    if found is not None:
        value = f"tl.permute(tl.reshape({value}, {found[0]}), {found[1]})"
    place = _aside(printer, op.target, op.indices, rows * columns)
    row = min(rows * columns, ASIDE)
    printer.writer.line(f"tl.store({place}, tl.reshape({value}, [{rows * columns // row}, {row}]))")


def print_take_back(printer: KernelPrinter, op: TakeBackOp) -> None:
    rows, columns = shape = tile.shape_of(op.result)
    value, found = f"tl.load({_aside(printer, op.source, op.indices, rows * columns)})", _fragments(shape)
    if found is not None:
        sizes, order = found
        back = [order.index(axis) for axis in range(len(order))]
        value = f"tl.permute(tl.reshape({value}, {[sizes[axis] for axis in order]}), {back})"
    printer.assign(op, f"tl.reshape({value}, [{rows}, {columns}])")


def _flag(printer: KernelPrinter, op: AwaitOp | SignalOp) -> str:
    base = printer.text(op.flags)
    terms = [f"{wide(printer.text(i))} * {s}" for i, s in zip(op.indices, printer.strides[base], strict=True)]
    return " + ".join([base, *terms])


def print_await(printer: KernelPrinter, op: AwaitOp) -> None:
    with printer.writer.block(f'while tl.atomic_add({_flag(printer, op)}, 0, sem="acquire") == 0:'):
        printer.writer.line("pass")


def print_signal(printer: KernelPrinter, op: SignalOp) -> None:
    """All threads have stored before one of them releases that."""
    printer.writer.line("tl.debug_barrier()")
    printer.writer.line(f'tl.atomic_xchg({_flag(printer, op)}, 1, sem="release")')


MEMORY_RULES: dict[type[Operation], Callable[..., None]] = {
    tile.LoadOp: print_load,
    tile.StoreOp: print_store,
    tile.AtomicAddOp: print_atomic_add,
    tile.AtomicMaxOp: print_atomic_max,
    tile.GatherOp: print_gather,
    tile.ScatterAddOp: print_scatter_add,
    AwaitOp: print_await,
    SignalOp: print_signal,
    LoadBlockOp: print_load_block,
    StoreBlockOp: print_store_block,
    SetAsideOp: print_set_aside,
    TakeBackOp: print_take_back,
}
