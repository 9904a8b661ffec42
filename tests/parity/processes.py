"""Many cases on many paths, a few in one process at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool

import torch

from tests.parity.cases import Case, cases, size_of
from tests.parity.check import Outcome, compare
from tests.parity.paths import PATHS, right

Work = tuple[int, str]
"""The number of a case, and a path."""
BATCH = 24
LONGEST = 900
"""Seconds for one case on one path."""


def _check(batch: Sequence[Work], pipe: Connection) -> None:
    torch.set_num_threads(1)
    every, paths = list(cases()), {path.name: path for path in PATHS}
    for number in dict.fromkeys(number for number, _ in batch):
        want = right(every[number])
        for name in (name for n, name in batch if n == number):
            pipe.send(compare(paths[name], every[number], want))


def _in_a_process(batch: Sequence[Work]) -> Iterator[Outcome]:
    """Outcomes in order, until the process dies or hangs."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(batch, theirs))
    process.start()
    theirs.close()
    with suppress(EOFError):
        while ours.poll(LONGEST):
            yield ours.recv()
    process.kill()
    process.join()


def _every(batch: Sequence[Work]) -> list[Outcome]:
    """Outcomes of all; what kills its process is a failure, and the rest goes on in a new one."""
    found: list[Outcome] = []
    every = list(cases())
    while len(found) < len(batch):
        found += _in_a_process(batch[len(found) :])
        if len(found) < len(batch):
            number, path = batch[len(found)]
            case = every[number]
            found.append(Outcome(case.name, case.dtype, path, "failed", float("inf"), "the process ended"))
    return found


def run(chosen: Sequence[Case], paths: Sequence[str], jobs: int, done: Sequence[Outcome] = ()) -> Iterator[Outcome]:
    """What is not done yet, large cases first."""
    known = {(o.case, o.dtype, o.path) for o in done}
    numbers = {str(case): number for number, case in enumerate(cases())}
    work = [
        (numbers[str(case)], path)
        for case in sorted(chosen, key=size_of, reverse=True)
        for path in paths
        if (case.name, case.dtype, path) not in known
    ]
    batches = [work[start : start + BATCH] for start in range(0, len(work), BATCH)]
    with ThreadPool(jobs) as pool:
        for outcomes in pool.imap_unordered(_every, batches):
            yield from outcomes
