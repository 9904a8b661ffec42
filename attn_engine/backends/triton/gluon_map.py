"""Rules for scalar ops, maps and global memory in Gluon: each scalar op is printed once, on tensors that broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, bf16, f32, i1
from xdsl.dialects.utils import FastMathFlag
from xdsl.ir import Operation, SSAValue
from xdsl.utils.hints import isa

from attn_engine.backends.code_writer import find_rule
from attn_engine.backends.triton import gluon_types as types
from attn_engine.backends.triton.gluon_printer import FunctionPrinter, cast_names, splat, spread
from attn_engine.backends.triton.gluon_types import Slice, restricted
from attn_engine.dialects import tile
from attn_engine.passes.tile_expand_math import may_be_approximate

_COMBINE = {tile.Reduction.SUM: "_add", tile.Reduction.MAX: "_max", tile.Reduction.MIN: "_min"}


# --- scalar ops --------------------------------------------------------------------------------


def _spell(printer: FunctionPrinter, op: Operation, spelling: str) -> None:
    names = cast_names(tile.element_of(op.operands[0]), tile.element_of(op.results[0]))
    printer.assign(op, spelling.format(*printer.texts(op.operands), **names))


def _scalar(printer: FunctionPrinter, op: Operation) -> None:
    _spell(printer, op, types.SCALAR_OPS[type(op)])


def _from_integer(printer: FunctionPrinter, op: Operation) -> None:
    table = types.FROM_BOOL if op.operands[0].type == i1 else types.FROM_INTEGER
    _spell(printer, op, table[type(op)])


def _truncate(printer: FunctionPrinter, op: arith.TruncIOp) -> None:
    _spell(printer, op, types.TRUNCATE_TO_BOOL if op.result.type == i1 else types.TRUNCATE)


def _compare_integers(printer: FunctionPrinter, op: arith.CmpiOp) -> None:
    _spell(printer, op, types.CMPI[op.predicate.value.data])


def _compare_floats(printer: FunctionPrinter, op: arith.CmpfOp) -> None:
    _spell(printer, op, types.CMPF[op.predicate.value.data])


def _extend(printer: FunctionPrinter, op: arith.ExtFOp) -> None:
    """Pair by pair where bf16 lie in pairs: a cast of each would take the upper ones out of their registers first."""
    if tile.element_of(op.input) != bf16 or tile.element_of(op.result) != f32 or not printer.map_axes.get(op.input):
        _scalar(printer, op)
        return
    printer.assign(op, f"widen_pairs({printer.text(op.input)})")


def _divide(printer: FunctionPrinter, op: arith.DivfOp) -> None:
    """By the reciprocal of the hardware where the op allows it."""
    if FastMathFlag.ALLOW_RECIP not in op.fastmath.data:
        _scalar(printer, op)
        return
    a, b = printer.texts(op.operands)
    asm = f'gl.inline_asm_elementwise(RECIPROCAL, "=f,f", [{b}], dtype=gl.float32, is_pure=True, pack=1)'
    printer.assign(op, f"{a} * {asm}")


def _function(printer: FunctionPrinter, op: math.SinOp | math.CosOp | math.Log2Op) -> None:
    """By the hardware's own, where the op allows it."""
    if not may_be_approximate(op):
        _scalar(printer, op)
        return
    name = types.APPROXIMATE[type(op)]
    asm = f'gl.inline_asm_elementwise({name}, "=f,f", [{printer.text(op.operand)}], dtype=gl.float32, is_pure=True, pack=1)'
    printer.assign(op, asm)


def _round(printer: FunctionPrinter, op: math.RoundEvenOp) -> None:
    """Of a number below 2**22 in size: the bits behind the point do not fit beside what is added, and taken away again."""
    assert may_be_approximate(op)
    printer.assign(op, f"{printer.text(op.operand)} + {types.ROUNDING} - {types.ROUNDING}")


def _constant(printer: FunctionPrinter, op: arith.ConstantOp) -> None:
    """A scalar gets its type; a tile is printed at each use, in the layout that the use wants."""
    if not isa(op.value, DenseIntOrFPElementsAttr):
        printer.assign(op, f"gl.cast({splat(op)}, {types.dtype(op.result.type)})")


# --- maps and reductions -----------------------------------------------------------------------


def _joined(printer: FunctionPrinter, values: Sequence[SSAValue]) -> tuple[int, ...]:
    return tuple(sorted({axis for value in values for axis in printer.map_axes.get(value, ())}))


def _map(printer: FunctionPrinter, op: tile.MapOp) -> None:
    """The region's ops in order; results that do not vary along every axis are broadcast."""
    shape, layout = tile.shape_of(op.outputs[0]), printer.layout_of(op.outputs[0])
    printer.map_shape, printer.map_layout = shape, printer.layout(layout)
    block = op.body.block
    for argument, value, axes in zip(block.args, op.inputs, tile.axes_of(op.axes), strict=True):
        text = printer.tile(value, restricted(layout, axes, len(shape))) if axes else printer.text(value)
        _bind(printer, argument, spread(text, axes, len(shape)))
        printer.map_axes[argument] = axes
    for inner in block.ops:
        if isinstance(inner, tile.MapYieldOp):
            _map_results(printer, op, inner)
            continue
        find_rule(_SCALAR_RULES, inner, types.BACKEND_NAME)(printer, inner)
        for result in inner.results:
            printer.map_axes[result] = _joined(printer, list(inner.operands))


def _bind(printer: FunctionPrinter, argument: SSAValue, text: str) -> None:
    """Lets an argument stand for a name as it is, and gives an expression a name."""
    if text.isidentifier():
        printer.names.bind(argument, text)
    else:
        printer.writer.line(f"{printer.text(argument)} = {text}")


def _map_results(printer: FunctionPrinter, op: tile.MapOp, end: tile.MapYieldOp) -> None:
    for output, value in zip(op.outputs, end.values, strict=True):
        text, axes = printer.text(value), printer.map_axes[value]
        if len(axes) < len(printer.map_shape):
            text = _broadcast(printer, text, axes, output)
        printer.writer.line(f"{printer.text(output)} = {text}")


def _broadcast(printer: FunctionPrinter, text: str, axes: tuple[int, ...], output: SSAValue) -> str:
    shape = list(printer.map_shape)
    if not axes:
        return f"gl.full({shape}, {text}, {types.dtype(tile.element_of(output))}, {printer.map_layout})"
    return f"gl.broadcast({text}, gl.full({shape}, 0, gl.int32, {printer.map_layout}))[0]"


def _reduce(printer: FunctionPrinter, op: tile.ReduceOp) -> None:
    """A vector comes as a row or column of the tile, and goes to the layout that it has."""
    axis, layout = op.axis.value.data, printer.layout_of(op.value)
    text = f"gl.reduce({printer.tile(op.value)}, {axis}, {_COMBINE[op.kind.data]})"
    if tile.shape_of(op.result) and printer.layout_of(op.result) != Slice(axis, layout):
        text = f"gl.convert_layout({text}, {printer.layout(printer.layout_of(op.result))})"
    printer.assign(op, text)


def _scan(printer: FunctionPrinter, op: tile.ScanOp) -> None:
    reverse = ", reverse=True" if op.reverse is not None and op.reverse.value.data else ""
    combine = _COMBINE[op.kind.data]
    printer.assign(op, f"gl.associative_scan({printer.tile(op.value)}, {op.axis.value.data}, {combine}{reverse})")


def _range(printer: FunctionPrinter, op: tile.RangeOp) -> None:
    """Printed at each use, in the layout that the use wants."""


# --- global memory -----------------------------------------------------------------------------


def _place(
    printer: FunctionPrinter,
    op: tile.LoadOp | tile.StoreOp | tile.AtomicAddOp,
    memory: SSAValue,
    value: SSAValue,
) -> tuple[str, str]:
    """The pointers and the mask (or nothing) of an access, as expressions."""
    shape, layout = tile.shape_of(value), printer.layout_of(value)
    base, dims = printer.text(memory), tile.ints_of(op.dims)
    strides = printer.strides[base]
    terms = [f"{_wide(printer.text(i))} * {s}" for i, s in zip(op.indices, strides, strict=True)]
    steps = [
        spread(f"gl.arange(0, {size}, {printer.layout(restricted(layout, (axis,), len(shape)))})", (axis,), len(shape))
        for axis, size in enumerate(shape)
    ]
    offsets = [f"{_wide(step)} * {strides[d]}" for step, d in zip(steps, dims, strict=True)]
    conditions: list[str] = []
    for axis, limit in zip(tile.ints_of(op.bounded), op.limits, strict=True):
        index = f"{printer.text(op.indices[dims[axis]])} + {steps[axis]}"
        conditions.append(f"(({index} >= 0) & ({index} < {printer.text(limit)}))")
    return " + ".join([base, *terms, *offsets]), " & ".join(conditions)


def _wide(text: str) -> str:
    """Addresses are computed in 64 bits."""
    return f"gl.cast({text}, gl.int64)"


def _zero(value: SSAValue) -> str:
    return "False" if tile.element_of(value) == i1 else "0"


def _load(printer: FunctionPrinter, op: tile.LoadOp) -> None:
    place, mask = _place(printer, op, op.source, op.result)
    printer.assign(op, f"gl.load({place}{f', mask={mask}, other={_zero(op.result)}' if mask else ''})")


def _store(printer: FunctionPrinter, op: tile.StoreOp) -> None:
    place, mask = _place(printer, op, op.target, op.value)
    value = printer.tile(op.value) if tile.shape_of(op.value) else printer.text(op.value)
    printer.writer.line(f"gl.store({place}, {value}{f', mask={mask}' if mask else ''})")


def _atomic_add(printer: FunctionPrinter, op: tile.AtomicAddOp) -> None:
    place, mask = _place(printer, op, op.target, op.value)
    value = printer.tile(op.value) if tile.shape_of(op.value) else printer.text(op.value)
    printer.writer.line(f'gl.atomic_add({place}, {value}{f", mask={mask}" if mask else ""}, sem="relaxed")')


def _scatter_add(printer: FunctionPrinter, op: tile.ScatterAddOp) -> None:
    """Places and guard are broadcast to the shape of the value."""
    shape, layout, base = tile.shape_of(op.value), printer.layout_of(op.value), printer.text(op.target)
    operands = [*op.indices, *([op.guard] if op.guard is not None else [])]
    texts: list[str] = []
    for operand, axes in zip(operands, tile.axes_of(op.axes), strict=True):
        text = printer.tile(operand, restricted(layout, axes, len(shape))) if axes else printer.text(operand)
        texts.append(spread(text, axes, len(shape)))
    pairs = zip(texts, printer.strides[base], strict=False)
    place = " + ".join([base, *(f"{_wide(index)} * {stride}" for index, stride in pairs)])
    mask = texts[-1] if op.guard is not None else ""
    if shape:
        place = f"{place} + gl.full({list(shape)}, 0, gl.int64, {printer.layout(layout)})"
        mask = f"{mask} & gl.full({list(shape)}, True, gl.int1, {printer.layout(layout)})" if mask else ""
    value = printer.tile(op.value) if shape else printer.text(op.value)
    printer.writer.line(f'gl.atomic_add({place}, {value}{f", mask={mask}" if mask else ""}, sem="relaxed")')


def _gather(printer: FunctionPrinter, op: tile.GatherOp) -> None:
    base = printer.text(op.source)
    pairs = zip(printer.texts(op.indices), printer.strides[base], strict=True)
    place = " + ".join([base, *(f"{_wide(index)} * {stride}" for index, stride in pairs)])
    if op.guard is None:
        printer.assign(op, f"gl.load({place})")
        return
    if _joined(printer, [*op.indices, op.guard]) != _joined(printer, list(op.indices)):
        # one zero offset for each element of the guard
        place = f"{place} + gl.cast({printer.text(op.guard)}, gl.int32) * 0"
    printer.assign(op, f"gl.load({place}, mask={printer.text(op.guard)}, other={_zero(op.result)})")


_SCALAR_RULES: dict[type[Operation], Callable[..., None]] = {
    **dict.fromkeys(types.SCALAR_OPS, _scalar),
    **dict.fromkeys(types.FROM_INTEGER, _from_integer),
    arith.ExtFOp: _extend,
    arith.DivfOp: _divide,
    **dict.fromkeys(types.APPROXIMATE, _function),
    math.RoundEvenOp: _round,
    arith.TruncIOp: _truncate,
    arith.CmpiOp: _compare_integers,
    arith.CmpfOp: _compare_floats,
    arith.ConstantOp: _constant,
    tile.GatherOp: _gather,
}
MAP_RULES: dict[type[Operation], Callable[..., None]] = {
    **_SCALAR_RULES,
    tile.MapOp: _map,
    tile.ReduceOp: _reduce,
    tile.ScanOp: _scan,
    tile.RangeOp: _range,
    tile.LoadOp: _load,
    tile.StoreOp: _store,
    tile.AtomicAddOp: _atomic_add,
    tile.ScatterAddOp: _scatter_add,
}
