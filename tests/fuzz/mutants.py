"""Planted compiler bugs: a function's source with one piece of text replaced, in place for a while."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from attn_engine.backends.cpu import gather
from attn_engine.frontend import arithmetic
from attn_engine.ir.autodiff import partials
from attn_engine.passes import (
    attn_exp_to_exp2,
    backward_operands,
    backward_regions,
    backward_sweep,
    online_combine,
    online_regions,
)
from attn_engine.passes.lowering import frame, key_gradients, mask_once, program, ranges
from attn_engine.passes.lowering.split_keys import SplitForwardLowering
from attn_engine.passes.online_regions import StepBuilder
from attn_engine.runtime import attention, driver
from tests.fuzz.check import check_case
from tests.fuzz.grammar import generate


@dataclass(frozen=True)
class Mutant:
    """In `function`, `old` (which must be there) becomes `new`."""

    name: str
    killer: int
    """The first case that it gets wrong."""
    function: Any
    old: str
    new: str


MUTANTS = (
    # What functions mean
    Mutant("division that truncates", 0, arithmetic.floor_divide, "arith.FloorDivSIOp", "arith.DivSIOp"),
    Mutant(
        "clamp with its bounds exchanged", 31, arithmetic.clamp, '(min, "lt"), (max, "gt")', '(max, "lt"), (min, "gt")'
    ),
    # Derivatives
    Mutant("sign of the derivative of a quotient", 1, partials._div, "scaled(-1.0)", "scaled(1.0)"),
    Mutant("branches of the derivative of where", 1, partials._select, "(True, False)", "(False, True)"),
    Mutant(
        "derivative of tanh above 1",
        1,
        partials._tanh,
        "graph.sub(graph.constant(1.0)",
        "graph.add(graph.constant(1.0)",
    ),
    Mutant("row sums without their factor", 2, backward_sweep.RowSums._closed, "closed = row * ", "closed = "),
    Mutant(
        "a new maximum keeps the old one's keys",
        12,
        backward_regions.BackwardCode._still_attained,
        "nothing.result",
        "old",
    ),
    Mutant("mods without a derivative", 7, backward_operands.vjp, "if region is None or", "if True or"),
    Mutant(
        "masked keys keep a gradient",
        3,
        mask_once.mask_once,
        "else program.where_visible(gradient)",
        "else gradient",
    ),
    # Online forms
    Mutant(
        "no rescaling of the accumulator",
        29,
        StepBuilder.build,
        "if separation.stabilisers else None",
        "if False else None",
    ),
    Mutant(
        "rescaling the wrong way",
        13,
        online_regions.Rescaling._exponent,
        "self.before.atom(s.atom), self.safe[s.atom]",
        "self.safe[s.atom], self.before.atom(s.atom)",
    ),
    Mutant(
        "dead rows forgotten",
        8,
        online_regions.build_epilogue,
        "scale = scalars.select(dead, scalars.constant(0.0), scale)",
        "pass",
    ),
    Mutant(
        "natural logarithms in base 2", 0, attn_exp_to_exp2.BaseTwo.apply, "constant(LN2, f32)", "constant(1.0, f32)"
    ),
    Mutant(
        "factors of parts exchanged", 19, online_combine.CombineBuilder.build, "in self.parts]", "in self.parts[::-1]]"
    ),
    # Kernels
    Mutant("lengths swapped in the ranges of a mask", 14, ranges.spans, 'frame.sq), "sq")', 'frame.skv), "sq")'),
    Mutant("full blocks that are not", 63, ranges.spans, "scope.round_up(full_lo", "scope.round_down(full_lo"),
    Mutant("visible blocks forgotten", 0, ranges.spans, "scope.round_up(visible_hi", "scope.round_down(visible_hi"),
    Mutant("keys beyond the end", 1, frame.Frame.see, "if self.operands.whole else in_range", "if True else in_range"),
    Mutant(
        "reductions of masked keys",
        1,
        program.Program._reduce,
        "value = self.where_visible(value, IDENTITY[kind])",
        "pass",
    ),
    Mutant(
        "negative indices that do not wrap",
        3,
        program.Program._wrapped,
        "negative, wrapped, index",
        "negative, index, index",
    ),
    Mutant(
        "one query head of a group", 0, key_gradients.KeyGradients.build, "loop(scope, 0, group", "loop(scope, 0, 1"
    ),
    Mutant("keys without the scale", 2, key_gradients.KeyGradients._store, 'frame.take("scale")', "None"),
    Mutant("parts that overlap", 2, SplitForwardLowering._part_kernel, "span.within(scope, first, after)", "span"),
    # Text
    Mutant("sums that keep the last summand", 1, gather.scatter_add, "accumulate=True", "accumulate=False"),
)
MOST_CASES = 500
"""So many cases must be enough to kill any of them."""


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The mutant wherever the function is known. What was compiled before serves no call within, nor the other way round."""
    function: FunctionType = mutant.function
    source = textwrap.dedent(inspect.getsource(function))
    assert mutant.old in source, f"{mutant.name}: the text to replace is gone; the mutant needs an update"
    namespace = dict(function.__globals__)
    exec(
        compile("from __future__ import annotations\n" + source.replace(mutant.old, mutant.new), "<mutant>", "exec"),
        namespace,
    )
    original, before = function.__code__, dict(driver._CACHE)
    _forget()
    made = namespace[function.__name__]
    function.__code__ = getattr(made, "__func__", made).__code__
    try:
        yield
    finally:
        function.__code__ = original
        _forget()
        driver._CACHE.update(before)


def _forget() -> None:
    """What was compiled, and which calls are known to need it."""
    driver._CACHE.clear()
    attention._SHARED.clear()


def cases_to_death(mutant: Mutant, seeds: Iterable[int]) -> int | None:
    """The first of these cases that the mutant gets wrong; an error would only say that it does not run."""
    with planted(mutant):
        return next((seed for seed in seeds if "is off by" in check_case(generate(seed), ("cpu",)).detail), None)
