"""A few random definitions through every path, and planted bugs that must not survive; `make fuzz` runs thousands."""

from __future__ import annotations

import pytest

from tests.fuzz.check import check_case
from tests.fuzz.grammar import generate
from tests.fuzz.mutants import MUTANTS, Mutant, planted
from tests.support.engines import INTERPRETED, ORACLE

# The cpu backend in every case, the interpreters in turn.
CASES = 18
MOST_CASES_OF_A_MUTANT = 40


@pytest.mark.parametrize("seed", range(CASES))
def test_random_definitions(seed: int):
    outcome = check_case(generate(seed), ("cpu", ORACLE if seed % 3 else INTERPRETED))
    assert outcome.verdict == "agreed", f"{outcome.case}# {outcome.verdict} {outcome.detail}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutants_die(mutant: Mutant):
    with planted(mutant):
        seeds = range(1000, 1000 + MOST_CASES_OF_A_MUTANT)
        # By a wrong number: an error would say that the mutant does not run.
        assert any("is off by" in check_case(generate(seed), ("cpu",)).detail for seed in seeds)


def test_source_is_reproducible():
    assert str(generate(3)) == str(generate(3))
    assert generate(3).source != generate(4).source
