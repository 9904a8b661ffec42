"""Python's operators on traced values: each is the torch function of its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import torch

from attn_engine.errors import ConcreteValueError, LeakedValueError, UnsupportedFunctionError
from attn_engine.frontend.source import refusal, refuse

if TYPE_CHECKING:
    from attn_engine.frontend.region import RegionTrace

Operand: TypeAlias = "TracedValue | torch.Tensor | bool | int | float"


def untraced() -> AbstractContextManager[object]:
    """Torch calls of our own, which tell nothing about the user's function."""
    return torch._C.DisableTorchFunction()  # pyright: ignore[reportPrivateUsage]


class TracedValue:
    """Whatever stands for data while a user's function runs."""

    def trace_call(self, name: str, args: Sequence[object], kwargs: Mapping[str, Any]) -> Any:
        """Take over a call that this value is an argument of; NotImplemented where any function may take it."""
        return NotImplemented


def contains_traced(values: Iterable[object]) -> bool:
    """Whether there is a traced value among arguments, or in lists, tuples and slices of them."""
    for value in values:
        if isinstance(value, TracedValue):
            return True
        if isinstance(value, slice):
            bounds = cast("slice[object, object, object]", value)
            value = (bounds.start, bounds.stop, bounds.step)
        if isinstance(value, tuple | list) and contains_traced(cast("Sequence[object]", value)):
            return True
    return False


_NUMPY_OPERATORS = {
    "equal": "eq",
    "left_shift": "bitwise_left_shift",
    "power": "pow",
    "right_shift": "bitwise_right_shift",
} | {
    name: name
    for name in [
        "add",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "divide",
        "floor_divide",
        "greater",
        "greater_equal",
        "less",
        "less_equal",
        "multiply",
        "not_equal",
        "remainder",
        "subtract",
    ]
}
"""What an operator with a numpy number on its left calls, and the torch function that it is."""


class Operators(TracedValue):
    """A traced value with operators."""

    region: RegionTrace

    def __array_ufunc__(self, function: Any, method: str, *inputs: object, **options: object) -> Any:
        name = function.__name__
        if method == "__call__" and name in _NUMPY_OPERATORS and not options:
            return self._apply(_NUMPY_OPERATORS[name], *inputs)
        raise refusal(
            UnsupportedFunctionError,
            f"numpy's {name} on a traced value",
            f"write torch.{name}, or with operators; numpy may make numbers and tensors outside of the function",
        )

    def __array_function__(self, function: Any, types: object, args: object, kwargs: object) -> NoReturn:
        refuse(
            UnsupportedFunctionError,
            f"numpy's {function.__name__} on a traced value",
            "write torch's function of that kind, torch.where or operators; numpy may make numbers and tensors outside of"
            " the function",
        )

    def __array__(self, *_: object, **__: object) -> NoReturn:
        refuse(
            ConcreteValueError,
            "numpy needs the number of a traced value here (an array's index, np.array, np.asarray, a numpy type)",
            "of an array that is indexed make a tensor outside of the function, values = torch.from_numpy(array), and write"
            " values[i]; write torch functions in place of numpy's",
        )

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

    def _apply(self, name: str, *args: object) -> Any:
        return self.region.apply(name, args, {})

    # Arithmetic
    def __add__(self, other: Operand) -> Any:
        return self._apply("add", self, other)

    def __radd__(self, other: Operand) -> Any:
        return self._apply("add", other, self)

    def __sub__(self, other: Operand) -> Any:
        return self._apply("sub", self, other)

    def __rsub__(self, other: Operand) -> Any:
        return self._apply("sub", other, self)

    def __mul__(self, other: Operand) -> Any:
        return self._apply("mul", self, other)

    def __rmul__(self, other: Operand) -> Any:
        return self._apply("mul", other, self)

    def __truediv__(self, other: Operand) -> Any:
        return self._apply("div", self, other)

    def __rtruediv__(self, other: Operand) -> Any:
        return self._apply("div", other, self)

    def __floordiv__(self, other: Operand) -> Any:
        return self._apply("floor_divide", self, other)

    def __rfloordiv__(self, other: Operand) -> Any:
        return self._apply("floor_divide", other, self)

    def __mod__(self, other: Operand) -> Any:
        return self._apply("remainder", self, other)

    def __rmod__(self, other: Operand) -> Any:
        return self._apply("remainder", other, self)

    def __divmod__(self, other: Operand) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Operand) -> tuple[Any, Any]:
        return other // self, other % self

    def __pow__(self, other: Operand, modulus: Operand | None = None) -> Any:
        power = self._apply("pow", self, other)
        return power if modulus is None else power % modulus

    def __rpow__(self, other: Operand) -> Any:
        return self._apply("pow", other, self)

    def __neg__(self) -> Any:
        return self._apply("neg", self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self._apply("abs", self)

    def __round__(self, digits: int = 0) -> Any:
        return self.region.apply("round", (self,), {"decimals": digits})

    def __floor__(self) -> Any:
        return self._apply("long", self._apply("floor", self))

    def __ceil__(self) -> Any:
        return self._apply("long", self._apply("ceil", self))

    def __trunc__(self) -> Any:
        return self._apply("long", self)

    def where(self, condition: Any, other: Operand) -> Any:
        """Itself where the condition holds: the method has it second, the function torch.where first."""
        return self._apply("where", condition, self, other)

    # Comparisons
    def __eq__(self, other: object) -> Any:
        return self._apply("eq", self, other)

    def __ne__(self, other: object) -> Any:
        return self._apply("ne", self, other)

    def __lt__(self, other: Operand) -> Any:
        return self._apply("lt", self, other)

    def __le__(self, other: Operand) -> Any:
        return self._apply("le", self, other)

    def __gt__(self, other: Operand) -> Any:
        return self._apply("gt", self, other)

    def __ge__(self, other: Operand) -> Any:
        return self._apply("ge", self, other)

    # Bits and logic
    def __and__(self, other: Operand) -> Any:
        return self._apply("bitwise_and", self, other)

    def __rand__(self, other: Operand) -> Any:
        return self._apply("bitwise_and", other, self)

    def __or__(self, other: Operand) -> Any:
        return self._apply("bitwise_or", self, other)

    def __ror__(self, other: Operand) -> Any:
        return self._apply("bitwise_or", other, self)

    def __xor__(self, other: Operand) -> Any:
        return self._apply("bitwise_xor", self, other)

    def __rxor__(self, other: Operand) -> Any:
        return self._apply("bitwise_xor", other, self)

    def __invert__(self) -> Any:
        return self._apply("bitwise_not", self)

    def __lshift__(self, other: Operand) -> Any:
        return self._apply("bitwise_left_shift", self, other)

    def __rlshift__(self, other: Operand) -> Any:
        return self._apply("bitwise_left_shift", other, self)

    def __rshift__(self, other: Operand) -> Any:
        return self._apply("bitwise_right_shift", self, other)

    def __rrshift__(self, other: Operand) -> Any:
        return self._apply("bitwise_right_shift", other, self)
