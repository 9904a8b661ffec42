"""Reductions over the visible keys of a row, by name: what a row function may call beside elementwise functions."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from xdsl.dialects import math
from xdsl.dialects.builtin import f32

from attn_engine.dialects import attn
from attn_engine.dialects.attn import ReduceKind, TieRule
from attn_engine.errors import OperandError, ReductionError
from attn_engine.frontend.arithmetic import clamp, select, truth
from attn_engine.frontend.functions import ELEMENTWISE
from attn_engine.frontend.region import Function, Level, RegionTrace
from attn_engine.frontend.source import refusal, refuse
from attn_engine.frontend.symbols import Symbol
from attn_engine.ir.dead_rows import has_infinities


class NoIndices:
    """The place of the indices of `s.max(dim=-1)`, which do not exist here."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(ReductionError, "the indices of a maximum or minimum", "use the values only: s.max(dim=-1).values")


class Extremum(NamedTuple):
    """What `s.max(dim=-1)` gives."""

    values: Symbol
    indices: NoIndices


def reduce(r: RegionTrace, kind: ReduceKind, x: object, ties: TieRule | None = None) -> Symbol:
    """One number per row from one per element."""
    value = r.as_f32(x)
    if r.level(value) is not Level.ELEMENT:
        refuse(
            ReductionError,
            f"{kind.value} over a value that is one number per row already",
            "reduce what depends on s; torch.ones_like(s).sum() is the number of visible keys",
        )
    return r.emit(attn.RowReduceOp(kind, value.value, ties), level=Level.ROW)


def _check(dim: object, dtype: object = None) -> None:
    if dim not in (None, -1, (-1,), [-1]):
        refuse(
            ReductionError,
            f"a reduction over dim {dim!r}",
            "a row function sees one row: reduce over dim=-1, or write torch.maximum(s, x) for an elementwise maximum",
        )
    if dtype not in (None, torch.float32):
        refuse(ReductionError, f"a reduction in {dtype}", "rows are computed in float32: leave dtype out")


def row_sum(r: RegionTrace, x: object, dim: object = None, keepdim: bool = False, dtype: object = None) -> Symbol:
    _check(dim, dtype)
    return reduce(r, ReduceKind.SUM, x)


def count(r: RegionTrace, x: object) -> Symbol:
    """How many keys the row sees; in a mod, how many channels it has."""
    if r.channels:
        return r.constant(float(r.channels), f32)
    return reduce(r, ReduceKind.COUNT, x)


def row_mean(r: RegionTrace, x: object, dim: object = None, keepdim: bool = False, dtype: object = None) -> Symbol:
    return row_sum(r, x, dim, keepdim, dtype) / count(r, x)


def row_var(
    r: RegionTrace,
    x: object,
    dim: object = None,
    *,
    correction: float = 1,
    unbiased: bool | None = None,
    keepdim: bool = False,
) -> Symbol:
    """The mean square of the distances to the mean: the mean comes first, so that nothing cancels."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    _check(dim)
    value = r.as_f32(x)
    centred = value - row_mean(r, value)
    freedom = count(r, value) - float(correction if unbiased is None else unbiased)
    return row_sum(r, centred * centred) / r.apply("clamp", (freedom,), {"min": 0.0})


def row_std(r: RegionTrace, x: object, dim: object = None, **options: Any) -> Symbol:
    return _root(r, row_var(r, x, dim, **options))


def _root(r: RegionTrace, square: Symbol) -> Symbol:
    """The root of a sum of squares: at 0 its gradient is 0, as torch has it, and no 0 * inf."""
    nothing = square == 0.0
    return select(r, nothing, 0.0, r.emit(math.SqrtOp(select(r, nothing, 1.0, square).value)))


def _shared_extremum(kind: ReduceKind) -> Function:
    def function(r: RegionTrace, x: object, dim: object = None, keepdim: bool = False) -> Symbol:
        _check(dim)
        return reduce(r, kind, x, TieRule.SPLIT)

    return function


row_amax = _shared_extremum(ReduceKind.MAX)
row_amin = _shared_extremum(ReduceKind.MIN)


def _extremum(kind: ReduceKind, elementwise: Function) -> Function:
    """`s.max()`, `s.max(dim=-1)` and the elementwise `s.max(other)`."""

    def function(
        r: RegionTrace, x: object, other: object = None, *, dim: object = None, keepdim: object = False
    ) -> object:
        if isinstance(other, int) and not isinstance(other, bool):
            dim, other = other, None
        if other is not None:
            return elementwise(r, x, other)
        if dim is None:
            return reduce(r, kind, x, TieRule.SPLIT)
        _check(dim)
        return Extremum(reduce(r, kind, x, TieRule.FIRST), NoIndices())

    return function


def logsumexp(r: RegionTrace, x: object, dim: object = None, keepdim: bool = False) -> Symbol:
    """max + log(sum(exp(x - max))); of some scores, the others being -inf, it is -inf where there are none of them."""
    _check(dim)
    value = r.as_f32(x)
    top = reduce(r, ReduceKind.MAX, value, TieRule.SPLIT)
    start = select(r, top == -float("inf"), 0.0, top) if has_infinities(value.value) else top
    total = reduce(r, ReduceKind.SUM, r.emit(math.ExpOp((value - start).value)))
    return start + r.emit(math.LogOp(total.value))


def softmax(r: RegionTrace, x: object, dim: object = None, dtype: object = None) -> Symbol:
    _check(dim, dtype)
    value = r.as_f32(x)
    top = reduce(r, ReduceKind.MAX, value, TieRule.SPLIT)
    weight = r.emit(math.ExpOp((value - top).value))
    return weight / reduce(r, ReduceKind.SUM, weight)


def log_softmax(r: RegionTrace, x: object, dim: object = None, dtype: object = None) -> Symbol:
    _check(dim, dtype)
    return r.as_f32(x) - logsumexp(r, x, dim)


def vector_norm(
    r: RegionTrace, x: object, ord: float | str = 2, dim: object = None, keepdim: bool = False, **options: object
) -> Symbol:
    _check(dim)
    value, order = r.as_f32(x), options.get("p", ord)
    if order in (2, "fro"):
        return _root(r, row_sum(r, value * value))
    if order == 1:
        return row_sum(r, abs(value))
    if order == float("inf"):
        return reduce(r, ReduceKind.MAX, abs(value), TieRule.SPLIT)
    raise refusal(
        OperandError, f"a norm of order {order!r}", "write 1, 2 or inf, or the sum itself: (s.abs() ** 3).sum()"
    )


def normalize(
    r: RegionTrace, x: object, p: float = 2.0, dim: object = 1, eps: float = 1e-12, out: object = None
) -> Symbol:
    """x / max(norm of the row, eps)."""
    return r.as_f32(x) / clamp(r, vector_norm(r, x, p, dim), eps)


def _ones_where(r: RegionTrace, x: object) -> Symbol:
    return select(r, truth(r, x), 1.0, 0.0)


def row_any(r: RegionTrace, x: object, dim: object = None, keepdim: bool = False) -> Symbol:
    """Whether a condition holds for a key of the row."""
    _check(dim)
    return reduce(r, ReduceKind.MAX, _ones_where(r, x), TieRule.SPLIT) > 0.0


def row_all(r: RegionTrace, x: object, dim: object = None, keepdim: bool = False) -> Symbol:
    """Whether a condition holds for all keys of the row."""
    _check(dim)
    return reduce(r, ReduceKind.MIN, _ones_where(r, x), TieRule.SPLIT) > 0.0


def row_count_nonzero(r: RegionTrace, x: object, dim: object = None) -> Symbol:
    """For how many keys of the row a condition holds."""
    return row_sum(r, _ones_where(r, x), dim)


def get_reduce(r: RegionTrace, x: object, kind: str) -> object:
    """`s.get_reduce("sum" | "max" | "min" | "abssum")`."""
    match kind:
        case "sum":
            return row_sum(r, x)
        case "abssum":
            return row_sum(r, abs(r.as_f32(x)))
        case "max":
            return row_amax(r, x)
        case "min":
            return row_amin(r, x)
        case _:
            raise refusal(ReductionError, f"get_reduce({kind!r})", 'write "sum", "max", "min" or "abssum"')


_NORMS: dict[str, Function] = {"vector_norm": vector_norm, "norm": vector_norm}

_REDUCTIONS: dict[str, Function] = _NORMS | {
    "all": row_all,
    "amax": row_amax,
    "amin": row_amin,
    "any": row_any,
    "count_nonzero": row_count_nonzero,
    "get_reduce": get_reduce,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "max": _extremum(ReduceKind.MAX, ELEMENTWISE["maximum"]),
    "mean": row_mean,
    "min": _extremum(ReduceKind.MIN, ELEMENTWISE["minimum"]),
    "normalize": normalize,
    "softmax": softmax,
    "std": row_std,
    "sum": row_sum,
    "var": row_var,
}


def _refused(name: str) -> Function:
    def function(r: RegionTrace, *args: object, **kwargs: object) -> NoReturn:
        refuse(
            ReductionError,
            f"the reduction '{name}' in {r.name}, which sees one element at a time",
            "reduce in the row function, reduce a captured tensor outside of the function,"
            " or write torch.maximum, torch.minimum, &, | for two values",
        )

    return function


def _elementwise_extremum(name: str, elementwise: Function) -> Function:
    """`x.max(other)`, which is elementwise; every other form of max is a reduction."""

    def function(r: RegionTrace, x: object, other: object = None, **kwargs: object) -> object:
        if other is None or kwargs:
            return _refused(name)(r)
        return elementwise(r, x, other)

    return function


_ELEMENTWISE_EXTREMA: dict[str, Function] = {
    "max": _elementwise_extremum("max", ELEMENTWISE["maximum"]),
    "min": _elementwise_extremum("min", ELEMENTWISE["minimum"]),
}


def _online_extremum(row: Function, elementwise: Function) -> Function:
    """In an OnlineFunc `x.max(y)` is elementwise, an integer y too."""

    def function(r: RegionTrace, x: object, other: object = None, **kwargs: object) -> object:
        return row(r, x, **kwargs) if other is None else elementwise(r, x, other)

    return function


def _of_no_row(name: str) -> Function:
    def function(r: RegionTrace, *args: object, **kwargs: object) -> NoReturn:
        refuse(
            ReductionError,
            f"'{name}' over a row, which kernels see in blocks and in any order",
            "reduce with sum, mean, max, min, any, all, logsumexp, softmax, norm, var or std",
        )

    return function


_NEVER = ("argmax", "argmin", "argsort", "cumprod", "cumsum", "flip", "kthvalue", "median", "prod", "sort", "topk")
_REFUSED: dict[str, Function] = {name: _refused(name) for name in (*_REDUCTIONS, *_NEVER)}

SCALAR_FUNCTIONS: dict[str, Function] = _REFUSED | ELEMENTWISE | _ELEMENTWISE_EXTREMA
ROW_FUNCTIONS: dict[str, Function] = {name: _of_no_row(name) for name in _NEVER} | ELEMENTWISE | _REDUCTIONS
ONLINE_FUNCTIONS: dict[str, Function] = ROW_FUNCTIONS | {
    name: _online_extremum(ROW_FUNCTIONS[name], function)
    for name, function in (("max", ELEMENTWISE["maximum"]), ("min", ELEMENTWISE["minimum"]))
}
