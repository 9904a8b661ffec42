"""A few random definitions through every path, and planted bugs that must not survive; `make fuzz` runs thousands."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from unittest import mock

import pytest

from tests.fuzz import run
from tests.fuzz.check import Outcome, check_case
from tests.fuzz.coverage import EXPECTED, Coverage, features
from tests.fuzz.grammar import Case, captures_of, generate
from tests.fuzz.kept import kept
from tests.fuzz.mutants import MOST_CASES, MUTANTS, Mutant, cases_to_death
from tests.fuzz.run import Checked
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


UNSTEADY = """
def make():
    def score_mod(s, b, h, q, kv):
        return torch.floor(s * 1e6) * 10.0

    return {"score_mod": score_mod}
"""


def test_what_small_changes_change_is_not_compared():
    case = replace(generate(0), source=UNSTEADY, captures=(), row="softmax")
    assert check_case(case, ("cpu",)).verdict == "ill-conditioned"


def test_cases_that_are_not_compared_are_drawn_again():
    """Every second one, until as many are compared as were asked for; and that is told to be too few."""

    def verdict(job: tuple[int, tuple[str, ...], int]) -> Checked:
        return Checked(Outcome(generate(job[0]), "ill-conditioned" if job[0] % 2 else "agreed"))

    options = Namespace(seconds=60.0, backends="cpu", jobs=1, seed=0, cases=10, tries=0)
    with mock.patch.object(run, "check", verdict), ThreadPool(1) as pool:
        tally = run._compare(options, pool)
    assert tally.compared >= 10 and 19 <= tally.drawn <= 22
    assert [text for text in tally.shortfalls() if "were fit to be compared" in text]


def check_nothing(case: Case) -> Outcome:
    """Whether the text is that of a definition."""
    try:
        features(case)
    except Exception as error:
        return Outcome(case, "failed", str(error))
    return Outcome(replace(case), "agreed")
