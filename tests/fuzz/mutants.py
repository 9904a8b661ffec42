"""Planted compiler bugs: a function's source with one piece of text replaced, in place for a while."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from attn_engine.frontend import arithmetic
from attn_engine.ir.autodiff import partials
from attn_engine.passes import online_regions
from attn_engine.passes.lowering import key_gradients, ranges
from attn_engine.runtime import driver


@dataclass(frozen=True)
class Mutant:
    """In `function`, `old` (which must be there) becomes `new`."""

    name: str
    function: Any
    old: str
    new: str


MUTANTS = (
    Mutant("sign of the derivative of a quotient", partials._div, "scaled(-1.0)", "scaled(1.0)"),
    Mutant("branches of the derivative of where", partials._select, "(True, False)", "(False, True)"),
    Mutant("division that truncates", arithmetic.floor_divide, "arith.FloorDivSIOp", "arith.DivSIOp"),
    Mutant("lengths swapped in the ranges of a mask", ranges.spans, 'frame.sq), "sq")', 'frame.skv), "sq")'),
    Mutant("full blocks that are not", ranges.spans, "scope.round_up(full_lo", "scope.round_down(full_lo"),
    Mutant("visible blocks forgotten", ranges.spans, "scope.round_up(visible_hi", "scope.round_down(visible_hi"),
    Mutant(
        "no rescaling of the accumulator",
        online_regions.StepBuilder.build,
        "if separation.stabilisers else None",
        "if False else None",
    ),
    Mutant("one query head of a group", key_gradients.KeyGradients.build, "loop(scope, 0, group", "loop(scope, 0, 1"),
)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The mutant wherever the function is known; compilations before and within are forgotten."""
    function: FunctionType = mutant.function
    source = textwrap.dedent(inspect.getsource(function))
    assert mutant.old in source, f"{mutant.name}: the text to replace is gone; the mutant needs an update"
    namespace = dict(function.__globals__)
    exec(
        compile("from __future__ import annotations\n" + source.replace(mutant.old, mutant.new), "<mutant>", "exec"),
        namespace,
    )
    original = function.__code__
    driver._CACHE.clear()
    function.__code__ = namespace[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = original
        driver._CACHE.clear()
