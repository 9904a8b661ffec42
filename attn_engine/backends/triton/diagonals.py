"""`tile.load_diagonals` and `tile.add_diagonals` in Triton and in Gluon.

A tile is loaded from one place, moved by what its rows and columns are numbered: all that a loop changes is that place.
It is added as sums over the rows of a tile that was turned, by atomic additions. Additions element by element would meet at the same places. Rows turned left by their numbers have each diagonal in one
column; elements that wrapped around belong to another diagonal of the column.
"""

from __future__ import annotations

from collections.abc import Sequence

from attn_engine.backends.code_writer import CodeWriter, Names
from attn_engine.backends.triton import gluon_diagonals
from attn_engine.backends.triton.gluon_printer import FunctionPrinter
from attn_engine.backends.triton.gluon_types import Layout, restricted
from attn_engine.backends.triton.printer import KernelPrinter, wide
from attn_engine.dialects import tile


def _print(
    writer: CodeWriter,
    names: Names,
    of: str,
    value: str,
    place: str,
    stride: str,
    rows: str,
    columns: str,
    shape: Sequence[int],
):
    """`of` is the module of the language; `rows` and `columns` are ranges over the tile's axes."""
    m, n = shape
    reach, turned, column = names.fresh("reach"), names.fresh("turned"), names.fresh("column")
    writer.line(f"{column} = {columns}")
    writer.line(f"{reach} = {rows}[:, None] + {column}[None, :]")
    writer.line(f"{turned} = {of}.gather({value}, {reach} % {n}, 1)")
    for wraps in range((m + n - 2) // n + 1):
        sums = f"{of}.reduce({of}.where({reach} // {n} == {wraps}, {turned}, 0.0), 0, _add)"
        places = f"{place} + {of}.cast({column} - {wraps * n}, {of}.int64) * {stride}"
        writer.line(f'{of}.atomic_add({places}, {sums}, sem="relaxed")')


def print_triton(printer: KernelPrinter, op: tile.AddDiagonalsOp) -> None:
    """Turned back: rows and columns change places."""
    base, (m, n) = printer.text(op.target), tile.shape_of(op.value)
    strides = printer.strides[base]
    terms = [f"{wide(text)} * {stride}" for text, stride in zip(printer.texts(op.indices), strides, strict=True)]
    place, value = " + ".join([base, *terms]), printer.text(op.value)
    if op.turned is not None:
        m, n, value = n, m, f"tl.trans({value})"
    ranges = (f"tl.arange(0, {m})", f"tl.arange(0, {n})")
    _print(printer.writer, printer.names, "tl", value, place, strides[-1], *ranges, (m, n))


def print_gluon(printer: FunctionPrinter, op: tile.AddDiagonalsOp) -> None:
    """A warp along the columns: neighbours in a row are in neighbouring banks, and sums go down a thread's own rows."""
    base, (m, n) = printer.text(op.target), tile.shape_of(op.value)
    strides, value = printer.strides[base], printer.text(op.value)
    indices = printer.texts(op.indices)
    terms = [f"gl.cast({text}, gl.int64) * {stride}" for text, stride in zip(indices, strides, strict=True)]
    held = printer.layout_of(op.value)
    if op.held is not None:
        row, column = (f"gl.cast({text}, gl.int64)" for text in _ranges(printer, held, (m, n)))
        steps = [f"{row}[:, None]", f"{column}[None, :]"]
        ahead, behind = steps if op.turned is not None else reversed(steps)
        place = f"({' + '.join([base, *terms])}) + ({ahead} - {behind})"
        printer.writer.line(f"add_diagonals({value}, {place}, {_statement(printer, 'ADDED', op)})")
        return
    if op.turned is not None:
        m, n, value = n, m, f"{value}.permute((1, 0))"
    layout = printer.names.fresh("by_column")
    printer.writer.line(f"{layout}: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [{printer.warps}, 1], [1, 0])")
    ranges = (f"gl.arange(0, {m}, gl.SliceLayout(1, {layout}))", f"gl.arange(0, {n}, gl.SliceLayout(0, {layout}))")
    value = f"gl.convert_layout({value}, {layout})"
    _print(printer.writer, printer.names, "gl", value, " + ".join([base, *terms]), strides[-1], *ranges, (m, n))


def _statement(printer: FunctionPrinter, name: str, op: tile.LoadDiagonalsOp | tile.AddDiagonalsOp) -> str:
    """What a warp says, and its constraints, as constants of the text."""
    make, constraints = gluon_diagonals.STATEMENTS[name]
    turned = op.turned is not None
    own = {f"{name}_TURNED" if turned else name: make(-1 if turned else 1), f"{name}_CONSTRAINTS": constraints}
    printer.functions.constants |= {constant: repr(text) for constant, text in own.items()}
    return ", ".join(own)


def _ranges(printer: FunctionPrinter, layout: Layout, shape: Sequence[int]) -> list[str]:
    return [f"gl.arange(0, {n}, {printer.layout(restricted(layout, (axis,), 2))})" for axis, n in enumerate(shape)]


def _places(
    op: tile.LoadDiagonalsOp, of: str, base: str, strides: Sequence[str], texts: Sequence[str], ranges: Sequence[str]
) -> str:
    """`texts` are the indices, then the positions of the first row and column."""
    *indices, rows, columns = texts
    signs = ("+", "-") if op.turned is not None else ("-", "+")
    start = f"{indices[-1]} {signs[0]} {rows} {signs[1]} {columns}"
    terms = [f"{of}.cast({i}, {of}.int64) * {s}" for i, s in zip(indices[:-1], strides[:-1], strict=True)]
    terms.append(f"{of}.cast({start}, {of}.int64)")
    row, column = (f"{of}.cast({text}, {of}.int64)" for text in ranges)
    steps = [f"{row}[:, None]", f"{column}[None, :]"]
    ahead, behind = steps if op.turned is not None else reversed(steps)
    return f"({' + '.join([base, *terms])}) + ({ahead} - {behind})"


def load_triton(printer: KernelPrinter, op: tile.LoadDiagonalsOp) -> None:
    base = printer.text(op.source)
    texts = printer.texts([*op.indices, op.rows, op.columns])
    ranges = [f"tl.arange(0, {size})" for size in tile.shape_of(op.result)]
    printer.assign(op, f"tl.load({_places(op, 'tl', base, printer.strides[base], texts, ranges)})")


def load_gluon(printer: FunctionPrinter, op: tile.LoadDiagonalsOp) -> None:
    """A thread that has the numbers of a diagonal several times loads them once, as threads hold what a product gives."""
    base, layout, shape = printer.text(op.source), printer.layout_of(op.result), tile.shape_of(op.result)
    texts = printer.texts([*op.indices, op.rows, op.columns])
    ranges = _ranges(printer, layout, shape)
    places = _places(op, "gl", base, printer.strides[base], texts, ranges)
    if op.held is not None:
        printer.assign(op, f"load_diagonals({places}, {_statement(printer, 'LOADED', op)})")
    else:
        printer.assign(op, f"gl.load({places})")
