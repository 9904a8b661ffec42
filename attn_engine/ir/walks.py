"""Walks over the code behind a value. It is a graph: x = x * x + x, forty times, has 2^40 paths and 80 values.

A recursion over operands takes as long as there are paths, and Python's stack ends at a thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from xdsl.ir import Operation, SSAValue

T = TypeVar("T")


def operands_of(value: SSAValue) -> Iterable[SSAValue]:
    """What a value is computed from; nothing for an argument."""
    return value.owner.operands if isinstance(value.owner, Operation) else ()


def bottom_up(
    value: SSAValue,
    before: Callable[[SSAValue], Iterable[SSAValue]],
    make: Callable[[SSAValue], T],
    known: dict[SSAValue, T],
) -> T:
    """`make(value)`, once those `before` it are in `known`, which `make` reads: every value is made once."""
    pending = [value]
    while pending:
        current = pending[-1]
        missing = [] if current in known else [v for v in before(current) if v not in known]
        if missing:
            pending += missing
            continue
        if current not in known:
            known[current] = make(current)
        pending.pop()
    return known[value]


def behind(
    values: Iterable[SSAValue], into: Callable[[SSAValue], Iterable[SSAValue]] = operands_of
) -> Iterator[SSAValue]:
    """The values and those that they are computed from, each once; `into` says which of these to go on with."""
    seen, pending = set[SSAValue](), list(values)
    while pending:
        value = pending.pop()
        if value not in seen:
            seen.add(value)
            yield value
            pending.extend(into(value))
