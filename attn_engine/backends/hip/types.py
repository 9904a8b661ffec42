"""How types, layouts and scalar ops are spelled in HIP C++ with the header library `attn_engine.h`."""

from __future__ import annotations

import math as numbers

from xdsl.dialects import arith, math
from xdsl.dialects.builtin import Float64Type, FloatAttr, IntegerAttr, f32, i1, i32, i64
from xdsl.ir import Attribute, Operation
from xdsl.utils.hints import isa

from attn_engine.dialects import tile
from attn_engine.dialects.tile_buffer_layout import (
    MfmaAttr,
    PaddedAttr,
    Part,
    SliceLayoutAttr,
    StagedAttr,
    SwizzledAttr,
)
from attn_engine.dialects.tile_types import BufferType
from attn_engine.errors import UnsupportedOpError

BACKEND_NAME = "hip"

_ELEMENTS = {
    "f32": "float",
    "f16": "attn::half",
    "bf16": "attn::bfloat",
    "f8E4M3FN": "attn::fp8",
    "f8E4M3FNUZ": "attn::fp8_fnuz",
    "i64": "long long",
    "i32": "int",
    "i16": "short",
    "i8": "signed char",
    "i1": "bool",
}
ONLY_STORED = ("bf16", "f8E4M3FN", "f8E4M3FNUZ")
"""Floats that are stored and converted; there is no arithmetic on them."""
_UNSIGNED = {"i64": "unsigned long long", "i32": "unsigned", "i16": "unsigned short", "i8": "unsigned char"}

SIGNATURES = {"f32": "f32", "i32": "i32", "i64": "i64", "i1": "i1"}
"""Scalars that a launcher takes, as its signature names them."""


def element(type_: Attribute) -> str:
    """`f16` -> `attn::half`."""
    name = _ELEMENTS.get(str(type_))
    if name is None:
        raise UnsupportedOpError(f"the element type {type_}", BACKEND_NAME)
    return name


def unsigned(type_: Attribute) -> str:
    """`i32` -> `unsigned`; what is no integer has none."""
    return _UNSIGNED.get(str(type_), "")


def parameter(type_: Attribute) -> str:
    """The type of a kernel's argument."""
    if isinstance(type_, tile.GlobalType):
        return f"attn::Global<{element(type_.element_type)}, {type_.rank.data}>"
    return element(type_)


def literal(attribute: Attribute) -> str:
    """A scalar constant, exact, with its type."""
    if isa(attribute, IntegerAttr):
        return _integer(attribute)
    if not isinstance(attribute, FloatAttr):
        raise UnsupportedOpError(f"arith.constant {attribute}", BACKEND_NAME)
    value = attribute.value.data
    if isinstance(attribute.type, Float64Type):
        raise UnsupportedOpError("the element type f64", BACKEND_NAME)
    if numbers.isnan(value):
        text = '__builtin_nanf("")'
    elif numbers.isinf(value):
        text = "__builtin_inff()" if value > 0 else "-__builtin_inff()"
    else:
        text = f"{value!r}f"
    return text if attribute.type == f32 else f"{element(attribute.get_type())}({text})"


def _integer(attribute: IntegerAttr) -> str:
    value = attribute.value.data
    if attribute.type == i1:
        return "true" if value else "false"
    if attribute.type == i64:
        return "(-9223372036854775807LL - 1)" if value == -(2**63) else f"{value}LL"
    if attribute.type == i32:
        return "(-2147483647 - 1)" if value == -(2**31) else f"{value}"
    return f"{element(attribute.type)}({value})"


# --- buffers -----------------------------------------------------------------------------------

_PARTS = {Part.ACC: "Acc", Part.A: "OperandA", Part.B: "OperandB"}


def layout(attribute: MfmaAttr) -> str:
    """`#tile.mfma<32x32x8, acc, 1x4>` -> `attn::Acc<32, 32, 8, 1, 4>`."""
    sizes = ", ".join(map(str, (*attribute.instruction, *attribute.waves)))
    return f"attn::{_PARTS[Part(attribute.part.data)]}<{sizes}>"


def fragment(type_: BufferType, held: Attribute | None, threads: int) -> str:
    """The C++ type of a fragment; each must have a layout here."""
    shape = ", ".join(map(str, type_.get_shape()))
    name = element(type_.element_type)
    if isinstance(held, MfmaAttr):
        return f"attn::Fragment<{name}, {shape}, {layout(held)}>"
    if isinstance(held, SliceLayoutAttr):
        return f"attn::Vector<{name}, {shape}, {held.axis.data}, {layout(held.parent)}>"
    if isinstance(held, StagedAttr):
        return f"attn::Staged<{name}, {shape}, {held.axis.data}, {threads}>"
    raise UnsupportedOpError(f"a fragment {type_} without a layout", BACKEND_NAME)


def shared(type_: BufferType, lies: Attribute | None) -> str:
    """The C++ type of a tile in LDS; rank 1 is a single row."""
    shape = type_.get_shape()
    if len(shape) not in (1, 2):
        raise UnsupportedOpError(f"a buffer of rank {len(shape)}: {type_}", BACKEND_NAME)
    sizes = ", ".join(map(str, shape if len(shape) == 2 else (1, *shape)))
    name = element(type_.element_type)
    if isinstance(lies, PaddedAttr):
        places = f"{lies.elements.data}, {lies.group.data}" if lies.group.data else str(lies.elements.data)
        return f"attn::Shared<{name}, {sizes}, attn::Padded<{places}>>"
    if isinstance(lies, SwizzledAttr):
        places = ", ".join(str(n.data) for n in (lies.vector, lies.per_phase, lies.phases))
        return f"attn::Shared<{name}, {sizes}, attn::Swizzled<{places}>>"
    return f"attn::Shared<{name}, {sizes}>"


# --- scalar ops --------------------------------------------------------------------------------

_CAST = "attn::to<{type}>({0})"


def _of_unsigned(operator: str) -> str:
    return f"({{type}})(({{unsigned}}){{0}} {operator} ({{unsigned}}){{1}})"


SCALAR_OPS: dict[type[Operation], str] = {
    arith.AddfOp: "{0} + {1}",
    arith.SubfOp: "{0} - {1}",
    arith.MulfOp: "{0} * {1}",
    arith.DivfOp: "{0} / {1}",
    arith.NegfOp: "-{0}",
    arith.MaximumfOp: "attn::maximum({0}, {1})",
    arith.MinimumfOp: "attn::minimum({0}, {1})",
    arith.MaxnumfOp: "__builtin_fmaxf({0}, {1})",
    arith.MinnumfOp: "__builtin_fminf({0}, {1})",
    arith.AddiOp: "{0} + {1}",
    arith.SubiOp: "{0} - {1}",
    arith.MuliOp: "{0} * {1}",
    arith.DivSIOp: "{0} / {1}",
    arith.RemSIOp: "{0} % {1}",
    arith.FloorDivSIOp: "attn::floor_div({0}, {1})",
    arith.CeilDivSIOp: "attn::ceil_div({0}, {1})",
    arith.DivUIOp: _of_unsigned("/"),
    arith.RemUIOp: _of_unsigned("%"),
    arith.ShRUIOp: _of_unsigned(">>"),
    arith.MaxSIOp: "attn::max_of({0}, {1})",
    arith.MinSIOp: "attn::min_of({0}, {1})",
    arith.AndIOp: "{0} & {1}",
    arith.OrIOp: "{0} | {1}",
    arith.XOrIOp: "{0} ^ {1}",
    arith.ShLIOp: "{0} << {1}",
    arith.ShRSIOp: "{0} >> {1}",
    arith.SelectOp: "{0} ? {1} : {2}",
    arith.ExtFOp: _CAST,
    arith.TruncFOp: _CAST,
    arith.FPToSIOp: _CAST,
    arith.BitcastOp: "attn::bits<{type}>({0})",
    math.AbsFOp: "__builtin_fabsf({0})",
    math.AbsIOp: "attn::abs_of({0})",
    math.CeilOp: "__builtin_ceilf({0})",
    math.FloorOp: "__builtin_floorf({0})",
    math.CosOp: "attn::cos({0})",
    math.SinOp: "attn::sin({0})",
    math.ExpOp: "attn::exp({0})",
    math.Exp2Op: "attn::exp2({0})",
    math.LogOp: "attn::log({0})",
    math.Log2Op: "attn::log2({0})",
    math.SqrtOp: "attn::sqrt({0})",
    math.RsqrtOp: "attn::rsqrt({0})",
    math.FmaOp: "__builtin_fmaf({0}, {1}, {2})",
}

# A signed i1 that is true is -1; C++ converts it to 1. To i1, only the lowest bit counts.
FROM_BOOL: dict[type[Operation], str] = {
    arith.ExtSIOp: "-attn::to<{type}>({0})",
    arith.SIToFPOp: "-attn::to<{type}>({0})",
    arith.ExtUIOp: _CAST,
    arith.UIToFPOp: _CAST,
}
_FROM_UNSIGNED = "attn::to<{type}>(({unsigned}){0})"
FROM_INTEGER: dict[type[Operation], str] = {
    arith.ExtSIOp: _CAST,
    arith.SIToFPOp: _CAST,
    arith.ExtUIOp: _FROM_UNSIGNED,
    arith.UIToFPOp: _FROM_UNSIGNED,
}
TRUNCATE = _CAST
TRUNCATE_TO_BOOL = "({0} & 1) != 0"

_SIGNED = ("==", "!=", "<", "<=", ">", ">=")
CMPI = (
    *(f"{{0}} {sign} {{1}}" for sign in _SIGNED),
    *(f"({{unsigned}}){{0}} {sign} ({{unsigned}}){{1}}" for sign in _SIGNED[2:]),
)
"""By predicate number of `arith.cmpi`: eq, ne, slt, sle, sgt, sge, ult, ule, ugt, uge."""

CMPF = (
    "false",
    "{0} == {1}",
    "{0} > {1}",
    "{0} >= {1}",
    "{0} < {1}",
    "{0} <= {1}",
    "{0} < {1} || {0} > {1}",
    "!attn::unordered({0}, {1})",
    "!({0} < {1} || {0} > {1})",
    "!({0} <= {1})",
    "!({0} < {1})",
    "!({0} >= {1})",
    "!({0} > {1})",
    "{0} != {1}",
    "attn::unordered({0}, {1})",
    "true",
)
"""By predicate number of `arith.cmpf`: false, oeq, ogt, oge, olt, ole, one, ord, ueq, ugt, uge, ult, ule, une, uno, true."""
