"""Traced scalars: what a user's function sees in place of numbers and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from xdsl.dialects.builtin import f32, i1, i64
from xdsl.ir import Attribute, SSAValue

from attn_engine.errors import (
    ConcreteValueError,
    ControlFlowError,
    InPlaceWriteError,
    LeakedValueError,
    LoopError,
    OperandError,
    UnsupportedFunctionError,
)
from attn_engine.frontend.source import refuse

if TYPE_CHECKING:
    from attn_engine.frontend.region import RegionTrace

Operand: TypeAlias = "Symbol | torch.Tensor | bool | int | float"

_DTYPES: dict[Attribute, torch.dtype] = {f32: torch.float32, i64: torch.int64, i1: torch.bool}


class TracedValue:
    """Whatever stands for data while a user's function runs."""

    def trace_call(self, name: str, args: Sequence[object]) -> Any:
        """Take over a call that this value is an argument of; NotImplemented where any function may take it."""
        return NotImplemented


class Symbol(TracedValue):
    """A scalar under tracing: f32, i64 or i1.

    Every operator, torch function and tensor method that `RegionTrace.functions` knows emits code
    into the region that the symbol belongs to.
    """

    # numpy scalars on the left give way to the reflected operators.
    __array_ufunc__ = None

    def __init__(self, region: RegionTrace, value: SSAValue):
        self.region = region
        self._value = value

    @property
    def value(self) -> SSAValue:
        """The SSA value, in the region that is being traced."""
        if not self.region.active:
            refuse(
                LeakedValueError,
                f"a value traced in {self.region.name} is used after that function has returned",
                "return the value instead, or compute it anew in the function that needs it",
            )
        return self._value

    @property
    def type(self) -> Attribute:
        return self.value.type

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.type]

    @property
    def ndim(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"<traced {self._value.type} in {self.region.name}>"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        # While tracing, the mode of the region takes every call before it reaches this place.
        refuse(
            LeakedValueError,
            f"torch.{func.__name__} gets a traced value outside of the function it was traced in",
            "return the value instead, or compute it anew in the function that needs it",
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_"):
            refuse(InPlaceWriteError, f".{name}() writes in place", f"write x = x.{name[:-1]}(...)")
        if name not in self.region.functions:
            refuse(
                UnsupportedFunctionError,
                f".{name} is not known on a traced value",
                "a traced value is one number: use operators, comparisons and elementwise torch functions",
            )
        return lambda *args, **kwargs: self.region.apply(name, (self, *args), kwargs)

    def _apply(self, name: str, *args: object) -> Any:
        return self.region.apply(name, args, {})

    # Arithmetic
    def __add__(self, other: Operand) -> Symbol:
        return self._apply("add", self, other)

    def __radd__(self, other: Operand) -> Symbol:
        return self._apply("add", other, self)

    def __sub__(self, other: Operand) -> Symbol:
        return self._apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Symbol:
        return self._apply("sub", other, self)

    def __mul__(self, other: Operand) -> Symbol:
        return self._apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Symbol:
        return self._apply("mul", other, self)

    def __truediv__(self, other: Operand) -> Symbol:
        return self._apply("div", self, other)

    def __rtruediv__(self, other: Operand) -> Symbol:
        return self._apply("div", other, self)

    def __floordiv__(self, other: Operand) -> Symbol:
        return self._apply("floor_divide", self, other)

    def __rfloordiv__(self, other: Operand) -> Symbol:
        return self._apply("floor_divide", other, self)

    def __mod__(self, other: Operand) -> Symbol:
        return self._apply("remainder", self, other)

    def __rmod__(self, other: Operand) -> Symbol:
        return self._apply("remainder", other, self)

    def __divmod__(self, other: Operand) -> tuple[Symbol, Symbol]:
        return self // other, self % other

    def __rdivmod__(self, other: Operand) -> tuple[Symbol, Symbol]:
        return other // self, other % self

    def __pow__(self, other: Operand) -> Symbol:
        return self._apply("pow", self, other)

    def __rpow__(self, other: Operand) -> Symbol:
        return self._apply("pow", other, self)

    def __neg__(self) -> Symbol:
        return self._apply("neg", self)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return self._apply("abs", self)

    def __round__(self, digits: int = 0) -> Symbol:
        return self.region.apply("round", (self,), {"decimals": digits})

    def __floor__(self) -> Symbol:
        return self._apply("long", self._apply("floor", self))

    def __ceil__(self) -> Symbol:
        return self._apply("long", self._apply("ceil", self))

    def __trunc__(self) -> Symbol:
        return self._apply("long", self)

    # Comparisons
    def __eq__(self, other: object) -> Symbol:  # type: ignore[override]
        return self._apply("eq", self, other)

    def __ne__(self, other: object) -> Symbol:  # type: ignore[override]
        return self._apply("ne", self, other)

    def __lt__(self, other: Operand) -> Symbol:
        return self._apply("lt", self, other)

    def __le__(self, other: Operand) -> Symbol:
        return self._apply("le", self, other)

    def __gt__(self, other: Operand) -> Symbol:
        return self._apply("gt", self, other)

    def __ge__(self, other: Operand) -> Symbol:
        return self._apply("ge", self, other)

    # Bits and logic
    def __and__(self, other: Operand) -> Symbol:
        return self._apply("bitwise_and", self, other)

    def __rand__(self, other: Operand) -> Symbol:
        return self._apply("bitwise_and", other, self)

    def __or__(self, other: Operand) -> Symbol:
        return self._apply("bitwise_or", self, other)

    def __ror__(self, other: Operand) -> Symbol:
        return self._apply("bitwise_or", other, self)

    def __xor__(self, other: Operand) -> Symbol:
        return self._apply("bitwise_xor", self, other)

    def __rxor__(self, other: Operand) -> Symbol:
        return self._apply("bitwise_xor", other, self)

    def __invert__(self) -> Symbol:
        return self._apply("bitwise_not", self)

    def __lshift__(self, other: Operand) -> Symbol:
        return self._apply("bitwise_left_shift", self, other)

    def __rlshift__(self, other: Operand) -> Symbol:
        return self._apply("bitwise_left_shift", other, self)

    def __rshift__(self, other: Operand) -> Symbol:
        return self._apply("bitwise_right_shift", self, other)

    def __rrshift__(self, other: Operand) -> Symbol:
        return self._apply("bitwise_right_shift", other, self)

    # What one number under tracing cannot do
    def __bool__(self) -> NoReturn:
        refuse(
            ControlFlowError,
            "Python decides on a traced value here (if, while, and, or, not, in, min, max, a chained comparison)",
            "write torch.where(condition, a, b) for if; &, |, ~ with parentheses for and, or, not;"
            " (a <= x) & (x < b) for a <= x < b; torch.minimum and torch.maximum for min and max",
        )

    def _concrete(self) -> NoReturn:
        refuse(
            ConcreteValueError,
            "Python needs the number of a traced value here (float(), int(), a function of math, a list index)",
            "write x.float() or x.long() for a cast, torch.exp for math.exp,"
            " and torch.tensor(values) in place of a list, made outside of the function and indexed as values[i]",
        )

    def __float__(self) -> float:
        self._concrete()

    def __int__(self) -> int:
        self._concrete()

    def __index__(self) -> int:
        self._concrete()

    def __complex__(self) -> complex:
        self._concrete()

    def item(self) -> NoReturn:
        self._concrete()

    def tolist(self) -> NoReturn:
        self._concrete()

    def __hash__(self) -> int:
        refuse(
            ConcreteValueError,
            "a traced value is looked up in a dict or set here",
            "make the values a tensor outside of the function and index it: values[i]",
        )

    def __iter__(self) -> Iterator[Symbol]:
        refuse(
            LoopError,
            "a loop over a traced value",
            "a traced value is one number; write the formula for one element, without the loop",
        )

    def __len__(self) -> int:
        refuse(
            LoopError,
            "the length of a traced value",
            "in a row function, torch.ones_like(s).sum() is the number of visible keys; elsewhere there is one number",
        )

    def __getitem__(self, index: object) -> NoReturn:
        refuse(
            OperandError,
            "a traced value is indexed",
            "a traced value is one number; index the tensor with all of its indices at once: table[h, q_idx]",
        )

    def __setitem__(self, index: object, value: object) -> None:
        refuse(InPlaceWriteError, "a write into a traced value", "write torch.where(condition, new, old)")

    def __matmul__(self, other: object) -> NoReturn:
        refuse(UnsupportedFunctionError, "@ on a traced value", "a traced value is one number: write a * b")

    __rmatmul__ = __matmul__
