"""Every elementwise function on traced scalars by its torch name; here also casts and constants."""

from __future__ import annotations

import torch
from xdsl.dialects import arith
from xdsl.dialects.builtin import f32, i64

from attn_engine.errors import UnsupportedFunctionError
from attn_engine.frontend.activations import ACTIVATIONS
from attn_engine.frontend.arithmetic import ARITHMETIC, Unary, truth
from attn_engine.frontend.composites import COMPOSITES
from attn_engine.frontend.region import Function, RegionTrace, as_number, constant_op
from attn_engine.frontend.source import refusal, refuse
from attn_engine.frontend.symbols import Symbol
from attn_engine.frontend.vectors import stack, unsqueeze


def cast_to(r: RegionTrace, x: object, *args: object, dtype: object = None, **_: object) -> Symbol:
    """`.to(dtype)` and `.to(other)`; devices and memory formats mean nothing here."""
    value = r.symbol(x)
    for argument in (*args, dtype):
        if isinstance(argument, Symbol | torch.Tensor):
            argument = argument.dtype
        if isinstance(argument, torch.dtype):
            value = _cast(r, value, argument)
    return value


def cast_by_type(r: RegionTrace, x: object, dtype: object = None, **_: object) -> Symbol:
    """`.type(dtype)`; without a dtype it would be a text."""
    if dtype is None:
        refuse(UnsupportedFunctionError, ".type() of a traced value, which is a text", "write x.dtype == torch.float32")
    return cast_to(r, x, dtype)


def _cast(r: RegionTrace, value: Symbol, dtype: torch.dtype) -> Symbol:
    if dtype == torch.float32:
        return r.as_f32(value)
    if dtype == torch.bool:
        return truth(r, value)
    if dtype in (torch.int32, torch.int64):
        return r.emit(arith.FPToSIOp(value.value, i64)) if value.scalar_type == f32 else r.as_i64(value)
    raise refusal(
        UnsupportedFunctionError,
        f"a cast to {dtype}",
        "scalars are float32, int64 and bool, whatever the dtype of the tensors; leave the cast out or cast to one of these",
    )


def _to(dtype: torch.dtype) -> Unary:
    return lambda r, x: _cast(r, r.symbol(x), dtype)


def same(r: RegionTrace, x: object, *_: object, **__: object) -> Symbol:
    return r.symbol(x)


def _filled(number: float) -> Function:
    def function(r: RegionTrace, x: object, **_: object) -> Symbol:
        return full_like(r, x, number)

    return function


def full_like(r: RegionTrace, x: object, fill_value: object, **_: object) -> Symbol:
    """A constant that counts as an element of whatever `x` is an element of."""
    like = r.symbol(x)
    number = as_number(fill_value)
    if number is not None:
        return r.emit(constant_op(number, like.scalar_type), level=r.level(like))
    value = r.symbol(fill_value, like.scalar_type)
    return r.emit(arith.SelectOp(r.as_i1(True).value, value.value, value.value), level=r.level(like))


def _new_filled(number: float) -> Function:
    def function(r: RegionTrace, x: object, size: object = (), **options: object) -> Symbol:
        return new_full(r, x, size, number, **options)

    return function


def new_full(
    r: RegionTrace, x: object, size: object = (), fill_value: object = 0, *, dtype: object = None, **_: object
) -> Symbol:
    """A constant of the dtype of `x`, or of another."""
    if size not in ((), []):
        refuse(
            UnsupportedFunctionError,
            f"a tensor of shape {size} made of a traced value",
            "a traced value is one number: write x.new_ones(())",
        )
    value = r.symbol(fill_value)
    return _cast(r, value, dtype if isinstance(dtype, torch.dtype) else r.symbol(x).dtype)


def refuse_detach(r: RegionTrace, x: object) -> Symbol:
    refuse(
        UnsupportedFunctionError,
        "detach() inside of a traced function",
        "detach the tensors before they are captured; gradients of scores cannot be stopped here",
    )


_CASTS: dict[str, Function] = {
    "as_tensor": same,
    "bool": _to(torch.bool),
    "clone": same,
    "contiguous": same,
    "detach": refuse_detach,
    "float": _to(torch.float32),
    "full_like": full_like,
    "int": _to(torch.int32),
    "long": _to(torch.int64),
    "new_full": new_full,
    "new_ones": _new_filled(1),
    "new_zeros": _new_filled(0),
    "ones_like": _filled(1),
    "positive": same,
    "stack": stack,
    "tensor": same,
    "to": cast_to,
    "type": cast_by_type,
    "type_as": cast_to,
    "unsqueeze": unsqueeze,
    "zeros_like": _filled(0),
}

_ALIASES: dict[str, tuple[str, ...]] = {
    "abs": ("absolute", "__abs__"),
    "bitwise_and": ("and",),
    "bitwise_left_shift": ("lshift",),
    "bitwise_not": ("invert",),
    "bitwise_or": ("or",),
    "bitwise_right_shift": ("rshift",),
    "bitwise_xor": ("xor",),
    "clamp": ("clip",),
    "div": ("divide", "true_divide", "truediv"),
    "eq": ("equal_to",),
    "floor_divide": ("floordiv",),
    "ge": ("greater_equal",),
    "gt": ("greater",),
    "le": ("less_equal",),
    "log_sigmoid": ("logsigmoid",),
    "lt": ("less",),
    "mul": ("multiply",),
    "ne": ("not_equal",),
    "neg": ("negative",),
    "pow": ("float_power",),
    "remainder": ("mod",),
    "sigmoid": ("expit",),
    "sub": ("subtract",),
    "trunc": ("fix",),
}

_FUNCTIONS: dict[str, Function] = ARITHMETIC | ACTIVATIONS | COMPOSITES | _CASTS

ELEMENTWISE: dict[str, Function] = _FUNCTIONS | {
    alias: _FUNCTIONS[name] for name, aliases in _ALIASES.items() for alias in aliases
}
