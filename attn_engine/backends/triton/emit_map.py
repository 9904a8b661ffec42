"""Rules for scalar ops, in a kernel's body or in a `tile.map`: each is printed once, on tensors that broadcast."""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects import arith
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, i1
from xdsl.ir import Operation, SSAValue
from xdsl.utils.hints import isa

from attn_engine.backends.code_writer import find_rule, python_literal
from attn_engine.backends.triton import types
from attn_engine.backends.triton.printer import KernelPrinter, cast_names, shape_text, spread
from attn_engine.dialects import tile
from attn_engine.errors import UnsupportedOpError

Rule = Callable[[KernelPrinter, Operation], None]


def _spell(printer: KernelPrinter, op: Operation, spelling: str) -> None:
    names = cast_names(tile.element_of(op.operands[0]), tile.element_of(op.results[0]))
    printer.assign(op, spelling.format(*printer.texts(op.operands), **names))


def _scalar(printer: KernelPrinter, op: Operation) -> None:
    _spell(printer, op, types.SCALAR_OPS[type(op)])


def _from_integer(printer: KernelPrinter, op: Operation) -> None:
    table = types.FROM_BOOL if op.operands[0].type == i1 else types.FROM_INTEGER
    _spell(printer, op, table[type(op)])


def _truncate(printer: KernelPrinter, op: arith.TruncIOp) -> None:
    _spell(printer, op, types.TRUNCATE_TO_BOOL if op.result.type == i1 else types.TRUNCATE)


def _compare_integers(printer: KernelPrinter, op: arith.CmpiOp) -> None:
    _spell(printer, op, types.CMPI[op.predicate.value.data])


def _compare_floats(printer: KernelPrinter, op: arith.CmpfOp) -> None:
    _spell(printer, op, types.CMPF[op.predicate.value.data])


def _constant(printer: KernelPrinter, op: arith.ConstantOp) -> None:
    """A constant has its type and, in Triton, a shape; a bare Python number has neither."""
    number = tile.splat_of(op.value) if isa(op.value, DenseIntOrFPElementsAttr) else op.value
    if number is None:
        raise UnsupportedOpError("arith.constant of different elements", types.BACKEND_NAME)
    shape = shape_text(tile.shape_of(op.result))
    printer.assign(op, f"tl.full({shape}, {python_literal(number)}, {types.dtype(tile.element_of(op.result))})")


SCALAR_RULES: dict[type[Operation], Callable[..., None]] = {
    **dict.fromkeys(types.SCALAR_OPS, _scalar),
    **dict.fromkeys(types.FROM_INTEGER, _from_integer),
    arith.TruncIOp: _truncate,
    arith.CmpiOp: _compare_integers,
    arith.CmpfOp: _compare_floats,
    arith.ConstantOp: _constant,
}


def joined(printer: KernelPrinter, values: list[SSAValue]) -> tuple[int, ...]:
    """The axes of the map's shape along which any of these values varies."""
    return tuple(sorted({axis for value in values for axis in printer.axes.get(value, ())}))


def print_map(printer: KernelPrinter, op: tile.MapOp, rules: dict[type[Operation], Callable[..., None]]) -> None:
    """The region's ops in order; results that do not vary along every axis are broadcast."""
    printer.map_shape = tile.shape_of(op.outputs[0])
    block = op.body.block
    for argument, value, axes in zip(block.args, op.inputs, tile.axes_of(op.axes), strict=True):
        printer.names.bind(argument, spread(printer.text(value), axes, len(printer.map_shape)))
        printer.axes[argument] = axes
    for inner in block.ops:
        if isinstance(inner, tile.MapYieldOp):
            _print_results(printer, op, inner)
            continue
        find_rule(rules, inner, types.BACKEND_NAME)(printer, inner)
        for result in inner.results:
            printer.axes[result] = joined(printer, list(inner.operands))


def _print_results(printer: KernelPrinter, op: tile.MapOp, end: tile.MapYieldOp) -> None:
    for output, value in zip(op.outputs, end.values, strict=True):
        text = printer.text(value)
        if len(printer.axes[value]) < len(printer.map_shape):
            text = f"tl.broadcast_to({text}, {shape_text(printer.map_shape)})"
        printer.writer.line(f"{printer.text(output)} = {text}")
