"""One region under tracing: a block that grows by one op per operation of the user's function."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from xdsl.dialects import arith
from xdsl.dialects.builtin import FloatAttr, IntegerAttr, TensorType, f32, i1, i64
from xdsl.ir import Attribute, Block, Operation, SSAValue

from attn_engine.dialects import attn
from attn_engine.errors import (
    CaptureIndexError,
    InPlaceWriteError,
    IntegerOverflowError,
    OperandError,
    UnsupportedFunctionError,
)
from attn_engine.frontend.operators import untraced as untraced
from attn_engine.frontend.source import refusal, refuse
from attn_engine.frontend.symbols import Symbol, TracedValue
from attn_engine.frontend.vectors import Part, Vector
from attn_engine.ir.walks import behind

if TYPE_CHECKING:
    from attn_engine.frontend.trace import Tracer

Function: TypeAlias = Callable[..., object]

_RANK: dict[Attribute, int] = {i1: 0, i64: 1, f32: 2}
_BY_RANK: tuple[Attribute, ...] = (i1, i64, f32)


class Level(IntEnum):
    """What a value is one of, in a row function."""

    UNIFORM = 0
    ROW = 1
    ELEMENT = 2


@dataclass(eq=False)
class RegionTrace:
    """The region of one user function while that function runs.

    `functions` says by name what may be called on its values; each takes the region and then
    the arguments of the torch function of that name.
    """

    name: str
    tracer: Tracer
    leading: Sequence[tuple[str, Attribute]]
    functions: Mapping[str, Function]
    block: Block = field(init=False)
    active: bool = True
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    levels: dict[SSAValue, Level] = field(default_factory=dict[SSAValue, Level])
    constants: dict[tuple[Attribute, str], Symbol] = field(default_factory=dict[tuple[Attribute, str], Symbol])
    channels: int = 0
    """Of the row of an operand that a query, key or value mod may read; 0 for other functions."""

    def __post_init__(self) -> None:
        self.block = Block(arg_types=[type_ for _, type_ in self.leading])
        for argument, (hint, _) in zip(self.block.args, self.leading, strict=True):
            argument.name_hint = hint

    @property
    def arguments(self) -> list[Symbol]:
        """The values that the user's function is called with."""
        return [Symbol(self, argument) for argument in self.block.args[: len(self.leading)]]

    def apply(self, name: str, args: Sequence[object], kwargs: Mapping[str, Any]) -> Any:
        """Call the function of that name on traced values."""
        for argument in args:
            if isinstance(argument, TracedValue):
                taken = argument.trace_call(name, args, kwargs)
                if taken is not NotImplemented:
                    return taken
        function = self.functions.get(name)
        if torch.is_grad_enabled() != self.grad_enabled:
            refuse(
                UnsupportedFunctionError,
                "gradients are switched off for a part of a traced function: torch.no_grad or a custom autograd.Function",
                "leave torch.no_grad() out (a maximum that only stabilises costs no gradient anyway); write a custom"
                " autograd.Function as plain arithmetic",
            )
        if name.endswith("_") or name == "setitem" or kwargs.get("out") is not None:
            refuse(
                InPlaceWriteError, f"{name} writes in place", "write a new value: y = torch.where(condition, new, x)"
            )
        if function is None:
            refuse(
                UnsupportedFunctionError,
                f"torch function '{name}' is not known on traced values",
                "write it with operators, torch.where and elementwise functions such as exp, log, tanh, clamp, maximum",
            )
        try:
            with untraced():
                return function(self, *args, **kwargs)
        except TypeError as error:
            refuse(
                OperandError, f"'{name}' cannot be called like this: {error}", "give it the arguments that torch takes"
            )

    # Emission
    def emit(self, op: Operation, level: Level | None = None) -> Symbol:
        """Append an op of one result."""
        self.block.add_op(op)
        result = op.results[0]
        inherited = max((self.levels.get(operand, Level.UNIFORM) for operand in op.operands), default=Level.UNIFORM)
        self.levels[result] = inherited if level is None else level
        return Symbol(self, result)

    def level(self, symbol: Symbol) -> Level:
        return self.levels.get(symbol.value, Level.UNIFORM)

    def constant(self, number: bool | int | float, type_: Attribute) -> Symbol:
        """A constant; the region holds each one once."""
        number = _as_float(number) if type_ == f32 else number
        key = (type_, repr(number))
        if key not in self.constants:
            self.constants[key] = self.emit(constant_op(number, type_))
        return self.constants[key]

    # Coercion
    def symbol(self, operand: object, type_: Attribute | None = None) -> Symbol:
        """An operand as a value of this region, promoted to `type_`."""
        number = as_number(operand)
        if number is not None:
            return self.constant(number, type_ or natural_type(number))
        if isinstance(operand, torch.Tensor):
            operand = self.read_whole(operand)
        if isinstance(operand, Vector):
            operand.refuse_whole()
        if not isinstance(operand, Symbol):
            refuse(
                OperandError,
                f"an operand is {_describe(operand)}",
                "use traced values, Python numbers and tensors that are indexed to one element",
            )
        return operand if type_ is None else self.promote(operand, type_)

    def promote(self, symbol: Symbol, type_: Attribute) -> Symbol:
        """A bool counts as 0 or 1, an integer becomes a float."""
        if symbol.scalar_type == type_:
            return symbol
        match (_RANK[symbol.scalar_type], _RANK[type_]):
            case (0, 1):
                return self.emit(arith.ExtUIOp(symbol.value, i64))
            case (0, 2):
                return self.emit(arith.UIToFPOp(symbol.value, f32))
            case (1, 2):
                return self.emit(arith.SIToFPOp(symbol.value, f32))
            case _:
                raise refusal(
                    OperandError,
                    f"a value is {symbol.scalar_type} where {type_} is needed",
                    "cast it: x.long() truncates, (x != 0) makes a condition",
                )

    def as_f32(self, operand: object) -> Symbol:
        return self.symbol(operand, f32)

    def as_i64(self, operand: object) -> Symbol:
        return self.symbol(operand, i64)

    def as_i1(self, operand: object) -> Symbol:
        return self.symbol(operand, i1)

    def common(self, *operands: object, at_least: Attribute = i1) -> list[Symbol]:
        """The operands, promoted to the type that torch computes in."""
        rank = max(_RANK[at_least], *(self._rank(operand) for operand in operands))
        return [self.symbol(operand, _BY_RANK[rank]) for operand in operands]

    def _rank(self, operand: object) -> int:
        number = as_number(operand)
        if number is not None:
            return _RANK[natural_type(number)]
        if isinstance(operand, torch.Tensor):
            return 2 if operand.is_floating_point() else 0 if operand.dtype == torch.bool else 1
        return _RANK[self.symbol(operand).scalar_type]

    # Captures
    def read_whole(self, tensor: torch.Tensor) -> Symbol:
        """A tensor of one element as a number."""
        with untraced():
            return self._read_whole(tensor)

    def _read_whole(self, tensor: torch.Tensor) -> Symbol:
        known = self.tracer.known_number(tensor)
        if known is not None:
            return self.symbol(known)
        if (element := self.tracer.element_of(tensor)) is not None and not tensor.ndim:
            return self.load(*element)
        if tensor.ndim:
            self.tracer.reads_values = True
        if tensor.numel() != 1:
            name = self.tracer.name_of(tensor)
            refuse(
                CaptureIndexError,
                f"tensor '{name}' of shape {tuple(tensor.shape)} is used as one number",
                f"index it to one element: {name}[{', '.join(['b', 'h', 'q_idx', 'kv_idx'][-tensor.ndim :])}]",
            )
        return self.load(tensor, [0] * tensor.ndim)

    def load(self, tensor: torch.Tensor, indices: Sequence[object]) -> Any:
        """One element of a captured tensor, or a part of it where indices are missing."""
        with untraced():
            rank = tensor.ndim
        while indices and _is_everything(indices[-1]):
            indices = indices[:-1]
        if indices and isinstance(indices[-1], slice) and len(indices) == rank:
            return Part(self, tensor, tuple(self.index(tensor, i) for i in indices[:-1]))[indices[-1]]
        symbols = [self.index(tensor, index) for index in indices]
        if len(symbols) < rank:
            return Part(self, tensor, tuple(symbols))
        if len(symbols) > rank:
            name = self.tracer.name_of(tensor)
            fitting = ", ".join(symbol.spelled() for symbol in symbols[:rank])
            refuse(
                CaptureIndexError,
                f"tensor '{name}' has {rank} dimensions and is indexed in {len(symbols)} of them",
                f"give one index for each: {name}[{fitting}]",
            )
        position = self.tracer.capture(tensor)
        argument = self.capture_argument(position)
        assert isinstance(argument.type, TensorType)
        element = cast("Attribute", argument.type.get_element_type())
        result = i1 if element == i1 else i64 if not _is_float(element) else f32
        return self.emit(attn.LoadOp(argument, [symbol.value for symbol in symbols], result))

    def index(self, tensor: torch.Tensor, index: object) -> Symbol:
        if index is None or index is Ellipsis or isinstance(index, slice | list):
            refuse(
                CaptureIndexError,
                f"tensor '{self.tracer.name_of(tensor)}' is indexed by {_describe(cast('object', index))}",
                "index it to one element with integers; slice, reshape and reduce it outside of the function",
            )
        symbol = self.symbol(index)
        if symbol.scalar_type != i64:
            refuse(
                CaptureIndexError,
                f"an index of tensor '{self.tracer.name_of(tensor)}' is {symbol.scalar_type}",
                "make it an integer: x.long()",
            )
        return symbol

    def at_channel(self, value: Symbol, index: object) -> Symbol:
        """What a value of a mod is at another channel of its row; indices go round."""
        place = self.symbol(index)
        if place.scalar_type != i64:
            refuse(OperandError, f"a channel is {place.scalar_type}", "index by an integer that is made of the channel")
        around = self.apply("remainder", (place, self.channels), {})
        unexpected = _arguments_behind(around.value) - {self.block.args[4]}
        if unexpected:
            names = ", ".join(sorted(argument.name_hint or "a capture" for argument in unexpected))
            refuse(
                OperandError,
                f"the channel that is read depends on {names}",
                "make the index of the channel and constants alone: x[(channel + d // 2) % d]",
            )
        number = self.as_f32(value)
        if self.level(number) is not Level.ELEMENT:
            return number
        return self.emit(attn.ChannelAtOp(number.value, around.value), Level.ELEMENT)

    def capture_argument(self, position: int) -> SSAValue:
        """The block argument of a capture; arguments are added up to it."""
        while len(self.block.args) <= len(self.leading) + position:
            capture = self.tracer.captures[len(self.block.args) - len(self.leading)]
            argument = self.block.insert_arg(capture.type, len(self.block.args))
            argument.name_hint = capture.name
        return self.block.args[len(self.leading) + position]

    def finish(self, *values: SSAValue) -> None:
        """Yield the results, drop what does not lead to them, close the region."""
        self.block.add_op(attn.YieldOp(*values))
        for op in reversed(list(self.block.ops)):
            if op.results and not any(result.uses for result in op.results):
                op.detach()
                op.erase()
        self.active = False


def _arguments_behind(value: SSAValue) -> set[SSAValue]:
    return {v for v in behind([value]) if not isinstance(v.owner, Operation)}


def as_number(operand: object) -> bool | int | float | None:
    """A Python or numpy number as a Python number."""
    if isinstance(operand, bool | int | float):
        return operand
    if type(operand).__module__ == "numpy" and hasattr(operand, "item") and not getattr(operand, "shape", ()):
        return as_number(operand.item())  # type: ignore[attr-defined]
    return None


def natural_type(number: bool | int | float) -> Attribute:
    return i1 if isinstance(number, bool) else i64 if isinstance(number, int) else f32


def _as_float(number: bool | int | float) -> float:
    """The nearest f32, infinite beyond its range."""
    try:
        return ctypes.c_float(number).value
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def constant_op(number: bool | int | float, type_: Attribute) -> arith.ConstantOp:
    """A constant of f32 (rounded, beyond its range infinite), i64 or i1."""
    if type_ == f32:
        return arith.ConstantOp(FloatAttr(_as_float(number), f32))
    if not isinstance(number, int):
        refuse(OperandError, f"{number!r} where an integer is needed", "write an integer, or cast the other operand")
    if not -(2**63) <= number < 2**63:
        refuse(
            IntegerOverflowError,
            f"the integer {number} does not fit into 64 bits",
            "traced integers are i64; write a float if a float is meant",
        )
    return arith.ConstantOp(IntegerAttr(int(number), i1 if type_ == i1 else i64))


def _is_float(type_: Attribute) -> bool:
    return str(type_).startswith(("f", "bf"))


def _is_everything(index: object) -> bool:
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _describe(value: object) -> str:
    return repr(value) if value is None or value is Ellipsis else f"a {type(value).__name__}"
