"""A few random definitions through every path, and planted bugs that must not survive; `make fuzz` runs thousands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fuzz.check import Outcome, check_case
from tests.fuzz.coverage import EXPECTED, Coverage, features
from tests.fuzz.grammar import Case, captures_of, generate
from tests.fuzz.kept import kept
from tests.fuzz.mutants import MOST_CASES, MUTANTS, Mutant, cases_to_death
from tests.fuzz.shrink import shrink
from tests.support.engines import ALL, INTERPRETED, ORACLE

CASES = 100
INTERPRETED_EACH = 10
"""The cpu backend in every case; an interpreter in one of so many, in turn."""


@pytest.mark.parametrize("first", range(0, CASES, INTERPRETED_EACH))
def test_random_definitions(first: int):
    for seed in range(first, first + INTERPRETED_EACH):
        interpreter = (ORACLE if first % (2 * INTERPRETED_EACH) else INTERPRETED,) if seed == first else ()
        outcome = check_case(generate(seed), ("cpu", *interpreter))
        assert outcome.verdict != "failed", f"{outcome.case}# {outcome.detail}"


@pytest.mark.parametrize("name", kept())
def test_cases_that_once_failed(name: str):
    outcome = check_case(kept()[name], ALL)
    assert outcome.verdict == "agreed", f"{outcome.case}# {outcome.verdict} {outcome.detail}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutants_die(mutant: Mutant):
    """By the case that is known to kill them, or else one of the first; `make fuzz` searches in all of them."""
    assert cases_to_death(mutant, (mutant.killer, *range(80))) is not None
    assert mutant.killer < MOST_CASES


def test_source_is_reproducible():
    assert str(generate(3)) == str(generate(3))
    assert generate(3).source != generate(4).source


def test_cases_are_of_every_kind():
    coverage = Coverage()
    for seed in range(60):
        coverage.add(features(generate(seed)))
    missing = [name for name in EXPECTED if not coverage.counts[name]]
    assert len(missing) <= 8, missing
    assert Coverage(100).rare() == [f"{name} (0)" for name in EXPECTED]


def test_failures_are_made_small():
    """What is asked for stays; functions, operands, captures and sizes that do not matter go."""
    case = next(c for c in map(generate, range(1000)) if "torch.erf(" in c.source and len(c.captures) > 1)
    small = shrink(case, lambda c: "torch.erf(" in c.source and check_nothing(c).verdict == "agreed", 400)
    assert small.source.count("def ") == 2 and small.sizes["b"] == small.sizes["hkv"] == small.sizes["sq"] == 1
    assert len(small.source) < len(case.source) and small.captures == captures_of(small.source.split("return", 1)[1])


def check_nothing(case: Case) -> Outcome:
    """Whether the text is that of a definition."""
    try:
        features(case)
    except Exception as error:
        return Outcome(case, "failed", str(error))
    return Outcome(replace(case), "agreed")
