"""Rules for scalar ops, in a kernel's body or in a `tile.buffer_map`: each is one line of Python."""

from __future__ import annotations

import math
from collections.abc import Callable

from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, IntegerType, i1
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.utils.hints import isa

from attn_engine.backends.tilelang import types
from attn_engine.backends.tilelang.printer import KernelPrinter, element, is_flags, quoted_dtype
from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_map import BufferMapOp
from attn_engine.dialects.tile_buffer_memory import buffer_type
from attn_engine.dialects.tile_types import BufferType
from attn_engine.errors import UnsupportedOpError

MAP_LIMIT, ROW_LIMIT, KERNEL_LIMIT = 32, 6, 2
"""How many operations the expression behind a name may have, in a map, in one of a vector, and outside. TVM replaces
names by expressions: without a limit they double with every second use, and its proofs about indices take minutes."""


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


def _spell(printer: KernelPrinter, op: Operation, spelling: str, named: bool = True, kept: bool = False) -> None:
    source, result = op.operands[0].type, op.results[0].type
    names = {
        "type": quoted_dtype(result),
        "unsigned": f'"u{types.dtype(source)}"',
        "minus_one": f"T.{types.dtype(result)}(-1)",
    }
    value = spelling.format(*printer.texts(op.operands), **names)
    uses = [spelling.count(f"{{{n}}}") * _weight(printer, operand) for n, operand in enumerate(op.operands)]
    weight = 1 + sum(uses)
    limit = (KERNEL_LIMIT, ROW_LIMIT, MAP_LIMIT)[min(len(printer.indices), 2)]
    if kept or _outlives(printer) or (weight > limit and (printer.indices or not printer.copies_ahead)):
        _keep(printer, op, value)
        return
    printer.weights[op.results[0]] = weight
    if named:
        printer.assign(op, value)
    else:
        printer.names.bind(op.results[0], f"({value})")


def _outlives(printer: KernelPrinter) -> bool:
    """Whether a number is read in other statements than its own: only what is kept is seen there."""
    return bool(printer.ids) and not printer.indices


def _weight(printer: KernelPrinter, value: SSAValue) -> int:
    return 0 if isinstance(value.owner, arith.ConstantOp) else printer.weights.get(value, 1)


def _keep(printer: KernelPrinter, op: Operation, value: str) -> None:
    """A value that stays one: TVM replaces names by what they stand for, but not what is read from memory."""
    name = printer.names.fresh(f"{op.results[0].name_hint or 'v'}_kept")
    printer.writer.line(f"{name} = T.alloc_local((1,), {quoted_dtype(op.results[0].type)})")
    printer.writer.line(f"{name}[0] = {value}")
    if _outlives(printer):
        printer.names.bind(op.results[0], f"{name}[0]")
    else:
        printer.assign(op, f"{name}[0]")


def print_kept(printer: KernelPrinter, name: str, value: str) -> str:
    """A number that is not an op's; kept in a kernel with a schedule. Gives the text that stands for it."""
    if not printer.ids:
        printer.writer.line(f"{name} = {value}")
        return name
    printer.writer.line(f'{name} = T.alloc_local((1,), "int32")')
    printer.writer.line(f"{name}[0] = {value}")
    return f"{name}[0]"


def _scalar(printer: KernelPrinter, op: Operation) -> None:
    table = types.BOOL_OPS if op.results[0].type == i1 and type(op) in types.BOOL_OPS else types.SCALAR_OPS
    is_choice = isinstance(op, arith.SelectOp) and bool(printer.ids)
    _spell(printer, op, types.CHOICE if is_choice else table[type(op)])


def _from_integer(printer: KernelPrinter, op: Operation) -> None:
    table = types.FROM_BOOL if op.operands[0].type == i1 else types.FROM_INTEGER
    _spell(printer, op, table[type(op)])


def _truncate(printer: KernelPrinter, op: arith.TruncIOp) -> None:
    _spell(printer, op, types.TRUNCATE_TO_BOOL if op.result.type == i1 else types.TRUNCATE)


def _compare_integers(printer: KernelPrinter, op: arith.CmpiOp) -> None:
    """In a map of integers kept: TVM refuses a name for one of numbers of which the one is read for several elements."""
    _spell(printer, op, types.CMPI[op.predicate.value.data], kept=_is_read(op) and _makes_integers(op.parent_op()))


def _is_read(op: Operation) -> bool:
    """Whether an op of a map depends on what is read from buffers."""
    everywhere = op.parent_op()
    if not isinstance(everywhere, BufferMapOp):
        return False
    block = everywhere.body.block
    found: set[SSAValue] = {
        a for a, v in zip(block.args, everywhere.inputs, strict=True) if isinstance(v.type, BufferType)
    }
    for earlier in block.ops:
        found.update(earlier.results if found.intersection(earlier.operands) else ())
    return bool(found.intersection(op.operands))


def _makes_integers(op: Operation | None) -> bool:
    return isinstance(op, BufferMapOp) and all(isinstance(buffer_type(o).element_type, IntegerType) for o in op.outputs)


def _compare_floats(printer: KernelPrinter, op: arith.CmpfOp) -> None:
    """In a map without a name: TVM refuses one of numbers of which the one is read for several elements at once."""
    _spell(printer, op, types.CMPF[op.predicate.value.data], named=not printer.indices)


def _constant(printer: KernelPrinter, op: arith.ConstantOp) -> None:
    printer.names.bind(op.result, scalar_literal(op.value, op.result.type))


def _gather(printer: KernelPrinter, op: tile.GatherOp) -> None:
    read = element(printer.text(op.source), printer.texts(op.indices))
    if is_flags(op.source.type):
        read = f"({read} != T.uint8(0))"
    if op.guard is not None:
        read = f"T.if_then_else({printer.text(op.guard)}, {read}, T.cast(0, {quoted_dtype(op.source.type)}))"
    if _outlives(printer):
        _keep(printer, op, read)
    else:
        printer.assign(op, read)


SCALAR_RULES: dict[type[Operation], Callable[..., None]] = {
    **dict.fromkeys(types.SCALAR_OPS, _scalar),
    **dict.fromkeys(types.FROM_INTEGER, _from_integer),
    arith.TruncIOp: _truncate,
    arith.CmpiOp: _compare_integers,
    arith.CmpfOp: _compare_floats,
    arith.ConstantOp: _constant,
    tile.GatherOp: _gather,
}
