"""Captured tensors indexed in part: more indices may follow, and a last axis of fixed size is a vector.

`table[h][q_idx]` is `table[h, q_idx]`; `torch.dot(a[b, q_idx], c[kv_idx])` and `w[h].sum()` are unrolled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from xdsl.dialects.builtin import i64

from attn_engine.errors import CaptureIndexError, ReductionError, UnsupportedFunctionError
from attn_engine.frontend.operators import Operators, untraced
from attn_engine.frontend.source import refuse, user_line
from attn_engine.frontend.symbols import Symbol

if TYPE_CHECKING:
    from attn_engine.frontend.region import RegionTrace

LONGEST = 64
"""Elements up to which a vector is unrolled."""

Calls = Mapping[str, Any]


class Vector(Operators):
    """Numbers in a row, each a traced value: elementwise functions act on all, reductions give one."""

    def __init__(self, region: RegionTrace, elements: Sequence[Any]):
        self.region, self._where = region, user_line()
        self._elements = list(elements)

    def elements(self) -> list[Any]:
        return self._elements

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.elements()),))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        return self.region.tracer.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements())

    def __getitem__(self, index: Any) -> Any:
        found = self.elements()[index]
        return Vector(self.region, found) if isinstance(index, slice) else found

    def __matmul__(self, other: object) -> Any:
        return self.region.apply("dot", (self, other), {})

    def __rmatmul__(self, other: object) -> Any:
        return self.region.apply("dot", (other, self), {})

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.region.apply(name, (self, *args), kwargs)

    def __bool__(self) -> NoReturn:
        self.refuse_whole()

    def refuse_whole(self) -> NoReturn:
        """It is used as one number."""
        raise CaptureIndexError(
            f"a vector of {len(self)} numbers is used as one number",
            "index it, or reduce it: (a * b).sum(), torch.dot(a, b)",
            self._where,
        )

    def trace_call(self, name: str, args: Sequence[object], kwargs: Calls) -> Any:
        if name in _REDUCTIONS and _reduces(name, args, kwargs):
            return _reduced(self.region, name, _as_elements(self.region, args[0]))
        if name == "squeeze" and len(self) == 1:
            return self[0]
        if name in ("dot", "inner", "vdot", "matmul"):
            left, right = (_as_elements(self.region, a) for a in args)
            return _total(self.region, [a * b for a, b in _zipped(left, right)])
        columns = [_as_elements(self.region, a) if _is_vector(a) else None for a in args]
        lengths = {len(c) for c in columns if c is not None} - {1}
        if len(lengths) > 1:
            refuse(CaptureIndexError, f"vectors of {sorted(lengths)} numbers meet in {name}", "give both the same size")
        count = max(lengths, default=1)
        results = [
            self.region.apply(
                name, [a if c is None else c[i % len(c)] for a, c in zip(args, columns, strict=True)], kwargs
            )
            for i in range(count)
        ]
        return Vector(self.region, results)


class Part(Vector):
    """A captured tensor with its first indices; a last axis alone is a vector, read element by element."""

    def __init__(self, region: RegionTrace, tensor: torch.Tensor, indices: tuple[object, ...]):
        self.region, self._where = region, user_line()
        self.tensor, self.indices = tensor, indices
        with untraced():
            self.is_row = tensor.ndim == len(indices) + 1
        self._read: list[Symbol] | None = None

    @property
    def name(self) -> str:
        return self.region.tracer.name_of(self.tensor)

    @property
    def shape(self) -> torch.Size:
        with untraced():
            for axis in range(len(self.indices), self.tensor.ndim):
                self.region.tracer.fix_size(self.tensor, axis)
            return self.tensor.shape[len(self.indices) :]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def elements(self) -> list[Any]:
        if self._read is None:
            if not self.is_row:
                self.refuse_whole()
            (size,) = self.shape
            if size > LONGEST:
                refuse(
                    CaptureIndexError,
                    f"a row of {size} numbers of tensor '{self.name}' is read whole",
                    f"at most {LONGEST} are unrolled: reduce the tensor outside of the function, or make these"
                    " numbers channels of the query and key",
                )
            self._read = [self.region.load(self.tensor, (*self.indices, i)) for i in range(size)]
        return self._read

    def __iter__(self) -> Iterator[Any]:
        if self.is_row:
            return iter(self.elements())
        return iter([self[i] for i in range(self.shape[0])])

    def __getitem__(self, index: Any) -> Any:
        indices = cast("tuple[object, ...]", index if isinstance(index, tuple) else (index,))
        bounds: Any = indices[0] if len(indices) == 1 else None
        if isinstance(bounds, slice) and bounds != slice(None) and self.is_row:
            return Vector(self.region, self.elements()[bounds])
        return self.region.load(self.tensor, (*self.indices, *indices))

    def refuse_whole(self) -> NoReturn:
        """It is used as one number, or as a row though several axes are left."""
        given = [spelled(i) for i in self.indices]
        missing = ", ".join([*given, *["i", "j", "k"][: self.tensor.ndim - len(given)]])
        raise CaptureIndexError(
            f"tensor '{self.name}' has {self.tensor.ndim} dimensions and is indexed in {len(given)} of them",
            f"give every index: {self.name}[{missing}]; of a last axis of fixed size, reduce what you read:"
            f" {self.name}[{', '.join(given)}].sum()",
            self._where,
        )


def spelled(index: object) -> str:
    """An index as the user may have written it."""
    if isinstance(index, Symbol):
        return index.spelled()
    return str(index) if isinstance(index, int) else "index"


def _is_vector(operand: object) -> bool:
    return isinstance(operand, Vector) or (isinstance(operand, torch.Tensor) and operand.ndim == 1)


def _as_elements(region: RegionTrace, operand: object) -> list[Any]:
    if isinstance(operand, torch.Tensor) and operand.ndim == 1:
        return Part(region, operand, ()).elements()
    if not isinstance(operand, Vector):
        refuse(UnsupportedFunctionError, "a vector meets one number", "write a * x elementwise, or index the vector")
    return operand.elements()


def _zipped(left: list[Any], right: list[Any]) -> Iterator[tuple[Any, Any]]:
    if len(left) != len(right):
        refuse(CaptureIndexError, f"a dot of {len(left)} and {len(right)} numbers", "give both the same size")
    return zip(left, right, strict=True)


def _reduces(name: str, args: Sequence[object], kwargs: Calls) -> bool:
    """Whether it is the reduction of that name and no elementwise `max(other)`; over the one axis there is."""
    if name in ("max", "min") and len(args) > 1 and not isinstance(args[1], int):
        return False
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim not in (None, -1, 0, (-1,), [-1]):
        refuse(ReductionError, f"a reduction of a vector over dim {dim!r}", "a vector has one axis: leave dim out")
    return True


def _counted(region: RegionTrace, values: list[Any]) -> list[Any]:
    """Conditions as 0 and 1: reductions count them, where + and * of two would give a condition."""
    return [region.common(value, at_least=i64)[0] for value in values]


def _total(region: RegionTrace, values: list[Any]) -> Any:
    return reduce(lambda a, b: a + b, _counted(region, values)) if values else region.symbol(0.0)


def _product(region: RegionTrace, values: list[Any]) -> Any:
    return reduce(lambda a, b: a * b, _counted(region, values))


def _pairwise(name: str) -> Callable[[RegionTrace, list[Any]], Any]:
    return lambda region, values: reduce(lambda a, b: region.apply(name, (a, b), {}), values)


def _mean(region: RegionTrace, values: list[Any]) -> Any:
    return _total(region, values) / len(values)


def unsqueeze(region: RegionTrace, x: object, dim: int) -> Vector:
    """One number as a vector of one."""
    return Vector(region, [region.symbol(x)])


def stack(region: RegionTrace, values: Sequence[object], dim: int = 0) -> Vector:
    """Several numbers as a vector."""
    return Vector(region, [region.symbol(x) for x in values])


_REDUCTIONS: dict[str, Callable[[RegionTrace, list[Any]], Any]] = {
    "all": _pairwise("logical_and"),
    "amax": _pairwise("maximum"),
    "amin": _pairwise("minimum"),
    "any": _pairwise("logical_or"),
    "max": _pairwise("maximum"),
    "mean": _mean,
    "min": _pairwise("minimum"),
    "prod": _product,
    "sum": _total,
}


def _reduced(region: RegionTrace, name: str, values: list[Any]) -> Any:
    if not values and name != "sum":
        refuse(ReductionError, f"{name} of no numbers", "the captured tensor has an empty last axis")
    return _REDUCTIONS[name](region, values)
