"""Rules for scalar ops: in kernels, in the regions of maps, and in plans on the host."""

from __future__ import annotations

from collections.abc import Callable

from xdsl.dialects import arith
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, i1
from xdsl.ir import Operation
from xdsl.utils.hints import isa

from attn_engine.backends.hip import types
from attn_engine.backends.hip.printer import FunctionPrinter
from attn_engine.dialects import tile
from attn_engine.errors import UnsupportedOpError

_ON_FLOATS = (arith.AddfOp, arith.SubfOp, arith.MulfOp, arith.DivfOp, arith.NegfOp, arith.CmpfOp)


def _spell(printer: FunctionPrinter, op: Operation, spelling: str) -> None:
    source, target = op.operands[0].type, op.results[0].type
    text = spelling.format(*printer.texts(op.operands), type=types.element(target), unsigned=types.unsigned(source))
    printer.assign(op, text)


def _scalar(printer: FunctionPrinter, op: Operation) -> None:
    _check_float(op)
    _spell(printer, op, types.SCALAR_OPS[type(op)])


def _check_float(op: Operation) -> None:
    if isinstance(op, _ON_FLOATS) and str(op.operands[0].type) in types.ONLY_STORED:
        raise UnsupportedOpError(f"{op.name} on {op.operands[0].type}", types.BACKEND_NAME)


def _from_integer(printer: FunctionPrinter, op: Operation) -> None:
    table = types.FROM_BOOL if op.operands[0].type == i1 else types.FROM_INTEGER
    _spell(printer, op, table[type(op)])


def _truncate(printer: FunctionPrinter, op: arith.TruncIOp) -> None:
    _spell(printer, op, types.TRUNCATE_TO_BOOL if op.result.type == i1 else types.TRUNCATE)


def _compare_integers(printer: FunctionPrinter, op: arith.CmpiOp) -> None:
    _spell(printer, op, types.CMPI[op.predicate.value.data])


def _compare_floats(printer: FunctionPrinter, op: arith.CmpfOp) -> None:
    _check_float(op)
    _spell(printer, op, types.CMPF[op.predicate.value.data])


def _constant(printer: FunctionPrinter, op: arith.ConstantOp) -> None:
    """A constant stands where it is used."""
    if isa(op.value, DenseIntOrFPElementsAttr):
        raise UnsupportedOpError("arith.constant of a tensor", types.BACKEND_NAME)
    text = types.literal(op.value)
    printer.names.bind(op.result, f"({text})" if text.startswith("-") else text)


def _dim(printer: FunctionPrinter, op: tile.DimOp) -> None:
    printer.assign(op, f"{printer.text(op.source)}.size[{op.axis.value.data}]")


SCALAR_RULES: dict[type[Operation], Callable[..., None]] = {
    **dict.fromkeys(types.SCALAR_OPS, _scalar),
    **dict.fromkeys(types.FROM_INTEGER, _from_integer),
    arith.TruncIOp: _truncate,
    arith.CmpiOp: _compare_integers,
    arith.CmpfOp: _compare_floats,
    arith.ConstantOp: _constant,
    tile.DimOp: _dim,
}
