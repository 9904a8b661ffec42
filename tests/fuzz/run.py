"""Random definitions through every path, then planted bugs, on several processes.

Failures print as code, made small; the last line counts cases and failures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from tests.fuzz.check import Outcome, check_case
from tests.fuzz.coverage import ENOUGH, Coverage, features
from tests.fuzz.grammar import Case, generate
from tests.fuzz.mutants import MOST_CASES, MUTANTS, cases_to_death
from tests.fuzz.shrink import MOST_CHECKS, shrink
from tests.support.engines import ALL
from tests.support.limits import limited

LONGEST = 60
"""Seconds of a processor that one case may take; more are a finding too."""
EACH = 200
"""So many cases apart, the time is told."""
LEAST_ACCEPTED = 0.8
"""The share of drawn cases that must be fit to be compared."""


@dataclass(frozen=True)
class Checked:
    """An outcome, small if it is a failure, and what its case is made of."""

    outcome: Outcome
    features: frozenset[str] = frozenset()


@dataclass
class Tally:
    """What all processes found."""

    verdicts: Counter[str] = field(default_factory=Counter)
    coverage: Coverage = field(default_factory=Coverage)

    @property
    def compared(self) -> int:
        return self.verdicts["agreed"] + self.verdicts["failed"]

    @property
    def drawn(self) -> int:
        return sum(self.verdicts.values())

    def add(self, checked: Checked) -> None:
        outcome = checked.outcome
        self.verdicts[outcome.verdict] += 1
        if outcome.verdict != "ill-conditioned":
            self.coverage.add(checked.features)
        if outcome.verdict == "failed":
            print(f"{outcome.case}# {outcome.detail}\n", flush=True)

    def shortfalls(self) -> list[str]:
        """What the cases were not: enough of those drawn, and of every kind."""
        found = []
        if self.compared < LEAST_ACCEPTED * self.drawn:
            found.append(f"only {self.compared} of {self.drawn} cases were fit to be compared")
        if self.compared >= ENOUGH and (rare := self.coverage.rare()):
            found.append(f"rare in {self.compared} cases: {', '.join(rare)}")
        return found


def check(job: tuple[int, tuple[str, ...], int]) -> Checked:
    """One case by its seed; a failure is made small where it was found, by so many tries."""
    seed, backends, tries = job
    torch.set_num_threads(1)
    with limited(LONGEST, "the case"):
        outcome = check_case(generate(seed), backends)
    if outcome.verdict == "failed":
        return Checked(_small(outcome, backends, tries), frozenset(features(outcome.case)))
    return Checked(outcome, frozenset(features(outcome.case) if outcome.verdict == "agreed" else ()))


def _small(outcome: Outcome, backends: tuple[str, ...], tries: int) -> Outcome:
    """The failure of a smaller case on the same backend, of the same kind."""
    kind = outcome.detail.split(":")[0]
    one = (kind,) if kind in backends else backends

    def fails(case: Case) -> bool:
        found = check_case(case, one)
        return found.verdict == "failed" and found.detail.split(":")[0] == kind

    case = shrink(outcome.case, fails, tries)
    return replace(outcome, case=case)


def run_mutant(number: int) -> tuple[str, int | None]:
    torch.set_num_threads(1)
    return MUTANTS[number].name, cases_to_death(MUTANTS[number], range(MOST_CASES))


def _compare(options: argparse.Namespace, pool: multiprocessing.pool.Pool) -> Tally:
    """Cases until enough are compared or the time is up; two wait for each process, so that none is idle."""
    tally, start = Tally(), time.monotonic()
    end = start + options.seconds
    backends, free = tuple(options.backends.split(",")), threading.Semaphore(2 * options.jobs)

    def jobs() -> Iterator[tuple[int, tuple[str, ...], int]]:
        for seed in count(options.seed):
            free.acquire()
            if tally.compared >= options.cases or time.monotonic() >= end:
                return
            yield seed, backends, options.tries

    for checked in pool.imap_unordered(check, jobs()):
        tally.add(checked)
        free.release()
        if tally.drawn % EACH == 0:
            print(f"{tally.drawn} cases drawn, {time.monotonic() - start:.0f} s", flush=True)
    return tally


def _survivors(pool: multiprocessing.pool.Pool) -> list[str]:
    """Mutants that no case killed."""
    found: Iterable[tuple[str, int | None]] = pool.imap_unordered(run_mutant, range(len(MUTANTS)))
    deaths = dict(found)
    for name, cases in deaths.items():
        print(f"mutant '{name}': {f'killed by case {cases}' if cases is not None else 'survives'}", flush=True)
    return [name for name, cases in deaths.items() if cases is None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="how many cases must be compared")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--backends", default=",".join(ALL), help=f"a list out of {', '.join(ALL)}; triton on a GPU")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="compare fewer cases if it takes longer")
    parser.add_argument("--tries", type=int, default=MOST_CHECKS, help="smaller cases to try for each failure")
    parser.add_argument("--no-mutants", action="store_true", help="leave the planted bugs out")
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=100) as pool:
        tally = _compare(options, pool)
        survivors = [] if options.no_mutants else _survivors(pool)
    shortfalls = [*tally.shortfalls(), *(f"mutant '{name}' survives {MOST_CASES} cases" for name in survivors)]
    ill = tally.verdicts["ill-conditioned"]
    print(
        f"drawn {tally.drawn}, ill-conditioned {ill} (drawn again): {tally.compared / max(1, tally.drawn):.1%} accepted"
    )
    print(tally.coverage.report())
    for shortfall in shortfalls:
        print(f"not as it should be: {shortfall}")
    print(f"{tally.compared} cases, {tally.verdicts['failed']} failures")
    return 1 if tally.verdicts["failed"] or shortfalls else 0
