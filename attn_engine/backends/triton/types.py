"""How types and scalar ops are spelled in Triton; every spelling is printed once, on whole tensors."""

from __future__ import annotations

from xdsl.dialects import arith, math
from xdsl.ir import Attribute, Operation

from attn_engine.dialects import tile
from attn_engine.dialects.tile_types import DescriptorType
from attn_engine.errors import UnsupportedOpError

BACKEND_NAME = "triton"

_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "i1": "int1",
}
_SIGNATURE = {"f64": "fp64", "f32": "fp32", "f16": "fp16", "bf16": "bf16"}


def dtype(element: Attribute) -> str:
    """`f16` -> `tl.float16`."""
    name = _DTYPES.get(str(element))
    if name is None:
        raise UnsupportedOpError(f"the element type {element}", BACKEND_NAME)
    return f"tl.{name}"


def unsigned(element: Attribute) -> str:
    """`i32` -> `tl.uint32`."""
    return dtype(element).replace("tl.", "tl.u")


def signature(type_: Attribute) -> str:
    """The type of a kernel argument as Triton's compiler names it: `*fp16` for a global tensor, `i32` for a scalar,
    `tensordesc<fp16[1, 1, 64, 128]>` for a descriptor."""
    if isinstance(type_, DescriptorType):
        element = str(type_.element_type)
        return f"tensordesc<{_SIGNATURE.get(element, element)}{list(type_.get_shape())}>"
    element = str(tile.element_of(type_))
    star = "*" if isinstance(type_, tile.GlobalType) else ""
    return star + _SIGNATURE.get(element, element)


_NAN_MAX = "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_NAN_MIN = "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"
_NUMBER = "tl.where({{0}} != {{0}}, {{1}}, tl.where({{1}} != {{1}}, {{0}}, {}({{0}}, {{1}})))"
_CAST = "tl.cast({0}, {type})"
_UNSIGNED = "tl.cast(tl.cast({{0}}, {{unsigned}}, bitcast=True) {} tl.cast({{1}}, {{unsigned}}, bitcast=True), {{type}}, bitcast=True)"

SCALAR_OPS: dict[type[Operation], str] = {
    arith.AddfOp: "{0} + {1}",
    arith.SubfOp: "{0} - {1}",
    arith.MulfOp: "{0} * {1}",
    arith.DivfOp: "{0} / {1}",
    arith.NegfOp: "{0} * -1.0",  # Triton's own minus is 0 - x, which loses the sign of zero
    arith.MaximumfOp: _NAN_MAX,
    arith.MinimumfOp: _NAN_MIN,
    arith.MaxnumfOp: _NUMBER.format("tl.maximum"),
    arith.MinnumfOp: _NUMBER.format("tl.minimum"),
    arith.AddiOp: "{0} + {1}",
    arith.SubiOp: "{0} - {1}",
    arith.MuliOp: "{0} * {1}",
    arith.DivSIOp: "{0} // {1}",  # on Triton's integers // and % truncate, as in C
    arith.RemSIOp: "{0} % {1}",
    arith.DivUIOp: _UNSIGNED.format("//"),
    arith.RemUIOp: _UNSIGNED.format("%"),
    arith.MaxSIOp: "tl.maximum({0}, {1})",
    arith.MinSIOp: "tl.minimum({0}, {1})",
    arith.AndIOp: "{0} & {1}",
    arith.OrIOp: "{0} | {1}",
    arith.XOrIOp: "{0} ^ {1}",
    arith.ShLIOp: "{0} << {1}",
    arith.ShRSIOp: "{0} >> {1}",
    arith.ShRUIOp: _UNSIGNED.format(">>"),
    arith.SelectOp: "tl.where({0}, {1}, {2})",
    arith.ExtFOp: _CAST,
    arith.TruncFOp: _CAST,
    arith.FPToSIOp: _CAST,
    arith.BitcastOp: "tl.cast({0}, {type}, bitcast=True)",
    math.AbsFOp: "tl.abs({0})",
    math.AbsIOp: "tl.abs({0})",
    math.CeilOp: "tl.ceil({0})",
    math.FloorOp: "tl.floor({0})",
    math.CosOp: "tl.cos({0})",
    math.SinOp: "tl.sin({0})",
    math.ErfOp: "tl.erf({0})",
    math.ExpOp: "tl.exp({0})",
    math.Exp2Op: "tl.exp2({0})",
    math.LogOp: "tl.log({0})",
    math.Log2Op: "tl.log2({0})",
    math.SqrtOp: "tl.sqrt({0})",
    math.RsqrtOp: "tl.rsqrt({0})",
    math.FmaOp: "tl.fma({0}, {1}, {2})",
}

# Triton converts i1 as 0 or 1; a signed i1 that is true is -1. To i1, only the lowest bit counts.
FROM_BOOL: dict[type[Operation], str] = {
    arith.ExtSIOp: "0 - tl.cast({0}, {type})",
    arith.SIToFPOp: "0.0 - tl.cast({0}, {type})",
    arith.ExtUIOp: _CAST,
    arith.UIToFPOp: _CAST,
}
_FROM_UNSIGNED = "tl.cast(tl.cast({0}, {unsigned}, bitcast=True), {type})"
FROM_INTEGER: dict[type[Operation], str] = {
    arith.ExtSIOp: _CAST,
    arith.SIToFPOp: _CAST,
    arith.ExtUIOp: _FROM_UNSIGNED,
    arith.UIToFPOp: _FROM_UNSIGNED,
}
TRUNCATE = _CAST
TRUNCATE_TO_BOOL = "({0} & 1) != 0"

_U0, _U1 = "tl.cast({0}, {unsigned}, bitcast=True)", "tl.cast({1}, {unsigned}, bitcast=True)"
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

CMPF = (
    "({0} < {1}) & ({1} < {0})",
    "{0} == {1}",
    "{0} > {1}",
    "{0} >= {1}",
    "{0} < {1}",
    "{0} <= {1}",
    "({0} < {1}) | ({0} > {1})",
    "({0} <= {1}) | ({0} > {1})",
    "(({0} < {1}) | ({0} > {1})) ^ True",
    "({0} <= {1}) ^ True",
    "({0} < {1}) ^ True",
    "({0} >= {1}) ^ True",
    "({0} > {1}) ^ True",
    "{0} != {1}",
    "(({0} <= {1}) | ({0} > {1})) ^ True",
    "({0} == {1}) | ({0} != {1})",
)
"""By predicate number of `arith.cmpf`: false, oeq, ogt, oge, olt, ole, one, ord, ueq, ugt, uge, ult, ule, une, uno, true."""
