"""Rules for scalar ops, in a kernel's body or in a `tile.buffer_map`: each is one line of Python."""

from __future__ import annotations

import math
from collections.abc import Callable

from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, i1
from xdsl.ir import Attribute, Operation
from xdsl.utils.hints import isa

from attn_engine.backends.tilelang import types
from attn_engine.backends.tilelang.printer import KernelPrinter, element, is_flags, quoted_dtype
from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_map import KeepOp
from attn_engine.errors import UnsupportedOpError


def scalar_literal(value: Attribute, type_: Attribute) -> str:
    """A constant with its type: a bare Python number has none."""
    name = types.dtype(type_)
    if isa(value, IntegerAttr):
        number = value.value.data
        return f"T.bool({number != 0})" if type_ == i1 else f"T.{name}({number})"
    if not isinstance(value, FloatAttr):
        raise UnsupportedOpError(f"arith.constant {value}", types.BACKEND_NAME)
    number = value.value.data
    if math.isinf(number):
        return f'{"-" if number < 0 else ""}T.infinity("{name}")'
    return f'T.{name}(float("nan"))' if math.isnan(number) else f"T.{name}({number!r})"


def _spell(printer: KernelPrinter, op: Operation) -> None:
    """One line; a comparison in a map has no name, for TVM refuses one where a side is read for several elements at once."""
    source, result = op.operands[0].type, op.results[0].type
    names = {
        "type": quoted_dtype(result),
        "unsigned": f'"u{types.dtype(source)}"',
        "minus_one": f"T.{types.dtype(result)}(-1)",
    }
    value = types.spelling(op, is_choice=bool(printer.ids)).format(*printer.texts(op.operands), **names)
    if _outlives(printer):
        _in_memory(printer, op, value)
    elif isinstance(op, arith.CmpiOp | arith.CmpfOp) and printer.indices:
        printer.names.bind(op.results[0], f"({value})")
    else:
        printer.assign(op, value)


def _outlives(printer: KernelPrinter) -> bool:
    """Whether a number is read in other statements than its own: they see of each other only what lies in memory."""
    return bool(printer.ids) and not printer.indices


def _in_memory(printer: KernelPrinter, op: Operation, value: str) -> None:
    name = printer.names.fresh(f"{op.results[0].name_hint or 'v'}_kept")
    printer.writer.line(f"{name} = T.alloc_local((1,), {quoted_dtype(op.results[0].type)})")
    printer.writer.line(f"{name}[0] = {value}")
    if _outlives(printer):
        printer.names.bind(op.results[0], f"{name}[0]")
    else:
        printer.assign(op, f"{name}[0]")


def _keep(printer: KernelPrinter, op: KeepOp) -> None:
    """TVM replaces names by what they stand for, but not what is read from memory."""
    _in_memory(printer, op, printer.text(op.value))


def print_kept(printer: KernelPrinter, name: str, value: str) -> str:
    """A number that is not an op's; kept in a kernel with a schedule. Gives the text that stands for it."""
    if not printer.ids:
        printer.writer.line(f"{name} = {value}")
        return name
    printer.writer.line(f'{name} = T.alloc_local((1,), "int32")')
    printer.writer.line(f"{name}[0] = {value}")
    return f"{name}[0]"


def _constant(printer: KernelPrinter, op: arith.ConstantOp) -> None:
    printer.names.bind(op.result, scalar_literal(op.value, op.result.type))


def _gather(printer: KernelPrinter, op: tile.GatherOp) -> None:
    read = element(printer.text(op.source), printer.texts(op.indices))
    if is_flags(op.source.type):
        read = f"({read} != T.uint8(0))"
    if op.guard is not None:
        read = f"T.if_then_else({printer.text(op.guard)}, {read}, T.cast(0, {quoted_dtype(op.source.type)}))"
    if _outlives(printer):
        _in_memory(printer, op, read)
    else:
        printer.assign(op, read)


SCALAR_RULES: dict[type[Operation], Callable[..., None]] = {
    **dict.fromkeys(types.SPELLED, _spell),
    arith.ConstantOp: _constant,
    KeepOp: _keep,
    tile.GatherOp: _gather,
}
