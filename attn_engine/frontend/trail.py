"""What a walk through functions has read that may change: a look at it tells whether another walk would find the same.

Only of plain functions, whose closures, globals and defaults are numbers, tensors, other such functions and what never
changes. Nothing is kept alive: functions and tensors are known by weak references.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast
from weakref import ref

import torch

Key: TypeAlias = tuple[object, ...]
Found: TypeAlias = tuple[Key, list[torch.Tensor]]

MOST_WALKS = 512
"""Remembered. Functions that are made anew for every call must not fill the memory."""
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_ABSENT = object()


@dataclass(frozen=True)
class _Function:
    """One that was walked, and what it had."""

    function: ref[types.FunctionType]
    code: types.CodeType
    defaults: object
    cells: tuple[object, ...]
    globals: tuple[tuple[str, object], ...]
    builtins: tuple[tuple[str, object], ...]
    """Names that are not among its globals, and what Python has under them."""

    def holds(self) -> bool:
        function = self.function()
        if function is None or function.__code__ is not self.code or function.__defaults__ is not self.defaults:
            return False
        if function.__kwdefaults__ is not None or function.__dict__:
            return False
        for cell, held in zip(function.__closure__ or (), self.cells, strict=True):
            if not _is(held, contents(cell)):
                return False
        names = function.__globals__
        for name, held in self.globals:
            if not _is(held, names.get(name, _ABSENT)):
                return False
        return all(n not in names and _is(held, getattr(builtins, n, _ABSENT)) for n, held in self.builtins)


@dataclass
class Trail:
    """What a walk has read so far; `broken` when it read what is not looked at here."""

    is_constant: Callable[[object], bool]
    """Of a module, class or function: whether it is one of those that never change."""
    functions: list[_Function] = field(default_factory=list[_Function])
    tensors: list[tuple[ref[torch.Tensor], torch.dtype, int, bool]] = field(
        default_factory=list[tuple[ref[torch.Tensor], torch.dtype, int, bool]]
    )
    broken: bool = False

    def function(self, function: types.FunctionType, names: Iterable[str]) -> None:
        """A function is walked whose code takes global `names`."""
        own, of_python = function.__globals__, [n for n in names if n not in function.__globals__]
        if function.__kwdefaults__ is not None or function.__dict__ or not _is_number(function.__defaults__):
            self.broken = True
            return
        found = _Function(
            ref(function),
            function.__code__,
            function.__defaults__,
            tuple(self._held(contents(cell)) for cell in function.__closure__ or ()),
            tuple((n, self._held(own[n])) for n in names if n in own),
            tuple((n, self._held(getattr(builtins, n)) if hasattr(builtins, n) else _ABSENT) for n in of_python),
        )
        self.functions.append(found)

    def tensor(self, tensor: torch.Tensor) -> None:
        """A tensor is met."""
        if type(tensor) not in _TENSORS or tensor.__dict__:
            self.broken = True
        self.tensors.append((ref(tensor), tensor.dtype, tensor.ndim, tensor.requires_grad))

    def _held(self, value: object) -> object:
        """A value, or a weak reference to it."""
        if _is_number(value):
            return value
        if type(value) in _TENSORS or (isinstance(value, types.FunctionType) and not self.is_constant(value)):
            return ref(cast("Any", value))
        if not self.is_constant(value):
            self.broken = True
        return value

    def holds(self) -> bool:
        """Whether all is as it was."""
        for tensor, dtype, ndim, trains in self.tensors:
            x = tensor()
            if x is None or x.requires_grad is not trains or x.dtype is not dtype or x.ndim != ndim or x.__dict__:
                return False
        return all(function.holds() for function in self.functions)


def _is(held: object, value: object) -> bool:
    return held() is value if type(held) is ref else held is value


def _is_number(value: object) -> bool:
    """Whether a value cannot change, or is a tuple of such."""
    return type(value) in _NUMBERS or (type(value) is tuple and all(map(_is_number, cast("tuple[object]", value))))


def contents(cell: types.CellType) -> object:
    """What a cell holds; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


# --- walks that are remembered -----------------------------------------------------------------

_WALKS: dict[Key, tuple[Trail, Key]] = {}
"""By the addresses of the functions where they began: as long as a trail holds, these have not been used again."""


def _place(start: Key, functions: Sequence[object]) -> Key:
    return (*start, *map(id, functions))


def recall(start: Key, functions: Sequence[object]) -> Found | None:
    """What a walk from these functions, or None, found, if another would find the same; `start` says what else it is of."""
    walk = _WALKS.get(_place(start, functions))
    if walk is None:
        return None
    trail, key = walk
    if not trail.holds():
        return None
    tensors = [tensor() for tensor, *_ in trail.tensors]
    return key, [x for x in tensors if x is not None]


def remember(start: Key, functions: Sequence[object], trail: Trail, key: Key) -> None:
    """A walk from these functions has found a key."""
    if trail.broken or not all(f is None or type(f) is types.FunctionType for f in functions):
        return
    if len(_WALKS) >= MOST_WALKS:
        _WALKS.clear()
    _WALKS[_place(start, functions)] = trail, key
