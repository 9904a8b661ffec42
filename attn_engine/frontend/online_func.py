"""`OnlineFunc`: a row function written as its own block-wise algorithm, read back as what it computes.

An OnlineFunc *means* its `online_fwd` applied to the whole row as one block, then its epilogue. The
initial values of the row's numbers are folded, so that `m.max(scores.get_reduce("max"))` from
m = -inf is the maximum itself and `r * scale` from r = 0 vanishes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from xdsl.dialects.builtin import f32, i1
from xdsl.ir import SSAValue

from attn_engine.errors import OnlineFuncError
from attn_engine.frontend.custom_io import CustomIO
from attn_engine.frontend.reductions import ONLINE_FUNCTIONS
from attn_engine.frontend.region import Function, Level, RegionTrace, as_number
from attn_engine.frontend.source import refuse
from attn_engine.frontend.symbols import Operand, Symbol, TracedValue


@dataclass(frozen=True)
class Var:
    """An initial value: a number, or its text ("-inf", "0.0")."""

    value: str | float

    def __post_init__(self) -> None:
        try:
            float(self.value)
        except (TypeError, ValueError):
            refuse(
                OnlineFuncError,
                f"Var({self.value!r}) is no number",
                'write a number or its text: Var("-inf"), Var(0.0)',
            )

    @property
    def number(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class SymbolScalar:
    """A number that each row carries through its blocks, with the value that it starts from."""

    name: str
    var: Var


class OnlineFunc:
    """A row function as block-wise updates; subclass it and write `online_fwd` and `online_fwd_epilogue`.

    What these two compute must not depend on how a row is cut into blocks. Everything else is derived from them:
    `forward`, `backward` and `combine` of a subclass are not needed, and compared with the derived ones if given.
    """

    def __init__(
        self,
        online_rowscales: Mapping[str, SymbolScalar],
        final_rowscales: Mapping[str, SymbolScalar],
        external_fwd_tensors: CustomIO | None = None,
    ):
        self.online_rowscales = dict(online_rowscales)
        self.final_rowscales = dict(final_rowscales)
        self.external_fwd_tensors = external_fwd_tensors or CustomIO()

    written: OnlineFunc | None = None
    """Of a copy whose methods are told other indices: what its user wrote."""
    online_fwd: Callable[..., tuple[Any, Mapping[str, Any], Any]]
    online_fwd_epilogue: Callable[..., tuple[Any, Mapping[str, Any]]]

    def check(self) -> None:
        """The parts of the contract that need no tracing."""
        kind = type(self)
        for name in ("online_fwd", "online_fwd_epilogue"):
            if not callable(getattr(kind, name, None)):
                _broken(kind.__init__, f"{kind.__name__} has no method {name}")
        for name in ("online_rowscales", "final_rowscales"):
            scalars: Mapping[str, object] = getattr(self, name, {"": None})
            if not all(isinstance(scalar, SymbolScalar) for scalar in scalars.values()):
                _broken(
                    kind.__init__,
                    f"{kind.__name__}.{name} is not a dict of SymbolScalar: call super().__init__ with"
                    ' {"m": SymbolScalar("m", Var("-inf")), ...}',
                )


class KnownSymbol(Symbol):
    """A number that an OnlineFunc starts from: it folds, and becomes a constant only where it must."""

    def __init__(self, region: RegionTrace, number: float | bool):
        self.region, self.number = region, number

    @property
    def value(self) -> SSAValue:
        return self.region.constant(self.number, i1 if isinstance(self.number, bool) else f32).value

    def __repr__(self) -> str:
        return f"<initial value {self.number}>"


class RowValues(dict[str, Symbol]):
    """The numbers of a row by name, as methods of an OnlineFunc get them."""

    def __missing__(self, name: str) -> NoReturn:
        refuse(
            OnlineFuncError,
            f"there is no number of the row named {name!r}, but {', '.join(self) or 'none at all'}",
            'declare it in the online_rowscales that __init__ passes on: SymbolScalar("r", Var(0.0))',
        )


def _is(operand: object, *numbers: float) -> bool:
    return isinstance(operand, KnownSymbol) and operand.number in numbers


def _folded(name: str, args: tuple[object, ...]) -> object:
    """What an operation gives if one operand is an initial value; None where it must be emitted."""
    infinity = float("inf")
    match name, args:
        case (("maximum" | "max"), (a, b)) if _is(a, -infinity) or _is(b, -infinity):
            return b if _is(a, -infinity) else a
        case (("minimum" | "min"), (a, b)) if _is(a, infinity) or _is(b, infinity):
            return b if _is(a, infinity) else a
        case "add", (a, b) if _is(a, 0, -infinity, infinity) or _is(b, 0, -infinity, infinity):
            start, other = (a, b) if isinstance(a, KnownSymbol) else (b, a)
            return other if _is(start, 0) else start
        case "sub", (a, b) if _is(b, 0) or _is(a, -infinity, infinity):
            return a
        case ("mul", (a, b)) if _is(a, 0) or _is(b, 0):
            return a if _is(a, 0) else b
        case ("mul", (a, b)) if _is(a, 1) or _is(b, 1):
            return b if _is(a, 1) else a
        case "div", (a, b) if _is(a, 0) or _is(b, 1):
            return a
        case "where", (condition, a, b) if isinstance(condition, KnownSymbol):
            return a if condition.number else b
        case _:
            return None


def _evaluate(r: RegionTrace, name: str, args: tuple[object, ...], kwargs: Mapping[str, Any]) -> KnownSymbol | None:
    """An operation on initial values and numbers alone, computed in double precision."""
    function = getattr(torch, name, None)
    if function is None:
        return None
    numbers = [a.number if isinstance(a, KnownSymbol) else as_number(a) for a in args]
    if any(number is None for number in numbers):
        return None
    tensors = [torch.tensor(n, dtype=torch.bool if isinstance(n, bool) else torch.float64) for n in numbers]
    result: object = function(*tensors, **kwargs).item()
    return KnownSymbol(r, cast("float", result))


def _with_folding(name: str, function: Function) -> Function:
    torch_name = {"max": "maximum", "min": "minimum"}.get(name, name)

    def folding(r: RegionTrace, *args: object, **kwargs: Any) -> object:
        if any(isinstance(a, KnownSymbol) for a in args):
            found = _evaluate(r, torch_name, args, kwargs)
            found = _folded(name, args) if found is None else found
            if found is not None:
                return found if isinstance(found, Symbol) else r.symbol(found)
        return function(r, *args, **kwargs)

    return folding


FOLDING_FUNCTIONS: dict[str, Function] = {name: _with_folding(name, f) for name, f in ONLINE_FUNCTIONS.items()}


class RowVectorSymbol(TracedValue):
    """The output row `o` in an epilogue: it may be multiplied and divided by numbers of the row."""

    __array_ufunc__ = None

    def __init__(self, region: RegionTrace, factors: tuple[tuple[str, object], ...] = ()):
        self._region, self.factors = region, factors

    def _scaled(self, operation: str, factor: Operand | RowVectorSymbol) -> RowVectorSymbol:
        if isinstance(factor, RowVectorSymbol):
            self._refuse()
        if self._region.level(self._region.symbol(factor)) is Level.ELEMENT:
            refuse(
                OnlineFuncError,
                "the epilogue scales o by a value that depends on the key",
                "scale o by numbers of the row only, such as online_rowscales['r']",
            )
        return RowVectorSymbol(self._region, (*self.factors, (operation, factor)))

    def __mul__(self, other: Operand | RowVectorSymbol) -> RowVectorSymbol:
        return self._scaled("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Operand | RowVectorSymbol) -> RowVectorSymbol:
        return self._scaled("div", other)

    def __neg__(self) -> RowVectorSymbol:
        return self._scaled("mul", -1.0)

    def _refuse(self, *_: object) -> NoReturn:
        refuse(
            OnlineFuncError,
            "the epilogue does something else with o than to scale it",
            "return o times or divided by numbers of the row: o / online_rowscales['r']",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __rtruediv__ = __pow__ = __bool__ = __float__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def trace_call(self, name: str, args: Sequence[object], kwargs: Mapping[str, Any]) -> RowVectorSymbol:
        kinds = {"mul": "mul", "multiply": "mul", "div": "div", "divide": "div", "true_divide": "div"}
        operation = kinds.get(name)
        if operation is None or len(args) != 2 or (operation == "div" and args[0] is not self):
            self._refuse()
        return self._scaled(operation, cast("Operand", args[1] if args[0] is self else args[0]))

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        # Marks the class as an argument that torch functions take; while tracing, the mode gets every call first.
        refuse(OnlineFuncError, "o is used outside of its epilogue", "return o from online_fwd_epilogue")


def trace_online_func(region: RegionTrace, online: OnlineFunc) -> tuple[Symbol, tuple[str, ...]]:
    """The weight of an element, and the names of the final row values."""
    scores, b, h, q_idx, _ = region.arguments
    scalars = online.online_rowscales.items()
    start = RowValues({name: KnownSymbol(region, scalar.var.number) for name, scalar in scalars})
    result = cast("object", online.online_fwd(scores, start, b, h, q_idx))
    if not isinstance(result, tuple) or len(result) != 3:  # type: ignore[arg-type]
        _broken(online.online_fwd, "online_fwd does not return (scores, online_rowscales, o_scale)")
    weight, rows, _ = cast("tuple[object, object, object]", result)
    rows = _row_values(region, online.online_fwd, rows, set(start), "online_rowscales")
    row = RowVectorSymbol(region)
    result = cast("object", online.online_fwd_epilogue(row, rows, b, h, q_idx))
    if not isinstance(result, tuple) or len(result) != 2:  # type: ignore[arg-type]
        _broken(online.online_fwd_epilogue, "online_fwd_epilogue does not return (o, final_rowscales)")
    scaled, final = cast("tuple[object, object]", result)
    if not isinstance(scaled, RowVectorSymbol):
        _broken(online.online_fwd_epilogue, "the first value that online_fwd_epilogue returns is not o, scaled")
    final = _row_values(region, online.online_fwd_epilogue, final, set(online.final_rowscales), "final_rowscales")
    p = region.as_f32(weight)
    for operation, factor in scaled.factors:
        p = p * cast("Symbol", factor) if operation == "mul" else p / cast("Symbol", factor)
    return p, tuple(final)


def _row_values(
    region: RegionTrace, function: Callable[..., object], values: object, names: set[str], what: str
) -> RowValues:
    """A returned dict of row values, checked: the declared names, one number per row each."""
    if not isinstance(values, Mapping) or set(cast("Mapping[str, object]", values)) != names:
        _broken(function, f"the returned {what} are not a dict of {', '.join(sorted(names)) or 'nothing'}, as declared")
    checked = RowValues()
    for name, value in cast("Mapping[str, object]", values).items():
        symbol = value if isinstance(value, Symbol) else region.as_f32(value)
        if not isinstance(symbol, KnownSymbol) and region.level(symbol) is Level.ELEMENT:
            _broken(function, f"{what}['{name}'] is one number per key, not one per row")
        checked[name] = symbol
    return checked


def _broken(function: Callable[..., object], problem: str) -> NoReturn:
    refuse(
        OnlineFuncError,
        problem,
        "online_fwd(scores, online_rowscales, b, h, q_idx) returns (scores, new_online_rowscales, o_scale);"
        " online_fwd_epilogue(o, online_rowscales, b, h, q_idx) returns (o_new, final_rowscales)",
        function,
    )
