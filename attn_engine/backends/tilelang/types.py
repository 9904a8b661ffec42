"""How types and scalar ops are spelled in TileLang."""

from __future__ import annotations

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import i1
from xdsl.ir import Attribute, Operation

from attn_engine.errors import UnsupportedOpError

BACKEND_NAME = "tilelang"

_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "i1": "bool",
}


def dtype(element: Attribute) -> str:
    """`f16` -> `float16`."""
    name = _DTYPES.get(str(element))
    if name is None:
        raise UnsupportedOpError(f"the element type {element}", BACKEND_NAME)
    return name


_CAST = "T.cast({0}, {type})"
# TVM's own max and min drop a NaN; a select that compares does not.
_NAN_MAX = "T.Select(T.isnan({0}) | ({0} > {1}), {0}, {1})"
_NAN_MIN = "T.Select(T.isnan({0}) | ({0} < {1}), {0}, {1})"
_UNSIGNED = "T.reinterpret(T.reinterpret({{0}}, {{unsigned}}) {} T.reinterpret({{1}}, {{unsigned}}), {{type}})"

SCALAR_OPS: dict[type[Operation], str] = {
    arith.AddfOp: "{0} + {1}",
    arith.SubfOp: "{0} - {1}",
    arith.MulfOp: "{0} * {1}",
    arith.DivfOp: "{0} / {1}",
    arith.NegfOp: "{0} * {minus_one}",  # TVM's own minus is 0 - x, which loses the sign of zero
    arith.MaximumfOp: _NAN_MAX,
    arith.MinimumfOp: _NAN_MIN,
    arith.MaxnumfOp: "T.max({0}, {1})",
    arith.MinnumfOp: "T.min({0}, {1})",
    arith.AddiOp: "{0} + {1}",
    arith.SubiOp: "{0} - {1}",
    arith.MuliOp: "{0} * {1}",
    arith.DivSIOp: "T.truncdiv({0}, {1})",
    arith.RemSIOp: "T.truncmod({0}, {1})",
    arith.FloorDivSIOp: "T.floordiv({0}, {1})",
    arith.CeilDivSIOp: "T.ceildiv({0}, {1})",
    arith.MaxSIOp: "T.max({0}, {1})",
    arith.MinSIOp: "T.min({0}, {1})",
    arith.AndIOp: "{0} & {1}",
    arith.OrIOp: "{0} | {1}",
    arith.XOrIOp: "{0} ^ {1}",
    arith.ShLIOp: "{0} << {1}",
    arith.ShRSIOp: "{0} >> {1}",
    arith.ShRUIOp: _UNSIGNED.format(">>"),
    arith.SelectOp: "T.Select({0}, {1}, {2})",
    arith.ExtFOp: _CAST,
    arith.TruncFOp: _CAST,
    arith.FPToSIOp: _CAST,
    arith.BitcastOp: "T.reinterpret({0}, {type})",
    math.AbsFOp: "T.abs({0})",
    math.AbsIOp: "T.abs({0})",
    math.CeilOp: "T.ceil({0})",
    math.FloorOp: "T.floor({0})",
    math.CosOp: "T.cos({0})",
    math.SinOp: "T.sin({0})",
    math.ErfOp: "T.erf({0})",
    math.ExpOp: "T.exp({0})",
    math.Exp2Op: "T.exp2({0})",
    math.LogOp: "T.log({0})",
    math.Log2Op: "T.log2({0})",
    math.SqrtOp: "T.sqrt({0})",
    math.RsqrtOp: "T.rsqrt({0})",
    math.FmaOp: "{0} * {1} + {2}",
}

CHOICE = "T.if_then_else({0}, {1}, {2})"
"""A select where numbers are kept in memory: TVM cannot simplify comparisons of vectors of these."""

# A signed i1 that is true is -1; to i1, only the lowest bit counts.
FROM_BOOL: dict[type[Operation], str] = {
    arith.ExtSIOp: "T.Select({0}, T.cast(-1, {type}), T.cast(0, {type}))",
    arith.SIToFPOp: "T.Select({0}, T.cast(-1, {type}), T.cast(0, {type}))",
    arith.ExtUIOp: _CAST,
    arith.UIToFPOp: _CAST,
}
FROM_INTEGER: dict[type[Operation], str] = {
    arith.ExtSIOp: _CAST,
    arith.SIToFPOp: _CAST,
    arith.ExtUIOp: "T.cast(T.reinterpret({0}, {unsigned}), {type})",
    arith.UIToFPOp: "T.cast(T.reinterpret({0}, {unsigned}), {type})",
}
TRUNCATE = _CAST
TRUNCATE_TO_BOOL = "({0} & 1) != 0"

# On i1, xor and equality are spelled with comparisons: TVM has no bit operations on booleans but and, or, not.
BOOL_OPS: dict[type[Operation], str] = {
    arith.AndIOp: "T.And({0}, {1})",
    arith.OrIOp: "T.Or({0}, {1})",
    arith.XOrIOp: "{0} != {1}",
}

_U0, _U1 = "T.reinterpret({0}, {unsigned})", "T.reinterpret({1}, {unsigned})"
CMPI = (
    "{0} == {1}",
    "{0} != {1}",
    "{0} < {1}",
    "{0} <= {1}",
    "{0} > {1}",
    "{0} >= {1}",
    f"{_U0} < {_U1}",
    f"{_U0} <= {_U1}",
    f"{_U0} > {_U1}",
    f"{_U0} >= {_U1}",
)
"""By predicate number of `arith.cmpi`: eq, ne, slt, sle, sgt, sge, ult, ule, ugt, uge."""

_UNORDERED = "T.isnan({0}) | T.isnan({1})"
CMPF = (
    "T.bool(False)",
    "{0} == {1}",
    "{0} > {1}",
    "{0} >= {1}",
    "{0} < {1}",
    "{0} <= {1}",
    "({0} < {1}) | ({0} > {1})",
    f"T.Not({_UNORDERED})",
    f"({{0}} == {{1}}) | {_UNORDERED}",
    f"({{0}} > {{1}}) | {_UNORDERED}",
    f"({{0}} >= {{1}}) | {_UNORDERED}",
    f"({{0}} < {{1}}) | {_UNORDERED}",
    f"({{0}} <= {{1}}) | {_UNORDERED}",
    f"({{0}} != {{1}}) | {_UNORDERED}",
    _UNORDERED,
    "T.bool(True)",
)
"""By predicate number of `arith.cmpf`: false, oeq, ogt, oge, olt, ole, one, ord, ueq, ugt, uge, ult, ule, une, uno, true."""


def spelling(op: Operation, is_choice: bool = False) -> str:
    """How a scalar op is written, a format of its operands; `is_choice` says of a select that it is a `CHOICE`."""
    makes_flag, takes_flag = op.results[0].type == i1, op.operands[0].type == i1
    match op:
        case arith.CmpiOp():
            return CMPI[op.predicate.value.data]
        case arith.CmpfOp():
            return CMPF[op.predicate.value.data]
        case arith.TruncIOp():
            return TRUNCATE_TO_BOOL if makes_flag else TRUNCATE
        case arith.SelectOp() if is_choice:
            return CHOICE
        case _ if type(op) in FROM_INTEGER:
            return (FROM_BOOL if takes_flag else FROM_INTEGER)[type(op)]
        case _:
            return (BOOL_OPS if makes_flag and type(op) in BOOL_OPS else SCALAR_OPS)[type(op)]


SPELLED = (*SCALAR_OPS, *FROM_INTEGER, arith.TruncIOp, arith.CmpiOp, arith.CmpfOp)
"""What `spelling` knows."""
