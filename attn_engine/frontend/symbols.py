"""Traced scalars: what a user's function sees in place of numbers and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from xdsl.dialects.arith import ConstantOp
from xdsl.dialects.builtin import IntegerAttr, f32, i1, i64
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
from attn_engine.frontend.operators import Operand as Operand
from attn_engine.frontend.operators import Operators
from attn_engine.frontend.operators import TracedValue as TracedValue
from attn_engine.frontend.source import refusal, refuse

if TYPE_CHECKING:
    from attn_engine.frontend.region import RegionTrace

_DTYPES: dict[Attribute, torch.dtype] = {f32: torch.float32, i64: torch.int64, i1: torch.bool}


_NO_LENGTH = (
    "in a row function, torch.ones_like(s).sum() is the number of visible keys; a length of the tensors is a number or a"
    " captured tensor that the function closes over"
)


class _NoSizes(tuple[int, ...]):
    """The shape of one number: it has no axes, and whoever asks for one means the row."""

    __slots__ = ()

    def __getitem__(self, axis: object) -> NoReturn:
        refuse(LoopError, "a size of a traced value, which is one number", _NO_LENGTH)


class Symbol(Operators):
    """A scalar under tracing: f32, i64 or i1.

    Every operator, torch function and tensor method that `RegionTrace.functions` knows emits code
    into the region that the symbol belongs to.
    """

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
    def scalar_type(self) -> Attribute:
        return self.value.type

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.scalar_type]

    @property
    def ndim(self) -> int:
        return 0

    @property
    def shape(self) -> tuple[int, ...]:
        return _NoSizes()

    def dim(self) -> int:
        return 0

    def size(self, dim: int | None = None) -> tuple[int, ...] | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> NoReturn:
        refuse(LoopError, "the number of elements of a traced value, which is one", _NO_LENGTH)

    def spelled(self) -> str:
        """As an index, the way its user may have written it."""
        owner = self.value.owner
        if isinstance(owner, ConstantOp) and isinstance(owner.value, IntegerAttr):
            return str(owner.value.value.data)
        return self.value.name_hint or "index"

    @property
    def device(self) -> torch.device:
        """Where the tensors of the call are: a tensor made inside of the function belongs there."""
        return self.region.tracer.device

    def __repr__(self) -> str:
        return f"<traced {self._value.type} in {self.region.name}>"

    def __format__(self, spec: str) -> str:
        if spec:
            self._concrete()
        return repr(self)

    def __deepcopy__(self, memo: object) -> Symbol:
        return self

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
            "Python needs the number of a traced value here (float(), int(), a function of math, a list index, a format)",
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
            "the length of a traced value, which is one number",
            _NO_LENGTH,
        )

    def __getitem__(self, index: object) -> Any:
        if self.region.channels:
            return self.region.at_channel(self, index)
        raise refusal(
            OperandError,
            "a traced value is indexed",
            "a traced value is one number; index the tensor with all of its indices at once: table[h, q_idx]",
        )

    def __setitem__(self, index: object, value: object) -> None:
        refuse(InPlaceWriteError, "a write into a traced value", "write torch.where(condition, new, old)")

    def __matmul__(self, other: object) -> NoReturn:
        refuse(UnsupportedFunctionError, "@ on a traced value", "a traced value is one number: write a * b")

    def __rmatmul__(self, other: object) -> NoReturn:
        refuse(UnsupportedFunctionError, "@ on a traced value", "a traced value is one number: write a * b")
