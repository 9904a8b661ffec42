"""Outcomes in a file, a line each with what the sources were: a run goes on where another of the same sources ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from tests.parity.cases import Case
from tests.parity.check import Outcome

ROOT = Path(__file__).parents[2]
DEFINITIONS = ("tests/backends/test_differential.py", "tests/backends/test_distances.py")
SOURCES = ("attn_engine", "tests/parity", "tests/support", *DEFINITIONS)
SUFFIXES = (".py", ".h", ".cpp")


def _files() -> Iterator[Path]:
    for name in SOURCES:
        path = ROOT / name
        yield from sorted(f for f in path.rglob("*") if f.suffix in SUFFIXES) if path.is_dir() else [path]


@cache
def sources() -> str:
    """Names the text of all that outcomes depend on."""
    digest = hashlib.sha256()
    for file in _files():
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def read(log: Path, chosen: Sequence[Case], paths: Sequence[str]) -> list[Outcome]:
    """What was found of these cases with the sources as they are; what was skipped may run now, with another tool here."""
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    found = [Outcome(**line["outcome"]) for line in lines if line["sources"] == sources()]
    wanted = {(case.name, case.dtype, path) for case in chosen for path in paths}
    return [o for o in found if (o.case, o.dtype, o.path) in wanted and o.verdict != "skipped"]


def write(log: Path, outcome: Outcome) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(json.dumps({"sources": sources(), "outcome": asdict(outcome)}) + "\n")
