"""Scalar code, in kernels and in maps: numbers, tensors [z, y], or tensors with the axes of a map."""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects import arith
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, FloatAttr, IntegerAttr, IntegerType, f32, i1
from xdsl.ir import Attribute, Operation, SSAValue

from attn_engine.backends.code_writer import python_literal
from attn_engine.backends.cpu.ownership import local
from attn_engine.backends.cpu.printer import KernelPrinter, shape_text
from attn_engine.backends.cpu.types import (
    FLOAT_COMPARISONS,
    IN_PLACE,
    INTEGER_COMPARISONS,
    SPELLINGS,
    Torch,
    Wrapping,
    bits_of,
    dtype_of,
)
from attn_engine.dialects import tile


def _constant(printer: KernelPrinter, op: arith.ConstantOp) -> None:
    """A number is written where it is used; a splat tile is one number, expanded."""
    if not isinstance(op.value, DenseIntOrFPElementsAttr):
        text = python_literal(op.value)
        printer.names.bind(op.result, f"({text})" if text.startswith("-") else text)
        printer.uniform.add(op.result)
        return
    element = tile.element_of(op.result)
    number = tile.splat_of(op.value)
    if number is not None:
        printer.assign(op, f"full({python_literal(number)}, {shape_text(op.result.type)}, {dtype_of(element)})")
        return
    values = ", ".join(_element_literal(value, element) for value in op.value.get_values())
    printer.assign(op, f"torch.tensor([{values}], dtype={dtype_of(element)}).view(1, 1, *{shape_text(op.result.type)})")


def _element_literal(value: object, element: Attribute) -> str:
    if isinstance(element, IntegerType):
        return python_literal(IntegerAttr(int(value), element))  # type: ignore[arg-type]
    return python_literal(FloatAttr(float(value), element))  # type: ignore[arg-type]


def _result(printer: KernelPrinter, op: Operation, expression: str) -> None:
    """Assigns a scalar op's result and notes which axes it has."""
    printer.assign(op, expression)
    axes = frozenset[int]().union(*(printer.axes.get(o, frozenset()) for o in op.operands))
    if axes:
        printer.axes[op.results[0]] = axes
    elif all(o in printer.uniform for o in op.operands):
        printer.uniform.add(op.results[0])


def _in_place(printer: KernelPrinter, op: Operation) -> bool:
    """Prints an op into the memory of an operand that nobody reads any more, or of a buffer, if there is one."""
    text = IN_PLACE.get(type(op))
    if text is None or op.results[0].type != f32 or not printer.is_tensor(op.operands[0]):
        return False
    out = _destination(printer, op)
    if out is None:
        return False
    numbers = printer.uniform if not isinstance(SPELLINGS[type(op)], Torch) else set[SSAValue]()
    operands = [printer.names.of(o) if o in numbers else printer.tensor(o) for o in op.operands]
    _result(printer, op, text.format(*operands, out=out))
    return True


def _destination(printer: KernelPrinter, op: Operation) -> str | None:
    """Memory for a result: that of an operand at its last use, else a buffer if the result is no vector."""
    lender = next((operand for operand in op.operands if printer.lends(operand, op)), None)
    if lender is not None:
        return f"programs.own({printer.names.of(lender)})"
    whole = next((o for o in op.operands if len(printer.axes.get(o, ())) == 2), None)
    if whole is None or not local(op.results[0]):
        return None
    return f"programs.spare({printer.buffer()}, {printer.names.of(whole)})"


def _scalar(printer: KernelPrinter, op: Operation) -> None:
    if _in_place(printer, op):
        return
    spelling, type_ = SPELLINGS[type(op)], op.results[0].type
    needs_tensors = isinstance(spelling, Torch)
    operands = [printer.tensor(o) if needs_tensors else printer.names.of(o) for o in op.operands]
    if isinstance(spelling, Wrapping):
        text = (spelling.i1 if type_ == i1 else spelling.text).format(*operands)
        certain = type_ == i1 or any(printer.is_tensor(o) for o in op.operands)
        _result(printer, op, text if certain else f"wrap({text}, {bits_of(type_)})")
        return
    bits = bits_of(type_)
    _result(printer, op, spelling.text.format(*operands, dtype=dtype_of(type_), bits=bits))
    if needs_tensors:
        printer.uniform.discard(op.results[0])


def _cmpi(printer: KernelPrinter, op: arith.CmpiOp) -> None:
    predicate = op.predicate.value.data
    operands = printer.texts(op.operands)
    if predicate >= len(INTEGER_COMPARISONS):
        operands = [f"unsigned({text}, {bits_of(op.lhs.type)})" for text in operands]
        predicate -= 4
    _result(printer, op, INTEGER_COMPARISONS[predicate].format(*operands))


def _cmpf(printer: KernelPrinter, op: arith.CmpfOp) -> None:
    _result(printer, op, FLOAT_COMPARISONS[op.predicate.value.data].format(*printer.texts(op.operands)))


def _select(printer: KernelPrinter, op: arith.SelectOp) -> None:
    """One of the two values is a tensor, so that the result has its type."""
    condition, then, otherwise = printer.texts(op.operands)
    if not printer.is_tensor(op.rhs) and not all(o in printer.uniform for o in op.operands):
        then = printer.tensor(op.lhs)
    into = ""
    if printer.is_tensor(op.cond) and op.result.type == f32 and printer.is_tensor(op.lhs) and printer.lends(op.lhs, op):
        into = f", programs.own({then})"
    _result(printer, op, f"select({condition}, {then}, {otherwise}{into})")


def _gather(printer: KernelPrinter, op: tile.GatherOp) -> None:
    guard = printer.names.of(op.guard) if op.guard is not None else "True"
    _result(printer, op, f"gather({printer.names.of(op.source)}, {printer.tuple(op.indices)}, {guard})")
    printer.uniform.discard(op.result)


SCALAR_RULES: dict[type[Operation], Callable[..., None]] = {
    **dict.fromkeys(SPELLINGS, _scalar),
    arith.ConstantOp: _constant,
    arith.CmpiOp: _cmpi,
    arith.CmpfOp: _cmpf,
    arith.SelectOp: _select,
    tile.GatherOp: _gather,
}
