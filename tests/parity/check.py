"""One case on one path, compared."""

from __future__ import annotations

import time
from dataclasses import dataclass

from attn_engine.errors import AttnEngineError
from tests.parity.cases import Case
from tests.parity.paths import Path, Results


@dataclass(frozen=True)
class Outcome:
    """`agreed`, `failed`, `skipped` with a reason, or `outside` of what the path is there for."""

    case: str
    dtype: str
    path: str
    verdict: str
    error: float = 0.0
    detail: str = ""
    seconds: float = 0.0


def compare(path: Path, case: Case, want: Results) -> Outcome:
    """Runs a case on a path; what the path refuses with an error of this project is skipped, all else is a failure."""
    place, start = (case.name, case.dtype, path.name), time.perf_counter()
    if not path.takes(case):
        return Outcome(*place, "outside")
    missing = path.missing()
    if missing is not None:
        return Outcome(*place, "skipped", detail=missing)
    try:
        got = path.run(case)
    except AttnEngineError as error:
        return Outcome(*place, "skipped", detail=f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome(*place, "failed", float("inf"), f"{type(error).__name__}: {error}")
    worst, where = difference(got, want)
    verdict = "agreed" if worst <= path.expected[case.dtype] else "failed"
    return Outcome(*place, verdict, worst, where, time.perf_counter() - start)


def difference(got: Results, want: Results) -> tuple[float, str]:
    """The largest error of the largest right value (or of 1), and where it is; results that are absent count."""
    if set(got) != set(want):
        return float("inf"), f"results {sorted(got)}, not {sorted(want)}"
    worst, where = 0.0, ""
    for name, right in want.items():
        value, finite = got[name].double(), right[right.isfinite()]
        if value.shape != right.shape:
            return float("inf"), f"shape of {name}"
        size = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
        distance = (value - right.double()).abs().where(value != right, 0.0)
        error = (
            distance.nan_to_num(nan=float("inf"), posinf=float("inf")).max().item() / size if distance.numel() else 0.0
        )
        if error > worst:
            worst, where = error, name
    return worst, where
