"""The meaning of scalar code (arith, math, casts, `attn.load`) on torch tensors, by broadcasting.

`SCALAR_OPS` is the table: one callable per op, `(op, operands, dtype_of) -> tensor`, where `dtype_of`
says which torch dtype stands for an IR type. The oracle reads every float as a real number
(`oracle_dtypes()`); an interpreter of typed code passes `exact_dtype`.

Gradients by torch autograd follow one rule more than torch's own: where the gradient that arrives is
0, the gradient that leaves is 0, though the local derivative be infinite. So the branch that a select
did not take, and keys that are masked, never leak a NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from xdsl.dialects import arith, math
from xdsl.dialects.builtin import (
    AnyFloat,
    BFloat16Type,
    DenseIntOrFPElementsAttr,
    Float8E4M3FNType,
    Float8E4M3FNUZType,
    Float16Type,
    Float32Type,
    Float64Type,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    TensorType,
)
from xdsl.ir import Attribute, Block, Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.errors import AttnEngineError
from attn_engine.interpreters import scalar_functions as functions
from attn_engine.interpreters.autograd import common_shape, local

DtypeOf = Callable[[Attribute], torch.dtype]
Rule = Callable[[Any, Sequence[Tensor], DtypeOf], Tensor]
Handlers = Mapping[type[Operation], Callable[[Any, Sequence[Tensor]], Tensor | None]]


class NoMeaningError(AttnEngineError):
    """The interpreter met an op that has no meaning as scalar code."""

    def __init__(self, op: Operation):
        super().__init__(f"'{op.name}' is not scalar code that the interpreter knows; add a rule to SCALAR_OPS")


# --- types -------------------------------------------------------------------------------------

_INTEGERS = {1: torch.bool, 8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_FLOATS: dict[type[Attribute], torch.dtype] = {
    Float16Type: torch.float16,
    BFloat16Type: torch.bfloat16,
    Float32Type: torch.float32,
    Float64Type: torch.float64,
    Float8E4M3FNType: torch.float8_e4m3fn,
    Float8E4M3FNUZType: torch.float8_e4m3fnuz,
}


def element_of(type_: Attribute) -> Attribute:
    """The element type of a tensor; a scalar's own type."""
    return cast("TensorType[Attribute]", type_).element_type if isinstance(type_, TensorType) else type_


def exact_dtype(type_: Attribute) -> torch.dtype:
    """The torch dtype of the same width."""
    element = element_of(type_)
    if isinstance(element, IntegerType):
        return _INTEGERS[cast(IntegerType, element).width.data]
    return torch.int64 if isinstance(element, IndexType) else _FLOATS[type(element)]


def oracle_dtypes(real: torch.dtype = torch.float64) -> DtypeOf:
    """Every float type stands for a real number, held in `real`; integers keep their width."""
    return lambda type_: real if isinstance(type_, AnyFloat) else exact_dtype(type_)


# --- regions -----------------------------------------------------------------------------------


def run_region(
    block: Block,
    arguments: Sequence[Tensor],
    dtype_of: DtypeOf | None = None,
    handlers: Handlers | None = None,
) -> list[Tensor]:
    """Evaluates a scalar region; the results are the operands of its terminator, in order.

    `handlers` give a meaning to ops that need more than their operands (a row reduction needs to
    know which keys are visible); they win over `SCALAR_OPS`.
    """
    env: dict[SSAValue, Tensor] = dict(zip(block.args, arguments, strict=True))
    dtype_of = dtype_of or oracle_dtypes()
    last = block.last_op
    assert last is not None
    for op in block.ops:
        if op is not last:
            value = _run_op(op, [env[o] for o in op.operands], dtype_of, handlers or {})
            if value is not None:
                env[op.results[0]] = value
    return [env[o] for o in last.operands]


def _run_op(op: Operation, args: Sequence[Tensor], dtype_of: DtypeOf, handlers: Handlers) -> Tensor | None:
    handler = handlers.get(type(op))
    if handler is not None:
        return handler(op, args)
    rule = SCALAR_OPS.get(type(op))
    if rule is None:
        raise NoMeaningError(op)
    return rule(op, args, dtype_of)


def _exact(function: Callable[..., Tensor]) -> Rule:
    """An op without a gradient, or with a finite one: the torch function as it is."""
    return lambda _op, args, _dtype_of: function(*args)


def _smooth(function: Callable[..., Tensor]) -> Rule:
    """An op whose derivative may be infinite somewhere."""
    return lambda _op, args, _dtype_of: local(function, *args)


# --- constants, casts, loads -------------------------------------------------------------------


def _constant(op: arith.ConstantOp, _args: Sequence[Tensor], dtype_of: DtypeOf) -> Tensor:
    match op.value:
        case FloatAttr() | IntegerAttr() as number:
            return torch.tensor(number.value.data, dtype=dtype_of(op.result.type))
        case DenseIntOrFPElementsAttr() as dense:
            shape, values = dense.get_shape(), dense.get_values()
            filled = torch.tensor(values, dtype=dtype_of(dense.get_element_type()))
            return filled.expand(shape) if dense.is_splat() else filled.reshape(shape)
        case _:
            raise NoMeaningError(op)


def _cast(op: Operation, args: Sequence[Tensor], dtype_of: DtypeOf) -> Tensor:
    return args[0].to(dtype_of(op.results[0].type))


def _signed_cast(op: Operation, args: Sequence[Tensor], dtype_of: DtypeOf) -> Tensor:
    """The one bit of a true i1 is its sign bit: extended, it is -1."""
    value = _cast(op, args, dtype_of)
    return -value if args[0].dtype == torch.bool else value


def _unsigned_cast(op: Operation, args: Sequence[Tensor], dtype_of: DtypeOf) -> Tensor:
    value, source = _cast(op, args, dtype_of), args[0].dtype
    if source == torch.bool:
        return value
    bits = torch.iinfo(source).bits
    if value.is_floating_point():
        return torch.where(args[0] < 0, value + 2.0**bits, value)
    return value if value.dtype == source else value & (2**bits - 1)


def _truncate(op: arith.TruncIOp, args: Sequence[Tensor], dtype_of: DtypeOf) -> Tensor:
    target = dtype_of(op.result.type)
    return (args[0] & 1).bool() if target == torch.bool else args[0].to(target)


def _bitcast(op: arith.BitcastOp, args: Sequence[Tensor], dtype_of: DtypeOf) -> Tensor:
    return args[0].view(dtype_of(op.result.type))


def load_index(source: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Python's indices made plain: negative ones count from the end, none lies outside."""
    return tuple(torch.where(i < 0, i + n, i).clamp(0, n - 1) for i, n in zip(indices, source.shape, strict=True))


def _load(op: attn.LoadOp, args: Sequence[Tensor], dtype_of: DtypeOf) -> Tensor:
    """Elements that are not visible read some element or other; nothing outside is ever read."""
    source, dtype = args[0], dtype_of(op.result.type)
    if source.numel() == 0:
        return torch.zeros(common_shape(args[1:]), dtype=dtype)
    return source[load_index(source, args[1:])].to(dtype)


# --- integers ----------------------------------------------------------------------------------


def _unsigned(function: Callable[[int, int], int]) -> Rule:
    """Exact unsigned arithmetic, one Python integer at a time; rare enough to be slow."""

    def rule(op: Operation, args: Sequence[Tensor], dtype_of: DtypeOf) -> Tensor:
        dtype = dtype_of(op.results[0].type)
        bits = torch.iinfo(dtype).bits
        shape = common_shape(args)
        a, b = (cast("list[int]", x.expand(shape).reshape(-1).tolist()) for x in args)
        values = [function(x % 2**bits, y % 2**bits) % 2**bits for x, y in zip(a, b, strict=True)]
        signed = [v - 2**bits if v >= 2 ** (bits - 1) else v for v in values]
        return torch.tensor(signed, dtype=dtype).reshape(shape)

    return rule


_INTEGER_COMPARISONS = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge)


def _compare_integers(op: arith.CmpiOp, args: Sequence[Tensor], _dtype_of: DtypeOf) -> Tensor:
    predicate = op.predicate.value.data
    if predicate < len(_INTEGER_COMPARISONS):
        # A true i1 is -1 to a signed comparison.
        a, b = (-x.long() if x.dtype == torch.bool else x for x in args)
        return _INTEGER_COMPARISONS[predicate](a, b)
    # Adding the smallest integer maps unsigned order to signed order.
    a, b = (x.long() if x.dtype == torch.bool else x + torch.iinfo(x.dtype).min for x in args)
    return _INTEGER_COMPARISONS[predicate - 4](a, b)


# --- floats ------------------------------------------------------------------------------------

_ORDERED = (torch.eq, torch.gt, torch.ge, torch.lt, torch.le, torch.ne)


def _compare_floats(op: arith.CmpfOp, args: Sequence[Tensor], _dtype_of: DtypeOf) -> Tensor:
    """Predicates 1-7 are false, 8-14 true, when an operand is NaN."""
    a, b = args
    predicate = op.predicate.value.data
    unordered = torch.isnan(a) | torch.isnan(b)
    match predicate:
        case 0 | 15:
            return torch.full_like(unordered, predicate == 15)
        case 7:
            return ~unordered
        case 14:
            return unordered
        case _ if predicate < 7:
            return _ORDERED[predicate - 1](a, b) & ~unordered
        case _:
            return _ORDERED[predicate - 8](a, b) | unordered


SCALAR_OPS: dict[type[Operation], Rule] = {
    arith.ConstantOp: _constant,
    arith.SelectOp: _exact(torch.where),
    attn.LoadOp: _load,
    # integers
    arith.AddiOp: _exact(torch.add),
    arith.SubiOp: _exact(torch.sub),
    arith.MuliOp: _exact(torch.mul),
    arith.DivSIOp: _exact(functions.truncating_divide),
    arith.FloorDivSIOp: _exact(functions.floor_divide),
    arith.CeilDivSIOp: _exact(functions.ceil_divide),
    arith.RemSIOp: _exact(functions.remainder),
    arith.MinSIOp: _exact(torch.minimum),
    arith.MaxSIOp: _exact(torch.maximum),
    arith.DivUIOp: _unsigned(lambda a, b: a // b if b else 0),
    arith.CeilDivUIOp: _unsigned(lambda a, b: -(-a // b) if b else 0),
    arith.RemUIOp: _unsigned(lambda a, b: a % b if b else 0),
    arith.MinUIOp: _unsigned(min),
    arith.MaxUIOp: _unsigned(max),
    arith.AndIOp: _exact(torch.bitwise_and),
    arith.OrIOp: _exact(torch.bitwise_or),
    arith.XOrIOp: _exact(torch.bitwise_xor),
    arith.ShLIOp: _exact(torch.bitwise_left_shift),
    arith.ShRSIOp: _exact(torch.bitwise_right_shift),
    arith.ShRUIOp: _unsigned(lambda a, b: a >> b),
    arith.CmpiOp: _compare_integers,
    math.AbsIOp: _exact(torch.abs),
    math.IPowIOp: _exact(functions.integer_power),
    # casts
    arith.IndexCastOp: _cast,
    arith.FPToSIOp: _cast,
    arith.FPToUIOp: _cast,
    arith.SIToFPOp: _signed_cast,
    arith.UIToFPOp: _unsigned_cast,
    arith.ExtFOp: _cast,
    arith.TruncFOp: _cast,
    arith.TruncIOp: _truncate,
    arith.ExtSIOp: _signed_cast,
    arith.ExtUIOp: _unsigned_cast,
    arith.BitcastOp: _bitcast,
    # floats
    arith.AddfOp: _exact(torch.add),
    arith.SubfOp: _exact(torch.sub),
    arith.NegfOp: _exact(torch.neg),
    arith.MulfOp: _smooth(torch.mul),
    arith.DivfOp: _smooth(torch.div),
    arith.CmpfOp: _compare_floats,
    arith.MaximumfOp: _smooth(torch.maximum),
    arith.MinimumfOp: _smooth(torch.minimum),
    arith.MaxnumfOp: _smooth(torch.fmax),
    arith.MinnumfOp: _smooth(torch.fmin),
    math.AbsFOp: _smooth(torch.abs),
    math.CeilOp: _exact(torch.ceil),
    math.FloorOp: _exact(torch.floor),
    math.TruncOp: _exact(torch.trunc),
    math.RoundOp: _exact(functions.round_away),
    math.RoundEvenOp: _exact(torch.round),
    math.CopySignOp: _smooth(torch.copysign),
    math.FmaOp: _smooth(functions.multiply_add),
    math.PowFOp: _smooth(torch.pow),
    math.FPowIOp: _smooth(torch.pow),
    math.ExpOp: _smooth(torch.exp),
    math.Exp2Op: _smooth(torch.exp2),
    math.ExpM1Op: _smooth(torch.expm1),
    math.LogOp: _smooth(torch.log),
    math.Log1pOp: _smooth(torch.log1p),
    math.Log2Op: _smooth(torch.log2),
    math.Log10Op: _smooth(torch.log10),
    math.SqrtOp: _smooth(torch.sqrt),
    math.RsqrtOp: _smooth(torch.rsqrt),
    math.CbrtOp: _smooth(functions.cube_root),
    math.ErfOp: _smooth(torch.erf),
    math.SinOp: _smooth(torch.sin),
    math.CosOp: _smooth(torch.cos),
    math.TanOp: _smooth(torch.tan),
    math.AsinOp: _smooth(torch.asin),
    math.AcosOp: _smooth(torch.acos),
    math.AtanOp: _smooth(torch.atan),
    math.Atan2Op: _smooth(torch.atan2),
    math.SinhOp: _smooth(torch.sinh),
    math.CoshOp: _smooth(torch.cosh),
    math.TanhOp: _smooth(torch.tanh),
    math.AsinhOp: _smooth(torch.asinh),
    math.AcoshOp: _smooth(torch.acosh),
    math.AtanhOp: _smooth(torch.atanh),
}
